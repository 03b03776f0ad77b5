"""The same promises on a real device: `benchmarks/gpu_check.sh tests` runs these where there is one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hicache.clock import MonotonicClock
from hicache.core.layout import KVGeometry
from hicache.cuda.choice import choose
from hicache.cuda.driver import CudaDriver, CudaError
from hicache.cuda.executors import METHODS, Executors, open_executors
from hicache.cuda.regions import DEVICE_LAYOUTS, TensorMemory, regions_of
from hicache.cuda.runs import HostPart, PageRuns, RunTable
from hicache.errors import ConfigError
from hicache.memory.layout import PageLayout

pytestmark = pytest.mark.gpu

LENGTHS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 64, 511, 512, 513, 4096, 16_384, 16_385, 100_003)


@pytest.fixture(scope="module")
def driver() -> CudaDriver:
    from hicache.cuda.cupy_driver import open_driver

    return open_driver()


@pytest.fixture(scope="module")
def executors(driver: CudaDriver) -> Iterator[Executors]:
    made = open_executors(driver, driver.facts(), pinned=True)
    yield made
    made.close()


def bytes_at(address: int, size: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def passed(driver: CudaDriver, stream: Any) -> None:
    event = driver.event()
    driver.record(event, stream)
    driver.synchronize(event)


def test_all_three_work_here(executors: Executors) -> None:
    assert executors.absent == {}
    assert tuple(executors.usable) == METHODS


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("count", [1, 5, 700])
def test_odd_runs_go_up_and_come_back(driver: CudaDriver, executors: Executors, name: str, count: int) -> None:
    random = np.random.default_rng(count)
    length = random.choice(LENGTHS, count).astype(np.int64)
    room = int(length.sum()) + count
    device, host = driver.malloc(room), driver.host_alloc(2 * room)
    try:
        sent, back = bytes_at(host, room), bytes_at(host + room, room)
        sent[:], back[:] = random.integers(0, 256, room, np.uint8), 0
        at = np.cumsum(length) - length + np.arange(count)
        there, order = np.zeros_like(at), random.permutation(count)
        there[order] = device + np.cumsum(length[order]) - length[order]
        stream = driver.stream()
        executors.usable[name].run(RunTable(host + at, there, length), stream)
        executors.usable[name].run(RunTable(there, host + room + at, length), stream)
        passed(driver, stream)
        inside = np.zeros(room, bool)
        for start, size in zip(at.tolist(), length.tolist(), strict=True):
            inside[start : start + size] = True
        assert np.array_equal(back, np.where(inside, sent, 0))
    finally:
        driver.free(device)
        driver.host_free(host)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("layout", sorted(set(DEVICE_LAYOUTS) - {"opaque"}))
def test_pages_of_every_layout_are_those_of_main_memory(
    driver: CudaDriver, executors: Executors, name: str, layout: str
) -> None:
    """The same regions, once in main memory and once at the same offsets on the device, give the same pages."""
    layers, heads, dim, tokens, slots = 4, 4, 64, 16, 8
    page = PageLayout.of(KVGeometry.mha(layers, kv_heads=heads, head_dim=dim, dtype="uint8", head_group=2), tokens)
    lengths = {"slot": slots, "layer": layers, "plane": 2, "token": tokens, "head": heads, "dim": dim}
    lengths["content"] = 2 * dim
    axes = DEVICE_LAYOUTS[layout]
    shape = tuple(lengths[axis] for axis in axes)
    count = 1 if "layer" in axes else layers * (2 if layout == "planes" else 1)
    each = int(np.prod(shape))
    tensors = np.random.default_rng(1).integers(0, 256, (count, *shape), np.uint8)
    device, host = driver.malloc(count * each), driver.host_alloc(count * each + 2 * slots * page.page_bytes)
    try:
        bytes_at(host, count * each)[:] = tensors.reshape(-1)
        stream = driver.stream()
        driver.memcpy_async(device, host, count * each, stream)
        pages = host + count * each
        found = []
        for base, run in ((host, executors.usable["plain"].run), (device, executors.usable[name].run)):
            memories = [TensorMemory(base + at * each, shape, tensors[0].strides, 1) for at in range(count)]
            regions = regions_of(memories[0] if "layer" in axes else memories, layout, page)
            part = HostPart.whole(pages + len(found) * slots * page.page_bytes, slots, page.page_bytes)
            order = np.random.default_rng(2).permutation(slots)
            run(PageRuns(page, regions, [part]).table(order, np.arange(slots), to_device=False), stream)
            passed(driver, stream)
            found.append(bytes_at(part.address, slots * page.page_bytes).copy())
        assert np.array_equal(*found)
    finally:
        driver.free(device)
        driver.host_free(host)


def test_the_choice_is_made_in_time(driver: CudaDriver) -> None:
    clock = MonotonicClock()
    start = clock.now()
    chosen = choose(driver, open_executors(driver, driver.facts(), pinned=True), clock, seconds=1.0)
    assert clock.now() - start < 5
    assert chosen.choice.absent == ()
    assert chosen.choice.rates
    chosen.close()


def test_what_cuda_refuses_is_told_with_its_name(driver: CudaDriver) -> None:
    with pytest.raises(CudaError, match="cudaErrorMemoryAllocation"):
        driver.malloc(1 << 50)
    passed(driver, driver.stream())  # and the device goes on


def test_a_device_that_does_not_exist_is_refused() -> None:
    from hicache.cuda.cupy_driver import open_driver

    with pytest.raises(ConfigError, match="does not exist: this process sees"):
        open_driver(10_000)
