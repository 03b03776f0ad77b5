"""The three executors move the same bytes, keep their tables until they are read, and say why they are absent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.cuda.driver import CudaError
from hicache.cuda.executors import BATCH_RUNS, METHODS, TABLE_RUNS, Executors, default_blocks, open_executors
from hicache.cuda.kernels import NAME
from hicache.cuda.runs import RunTable
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS


def opened(cuda: FakeCuda, *, pinned: bool = True, blocks: int | None = None) -> Executors:
    return open_executors(cuda, cuda.facts(), pinned=pinned, blocks=blocks)


def memory(cuda: FakeCuda, size: int) -> tuple[int, Any]:
    """Pinned memory: its address, and its bytes."""
    address = cuda.host_alloc(size)
    return address, np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * size).from_address(address))


def table_of(source: int, target: int, length: list[int], seed: int) -> tuple[RunTable, int]:
    """Runs in another order on each side, with a byte between them; and the room that they take."""
    sizes = np.array(length, np.int64)
    at = [np.zeros(len(sizes), np.int64) for _ in range(2)]
    for side, places in enumerate(at):
        order = np.random.default_rng(seed + side).permutation(len(sizes))
        places[order] = np.cumsum(sizes[order] + 1) - sizes[order] - 1
    return RunTable(source + at[0], target + at[1], sizes), int(sizes.sum()) + len(sizes)


@pytest.mark.parametrize("name", METHODS)
@given(
    length=st.lists(st.integers(1, 3000), min_size=1, max_size=40), seed=st.integers(0, 1000), blocks=st.integers(1, 3)
)
def test_each_moves_exactly_the_runs(name: str, length: list[int], seed: int, blocks: int) -> None:
    cuda = FakeCuda(seed=seed, kernels=KERNELS)
    executors = opened(cuda, blocks=blocks)
    room = sum(length) + len(length)
    (source, given_bytes), (target, found) = memory(cuda, room), memory(cuda, room)
    given_bytes[:] = np.random.default_rng(seed).integers(0, 256, room)
    found[:] = 7
    table, _ = table_of(source, target, length, seed)
    expected = found.copy()
    for start, to, size in zip(table.source - source, table.destination - target, table.length, strict=True):
        expected[to : to + size] = given_bytes[start : start + size]
    stream = cuda.stream()
    executors.usable[name].run(table, stream)
    cuda.finish()
    assert np.array_equal(found, expected)
    executors.close()


@pytest.mark.parametrize("name", METHODS)
def test_a_table_without_runs_is_no_work(name: str) -> None:
    cuda = FakeCuda(kernels=KERNELS)
    executors = opened(cuda)
    before = dict(cuda.calls)
    none = np.empty(0, np.int64)
    executors.usable[name].run(RunTable(none, none, none), cuda.stream())
    assert {call for call in cuda.calls if cuda.calls[call] != before.get(call)} == {"stream"}
    executors.close()


def test_a_batch_is_cut_in_calls_of_bounded_size() -> None:
    cuda = FakeCuda()
    executors = opened(cuda)
    count = 2 * BATCH_RUNS + 1
    (source, _), (target, found) = memory(cuda, count), memory(cuda, count)
    at = np.arange(count, dtype=np.int64)
    executors.usable["batch"].run(RunTable(source + at, target + at, np.ones(count, np.int64)), cuda.stream())
    assert cuda.calls["memcpy_batch_async"] == 3
    del found


def test_the_oldest_table_is_waited_for_when_all_are_in_use() -> None:
    """A stream stands still until somebody waits for it: only then may its first table make room."""

    class StandsStill(FakeCuda):
        door: Any

        def synchronize(self, event: Any) -> None:
            self.door.open()
            super().synchronize(event)

    cuda = StandsStill(kernels=KERNELS)
    executors = opened(cuda)
    (source, given_bytes), (target, found) = memory(cuda, 16 * 20), memory(cuda, 16 * 20)
    given_bytes[:] = np.arange(16 * 20) % 251
    stream = cuda.stream()
    cuda.door = cuda.gate(stream)
    for at in range(0, 16 * 20, 16):
        table = RunTable(np.array([source + at]), np.array([target + at]), np.array([16]))
        executors.usable["kernel"].run(table, stream)
    cuda.finish()
    assert np.array_equal(found, given_bytes)
    executors.close()


@pytest.mark.parametrize("runs", [3, 60])
def test_a_table_is_not_overwritten_before_its_kernel_has_passed(runs: int) -> None:
    """More tables than buffers, in one stream that does not move: the one too many waits, and no table is lost."""
    cuda = FakeCuda(kernels=KERNELS, seed=3)
    executors = opened(cuda)
    kernel = executors.usable["kernel"]
    (source, given_bytes), (target, found) = memory(cuda, 4000), memory(cuda, 20 * 4000)
    given_bytes[:] = np.arange(4000) % 251
    at = np.arange(runs, dtype=np.int64) * 16
    stream = cuda.stream()
    gate = cuda.gate(stream)
    for number in range(7):
        kernel.run(RunTable(source + at, target + number * 4000 + at, at * 0 + 16), stream)
    assert cuda.waiting
    gate.open()
    for number in range(7, 20):  # beyond the buffers: it waits by itself for those that are in use
        kernel.run(RunTable(source + at, target + number * 4000 + at, at * 0 + 16), stream)
    cuda.finish()
    for number in range(20):
        assert np.array_equal(found[number * 4000 : number * 4000 + 16 * runs], given_bytes[: 16 * runs])
    executors.close()
    executors.close()
    assert cuda.allocated == {}
    assert len(cuda.registered) == 2  # those of this test


def test_a_table_with_more_runs_than_there_is_room_for_is_several_launches() -> None:
    cuda = FakeCuda(kernels=KERNELS)
    executors = opened(cuda)
    count = TABLE_RUNS + 3
    (source, given_bytes), (target, found) = memory(cuda, 2 * count), memory(cuda, 2 * count)
    given_bytes[:] = np.arange(2 * count) % 251
    found[:] = 7
    at = np.arange(count, dtype=np.int64) * 2
    executors.usable["kernel"].run(RunTable(source + at, target + at, at * 0 + 1), cuda.stream())
    cuda.finish()
    assert cuda.calls["launch"] == 2
    assert np.array_equal(found[::2], given_bytes[::2])
    assert (found[1::2] == 7).all()
    executors.close()


def test_copies_take_no_memory() -> None:
    """Taking some can make a device wait for all that it does."""
    cuda = FakeCuda(kernels=KERNELS)
    executors = opened(cuda)
    (source, _), (target, _) = memory(cuda, 4096), memory(cuda, 4096)
    at = np.arange(100, dtype=np.int64) * 32
    before, stream = (cuda.calls["host_alloc"], cuda.calls["malloc"]), cuda.stream()
    for _ in range(20):
        executors.usable["kernel"].run(RunTable(source + at, target + at, at * 0 + 5), stream)
    assert (cuda.calls["host_alloc"], cuda.calls["malloc"]) == before
    executors.close()


def test_without_memory_for_tables_there_is_no_kernel_and_nothing_is_kept() -> None:
    for call in ("malloc", "host_alloc"):
        cuda = FakeCuda(kernels=KERNELS)
        cuda.fail(call, "cudaErrorMemoryAllocation", 2, after=3)
        executors = opened(cuda)
        assert executors.absent == {"kernel": f"{call}: cudaErrorMemoryAllocation (2): injected"}
        assert cuda.allocated == {}
        assert cuda.registered == {}


def test_a_launch_that_fails_leaves_its_table_until_what_was_begun_has_passed() -> None:
    cuda = FakeCuda(kernels=KERNELS)
    executors = opened(cuda)
    (source, _), (target, _) = memory(cuda, 160), memory(cuda, 160)
    at = np.arange(20, dtype=np.int64) * 8
    cuda.fail("launch", "cudaErrorLaunchFailure", 719)
    with pytest.raises(CudaError, match="cudaErrorLaunchFailure"):
        executors.usable["kernel"].run(RunTable(source + at, target + at, at * 0 + 4), cuda.stream())
    executors.close()
    assert cuda.allocated == {}


def test_what_cannot_work_is_absent_and_says_why() -> None:
    assert opened(FakeCuda(kernels=KERNELS)).absent == {}
    assert opened(FakeCuda(batches=False, kernels=KERNELS)).absent == {"batch": "this fake has none"}
    unpinned = opened(FakeCuda(kernels=KERNELS), pinned=False)
    assert unpinned.absent == dict.fromkeys(
        ("batch", "kernel"), "the host memory is not pinned, and this way reaches no other"
    )
    assert list(unpinned.usable) == ["plain"]
    broken = opened(FakeCuda())
    assert broken.absent == {"kernel": f"compiling {NAME}: CompileException (-1): no model of it"}
    assert list(broken.usable) == ["plain", "batch"]


def test_a_device_that_cannot_reach_the_hosts_addresses_has_neither_batches_nor_a_kernel() -> None:
    """Batches are not translated for it as single copies are: they would break the device."""
    cuda = FakeCuda(kernels=KERNELS)
    facts = cuda.facts()
    other = type(facts)(**{name: getattr(facts, name) for name in facts.__slots__} | {"maps_host": False})
    absent = open_executors(cuda, other, pinned=True).absent
    said = f"{facts.name} cannot reach pinned memory by the host's own addresses"
    assert absent == {"batch": said, "kernel": said}


@pytest.mark.parametrize(("multiprocessors", "blocks"), [(132, 16), (108, 13), (20, 2), (4, 1)])
def test_the_grid_is_a_small_part_of_the_device(multiprocessors: int, blocks: int) -> None:
    facts = FakeCuda().facts()
    given_facts = {name: getattr(facts, name) for name in facts.__slots__} | {"multiprocessors": multiprocessors}
    assert default_blocks(type(facts)(**given_facts)) == blocks
