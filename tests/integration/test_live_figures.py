"""A service under load: whoever is asked for figures, and whatever was recorded, it is the same story."""

from __future__ import annotations

import itertools
import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.cli import main
from hicache.testing.sidecars import ServiceProcess, namespace_of

pytestmark = pytest.mark.slow

NAMESPACE = namespace_of(8192, model="org/watched")
TIERS = ("asked", "device", "host", "storage")
LOOKS = 4


class Load:
    """Two clients that ask without a pause, for prompts that share a beginning and do not all fit."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self.begun = threading.Barrier(3)
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(2)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self.begun.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        with hicache.connect(self._address, NAMESPACE, required=True) as cache:
            first = True
            while first or not self._stop.is_set():
                tokens = np.concatenate(
                    [np.arange(64), 1000 * random.integers(1, 20) + np.arange(random.integers(200))]
                )
                with cache.request(tokens.astype(np.uint32)) as request:
                    request.load()
                    request.write_from([bytes(cache.host.page_bytes)] * len(request.allocate()))
                    request.commit()
                if first:
                    self.begun.wait(60)
                first = False


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def of_stats(document: Any) -> dict[str, int]:
    (pool,) = document["pools"]
    return of_tokens(pool["statistics"]["tokens"])


def of_tokens(tokens: Any) -> dict[str, int]:
    return {name: tokens[name] for name in TIERS} | {"missed": sum(tokens["missed"].values())}


def of_metrics(address: str) -> dict[str, int]:
    with urllib.request.urlopen(f"http://{address}/metrics") as page:
        lines = [line.rsplit(" ", 1) for line in page.read().decode().splitlines() if line.startswith("hicache_tokens")]

    def total(name: str, label: str = "") -> int:
        return sum(round(float(value)) for key, value in lines if key.startswith(f"hicache_{name}{{") and label in key)

    hits = {tier: total("tokens_hit_total", f'tier="{tier}"') for tier in TIERS if tier != "asked"}
    return {"asked": total("tokens_asked_total"), **hits, "missed": total("tokens_missed_total")}


@pytest.mark.case("STAT-5")
def test_stats_top_metrics_and_the_log_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Asked one after the other while requests come: no figure falls behind the one before it, none is ahead of the one
    after it, in each asked = hits + misses; and at rest all of them, and the access log, are equal.
    """
    log = tmp_path / "log"
    options = ("--access-log", str(log), "--metrics", "127.0.0.1:0")
    with ServiceProcess(tmp_path, *options, host="512KiB") as service:
        address, metrics = service.address, service.ready["metrics"]
        figures: list[dict[str, int]] = []
        with Load(address):
            for _ in range(LOOKS):
                figures.append(of_stats(told(capsys, "stats", address)))
                figures.append(of_tokens(told(capsys, "top", address, "--once")["tokens"]))
                figures.append(of_metrics(metrics))
        for each in figures:
            assert each["asked"] == each["device"] + each["host"] + each["storage"] + each["missed"]
            assert each["device"] == each["storage"] == 0  # there is neither here
        for before, after in itertools.pairwise(figures):
            assert all(before[name] <= after[name] for name in before)
        assert figures[-1]["asked"] > figures[0]["asked"]
        document = told(capsys, "stats", address)
        rest = of_stats(document)
        assert rest == of_metrics(metrics) == of_tokens(told(capsys, "top", address, "--once")["tokens"])
        service.stop()
    found = told(capsys, "analyze", str(log))
    recorded, pages = found["recorded"], document["pools"][0]["statistics"]["pages"]
    assert recorded["requests_dropped"] == 0
    assert found["input_tokens"] == rest["asked"]
    assert (recorded["pages_asked"], recorded["pages_host"]) == (pages["asked"], pages["host"])
    assert {reason: count for reason, count in recorded["misses_by_reason"].items() if count} == pages["missed"]
    assert pages["missed"]["evicted"] > 0
