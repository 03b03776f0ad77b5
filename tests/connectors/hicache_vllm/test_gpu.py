"""KV tensors on a GPU, as the small engine has them: a fake of CUDA reaches the engine's and the service's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm_services import small
from vllm_small_engine import SmallEngine

import hicache_vllm.tensors
from hicache.cuda import CudaOptions
from hicache.cuda.driver import Event, Stream
from hicache.errors import ConfigError, GeometryError
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS
from hicache_vllm.devices import DeviceTensors
from hicache_vllm.gpu import GpuTensors
from hicache_vllm.layouts import LAYOUTS, OPAQUE, ROWS, BlockShape, PageForm, Run
from hicache_vllm.tensors import DirectTensors, KVTensors

BATCH = CudaOptions(method="batch")
Engines = Callable[..., SmallEngine]


class EngineCuda(FakeCuda):
    """The small engine computes on the CPU, as its current stream: what that waits for, its thread has to."""

    def __init__(self, **options: Any) -> None:
        super().__init__(memory=1 << 22, kernels=KERNELS, **options)
        self.layers_waited = 0

    def wait(self, stream: Stream, event: Event) -> None:
        super().wait(stream, event)
        if stream is self.default:
            self.layers_waited += 1
            self.synchronize(event)


def adopt(cuda: FakeCuda, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        cuda.adopt(tensor.data_ptr(), tensor.numel() * tensor.element_size())


@pytest.fixture
def cudas(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EngineCuda]]:
    """The devices of the engines that are made from now on, a worker each."""
    made: list[EngineCuda] = []

    def on_gpu(layers: Any, layout: Any, form: PageForm) -> KVTensors:
        cuda = EngineCuda(seed=len(made))
        made.append(cuda)
        adopt(cuda, layers)
        rows = dataclasses.replace(form, halves=(ROWS, ROWS))
        return GpuTensors(layers, LAYOUTS["rows"], rows, driver=cuda, options=BATCH)

    monkeypatch.setattr("hicache_vllm.start.made_of", on_gpu)
    yield made
    for cuda in made:
        assert not cuda.allocated


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
