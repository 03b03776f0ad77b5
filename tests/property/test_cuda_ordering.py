"""Copies and an engine's kernels on streams that run in any order: nobody reads what is not there yet, nobody writes
what is needed still, and each byte is verified. The fake device draws from seeds what a real one may do; marked `gpu`,
the same runs on one.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.cuda.driver import CudaDriver, CudaError
from hicache.cuda.engine import CudaCopyEngine
from hicache.cuda.executors import PlainExecutor
from hicache.cuda.lanes import CudaCopy
from hicache.cuda.options import CudaOptions
from hicache.cuda.pool import CudaDevicePool
from hicache.cuda.runs import HostPart
from hicache.memory.base import Bytes
from hicache.memory.writer import ThreadEvent
from hicache.records import PageResult
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS

GEOMETRY = hicache.KVGeometry.mha(layers=3, kv_heads=2, head_dim=8, dtype="float16", head_group=1)
PAGE_SIZE = 4
SLOTS = 8
STEPS = 40
LIMIT = 30.0
DELAY = 32 << 20


def opened(kind: str, seed: int) -> CudaDriver:
    if kind == "fake":
        return FakeCuda(seed=seed, memory=1 << 22, kernels=KERNELS)
    from hicache.cuda.cupy_driver import open_driver

    return open_driver()


DEVICES = pytest.mark.parametrize("kind", ["fake", pytest.param("gpu", marks=pytest.mark.gpu)])


class Engine:
    """An engine with one compute stream. What the host says is free is free to it, whatever the device still does."""

    def __init__(self, kind: str, seed: int, *, method: str, reuse: str = "stream") -> None:
        self.random = random.Random(seed)
        self.cuda = opened(kind, seed)
        self.stream = self.cuda.stream()
        self.reuse = reuse
        self.pool = CudaDevicePool.allocate(
            GEOMETRY,
            page_size=PAGE_SIZE,
            slots=SLOTS,
            driver=self.cuda,
            stream=self.stream,
            options=CudaOptions(method=method, reuse=reuse, in_flight_bytes=4096),  # type: ignore[arg-type]
        )
        self.host = self.pool.host_pool(GEOMETRY, PAGE_SIZE, SLOTS)
        self.copies: CudaCopyEngine = self.pool.cuda_engine(self.host)
        self.kernel = PlainExecutor(self.cuda)  # what an engine's kernels would read and write, they copy
        self.buffers: list[int] = []
        self.delay = 0 if kind == "fake" else self.cuda.malloc(DELAY)
        self.device_free = set(range(SLOTS))
        self.host_free = set(range(SLOTS))
        self.on_host: dict[int, Bytes] = {}  # what host slots must hold
        self.seen: list[tuple[Bytes, Bytes]] = []  # what kernels have read, and what they had to
        self.running: list[CudaCopy] = []
        self.failures = 0

    def buffer(self) -> Bytes:
        """Pinned memory of one page, zeroed."""
        address = self.cuda.host_alloc(self.pool.page_bytes)
        self.buffers.append(address)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * self.pool.page_bytes).from_address(address))
        memory[:] = 0
        return memory

    def launch(self, slot: int, page: Bytes, *, writes: bool, layer: int | None = None) -> None:
        """A kernel that fills a slot with a page, or reads one."""
        if self.delay:
            self.cuda.memset_async(self.delay, 0, DELAY, self.stream)
        runs = self.pool.runs((HostPart.whole(page.ctypes.data, 1, self.pool.page_bytes),))
        layers = None if layer is None else (layer, layer + 1)
        table = runs.table(np.array([slot]), np.zeros(1, np.int64), to_device=writes, layers=layers)
        self.kernel.run(table, self.stream)

    def write(self) -> None:
        """A kernel fills a slot, and the page goes down behind it. Both slots are free when that is done."""
        if not self.device_free or not self.host_free:
            return
        slot, target, page = self.device_free.pop(), self.host_free.pop(), self.buffer()
        page[:] = np.frombuffer(self.random.randbytes(len(page)), np.uint8)
        self.launch(slot, page, writes=True)
        ready: Any = self.pool.record()
        if self.random.random() < 0.2:  # an event of another kind, that passes behind it
            ready.wait(None)
            ready = ThreadEvent()
            ready.set()

        def done(results: Sequence[PageResult]) -> None:
            if results[0] is PageResult.OK:
                self.on_host[target] = page
            else:
                self.failures += 1
                self.host.pages[target] = page  # another page comes into the slot, from elsewhere
                self.on_host[target] = page
            self.device_free.add(slot)

        self.running.append(self.copies.device_to_host(np.array([slot]), np.array([target]), ready=ready, done=done))

    def load(self) -> None:
        """Pages go up, and kernels read each layer as it comes. Then their slots are others' at once."""
        count = min(len(self.on_host), len(self.device_free), self.random.randint(1, 3))
        if not count:
            return
        sources = self.random.sample(sorted(self.on_host), count)
        targets = [self.device_free.pop() for _ in sources]
        pages = [self.on_host.pop(slot) for slot in sources]

        def done(results: Sequence[PageResult]) -> None:
            for source in sources:
                self.host.pages[source] = 0xAB
                self.host_free.add(source)
            self.failures += len(results) - results.count(PageResult.OK)

        copy = self.copies.host_to_device(np.array(sources), np.array(targets), done=done)
        self.running.append(copy)
        found = [self.buffer() for _ in targets]
        seen = 0
        while seen < self.pool.layers and copy.let_wait(seen, self.stream, LIMIT):
            for slot, page in zip(targets, found, strict=True):
                self.launch(slot, page, writes=False, layer=seen)
            seen += 1
        assert copy.wait(LIMIT)
        if copy.results == (PageResult.OK,) * count:
            assert seen == self.pool.layers
            self.seen.extend(zip(found, pages, strict=True))
        if self.reuse == "told":
            self.pool.used_until(targets, self.pool.record())
        self.device_free.update(targets)

    def run(self) -> None:
        for _ in range(STEPS):
            if self.running and self.random.random() < 0.5:
                assert self.running.pop(0).wait(LIMIT)
            self.random.choice((self.write, self.load))()
            for slot, page in list(self.on_host.items()):
                assert np.array_equal(self.host.page(slot), page), f"host slot {slot} has other bytes"

    def close(self) -> None:
        for copy in self.running:
            assert copy.wait(LIMIT)
        self.pool.record().wait(None)
        assert self.copies.close(LIMIT) == 0
        for slot, page in self.on_host.items():
            assert np.array_equal(self.host.page(slot), page), f"host slot {slot} has other bytes"
        assert self.seen
        for found, wanted in self.seen:
            assert np.array_equal(found, wanted), "a kernel has read other bytes"
        self.host.close()
        self.pool.close()
        for address in self.buffers:
            self.cuda.host_free(address)
        if self.delay:
            self.cuda.free(self.delay)


@DEVICES
@pytest.mark.parametrize("method", ["plain", "batch", "kernel"])
@pytest.mark.case("RACE-1")
@pytest.mark.case("RACE-5")
def test_every_byte_is_right_in_any_order(kind: str, method: str) -> None:
    """Writes, write-backs, loads by layer and reuse, each as early as the host allows it."""
    for seed in range(4):
        engine = Engine(kind, seed, method=method)
        engine.run()
        engine.close()
        assert engine.failures == 0
        assert {name.split()[0] for name in engine.copies.statistics().tables} == {method}


@DEVICES
def test_an_engine_that_tells_how_long_it_uses_slots_is_waited_for_no_longer_and_no_shorter(kind: str) -> None:
    for seed in range(4):
        engine = Engine(kind, seed, method="plain", reuse="told")
        engine.run()
        engine.close()


class FaultyCuda(FakeCuda):
    """Calls of copy engines fail now and then; those of the engine's own kernels do not."""

    def memcpy_async(self, target: int, source: int, size: int, stream: Any) -> None:
        self._fail(0.01)
        super().memcpy_async(target, source, size, stream)

    def memcpy_batch_async(self, *arguments: Any) -> None:
        self._fail(0.1)
        super().memcpy_batch_async(*arguments)

    def _fail(self, share: float) -> None:
        if threading.current_thread().name.endswith("-put") and self.timeline.random.random() < share:
            raise CudaError("cudaMemcpyAsync", "cudaErrorInvalidValue", 1)


@pytest.mark.parametrize("method", ["plain", "batch"])
def test_copies_that_fail_leave_the_others_right_and_their_slots_alone(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call fails now and then: the page's result says so, and nothing of it comes into a slot that is another's."""
    monkeypatch.setitem(globals(), "FakeCuda", FaultyCuda)
    failures = 0
    for seed in range(4):
        engine = Engine("fake", seed, method=method)
        engine.run()
        engine.close()
        failures += engine.failures
        assert engine.copies.statistics().failed_pages == engine.failures
    assert failures
