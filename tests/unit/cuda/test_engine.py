"""The copy engine on CUDA: what it promises as every copy engine, and what its streams and events add."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.cuda import CudaDevicePool, CudaOptions
from hicache.cuda.engine import CudaCopyEngine
from hicache.cuda.kept import KEPT
from hicache.errors import CacheClosed, ConfigError, HicacheInternalError
from hicache.memory.base import HostPool
from hicache.memory.host import MmapHostPool
from hicache.memory.writer import READY, ThreadEvent
from hicache.records import PageResult
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS

GEOMETRY = hicache.KVGeometry.mha(layers=3, kv_heads=2, head_dim=8, dtype="float16")
PAGE = 4
SLOTS = 8
LIMIT = 20.0


class Memory:
    """A pool and a host pool on a fake device, and the engines that a test made."""

    def __init__(self) -> None:
        self.cuda = FakeCuda(memory=1 << 22, kernels=KERNELS)
        self.pools: list[CudaDevicePool] = []
        self.engines: list[CudaCopyEngine] = []

    def pool(self, **options: Any) -> CudaDevicePool:
        made = CudaDevicePool.allocate(
            GEOMETRY,
            page_size=PAGE,
            slots=SLOTS,
            driver=self.cuda,
            options=CudaOptions(**{"method": "plain"} | options),
        )
        self.pools.append(made)
        return made

    def engine(self, host: HostPool | None, **options: Any) -> CudaCopyEngine:
        self.engines.append(self.pool(**options).cuda_engine(host))
        return self.engines[-1]


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    for engine in made.engines:
        engine.close(LIMIT)
    for pool in made.pools:
        pool.close()
    assert not made.cuda.registered
    assert not made.cuda.allocated


@pytest.fixture
def host(memory: Memory) -> Iterator[MmapHostPool]:
    pool = MmapHostPool(SLOTS, GEOMETRY.page_bytes(PAGE))
    pool.pages[:] = np.random.default_rng(1).integers(0, 256, pool.pages.shape, np.uint8)
    yield pool
    pool.close()


def slots(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


class Told:
    """Results, as callbacks got them."""

    def __init__(self) -> None:
        self.results: list[list[PageResult]] = []
        self.layers: list[int] = []

    def done(self, results: Sequence[PageResult]) -> None:
        self.results.append(list(results))


def test_it_tells_how_pages_moved_and_what_moves_them(memory: Memory, host: MmapHostPool) -> None:
    engine, told = memory.engine(host, method="auto"), Told()
    up = engine.host_to_device(slots(1, 2), slots(5, 3), done=told.done, layer_done=told.layers.append)
    assert up.wait(LIMIT)
    assert up.wait_layer(2, 0.0)
    down = engine.device_to_host(slots(5), slots(7), ready=None, done=told.done)
    assert down.wait(LIMIT)
    assert np.array_equal(host.page(7), host.page(1))
    assert told.layers == [0, 1, 2]
    assert told.results == [[PageResult.OK] * 2, [PageResult.OK]]
    found = engine.statistics()
    assert (found.pages_host_to_device, found.pages_device_to_host, found.failed_pages) == (2, 1, 0)
    assert found.bytes_host_to_device == 2 * host.page_bytes
    assert (found.in_flight, found.waiting, found.device, found.error) == (0, 0, 0, "")
    assert found.pinned.pinned
    assert found.pinned.bytes == host.size
    assert found.choice is not None
    assert sum(found.tables.values()) == 2
    assert {name.split()[1] for name in found.tables} == {"up", "down"}


def test_layers_go_down_one_by_one_and_a_page_counts_with_its_last(memory: Memory, host: MmapHostPool) -> None:
    engine = memory.engine(host)
    pool, before = memory.pools[-1], host.pages.copy()
    for slot in (2, 5):
        pool.write_page(slot, np.full(host.page_bytes, slot, np.uint8))
    layers = pool.layers
    for layer in range(layers):
        told = Told()
        copy = engine.device_to_host(slots(2, 5), slots(1, 0), ready=READY, done=told.done, layers=(layer, layer + 1))
        assert copy.wait(LIMIT)
        assert told.results == [[PageResult.OK] * 2]
        assert engine.statistics().pages_device_to_host == (2 if layer + 1 == layers else 0)
        assert (host.pages[1] == 2).sum() < host.page_bytes or layer + 1 == layers
    assert (host.pages[1] == 2).all()
    assert (host.pages[0] == 5).all()
    assert (host.pages[2:] == before[2:]).all()


def test_a_copy_without_pages_ends_too(memory: Memory, host: MmapHostPool) -> None:
    engine, told = memory.engine(host), Told()
    assert engine.host_to_device(slots(), slots(), done=told.done).wait(LIMIT)
    assert engine.device_to_host(slots(), slots(), ready=READY, done=told.done).wait(LIMIT)
    assert told.results == [[], []]


def test_a_writers_event_holds_only_those_behind_it(memory: Memory, host: MmapHostPool) -> None:
    """A copy whose event has not passed lets others go first, also where the event is CUDA's own."""
    engine, told = memory.engine(host), Told()
    pool = memory.pools[0]
    gate = memory.cuda.gate(memory.cuda.default)
    late = engine.device_to_host(slots(0), slots(0), ready=pool.record(), done=told.done)
    thread_event = ThreadEvent()
    parked = engine.device_to_host(slots(1), slots(1), ready=thread_event, done=told.done)
    assert engine.device_to_host(slots(2), slots(2), ready=READY, done=told.done).wait(LIMIT)
    assert not late.finished
    assert not parked.finished
    gate.open()
    assert late.wait(LIMIT)
    thread_event.set()
    assert parked.wait(LIMIT)
    assert engine.statistics().failed_pages == 0


def test_a_copy_up_waits_for_the_uses_that_it_was_told_of_and_for_no_others(memory: Memory, host: MmapHostPool) -> None:
    engine, told = memory.engine(host, reuse="told"), Told()
    gate = memory.cuda.gate(memory.cuda.default)
    memory.pools[0].used_until([3], memory.pools[0].record())
    assert engine.host_to_device(slots(1), slots(4), done=told.done).wait(LIMIT)
    held = engine.host_to_device(slots(1), slots(3), done=told.done)
    assert not held.wait(0.05)
    gate.open()
    assert held.wait(LIMIT)
    assert engine.host_to_device(slots(2), slots(3), done=told.done).wait(LIMIT)
    assert told.results == [[PageResult.OK]] * 3


def test_callbacks_may_raise_and_events_may_break(memory: Memory, host: MmapHostPool) -> None:
    engine, told = memory.engine(host), Told()

    def raises(results: object) -> None:
        raise RuntimeError("a callback")

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("an event")

        def wait(self, timeout: float | None) -> bool:
            raise RuntimeError("an event")

    assert engine.host_to_device(slots(1), slots(1), done=raises).wait(LIMIT)
    broken = engine.device_to_host(slots(1), slots(1), ready=Broken(), done=told.done)
    assert broken.wait(LIMIT)
    assert told.results == [[PageResult.FAILED]]
    passed: list[bool] = []
    seen = threading.Event()
    engine.when_ready(READY, lambda good: (passed.append(good), seen.set()))  # type: ignore[func-returns-value]
    assert seen.wait(LIMIT)
    assert passed == [True]
    assert engine.statistics().callback_errors == 1


def test_a_page_that_cannot_be_copied_fails_alone(memory: Memory, host: MmapHostPool) -> None:
    engine, told = memory.engine(host), Told()
    memory.cuda.fail("memcpy_async", "cudaErrorInvalidValue", 1)
    memory.cuda.fail("memcpy_async", "cudaErrorInvalidValue", 1, after=2)
    copy = engine.host_to_device(slots(1, 2, 3, 4), slots(1, 3, 5, 7), done=told.done, layer_done=told.layers.append)
    assert copy.wait(LIMIT)
    assert told.results[0].count(PageResult.FAILED) == 1
    for at, slot in enumerate((1, 3, 5, 7)):
        if told.results[0][at] is PageResult.OK:
            assert np.array_equal(memory.pools[0].read_page(slot), host.page(at + 1))
    assert told.layers == []  # of no layer could be said that it is complete in every page
    assert not copy.let_wait(0, memory.cuda.default, LIMIT)
    assert engine.statistics().error == "memcpy_async: cudaErrorInvalidValue (1): injected"
    assert engine.statistics().failed_pages == 1


def test_a_device_that_fails_fails_every_page_and_hangs_nobody(memory: Memory, host: MmapHostPool) -> None:
    engine, told = memory.engine(host), Told()
    event = memory.pools[0].record()
    memory.cuda.fail("work", "cudaErrorIllegalAddress", 700)
    first = engine.host_to_device(slots(1, 2), slots(1, 2), done=told.done)
    assert first.wait(LIMIT)
    for copy in (
        engine.host_to_device(slots(3), slots(3), done=told.done),
        engine.device_to_host(slots(3), slots(3), ready=READY, done=told.done),
        engine.device_to_host(slots(4), slots(4), ready=event, done=told.done),
    ):
        assert copy.wait(LIMIT)
    assert first.results == (PageResult.FAILED,) * 2
    assert first.stranded  # it is not said that its bytes have stopped: nobody else may have its slots
    assert told.results == [[PageResult.FAILED]] * 3
    assert "cudaErrorIllegalAddress" in engine.statistics().error
    assert engine.statistics().lost == engine.lost != ""
    assert engine.close(LIMIT) == 2
    assert KEPT.pop() is engine
    memory.pools[0].close()  # says in the log that nothing can be given back
    memory.cuda.registered.clear()
    memory.cuda.allocated.clear()
    memory.engines.clear()


def test_what_is_under_way_is_bounded(memory: Memory, host: MmapHostPool) -> None:
    """With room for one page, the second is put into the stream when the first has passed."""
    engine, told = memory.engine(host, in_flight_bytes=1), Told()
    gate = memory.cuda.gate(memory.cuda.default)  # copies up wait for the engine's stream
    copies = [engine.host_to_device(slots(at), slots(at), done=told.done) for at in range(3)]
    assert copies[0].let_wait(2, memory.cuda.stream(), LIMIT)
    assert not copies[2].let_wait(0, memory.cuda.stream(), 0.01)
    gate.open()
    assert all(copy.wait(LIMIT) for copy in copies)


def test_closing_drains_then_drops_and_pins_last_until_the_last_byte(memory: Memory, host: MmapHostPool) -> None:
    engine, told = memory.engine(host), Told()
    gate = memory.cuda.gate(memory.cuda.default)
    moving = engine.host_to_device(slots(1, 2), slots(1, 2), done=told.done)
    assert moving.let_wait(0, memory.cuda.stream(), LIMIT)
    event = ThreadEvent()
    parked = engine.device_to_host(slots(3), slots(3), ready=event, done=told.done)
    dropped: list[bool] = []
    engine.when_ready(event, dropped.append)
    assert engine.close(0.0) == 3
    assert parked.results == (PageResult.FAILED,)
    assert dropped == [False]
    assert not moving.finished
    assert memory.cuda.registered  # its bytes are still moving
    with pytest.raises(CacheClosed):
        engine.host_to_device(slots(1), slots(1), done=told.done)
    with pytest.raises(CacheClosed):
        engine.device_to_host(slots(1), slots(1), ready=event, done=told.done)
    gate.open()
    assert moving.wait(LIMIT)
    assert moving.results == (PageResult.OK,) * 2
    assert not memory.cuda.registered
    assert engine.close(0.0) == 3


def test_without_a_host_pool_events_are_waited_for_and_nothing_is_copied(memory: Memory) -> None:
    engine = memory.engine(None)
    with pytest.raises(HicacheInternalError, match="no host pool"):
        engine.host_to_device(slots(1), slots(1), done=print)
    assert engine.statistics().choice is None
    assert engine.close(1.0) == 0


def test_what_does_not_pair_or_fit_is_refused(memory: Memory, host: MmapHostPool) -> None:
    engine = memory.engine(host)
    with pytest.raises(HicacheInternalError, match="do not pair"):
        engine.host_to_device(slots(1, 2), slots(1), done=print)
    other = MmapHostPool(1, 64)
    with pytest.raises(ConfigError, match="device pages have 768 bytes, host pages 64"):
        memory.engine(other)
    other.close()


def test_slots_that_do_not_exist_fail_their_copy(memory: Memory, host: MmapHostPool) -> None:
    engine, told = memory.engine(host), Told()
    assert engine.host_to_device(slots(1, SLOTS), slots(1, 1), done=told.done).wait(LIMIT)
    assert told.results == [[PageResult.OK, PageResult.FAILED]]


def test_a_kernel_that_does_not_compile_is_replaced_with_a_word(memory: Memory, host: MmapHostPool) -> None:
    memory.cuda.fail("compile", "CompileException", -1)
    engine, told = memory.engine(host, method="kernel"), Told()
    assert engine.host_to_device(slots(1), slots(1), done=told.done).wait(LIMIT)
    choice = engine.statistics().choice
    assert choice is not None
    assert "kernel" not in str(engine.statistics().tables)
    assert "kernel" in dict(choice.absent)
    assert choice.notes


def test_what_fails_at_attach_leaves_nothing(memory: Memory, host: MmapHostPool) -> None:
    memory.cuda.fail("stream", "cudaErrorMemoryAllocation", 2, after=2)  # behind the pool's and the choice's
    with pytest.raises(hicache.HicacheError, match="cudaErrorMemoryAllocation"):
        memory.engine(host)
    assert not memory.cuda.registered
