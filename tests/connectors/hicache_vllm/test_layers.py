"""Layers that wait for their pages and are stored as they are computed, and steps in which vLLM calls for none of them.

A graph of the whole model is replayed without Python: what relies on its layers' calls would read what is not there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_cuda import EngineCuda
from vllm_recorded import RELEASES, Forwards, record
from vllm_services import small
from vllm_small_engine import BLOCK, LAYERS, SmallEngine

from hicache.testing.clients import until
from hicache_vllm.compat import Forward, forward
from hicache_vllm.early import EarlyStores
from hicache_vllm.plans import Store
from hicache_vllm.saving import Stage
from hicache_vllm.waits import LayerWaits

Engines = Callable[..., SmallEngine]

STEPS: dict[str, dict[str, Any]] = {
    "eager": {"forward": {}},
    "pieces": {"forward": {"mode": "PIECEWISE"}},
    "whole graph": {"forward": {"mode": "FULL"}, "hooks": False},
    "whole graph of the second runner": {"forward": None, "hooks": False},
    "nothing said": {"forward": {"computes": False}, "hooks": False},
}
"""What vLLM says of a step, and whether its layers call."""


@pytest.fixture(params=["processor", "gpu"])
def place(request: pytest.FixtureRequest) -> None:
    """Where the tensors of engines are that are made from now on."""
    if request.param == "gpu":
        request.getfixturevalue("cudas")


def on(engine: SmallEngine, step: dict[str, Any]) -> SmallEngine:
    for name, value in step.items():
        setattr(engine, name, value)
    return engine


# ---- what vLLM says


@pytest.mark.case("PLUG-3")
@pytest.mark.parametrize("release", RELEASES)
def test_releases_say_whether_layers_call(install: Any, release: str) -> None:
    """The operator calls before and behind each layer; what tells of graphs is there; vLLM asks us for pieces."""
    known = record(release)
    assert known["hooks"] == [
        "connector.has_connector_metadata()",
        "connector.wait_for_layer_load(layer_name)",
        "connector.save_kv_layer(layer_name, kv_cache, attn_metadata)",
    ]
    assert known["asks_for_piecewise"]
    connector = install(release=release).HiCacheConnector
    assert connector.requires_piecewise_for_cudagraph({"load": "sync"})
    for settings in ({}, {"load": "async"}, {"layerwise_stores": "on"}):  # stores do without
        assert not connector.requires_piecewise_for_cudagraph(settings)
    for mode, hooked in (("NONE", True), ("PIECEWISE", True), ("FULL", False)):
        Forwards.begin(release, mode=mode)
        assert forward() == Forward(hooked=hooked)
    Forwards.begin(release, parts=2)
    assert forward() == Forward(hooked=True, split=True)
    Forwards.begin(release, computes=False)
    assert forward() == Forward()
    Forwards.current = None
    assert forward() == Forward()


# ---- loads


@pytest.mark.slow
@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("step", STEPS)
def test_no_layer_reads_a_page_before_it_has_come(engines: Engines, step: str) -> None:
    engine = on(engines(load="sync"), STEPS[step])
    engine.generate(small(1, 43))
    engine.generate(small(1, 43))
    assert (engine.external, engine.failed) == (40, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("step", ["eager", "whole graph", "whole graph of the second runner"])
def test_no_layer_reads_a_page_before_it_has_come_on_a_gpu(
    cudas: list[EngineCuda], engines: Engines, step: str
) -> None:
    """Copies end only once the engine's stream waits for one of them, as they do on a slow link."""
    engine = on(engines(load="sync"), STEPS[step])
    (cuda,) = cudas
    engine.generate(small(1, 43))
    cuda.slow = True
    engine.generate(small(1, 43))
    assert (engine.external, engine.failed) == (40, 0)
    assert cuda.layers_waited


@pytest.mark.slow
@pytest.mark.usefixtures("service")
def test_a_wait_that_is_left_out_is_found(
    cudas: list[EngineCuda], engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above fail where the wait in front of a whole graph is missing."""
    engine = on(engines(load="sync"), STEPS["whole graph"])
    (cuda,) = cudas
    engine.generate(small(1, 43))
    monkeypatch.setattr(LayerWaits, "begun", lambda _: None)
    cuda.slow = True
    engine.computing = lambda layer: cuda.let_go() if layer == LAYERS - 1 else None
    with pytest.raises(AssertionError, match="token 0, layer 0"):
        engine.generate(small(1, 43))


@pytest.mark.slow
@pytest.mark.usefixtures("service", "place")
def test_layers_that_should_have_called_and_did_not_make_no_wrong_answer(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an unknown release: what was read too early is computed, and later steps wait before they begin."""
    engine = engines(load="sync")
    prompts = [small(number, 43) for number in (2, 3)]
    engine.generate(*prompts)
    engine.hooks = False
    engine.generate(prompts[0])
    assert (engine.external, engine.failed) == (40, 10)
    assert engine.stats["failed_pages/load: unordered"] == 5
    engine.generate(prompts[1])
    assert (engine.external, engine.failed) == (80, 10)
    (line,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert "3 of 3 layers were computed without waiting for their pages" in line


@pytest.mark.slow
@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("early", ["off", "on"])
def test_what_was_computed_behind_a_failed_load_is_not_stored(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, early: str
) -> None:
    """The step that finds out has computed two whole pages out of what did not come."""
    engine = engines(load="sync", layerwise_stores=early)
    tokens = small(4, 59)
    engine.generate(tokens[:43])
    tensors = engine.workers[0]._worker._tensors
    load = tensors.load

    def fails(pages: Any, runs: Any, came: Callable[[int], None]) -> None:
        load(np.zeros_like(pages), runs, came)
        raise OSError("the link is down")

    with monkeypatch.context() as patch:
        patch.setattr(tensors, "load", fails)
        engine.add(tokens)
        until(lambda: engine.stepped() and engine.failed > 0)
    stores = engine.scheduler._scheduler._stores
    until(lambda: all(work.stage is not Stage.PREPARING for work in stores._works.values()), "slots are there")
    engine.run()
    assert (engine.external, engine.failed) == (40, 10)
    fresh = engines()
    fresh.generate(tokens)
    assert (fresh.external, fresh.failed) == (56, 0)


def test_steps_that_are_scheduled_ahead_wait_for_no_load(
    install: Any, spec: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM would keep what the next step, scheduled already, makes of pages that did not come."""
    from vllm_recorded import Role, cache_config, vllm_config

    extra = {"address": "unix:///nowhere/hicache.sock", "page_size": 2 * BLOCK, "load": "sync", "layer_partition": 1}
    for changed in ({"scheduler_config__async_scheduling": True}, {"parallel_config__pipeline_parallel_size": 2}):
        caplog.clear()
        config = vllm_config(extra, spec, layers=2, **changed)
        made = install().HiCacheConnector(config, Role.SCHEDULER, cache_config(spec))
        made.shutdown()
        assert made._start.settings.load == "async"
        assert "--no-async-scheduling" in caplog.text


# ---- stores


@pytest.mark.slow
@pytest.mark.usefixtures("service", "place")
@pytest.mark.parametrize(
    ("place", "step"),
    [*(("processor", step) for step in STEPS), ("gpu", "eager"), ("gpu", "whole graph")],
    indirect=["place"],
)
def test_pages_go_with_the_step_that_completes_them(engines: Engines, step: str) -> None:
    """Two prompts that share a prefix, one of them in one step; all is found by others, bit for bit."""
    engine = on(engines(layerwise_stores="on"), STEPS[step])
    common = small(5, 24)
    prompts = [common + small(6, 19), common + small(7, 30)]
    engine.generate(*prompts)
    assert engine.early == 2
    assert engine.free_blocks == 63
    fresh = engines()
    fresh.generate(*prompts)
    assert (fresh.external, fresh.failed) == (40 + 48, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("service")
def test_the_step_itself_stores_and_not_the_one_behind_it(engines: Engines) -> None:
    engine = engines(layerwise_stores="on")
    request = engine.add(small(8, 43), new=1)
    until(lambda: engine.stepped() and request.num_tokens == request.wanted)
    until(lambda: not engine.workers[0]._worker._waiting, "the copies have ended")  # without another step
    fresh = engines()
    fresh.generate(small(8, 43))
    assert fresh.external == 40


@pytest.mark.slow
@pytest.mark.usefixtures("service")
def test_chunks_and_answers(engines: Engines) -> None:
    """Each chunk's pages go with its step; what is generated goes behind, as ever."""
    engine = engines(layerwise_stores="on", chunk=16)
    (first,) = engine.generate(small(9, 60), new=15)
    assert engine.early == 4
    assert engine.free_blocks == 63
    fresh = engines()
    fresh.generate(first.all_token_ids)
    assert (fresh.external, fresh.failed) == (72, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("service")
def test_ranks_store_their_parts(engines: Engines) -> None:
    engine = engines(layerwise_stores="on", tp=2, chunk=24)
    engine.generate(small(10, 60))
    assert engine.early == 3
    fresh = engines(tp=2)
    fresh.generate(small(10, 60))
    assert (fresh.external, fresh.failed) == (56, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_step_that_is_aborted_publishes_nothing(
    engines: Engines, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model raises in one of its layers: what was copied by then is dropped, and stored when it was computed."""
    monkeypatch.setattr("hicache_vllm.early.STEP_BYTES", 1)  # each layer at once
    engine = engines(layerwise_stores="on")
    engine.raises = layer
    request = engine.add(small(11, 43))
    until(lambda: engine.stepped() and engine.raises is None)
    until(lambda: not engine.workers[0]._worker._waiting, "the copies have ended")
    other = engines(changed={"kv_transfer_config__is_kv_producer": False})
    other.generate(small(11, 43), new=1)
    assert other.external == 0
    engine.run()
    assert request.num_tokens == request.wanted
    fresh = engines()
    fresh.generate(small(11, 43))
    assert (fresh.external, fresh.failed) == (40, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("service")
def test_layers_that_stop_calling_publish_nothing(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that is not known calls for some layers only: pages are stored behind the step, as ever."""
    monkeypatch.setattr("hicache_vllm.early.STEP_BYTES", 1)  # each layer at once
    engine = engines(layerwise_stores="on")
    engine.computing = lambda layer: setattr(engine, "hooks", (layer + 1) % LAYERS < LAYERS - 1)  # the last does not
    engine.generate(small(12, 43))
    assert engine.early == 1
    fresh = engines()
    fresh.generate(small(12, 43))
    assert (fresh.external, fresh.failed) == (40, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("step", ["eager", "whole graph"])
def test_blocks_are_not_given_away_while_they_are_copied(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Preemption in front of, while and behind copies; with a graph the store has not even begun."""
    engine = on(engines(layerwise_stores="on", chunk=24), STEPS[step])
    form = type(engine.workers[0]._worker._tensors._form)
    copy, slow = form.copy, threading.Event()
    monkeypatch.setattr(form, "copy", lambda *given, **named: (slow.wait(0.01), copy(*given, **named))[1])
    prompts = [small(90 + number, 60) for number in range(3)]
    for steps, tokens in enumerate(prompts, start=1):
        request = engine.add(tokens, new=4)
        until(lambda: engine.stepped() and request.num_computed_tokens > 0)  # noqa: B023
        for _ in range(steps - 1):
            engine.step()
        if request in engine._running:
            engine.preempt(request)
        engine.run()
        assert engine.free_blocks == 63
    assert engine.early >= 3
    fresh = engines(blocks=200)
    fresh.generate(*prompts)
    assert (fresh.external, fresh.failed) == (3 * 56, 0)


@pytest.mark.slow
def test_a_pool_without_room_stores_behind_the_step(engines: Engines, folder: Path) -> None:
    from vllm_services import service_config

    from hicache.testing.serving import ServedApp

    with ServedApp(service_config(folder, host=16 * 1024)):
        engine = engines(layerwise_stores="on")
        for number in range(4):
            engine.generate(small(60 + number, 43))
        assert engine.failed == 0
        assert engine.free_blocks == 63


@pytest.mark.slow
@pytest.mark.usefixtures("service")
def test_aborted_requests_give_all_slots_back(engines: Engines, service: Any) -> None:
    engine = engines(layerwise_stores="on", chunk=16)
    requests = [engine.add(small(70 + number, 60)) for number in range(4)]
    for request in requests:
        engine.step()
        engine.abort(request)
    engine.run()
    assert engine.free_blocks == 63
    engine.scheduler.shutdown()
    assert service.do(service.app.service.leases.statistics).open == 0


@pytest.mark.slow
@pytest.mark.usefixtures("service")
def test_every_token_is_told_once(engines: Engines) -> None:
    """The lookup's lease, which counts, stays open for the stores."""
    engine = engines(layerwise_stores="on")

    def told() -> dict[str, float]:
        return {name: count for name, count in engine.stats.items() if name.partition("/")[0].endswith("_tokens")}

    for number, wanted in enumerate(
        (
            {"asked_tokens": 43, "missed_tokens/cold": 40, "missed_tokens/unaligned_tail": 3},
            {"asked_tokens": 86, "hit_tokens/host": 40, "missed_tokens/cold": 40, "missed_tokens/unaligned_tail": 6},
        )
    ):
        engine.generate(small(13, 43))
        until(lambda: engine.stepped() and told() == wanted, f"the account of request {number}")  # noqa: B023
    assert engine.stats["early_pages"] == 5


class TestEarlyStores:
    """What is copied when, without an engine."""

    def test_thin_layers_wait_for_others_and_none_is_copied_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[Any] = []

        class Tensors:
            block_bytes = 3 * 100

            def mark(self) -> Callable[[], None]:
                return lambda: told.append("ready")

            def by_layer(self, joined: Any, first: int, blocks: Any) -> Any:
                return self

            def copy(self, first: int, end: int) -> None:
                told.append((first, end))

            def finish(self, *, good: bool) -> int:
                return 2 * good

        class Now:
            def store(self, work: Callable[[], None]) -> None:
                work()

        class Ends:
            def join(self, ticket: bytes) -> Any:
                return self

            def close(self) -> None:
                told.append("closed")

            def publish(self, joined: Any, store: Any, pages: int) -> int:
                return pages

            def over(self, store: Any, pages: int) -> None:
                told.append(pages)

        store = Store(1, "r", b"t", 0, 2, [1, 2, 3, 4], early=True)
        monkeypatch.setattr("hicache_vllm.early.STEP_BYTES", 2 * 4 * 100)
        stores = EarlyStores(Tensors(), 3, Now(), Ends())  # type: ignore[arg-type]
        stores.begin([store], Forward(hooked=True))
        for layer in range(3):
            stores.computed(layer)
        stores.end(good=True)
        assert told == ["ready", (0, 2), "ready", (2, 3), "closed", 2]
        for calls, good in (((0, 1, 1, 2), True), ((0, 2), True), ((0, 1), True), ((0, 1, 2), False), ((), True)):
            told.clear()
            stores.begin([store], Forward(hooked=True))
            for layer in calls:
                stores.computed(layer)
            stores.end(good=good)
            assert told[-1] == 0, calls
        stores.begin([store], Forward(hooked=True, split=True))  # each layer calls once a part
        stores.computed(0)
        stores.end(good=True)
        assert stores.take_late() == [store]
        assert stores.take_late() == []
