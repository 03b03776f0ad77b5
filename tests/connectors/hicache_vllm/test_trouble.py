"""What can go wrong between an engine and the service: the engine goes on, and computes what does not come."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_services import flushed, service_config, small
from vllm_small_engine import SmallEngine

from hicache.errors import ServiceUnavailable
from hicache.testing.clients import until
from hicache.testing.serving import ServedApp

Engines = Callable[..., SmallEngine]

pytestmark = pytest.mark.slow


def test_service_that_comes_late_goes_and_comes_back(engines: Engines, folder: Path) -> None:
    """Without it nothing is found and nothing waits; with it, it is used again, and storage has what it had."""
    engine = engines()
    tokens = small(1, 40)
    engine.generate(tokens, tokens)
    assert engine.external == 0
    service = ServedApp(service_config(folder))
    for found in (0, 32):
        with service:
            until(lambda: all(one._cache.connected for one in (engine.scheduler, *engine.workers)))
            engine.generate(tokens)
            assert engine.external == found
            flushed(service)
        engine.generate(tokens)
        assert engine.external == found
    assert engine.failed == 0


@pytest.mark.case("RACE-3")
@pytest.mark.case("FAIL-5")
@pytest.mark.parametrize("load", ["async", "sync"])
def test_pages_that_are_lost_between_match_and_load_are_computed(engines: Engines, folder: Path, load: str) -> None:
    """The service ends when the engine has blocks for them: they are said not to have come, and are computed."""
    engine = engines(load=load)
    tokens = small(2, 40)
    with ServedApp(service_config(folder)) as service:
        until(lambda: all(one._cache.connected for one in (engine.scheduler, *engine.workers)))
        engine.generate(tokens)
        promise = engine.scheduler.update_state_after_alloc

        def lose(request: Any, blocks: Any, tokens: int) -> None:
            promise(request, blocks, tokens)
            if tokens:
                service.stop()

        engine.scheduler.update_state_after_alloc = lose
        request = engine.add(tokens)
        engine.run()
        assert request.external == 32
        assert engine.failed == 8
        assert engine.stats["failed_pages/load: lost"] == 4


@pytest.mark.case("FAIL-7")
def test_full_pool_stores_less_and_says_so(engines: Engines, folder: Path) -> None:
    """Eight slots for requests of ten pages at once: what has no place is counted, and nothing fails."""
    with ServedApp(service_config(folder, host=8 * 4096)):
        engine = engines(blocks=200)
        engine.generate(*(small(10 + number, 80) for number in range(6)))
        assert engine.stats["failed_pages/store: host pool full"] > 0
        assert engine.failed == 0
        engine.generate(small(20, 40))
        engine.generate(small(20, 40))
        assert engine.external == 32


@pytest.mark.case("FAIL-2")
def test_damaged_object_is_computed_again(engines: Engines, folder: Path) -> None:
    """A bit flips in a stored page: that page and those behind it are a miss, and the engine's answer is right."""
    tokens = small(30, 60)
    with ServedApp(service_config(folder)) as service:
        engines().generate(tokens)
        flushed(service)
    objects = sorted((folder / "kv").rglob("*_L0-3_H0"))
    assert len(objects) == 7
    for path in objects[3:4]:
        data = bytearray(path.read_bytes())
        data[-4096] ^= 1
        path.write_bytes(data)
    with ServedApp(service_config(folder)):
        engine = engines()
        engine.generate(tokens)
        assert engine.external < 56
        assert engine.failed == 0
        engine.generate(tokens)
        assert engine.sources.get("host", 0) == 56, (engine.sources, engine.stats)


def _fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("deliberately")


SCHEDULER = ("matched", "allocated", "plan", "reported", "finished", "sources")
WORKER = ("fence", "begin_stores", "begin_loads", "wait_for_layer", "take_report")


@pytest.mark.case("FAIL-4")
@pytest.mark.usefixtures("service")
def test_exceptions_of_the_scheduler_stay_inside(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever fails in our part of the scheduler, the engine goes on, computes what it has to, and keeps no block."""
    tokens = small(40, 40)
    for name in SCHEDULER:
        monkeypatch.setattr("hicache_vllm.guard._said", {})
        caplog.clear()
        engine = engines()
        engine.generate(tokens)
        monkeypatch.setattr(engine.scheduler._scheduler, name, _fails)
        requests = [engine.add(tokens) for _ in range(2)]
        for _ in range(300):
            engine.step()
        assert all(request.num_tokens == request.wanted for request in requests), name
        assert "deliberately" in caplog.text, name
        if name not in ("plan", "reported"):
            assert engine.free_blocks == 63, name


@pytest.mark.usefixtures("service")
def test_exceptions_of_a_worker_stay_inside(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = small(41, 40)
    for name in WORKER:
        monkeypatch.setattr("hicache_vllm.guard._said", {})
        caplog.clear()
        engine = engines()
        engine.generate(tokens)
        monkeypatch.setattr(engine.workers[0]._worker, name, _fails)
        request = engine.add(tokens)
        for _ in range(300):
            engine.step()
        assert request.num_tokens == request.wanted, name
        assert "deliberately" in caplog.text, name


@pytest.mark.case("FAIL-3")
@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("load", ["async", "sync"])
def test_copies_that_fail_are_said_to_have_failed(
    engines: Engines, load: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine hears which blocks did not come, and does not ask for ever; stores that fail are misses later."""
    engine = engines(load=load)
    tokens = small(42, 40)
    engine.generate(tokens)
    tensors = engine.workers[0]._worker._tensors
    monkeypatch.setattr(tensors, "load", _fails)
    engine.generate(tokens)
    assert (engine.external, engine.failed) == (32, 8)
    monkeypatch.setattr(tensors, "store", _fails)
    engine.generate(small(43, 40))
    monkeypatch.undo()
    engine.generate(small(43, 40))
    assert engine.external == 32
    assert engine.free_blocks == 63
    assert "a copy has failed" in caplog.text


@pytest.mark.usefixtures("service")
def test_worker_that_does_not_know_its_tensors(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    """It says why, once, and the scheduler asks for nothing any more; requests that it promised are computed."""
    engine = engines()
    tokens = small(44, 40)
    engine.generate(tokens)
    worker = engine.workers[0]
    worker._worker.close()
    worker._disable("the tensors have gone", told=True)
    engine.generate(tokens)
    engine.generate(tokens)
    assert (engine.external, engine.failed) in ((32, 8), (0, 0))  # the scheduler may hear of it before it promises
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "hicache: runs without a cache from now on: the tensors have gone"
    ]
    assert engine.free_blocks == 63


@pytest.mark.usefixtures("service")
def test_audited_page_that_differs_withdraws_the_model(
    engines: Engines, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an engine has other weights under the same name: an alarm, and nobody finds any of these pages."""
    tokens = small(50, 40)
    engines().generate(tokens)
    engine = engines(audit_probability=1.0)
    monkeypatch.setattr("hicache_vllm.comparing.Comparison.outcome", lambda *_: "different")
    engine.generate(tokens)
    engine.generate(tokens)
    assert engine.external == 24
    assert engine.stats["audited_pages/different"] == 1
    assert "audited page differs" in caplog.text
    fresh = engines()
    until(lambda: not engine.scheduler._scheduler._scopes.stale)
    fresh.generate(tokens)
    assert fresh.external == 0


def test_reset_without_the_service_is_made_up_for(engines: Engines, folder: Path) -> None:
    """Pages that could not be forgotten are not used until they are."""
    engine = engines()
    tokens = small(60, 40)
    with ServedApp(service_config(folder)) as service:
        until(lambda: all(one._cache.connected for one in (engine.scheduler, *engine.workers)))
        engine.generate(tokens)
        flushed(service)
    until(lambda: not engine.scheduler._cache.connected)
    assert engine.scheduler.reset_cache() is False
    with ServedApp(service_config(folder)):
        until(lambda: not engine.scheduler._scheduler._scopes.stale)
        engine.generate(tokens)
        assert engine.external == 0


@pytest.mark.usefixtures("service")
def test_answer_that_comes_late_is_not_waited_for(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for its deadline, others go on meanwhile, and the lease that comes late is given back."""
    engine = engines(deadline=0.05)
    tokens = small(70, 40)
    engine.generate(tokens)
    gate = threading.Event()
    ask = engine.scheduler._cache.request

    def slow(given: Any, **options: Any) -> Any:
        if options.get("logits", True):
            gate.wait()
        return ask(given, **options)

    monkeypatch.setattr(engine.scheduler._cache, "request", slow)
    request = engine.add(tokens)
    short = engine.add(small(71, 5))
    until(lambda: engine.stepped() and short.num_tokens == short.wanted)
    until(lambda: engine.stepped() and request.num_tokens == request.wanted)
    assert engine.external == 0
    assert engine.stats["missed_tokens/late"] > 0
    gate.set()
    engine.run()
    until(lambda: not engine.scheduler._cache.state.open_leases)


@pytest.mark.usefixtures("service")
def test_lease_that_is_lost_before_its_pages_are_promised_is_no_hit(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    tokens = small(72, 40)
    engine.generate(tokens)
    monkeypatch.setattr("hicache_vllm.lookups.Lookup.lost", True)
    engine.generate(tokens)
    assert engine.external == 0
    assert engine.free_blocks == 63


@pytest.mark.usefixtures("service")
def test_slots_that_cannot_be_had_are_counted_by_reason(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service answers with an error, the lease is lost, the queue is full: pages are not stored, nothing else."""
    engine = engines()
    ask = engine.scheduler._cache.request

    def refused(given: Any, **options: Any) -> Any:
        raise ServiceUnavailable("not now")

    monkeypatch.setattr(engine.scheduler._cache, "request", refused)
    engine.generate(small(73, 40))
    assert engine.stats["failed_pages/store: ServiceUnavailable"] == 5
    monkeypatch.setattr(engine.scheduler._cache, "request", ask)
    monkeypatch.setattr("hicache.rpc.client.request.RequestView.ticket", lambda _: None)
    engine.generate(small(74, 40))
    assert engine.stats["failed_pages/store: lease lost"] == 5
    monkeypatch.undo()
    monkeypatch.setattr(engine.scheduler._scheduler._tasks, "begin", lambda _: False)
    engine.generate(small(75, 40))
    assert engine.stats["failed_pages/store: busy"] == 5
    monkeypatch.undo()
    monkeypatch.setattr("hicache_vllm.stores.MOST", 0)
    engine.generate(small(76, 40))
    assert engine.stats["failed_pages/store: busy"] > 5
    assert engine.free_blocks == 63


@pytest.mark.case("RACE-4")
@pytest.mark.usefixtures("service")
def test_requests_that_are_computed_when_the_cache_is_cleared_go_past_it(engines: Engines) -> None:
    """Their keys and values are of the old weights: none of them is stored any more."""
    engine = engines(chunk=20)
    request = engine.add(small(77, 60))
    while request.num_computed_tokens < 40:
        engine.step()
    assert engine.scheduler.reset_cache() is True
    engine.run()
    engine.generate(small(77, 60))
    assert engine.external == 0
    assert engine.free_blocks == 63


@pytest.mark.case("FAIL-1")
@pytest.mark.usefixtures("service")
def test_store_whose_blocks_were_overwritten_is_not_published(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine could not wait any longer: what was read by then may be another's."""
    monkeypatch.setattr("hicache_vllm.worker.FENCE_SECONDS", 0.0)
    engine = engines()
    gate = threading.Event()
    tensors = engine.workers[0]._worker._tensors
    store = tensors.store
    monkeypatch.setattr(tensors, "store", lambda *given: (gate.wait(), store(*given))[1])
    request = engine.add(small(78, 60), new=30)
    until(lambda: engine.stepped() and bool(engine.workers[0]._worker._waiting))
    engine.preempt(request)
    engine.step()
    gate.set()
    engine.run()
    fresh = engines()
    fresh.generate(small(78, 60))
    assert fresh.failed == 0


@pytest.mark.usefixtures("service")
def test_worker_that_leaves_with_work_undone_answers_for_it(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load under way fails and is computed, a store under way is over, and blocks are free again."""
    engine = engines()
    tokens = small(79, 40)
    engine.generate(tokens)
    gate = threading.Event()
    worker = engine.workers[0]._worker
    load = worker._tensors.load
    monkeypatch.setattr(worker._tensors, "load", lambda *given: (gate.wait(), load(*given))[1])
    monkeypatch.setattr("hicache_vllm.copier.CLOSE_SECONDS", 0.01)
    request = engine.add(tokens)
    until(lambda: engine.stepped() and bool(worker._waiting))
    monkeypatch.setattr(worker, "take_report", _fails)
    for _ in range(50):
        engine.step()
    gate.set()
    assert request.num_tokens == request.wanted
    assert engine.failed == 8
    engine.run()
    assert engine.free_blocks == 63
