"""Metrics say what the statistics say, under documented names, and nothing that is not a number."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import hicache
from hicache.core.whatif import SizeGhost, WhatIf
from hicache.rpc.latency import LatencyMeter
from hicache.runtime.accesslog.writer import AccessLogStatistics
from hicache.sidecar.events import EventLog
from hicache.sidecar.kv_events import KvPublisherStatistics
from hicache.sidecar.metrics import FAMILIES, LATENCY, Metrics, histograms, metrics_table
from hicache.storage.memory import MemoryBackend
from hicache.storage.wrappers import MeteredBackend

SERVICE = {
    "uptime_seconds": 12.5,
    "sessions": 2,
    "sessions_opened": 3,
    "groups": 1,
    "leases": {"open": 4, "ended": 1, "quarantined_slots": 9, "opened": 50, "expired": 2, "revoked": 0},
    "pins": {"pins": 1, "slots": 6, "given_up": 0, "expired": 0},
    "verbs": [{"verb": "match", "answered": 9, "failed": 2, "seconds": 0.5, "buckets": []}],
    "degraded": ["storage: reads breaker open: refused"],
    "quotas": [
        {"tenant": "acme", "tier": "host", "bytes": 5, "quota": 10},
        {"tenant": None, "tier": "host", "bytes": 1},
    ],
    "events": asdict(EventLog(buckets=1).statistics()),
    "kv_events": asdict(KvPublisherStatistics(messages=8)),
    "access_log": asdict(AccessLogStatistics("/var/log/hicache", 9, 7, 1, 1, 0, 4096, 1, "")),
}


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {getattr(key, "name", str(key)).lower(): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The real statistics of a cache that was used, twice, as two pools on one store."""
    geometry = hicache.KVGeometry.mha(layers=1, kv_heads=1, head_dim=8, dtype="float16")
    namespace = hicache.Namespace(model="example/tiny", revision="1", geometry=geometry, page_size=16)
    with hicache.open(namespace, device=8, host=16, storage="memory://") as cache:
        for prompt in (np.arange(100), np.arange(100), np.arange(500, 590)):
            with cache.request(prompt) as request:
                request.load()
                for slot in request.allocate(deadline=30):
                    cache.device.write_page(slot, bytes(cache.device.page_bytes))
                request.commit(ready=hicache.READY)
        cache.flush()
        statistics = plain(asdict(cache.statistics()))
    ghost = WhatIf([SizeGhost("host", 16)], size=16)
    ghost.use(bytes(range(96)), asked=6, kept=6)
    pools = [
        {
            "model": "example/tiny",
            "namespace": "00ff",
            "tenant": tenant,
            "ranks": 2,
            "page_bytes": 512,
            "bytes": 8192,
            "sessions": 1,
            "device_pages": 7,
            "statistics": statistics,
            "what_if": [asdict(tier) for tier in ghost.statistics()],
        }
        for tenant in (None, "acme")
    ]
    return json.loads(json.dumps({"service": SERVICE, "pools": pools}))


def samples(metrics: Metrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(asyncio.run(metrics.page()).body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_every_family_has_a_value(document: dict[str, Any]) -> None:
    """Each is read from where the statistics really have it; what only trouble brings may be empty."""
    found = samples(Metrics(lambda: document))
    troubles = {"hicache_failed_pages_total", "hicache_shed_pages_total", "hicache_storage_not_ok_total"}
    unlimited = {"hicache_storage_capacity_bytes"}
    missing = {family.name for family in FAMILIES} - set(found)
    assert missing <= troubles | unlimited


def test_values_are_those_of_the_statistics(document: dict[str, Any]) -> None:
    """Tokens add up, states add up to the capacity, and the two pools are told apart by their labels."""
    found = samples(Metrics(lambda: document))

    def of(name: str, tenant: str = "acme") -> dict[tuple[str, ...], float]:
        rows = [(labels, value) for labels, value in found[name] if labels.get("tenant", tenant) == tenant]
        extra = ("tier", "reason", "state", "edge")
        return {tuple(labels[key] for key in extra if key in labels): value for labels, value in rows}

    assert of("hicache_tokens_asked_total") == of("hicache_tokens_asked_total", "") == {(): 290.0}
    hits, missed = of("hicache_tokens_hit_total"), of("hicache_tokens_missed_total")
    assert hits["device",] == 96.0
    assert missed["cold",] > 0
    assert sum(hits.values()) + sum(missed.values()) == 290.0
    assert sum(of("hicache_host_pages").values()) == 16
    assert of("hicache_moved_bytes_total")["host_to_storage",] > 0
    assert found["hicache_degraded"] == [({}, 1.0)]
    assert found["hicache_leases"] == [({"state": "open"}, 4.0), ({"state": "ended"}, 1.0)]
    assert found["hicache_verb_failures_total"] == [({"verb": "match"}, 2.0)]
    assert found["hicache_tenant_quota_bytes"] == [({"tenant": "acme", "tier": "host"}, 10.0)]
    assert "process_resident_memory_bytes" in found


def test_the_store_of_all_pools_is_told_once(document: dict[str, Any]) -> None:
    """Otherwise a sum over pools would count it several times."""
    found = samples(Metrics(lambda: document))
    assert len(found["hicache_storage_objects"]) == 1
    assert len(found["hicache_storage_breaker_closed"]) == 2


@pytest.mark.case("STAT-2")
def test_before_anything_happened() -> None:
    """Without pools and sessions, and where values are not known, there is no NaN and no error."""
    empty: dict[str, Any] = {"service": {"uptime_seconds": float("nan"), "sessions": None}, "pools": []}
    text = asyncio.run(Metrics(lambda: empty).page()).body.decode()
    ours = [line for line in text.splitlines() if line.startswith("hicache_")]
    assert ours == ["hicache_degraded 0.0"]
    assert "# HELP hicache_tokens_asked_total" in text
    assert "NaN" not in text


def test_latencies_of_both_tiers() -> None:
    """Buckets are cumulative, the last has no bound, and sum and count go with them."""
    meter = LatencyMeter()
    for seconds in (0.00004, 0.0003, 0.0004, 9.0):
        meter.answered("match", seconds, failed=False)
    times = iter((0.0, 0.002))
    backend = MeteredBackend(MemoryBackend(), now=lambda: next(times))
    backend.contains([])
    found = samples(Metrics(dict, lambda: histograms(meter.statistics(), backend.verbs())))
    buckets = {(labels["verb"], labels["tier"], labels["le"]): value for labels, value in found[f"{LATENCY}_bucket"]}
    assert [buckets["match", "host", bound] for bound in ("5e-05", "0.00025", "0.0005", "5.0", "+Inf")] == [
        1,
        1,
        3,
        3,
        4,
    ]
    assert buckets["contains", "storage", "0.001"] == 0
    assert buckets["contains", "storage", "0.0025"] == 1
    assert ({"verb": "match", "tier": "host"}, 4.0) in found[f"{LATENCY}_count"]
    sums = {labels["verb"]: value for labels, value in found[f"{LATENCY}_sum"]}
    assert sums["match"] == pytest.approx(9.00074)


def test_names_follow_prometheus() -> None:
    """Counters end in _total, nothing else does; units are base units; names are unique."""
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert not {"ms", "us", "mb", "gb", "percent"} & set(family.name.split("_")), family.name
        assert family.help
        assert not family.help.endswith(".")


def test_the_documented_table_is_that_of_the_code(repository: Path) -> None:
    """`deploy/metrics.md` has what `metrics_table()` gives; put it there after a change."""
    assert metrics_table() in (repository / "deploy" / "metrics.md").read_text()
