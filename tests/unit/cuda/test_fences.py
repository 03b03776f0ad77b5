"""Whatever fails in a lane, no copy ends before its bytes have: calls, events, streams, and errors of other kinds."""

from __future__ import annotations

import ctypes
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.cuda import CudaDevicePool, CudaError, CudaOptions
from hicache.cuda.engine import CudaCopyEngine
from hicache.cuda.executors import KernelExecutor
from hicache.cuda.kept import KEPT
from hicache.cuda.runs import RunTable
from hicache.errors import GeometryError
from hicache.memory.host import MmapHostPool
from hicache.memory.writer import READY
from hicache.records import PageResult
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS

GEOMETRY = hicache.KVGeometry.mha(layers=3, kv_heads=2, head_dim=8, dtype="float16")
PAGE, SLOTS = 4, 8
LIMIT = 20.0
INVALID = ("cudaErrorInvalidResourceHandle", 400)


class OddCuda(FakeCuda):
    """A driver in which calls that wait raise what no driver should, where a test says so."""

    odd = False

    def wait(self, stream: Any, event: Any) -> None:
        if self.odd:
            raise RuntimeError("out of nothing")
        super().wait(stream, event)


class Made:
    """An engine over a fake device, with plain copies of single pages."""

    def __init__(self) -> None:
        self.cuda = OddCuda(memory=1 << 22, kernels=KERNELS)
        self.pool = CudaDevicePool.allocate(
            GEOMETRY, page_size=PAGE, slots=SLOTS, driver=self.cuda, options=CudaOptions(method="plain")
        )
        self.host = MmapHostPool(SLOTS, GEOMETRY.page_bytes(PAGE))
        self.host.pages[:] = np.random.default_rng(1).integers(0, 256, self.host.pages.shape, np.uint8)
        self.engine: CudaCopyEngine = self.pool.cuda_engine(self.host)
        self.down = list(self.cuda.timeline.streams.values())[-1]
        self.done: list[list[PageResult]] = []

    def copy_up(self, *slots: int) -> Any:
        numbers = np.array(slots, np.int64)
        return self.engine.host_to_device(numbers, numbers, done=lambda results: self.done.append(list(results)))

    def copy_down(self, *slots: int, ready: Any = READY) -> Any:
        numbers = np.array(slots, np.int64)
        return self.engine.device_to_host(
            numbers, numbers, ready=ready, done=lambda results: self.done.append(list(results))
        )


@pytest.fixture
def made() -> Iterator[Made]:
    before = len(KEPT)
    one = Made()
    yield one
    one.engine.close(LIMIT)
    one.pool.close()
    one.host.close()
    del KEPT[before:]


@pytest.mark.case("RACE-1")
@pytest.mark.parametrize("call", ["event", "record"])
def test_a_copy_without_its_event_ends_when_its_bytes_have(made: Made, call: str) -> None:
    """The event behind a copy cannot be had: it has failed, and its slots are others' when the stream has passed it."""
    gate = made.cuda.gate(made.down)
    made.cuda.fail(call, *INVALID)
    copy = made.copy_down(1)
    assert not copy.wait(0.05)
    assert made.done == []
    gate.open()
    assert copy.wait(LIMIT)
    assert made.done == [[PageResult.FAILED]]
    assert not copy.stranded
    assert made.copy_down(2).wait(LIMIT)
    assert made.done[1] == [PageResult.OK]
    assert made.engine.lost == ""


def test_a_wait_that_fails_is_made_good_by_another_event(made: Made) -> None:
    gate = made.cuda.gate(made.down)
    made.cuda.fail("synchronize", *INVALID)
    copy = made.copy_down(1)
    assert not copy.wait(0.05)
    gate.open()
    assert copy.wait(LIMIT)
    assert made.done == [[PageResult.FAILED]]
    assert made.engine.statistics().stranded_pages == 0


def test_a_copy_of_which_no_event_tells_is_stranded(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    """Twice is enough: a device on which no event can be recorded has failed."""
    gate = made.cuda.gate(made.down)
    told: list[bool] = []
    made.engine.when_stranded(lambda: told.append(True))
    made.cuda.fail("record", *INVALID)
    made.cuda.fail("record", *INVALID)
    copy = made.copy_down(1, 2)
    assert copy.wait(LIMIT)
    assert copy.stranded
    assert copy.results == (PageResult.FAILED,) * 2
    assert (made.done, told) == ([], [True])
    assert "cudaErrorInvalidResourceHandle" in made.engine.lost
    calls = made.cuda.calls["memcpy_async"]
    assert made.copy_down(3).wait(LIMIT)
    assert made.copy_up(3).wait(LIMIT)
    assert made.done == [[PageResult.FAILED]] * 2
    assert made.cuda.calls["memcpy_async"] == calls
    found = made.engine.statistics()
    assert (found.failed_pages, found.stranded_pages, found.in_flight) == (4, 2, 0)
    assert found.lost == made.engine.lost
    assert made.engine.close(LIMIT) == 2
    assert made.engine.close(LIMIT) == 2
    assert not made.engine.over
    assert KEPT.count(made.engine) == 1
    assert made.cuda.registered
    gate.open()
    made.cuda.finish()
    assert np.array_equal(made.host.page(1), made.pool.read_page(1))


def test_layers_in_front_of_a_failure_are_told_and_the_copy_fails(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.cuda.putting._STEP_BYTES", 1)
    made.cuda.fail("record", *INVALID, after=2)  # behind the mark of the engine's stream and the first layer
    layers: list[int] = []
    numbers = np.array([1, 2], np.int64)
    copy = made.engine.host_to_device(
        numbers, numbers, done=lambda results: made.done.append(list(results)), layer_done=layers.append
    )
    assert copy.wait(LIMIT)
    assert layers == [0]
    assert made.done == [[PageResult.FAILED] * 2]
    assert copy.let_wait(0, made.cuda.default, LIMIT)
    assert not copy.let_wait(1, made.cuda.default, LIMIT)


def test_what_is_no_error_of_cuda_ends_the_copy_and_not_its_lane(made: Made) -> None:
    made.cuda.odd = True
    copy = made.copy_up(1)  # waits for the engine's stream
    assert copy.wait(LIMIT)
    made.cuda.odd = False
    assert made.copy_up(2).wait(LIMIT)
    assert made.done == [[PageResult.FAILED], [PageResult.OK]]
    assert made.engine.statistics().error == "out of nothing"
    assert made.engine.lost == ""


def test_a_bug_in_front_of_the_stream_ends_the_copy_and_not_its_lane(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.cuda.putting.Putting._steps", lambda self, job: 1 // 0)
    assert made.copy_up(1).wait(LIMIT)
    monkeypatch.undo()
    assert made.copy_up(2).wait(LIMIT)
    assert made.done == [[PageResult.FAILED], [PageResult.OK]]


@pytest.mark.parametrize("what", ["stream", "allocator"])
def test_without_a_stream_of_their_own_late_copies_wait_among_the_others(
    made: Made, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "stream":
        made.cuda.fail("stream", "cudaErrorMemoryAllocation", 2)
    else:
        monkeypatch.setattr(CudaDevicePool, "used_by", lambda self, stream: 1 // 0)
    gate = made.cuda.gate(made.cuda.default)
    late = made.copy_down(1, ready=made.pool.record())
    assert not late.wait(0.05)
    gate.open()
    assert late.wait(LIMIT)
    assert made.done == [[PageResult.OK]]
    monkeypatch.undo()
    gate = made.cuda.gate(made.cuda.default)
    late = made.copy_down(2, ready=made.pool.record())
    assert made.copy_down(3).wait(LIMIT)  # now they have one
    gate.open()
    assert late.wait(LIMIT)


def test_a_table_whose_event_could_not_be_recorded_is_never_used_again() -> None:
    """The kernel in front of the failure still reads it, whenever its stream comes to that."""
    cuda = FakeCuda(memory=1 << 23, kernels=KERNELS)
    kernel, stream = KernelExecutor(cuda, blocks=2), cuda.stream()
    host, device = cuda.host_alloc(4096), cuda.malloc(4096)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * 4096).from_address(host))
    memory[:] = np.arange(4096) % 251

    def table(at: int) -> RunTable:
        return RunTable(np.array([host + at]), np.array([device + at]), np.array([64]))

    gate = cuda.gate(stream)
    cuda.fail("record", *INVALID)
    with pytest.raises(CudaError, match="cudaErrorInvalidResourceHandle"):
        kernel.run(table(0), stream)
    for number in range(1, 8):
        kernel.run(table(64 * number), stream)
    gate.open()
    cuda.finish()
    found = np.ctypeslib.as_array((ctypes.c_uint8 * 512).from_address(device))
    assert np.array_equal(found, memory[:512])
    for _ in range(7):
        cuda.fail("record", *INVALID)
        with pytest.raises(CudaError, match="cudaErrorInvalidResourceHandle"):
            kernel.run(table(0), stream)
    with pytest.raises(CudaError, match="its tables are in use for good"):
        kernel.run(table(0), stream)
    kernel.close()


def test_a_direct_copy_that_fails_in_part_raises_when_the_rest_has_passed(made: Made) -> None:
    made.cuda.fail("memcpy_async", *INVALID, after=1)
    with pytest.raises(CudaError, match="cudaErrorInvalidResourceHandle"):
        made.pool.read_page(1)
    assert made.cuda.waiting == 0
    with pytest.raises(GeometryError, match="slot"):
        made.pool.gather(np.array([SLOTS]), made.host, np.array([0]))
    assert made.pool.read_page(1) is not None


def test_memory_of_a_direct_copy_without_an_end_is_kept(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    before = len(KEPT)
    made.cuda.fail("synchronize", *INVALID)
    with caplog.at_level(logging.WARNING), pytest.raises(CudaError):
        made.pool.gather(np.array([1]), made.host, np.array([0]))
    assert KEPT[before:] == [made.host]
    assert "host memory of a copy whose end is not known: kept until this process ends" in caplog.text


def test_nothing_is_collected_while_a_copy_is_in_it_and_all_of_it_once_it_is_closed() -> None:
    """Whoever forgets a pool, its host pool and its engine: they live until the copy has ended and they are closed."""
    one = Made()
    gate = one.cuda.gate(one.cuda.default)
    copy, pool, first, cuda = one.copy_up(1), one.pool, one.host.page(1).copy(), one.cuda
    forgotten = [weakref.ref(part) for part in (one.engine, one.host)]
    del one
    gc.collect()
    engine, host = (part() for part in forgotten)
    assert isinstance(engine, CudaCopyEngine)
    assert isinstance(host, MmapHostPool)
    gate.open()
    assert copy.wait(LIMIT)
    assert np.array_equal(pool.read_page(1), first)
    assert engine.close(LIMIT) == 0
    host.close()
    pool.close()
    assert not cuda.registered
    del engine, host
    gc.collect()
    assert [part() for part in forgotten] == [None, None]


def test_a_forked_child_leaves_everything_to_its_parent(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.cuda.engine.os.getpid", lambda: -1)
    assert made.engine.close(LIMIT) == 0
    monkeypatch.undo()
    assert made.copy_up(1).wait(LIMIT)
    assert made.done == [[PageResult.OK]]
