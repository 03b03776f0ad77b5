"""Embedded caches and services write what requests asked for and got; what is read back is what they counted."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.analytics.analysis.recorded import Recorded, between_ideals
from hicache.analytics.analysis.report import Analysis, AnalyzeOptions, analyze
from hicache.analytics.traces import Opening, open_trace
from hicache.cli import main
from hicache.core.identity import Adapter
from hicache.errors import ConfigError
from hicache.rpc.service import Caller, RequestScope
from hicache.runtime.accesslog.settings import AccessLog
from hicache.runtime.accesslog.writer import AccessLogWriter
from hicache.sidecar.document import document
from hicache.testing.engine import FakeEngine, prompt, small_namespace
from hicache.testing.sessions import NAMESPACE, Client, running
from hicache.testing.sessions import prompt as pages_of
from hicache.testing.sidecars import ServiceProcess, namespace_of


def analysed(folder: Path) -> tuple[Analysis, Recorded]:
    found = analyze(open_trace([folder]), AnalyzeOptions())
    assert found.recorded is not None
    return found, found.recorded


def text_of(folder: Path) -> bytes:
    return b"".join(gzip.decompress(path.read_bytes()) for path in sorted(folder.iterdir()))


@pytest.mark.case("STAT-1", "STAT-5")
def test_an_embedded_cache_logs_what_it_counts(tmp_path: Path) -> None:
    """Random traffic over all three tiers: the log's sums are the cache's own, by tier and by reason."""
    random = np.random.default_rng(5)
    store = f"file://{tmp_path}/store?capacity=4MiB"
    with hicache.open(small_namespace(), device=24, host=40, storage=store, access_log=tmp_path / "log") as cache:
        engine = FakeEngine(cache)
        for _ in range(60):
            tokens = prompt(int(random.integers(3)), 20) + prompt(
                100 + int(random.integers(8)), int(random.integers(50))
            )
            engine.run(tokens)
        with cache.request(prompt(1, 30), adapter=Adapter("no digest")) as past:
            past.load()
        with pytest.raises(RuntimeError), cache.request(prompt(1, 30)):
            raise RuntimeError("the engine")
        cache.flush()
        counted = cache.statistics()
    found, recorded = analysed(tmp_path / "log")
    pages = counted.pages
    assert (recorded.requests, recorded.aborted) == (counted.requests, counted.aborted) == (62, 1)
    assert recorded.pages_asked == pages.asked
    assert (recorded.pages_device, recorded.pages_host, recorded.pages_storage) == (
        pages.device,
        pages.host,
        pages.storage,
    )
    assert {reason: n for reason, n in recorded.misses_by_reason.items() if n} == {
        reason.value: n for reason, n in pages.missed.items()
    }
    assert recorded.misses_by_reason["bypassed"] == 7
    assert found.input_tokens == counted.tokens.asked
    assert recorded.recorded_hit_rate_pages <= recorded.recorded_ideal_hit_rate_pages
    assert recorded.pages_hit_unknown == 0
    assert recorded.pages_not_asked > 0
    assert between_ideals(recorded, asked=found.pages_asked, hit=found.ideal_pages_hit), "they add up"
    assert recorded.load_seconds.count > 0
    assert counted.access_log is not None
    assert counted.access_log.requests == 62


def test_no_token_and_no_name_is_written(tmp_path: Path) -> None:
    """Nothing that users wrote: tokens, tenants, salts and adapters stand nowhere, not even as text in the file."""
    tokens = [1_234_567_890 + number for number in range(64)]
    with hicache.open(small_namespace(), device=32, access_log=tmp_path / "log") as cache:
        adapter = Adapter("an adapter", digest=bytes(range(32)))
        with cache.request(tokens, tenant="a tenant", salt="a salt", adapter=adapter) as request:
            request.load()
            request.extend([1_999_999_999])
    text = text_of(tmp_path / "log")
    assert all(str(token).encode() not in text for token in [*tokens, 1_999_999_999])
    assert np.array(tokens[:4], "<u4").tobytes() not in text
    assert not any(name in text for name in (b"a tenant", b"a salt", b"an adapter"))
    assert b'"output":1' in text
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "log").iterdir())


def test_answers_count_for_the_next_turn(tmp_path: Path) -> None:
    """What a request grew by was kept, so that the next turn could hit it: the ideal knows."""
    with hicache.open(small_namespace(), device=64, access_log=tmp_path / "log") as cache:
        conversation = prompt(1, 20)
        for _ in range(3):
            with cache.request(conversation) as request:
                request.load()
                request.extend(prompt(7, 12))
                for slot in request.allocate():
                    cache.device.write_page(slot, bytes(cache.device.page_bytes))
                request.commit(ready=hicache.READY)
            conversation = [*conversation, *prompt(7, 12), *prompt(9, 5)]
    found, recorded = analysed(tmp_path / "log")
    assert found.output_tokens == 36
    assert recorded.recorded_hit_rate_pages == recorded.recorded_ideal_hit_rate_pages > 0
    assert recorded.pages_that_could_hit == recorded.pages_device
    steps = between_ideals(recorded, asked=found.pages_asked, hit=found.ideal_pages_hit)
    assert ("left by answers", 0, recorded.pages_of_answers) in steps


def test_a_log_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    """The folder goes while the cache is open: requests are lost for the log, it says so, and goes on where it can."""
    folder = tmp_path / "log"
    with hicache.open(small_namespace(), device=16, access_log=folder) as cache:
        log = cache._own_log
        assert log is not None
        folder.rmdir()
        folder.touch()
        FakeEngine(cache).run(prompt(1, 20))
        log._safely(last=True)
        told = cache.statistics()
        assert told.access_log is not None
        assert told.access_log.dropped == 1
        assert any("cannot be written" in text and "1 requests lost" in text for text in told.degraded)
        folder.unlink()
        FakeEngine(cache).run(prompt(1, 20))
        log._safely(last=True)
        assert cache.statistics().degraded == ()
    assert analysed(folder)[1].requests_dropped == 1


def test_a_log_replayed_is_what_was_recorded(repository: Path, tmp_path: Path) -> None:
    """A real trace through a cache without bytes, and its log through another one of the same size: the same hits."""
    geometry = hicache.KVGeometry.mha(layers=1, kv_heads=1, head_dim=8, dtype="float16")
    namespace = hicache.Namespace(model="m", geometry=geometry, page_size=512)

    def run(path: Path, log: Path | None) -> hicache.Totals:
        with hicache.open(namespace, device=300, host=3000, bytes=False, access_log=log) as cache:
            for asked in Opening(limit=400).open([path]):
                tokens = np.append(np.repeat(asked.ids, 512), np.zeros(512, np.uint32))[: asked.input_tokens]
                with cache.request(tokens) as request:
                    request.load()
                    request.allocate()
                    request.commit(ready=hicache.READY)
                cache.flush()  # so that it is no question of time what is where
            return cache.statistics().pages

    counted = run(repository / "benchmarks" / "traces" / "conversation_1000.jsonl", tmp_path / "log")
    recorded = analysed(tmp_path / "log")[1]
    again = run(tmp_path / "log", None)
    assert (recorded.pages_device, recorded.pages_host) == (counted.device, counted.host) == (again.device, again.host)
    assert min(counted.device, counted.host) > 10
    assert recorded.misses_by_reason["evicted"] == again.missed[hicache.MissReason.EVICTED] > 0


def test_settings_that_cannot_work_open_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"access_log.folder .*cannot be made"):
        hicache.open(small_namespace(), device=8, access_log=tmp_path / "file")
    with pytest.raises(ConfigError, match="access_log=True is not None"):
        hicache.open(small_namespace(), device=8, access_log=True)  # type: ignore[arg-type]


def test_all_pools_of_a_service_write_one_log(tmp_path: Path) -> None:
    """Its sums are those of the document; prefetches and what nobody was given are no requests; sessions are told."""

    async def test() -> dict[str, Any]:
        log = AccessLogWriter(AccessLog(tmp_path / "log", tenants="name"), background=False)
        async with running(storage=f"file://{tmp_path}/store?capacity=64MiB", log=log) as (service, _):
            first, second = await Client.attach(service, pool_bytes=4 << 20), await Client.attach(service)
            for client, seed in ((first, 0), (second, 0), (second, 1), (first, 1)):
                await client.store(pages_of(5, seed))
                assert await client.check(pages_of(5, seed)) == 5
            await first.store(pages_of(3), RequestScope(salt="x"))
            await first.session.prefetch(1, RequestScope(), b"", until=0.0)
            other = await Client.attach(service, Caller(tenant="acme"), pool_bytes=4 << 20)
            await other.store(pages_of(5))
            found: dict[str, Any] = document(service, Caller())
        log.close()
        return found

    found = asyncio.run(test())
    analysis, recorded = analysed(tmp_path / "log")
    totals: Counter[str] = Counter()
    for pool in found["pools"]:
        statistics = pool["statistics"]
        totals.update(
            requests=statistics["requests"], asked=statistics["pages"]["asked"], host=statistics["pages"]["host"]
        )
        totals.update({f"missed {reason}": n for reason, n in statistics["pages"]["missed"].items()})
    assert (recorded.requests, recorded.pages_asked, recorded.pages_host) == (
        totals["requests"],
        totals["asked"],
        totals["host"],
    )
    for reason, count in recorded.misses_by_reason.items():
        assert count == totals[f"missed {reason}"]
    assert found["service"]["access_log"]["requests"] == recorded.requests
    text = text_of(tmp_path / "log").decode()
    assert '"tenant":"acme"' in text
    assert NAMESPACE.model in text
    sessions = {json.loads(line).get("session") for line in text.splitlines()} - {None}
    assert len(sessions) == 3
    assert analysis.requests == recorded.requests


@pytest.mark.slow
def test_a_service_and_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`serve --access-log`, killed and started again, is analysed, simulated and told by stats; all from one folder."""
    folder = tmp_path / "log"
    namespace = namespace_of(8192)
    asked = 0
    for life in range(2):
        with ServiceProcess(tmp_path, "--access-log", str(folder), "--metrics", "127.0.0.1:0") as service:
            with hicache.connect(service.address, namespace, required=True) as cache:
                for turn in range(3):
                    with cache.request(np.arange(100 + 16 * turn, dtype=np.uint32)) as request:
                        request.load()
                        fresh = request.allocate()
                        request.write_from([bytes(cache.host.page_bytes)] * len(fresh))
                        request.commit()
                        asked += 6 + turn
            assert main(["stats", service.address, "--json"]) == 0
            told = json.loads(capsys.readouterr().out)["service"]["access_log"]
            assert told["requests"] == 3
            assert main(["stats", service.address]) == 0
            assert re.search(rf"access log +0 written, 3 waiting, .* in {folder}", capsys.readouterr().out)
            if life:
                service.kill()  # what it had not written by then is lost, and nothing else
                left = min(folder.iterdir())
                with left.open("ab") as file:
                    file.write(left.read_bytes()[:40])  # as if it had been in the middle of a block
            else:
                service.stop()
    assert main(["analyze", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    recorded = found["recorded"]
    assert recorded["requests"] == found["requests"] == 3
    assert recorded["pages_asked"] == asked // 2 == recorded["pages_host"] + recorded["pages_missed"]
    assert recorded["pages_host"] == 6 + 7
    assert main(["analyze", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "what 3 requests really got" in shown
    assert "had nothing been forgotten" in shown
    assert main(["simulate", str(folder), "--device", "64", "--host", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"HICACHE_ACCESS_LOG__SAMPLE": "0"}, "access_log.sample"),
        ({"HICACHE_ACCESS_LOG__FILE_BYTES": "1GiB"}, "access_log.file_bytes"),
        ({"HICACHE_ACCESS_LOG__KEY_FILE": "/nowhere/key"}, "access_log.key_file"),
        ({"HICACHE_ACCESS_LOG__TENANTS": "all"}, "use one of digest, name, omit"),
    ],
)
def test_bad_settings_of_a_service(
    settings: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line before anything starts."""
    for name, value in settings.items():
        monkeypatch.setitem(os.environ, name, value)
    code = main(["serve", "--host", "1MiB", "--listen", f"unix://{tmp_path}/s", "--access-log", str(tmp_path / "log")])
    message = capsys.readouterr().err
    assert (code, message.count("\n"), words in message) == (2, 1, True), message
