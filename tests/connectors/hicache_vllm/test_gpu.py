"""KV tensors on a GPU, as the small engine has them: a fake of CUDA reaches the engine's and the service's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_cuda import BATCH, EngineCuda, adopt
from vllm_services import service_config, small
from vllm_small_engine import SmallEngine

import hicache_vllm.gpu
import hicache_vllm.tensors
from hicache.core.arenas import Run as ArenaRun
from hicache.cuda.driver import CudaError
from hicache.cuda.kept import KEPT
from hicache.cuda.lanes import CudaCopy
from hicache.errors import ConfigError, GeometryError
from hicache.memory.rankpages import RankMemory, RankPages
from hicache.testing.clients import until
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS
from hicache.testing.serving import ServedApp
from hicache_vllm.devices import DeviceTensors
from hicache_vllm.gpu import GpuTensors
from hicache_vllm.layouts import LAYOUTS, OPAQUE, ROWS, BlockShape, PageForm, Run
from hicache_vllm.saving import Early
from hicache_vllm.tensors import DirectTensors, PagesAtRiskError

Engines = Callable[..., SmallEngine]


@pytest.mark.slow
@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("load", ["async", "sync"])
def test_pages_come_back_straight_from_the_services_memory(
    cudas: list[EngineCuda], engines: Engines, load: str
) -> None:
    """As on the processor, bit for bit; the arenas are pinned, and not any more when the engine has gone."""
    engine = engines(load=load)
    (cuda,) = cudas
    tokens = small(1, 43)
    engine.generate(tokens)
    assert (engine.external, engine.failed) == (0, 0)
    assert cuda.registered
    engine.generate(tokens)
    assert (engine.external, engine.failed) == (40, 0)
    assert bool(cuda.layers_waited) is (load == "sync")
    assert engine.free_blocks == 63
    (worker,) = engine.workers
    pinned = [one.pinned.pinned for one in worker._worker._tensors._blocks.statistics()]
    assert pinned
    assert all(pinned)
    worker.shutdown()
    assert not cuda.registered


@pytest.mark.slow
@pytest.mark.usefixtures("service")
def test_many_requests_of_any_length_and_two_ranks(cudas: list[EngineCuda], engines: Engines) -> None:
    engine = engines(tp=2)
    prompts = [small(300 + number % 3, 20 + 7 * number) for number in range(6)]
    engine.generate(*prompts)
    engine.generate(*prompts)
    assert engine.external
    assert engine.failed == 0
    assert len(cudas) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("service")
def test_copies_that_fail_are_computed_again(cudas: list[EngineCuda], engines: Engines) -> None:
    engine = engines(load="sync")
    (cuda,) = cudas
    tokens = small(7, 43)
    engine.generate(tokens)
    for _ in range(2):  # the step, and then the first of its blocks
        cuda.fail("memcpy_batch_async", "cudaErrorInvalidValue", 1)
    engine.generate(tokens)
    assert engine.failed
    before = engine.failed
    engine.generate(tokens)
    assert engine.failed == before
    assert engine.external


@pytest.mark.slow
def test_a_service_out_of_reach_sends_pages_through_a_buffer(
    cudas: list[EngineCuda], engines: Engines, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed pages, and those of which another rank writes a part, are never lent."""
    monkeypatch.setattr("hicache.rpc.client.group.JoinedRequest.lend", lambda *_, **__: None)
    monkeypatch.setattr("hicache_vllm.gpu.STAGED_BYTES", 1)
    for load in ("sync", "async"):
        engine = engines(load=load)
        tokens = small(8, 43)
        engine.generate(tokens)
        engine.generate(tokens)
        assert engine.external >= 40
        assert engine.failed == 0


SHAPE = BlockShape(heads=2, tokens=4, width=8, itemsize=2)
FORM = PageForm(SHAPE, 2, 1, 2, (ROWS, ROWS))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("rows", (6, 2, 4, 16)),
        ("split/nhd", (2, 6, 4, 2, 8)),
        ("split/hnd", (2, 6, 2, 4, 8)),
        ("blocks/nhd", (6, 2, 4, 2, 8)),
        ("blocks/hnd", (6, 2, 2, 4, 8)),
    ],
)
def test_pages_are_those_of_the_processors_copies(name: str, shape: tuple[int, ...]) -> None:
    """Both ways of each layout, against what numpy makes of the same tensors."""
    cuda = EngineCuda()
    given = [torch.randint(0, 2**15, shape, dtype=torch.int16).view(torch.bfloat16) for _ in range(2)]
    adopt(cuda, given)
    ours = GpuTensors(given, LAYOUTS[name], FORM, driver=cuda, options=BATCH)
    theirs = hicache_vllm.tensors.HostTensors(given, LAYOUTS[name], FORM)
    assert isinstance(ours, DirectTensors)
    assert ours.block_bytes == theirs.block_bytes
    runs = [Run(4, 0, 2), Run(1, 2, 1), Run(3, 3, 1)]
    ours.mark()()
    pages = ours.store(2, runs).copy()
    assert (pages == theirs.store(2, runs)).all()
    wanted = [tensor.clone() for tensor in given]
    for tensor in given:
        tensor.zero_()
    came: list[int] = []
    ours.load(pages, runs, came.append)
    assert came == [0, 1]
    blocks = given[0].shape.index(6)
    for tensor, before in zip(given, wanted, strict=True):
        for block in (1, 3, 4, 5):
            found, wanted_block = (one.view(torch.int16).select(blocks, block) for one in (tensor, before))
            assert torch.equal(found, wanted_block)
        assert not tensor.select(blocks, 0).any()
    ours.close()
    ours.close()
    assert not cuda.registered
    assert not cuda.allocated


def test_opaque_rows_are_bytes() -> None:
    cuda = EngineCuda()
    shape = BlockShape(heads=1, tokens=4, width=20, itemsize=1, planes=1)
    form = PageForm(shape, 2, 1, 1, (ROWS,))
    given = [torch.randint(0, 255, (3, 1, 4, 20), dtype=torch.uint8) for _ in range(2)]
    adopt(cuda, given)
    ours = GpuTensors(given, OPAQUE, form, driver=cuda, options=BATCH)
    assert (
        ours.store(1, [Run(2, 0, 1)]) == hicache_vllm.tensors.HostTensors(given, OPAQUE, form).store(1, [Run(2, 0, 1)])
    ).all()
    ours.close()


def test_what_is_not_understood_is_refused() -> None:
    cuda = EngineCuda()
    given = [torch.zeros((6, 2, 4, 16), dtype=torch.bfloat16) for _ in range(2)]
    with pytest.raises(GeometryError, match="layer 0 is in main memory"):
        GpuTensors(given, LAYOUTS["rows"], FORM, driver=cuda)
    adopt(cuda, given)
    with pytest.raises(ConfigError, match="divides rows"):
        GpuTensors(given, LAYOUTS["cpu_attn/vec"], FORM, driver=cuda)
    with pytest.raises(ConfigError, match="1 layers with a KV cache"):
        GpuTensors(given[:1], LAYOUTS["rows"], FORM, driver=cuda)
    cuda.adopt(given[1].data_ptr(), 4, device=1)
    with pytest.raises(GeometryError, match="layer 1 is in CUDA device 1"):
        GpuTensors(given, LAYOUTS["rows"], FORM, driver=cuda)


def test_without_cupy_torch_copies(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("hicache_vllm.devices.CudaStreams", lambda: None)
    given = [torch.zeros((6, 2, 4, 16), dtype=torch.bfloat16) for _ in range(2)]
    assert isinstance(hicache_vllm.tensors._on_gpu(given, LAYOUTS["rows"], FORM), DeviceTensors)
    assert "pip install 'hicache[cuda]'" in caplog.text


def test_tensors_of_two_devices_are_refused() -> None:
    given = [torch.zeros((6, 2, 4, 16), device=device) for device in ("meta", "cpu")]
    with pytest.raises(ConfigError, match="KV tensors on cpu, meta: all of a worker's have to be on one"):
        hicache_vllm.tensors.made_of(given, LAYOUTS["rows"], FORM)


# ---- before there are requests

ARENA = 384 * 1024
MADE = ("compile", "host_register", "host_alloc", "malloc")


@pytest.mark.slow
@pytest.mark.usefixtures("service")
def test_a_request_pins_compiles_and_measures_nothing(
    cudas: list[EngineCuda], engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.hicache"):
        engine = engines(load="sync", layerwise_stores="on")
    assert "of the service's memory, 384 KiB of it pinned, by batch" in caplog.text
    (cuda,) = cudas
    assert ARENA in cuda.registered.values()
    before = [cuda.calls.get(name, 0) for name in MADE]
    for _ in range(2):
        engine.generate(small(1, 43))
    assert (engine.external, engine.failed) == (40, 0)
    assert engine.early == 1
    assert [cuda.calls.get(name, 0) for name in MADE] == before


@pytest.mark.slow
def test_a_service_that_comes_later_is_pinned_beside_the_steps(
    cudas: list[EngineCuda], engines: Engines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_vllm.start.ATTACH_SECONDS", 0.0)
    engine = engines()
    (cuda,) = cudas

    def pinned() -> bool:
        return ARENA in cuda.registered.values()

    for _ in range(2):
        assert not pinned()
        with ServedApp(service_config(folder, host=ARENA)):
            until(lambda: engine.stepped() and pinned(), "the memory is pinned")
            before = cuda.calls["host_register"]
            engine.generate(small(1, 43))
            assert cuda.calls["host_register"] == before
        until(lambda: engine.stepped() and not pinned(), "the memory is not pinned any more")


@pytest.mark.slow
@pytest.mark.usefixtures("service", "cudas")
def test_memory_that_cannot_be_pinned_is_one_line_at_start(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise CudaError("cudaHostRegister", "cudaErrorMemoryAllocation", 2, "out of memory")

    monkeypatch.setattr(EngineCuda, "host_register", refused)
    engine = engines()
    (line,) = [one.getMessage() for one in caplog.records if "could not be pinned" in one.getMessage()]
    assert "384 KiB could not be pinned: cudaErrorMemoryAllocation (2)" in line
    for _ in range(2):
        engine.generate(small(1, 43))
    assert (engine.external, engine.failed) == (40, 0)


def test_memory_out_of_reach_has_its_buffers_before() -> None:
    cuda = EngineCuda()
    given = [torch.randint(0, 2**15, (6, 2, 4, 16), dtype=torch.int16).view(torch.bfloat16) for _ in range(2)]
    adopt(cuda, given)
    ours = GpuTensors(given, LAYOUTS["rows"], FORM, driver=cuda, options=BATCH)
    assert "through a pinned buffer of 32 MiB" in ours.attach(None)
    before = [cuda.calls.get(name, 0) for name in MADE]
    pages = ours.store(1, [Run(2, 0, 2)])
    ours.load(pages, [Run(4, 0, 2)])
    assert [cuda.calls.get(name, 0) for name in MADE] == before
    assert torch.equal(given[0][4].view(torch.int16), given[0][2].view(torch.int16))  # some are no numbers
    ours.close()


# ---- stores layer by layer


class Shared:
    """A service's memory, and a loan of its pages."""

    def __init__(self, slots: int) -> None:
        self.rows = np.zeros((slots, FORM.page_bytes), np.uint8)
        self.pages = RankPages(FORM.page_bytes, [RankMemory(self.rows, (ArenaRun(0, 0, FORM.page_bytes),), True)])
        self.memory = self
        self.slots = np.arange(slots)
        self.lost = 0
        self.written: list[int] = []
        self.closed = False

    def before_unmapping(self, callback: Callable[[], None]) -> None:
        del callback

    def lend(self, first: int, count: int, *, write: bool) -> Any:
        assert write
        return None if self.lost < 0 else self

    def good(self) -> int:
        return len(self.slots) - self.lost

    def wrote(self, pages: int) -> None:
        self.written.append(pages)

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        self.closed = True


@pytest.mark.parametrize("seed", range(6))
def test_a_layer_is_copied_when_it_is_computed_and_not_before(seed: int) -> None:
    """Its copy is asked for while the engine's stream has not come so far, and others go in between."""
    cuda = FakeCuda(seed=seed, memory=1 << 22, kernels=KERNELS)
    given = [torch.zeros((6, 2, 4, 16), dtype=torch.bfloat16) for _ in range(2)]
    adopt(cuda, given)
    ours = GpuTensors(given, LAYOUTS["rows"], FORM, driver=cuda, options=BATCH)
    shared = Shared(2)
    layers = ours.by_layer(shared, 0, [4, 5, 1, 3])  # type: ignore[arg-type]
    wanted = [torch.randn(tensor.shape).to(torch.bfloat16) for tensor in given]
    for layer, tensor in enumerate(given):
        gate = cuda.gate(cuda.default)
        cuda.compute(cuda.default, lambda tensor=tensor, layer=layer: tensor.copy_(wanted[layer]))  # type: ignore[misc]
        ours.mark()()
        layers.copy(layer, layer + 1)
        cuda.drive(5)
        gate.open()
    assert layers.finish(good=True) == 2
    assert (shared.written, shared.closed) == ([2], True)
    theirs = hicache_vllm.tensors.HostTensors(wanted, LAYOUTS["rows"], FORM)
    assert (shared.rows == theirs.store(2, [Run(4, 0, 2), Run(1, 2, 1), Run(3, 3, 1)])).all()
    ours.close()


@pytest.mark.parametrize(("lost", "good", "written"), [(1, True, 1), (0, False, 0), (2, True, 0), (-1, True, None)])
def test_pages_that_are_not_there_whole_are_not_said_to_be(lost: int, good: bool, written: int | None) -> None:
    """A slot that was taken away, a step that came to nothing, and memory that cannot be reached."""
    cuda = EngineCuda()
    given = [torch.zeros((6, 2, 4, 16), dtype=torch.bfloat16) for _ in range(2)]
    adopt(cuda, given)
    ours = GpuTensors(given, LAYOUTS["rows"], FORM, driver=cuda, options=BATCH)
    shared = Shared(2)
    shared.lost = lost
    layers = ours.by_layer(shared, 0, [4, 5, 1, 3])  # type: ignore[arg-type]
    for layer in range(2):
        layers.copy(layer, layer + 1)
    assert layers.finish(good=good) == written
    assert shared.closed is (lost >= 0)
    ours.close()


def test_pages_that_a_failed_gpu_may_still_write_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.cuda.blocks._CLOSE_SECONDS", 0.05)
    before = len(KEPT)
    cuda = FakeCuda(memory=1 << 22, kernels=KERNELS)
    given = [torch.zeros((6, 2, 4, 16), dtype=torch.bfloat16) for _ in range(2)]
    adopt(cuda, given)
    ours = GpuTensors(given, LAYOUTS["rows"], FORM, driver=cuda, options=BATCH)
    shared = Shared(2)
    layers = ours.by_layer(shared, 0, [4, 5, 1, 3])  # type: ignore[arg-type]
    layers.copy(0, 1)
    gate = cuda.gate(list(cuda.timeline.streams.values())[-1])
    layers.copy(1, 2)
    assert not layers._copies[-1].wait(0.05)
    cuda.lose()
    with pytest.raises(PagesAtRiskError):
        layers.finish(good=True)
    assert shared.written == []
    gate.open()
    cuda.finish()
    ours.close()
    del KEPT[before:]


@pytest.mark.slow
@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("early", ["on", "off"])
def test_pages_at_risk_stay_with_their_lease(
    cudas: list[EngineCuda], engines: Engines, monkeypatch: pytest.MonkeyPatch, early: str
) -> None:
    """The engine has its blocks again and goes on; of the service's pages nobody gets any, and none is published."""
    engine = engines(layerwise_stores=early)
    assert cudas

    def lost(copies: Sequence[CudaCopy]) -> None:
        for copy in copies:
            copy.wait(None)
        raise PagesAtRiskError("injected")

    monkeypatch.setattr(hicache_vllm.gpu, "_wait_for", lost)
    tokens = small(1, 43)
    engine.generate(tokens)
    engine.generate(tokens)
    assert engine.external == 0
    assert engine.free_blocks == 63
    kept = engine.scheduler._scheduler._stores._at_risk
    assert any(isinstance(work, Early) for work in kept.values()) is (early == "on")
    assert kept
    for work in kept.values():
        lease = work._ahead.lookup._request if isinstance(work, Early) else work._lease
        assert not lease.closed
