"""Whole caches over a fake GPU under random use: loads by layer, kernels that read each layer as it comes, copies that
fail, requests that are given up, and a device that fails for good in the middle. Each byte is verified.
"""

from __future__ import annotations

import ctypes
import random
import threading
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.cuda import CudaDevicePool, CudaError, CudaOptions
from hicache.cuda.executors import PlainExecutor
from hicache.cuda.kept import KEPT
from hicache.cuda.lanes import CudaCopy
from hicache.cuda.runs import HostPart
from hicache.errors import OutOfSlots
from hicache.memory.base import Bytes
from hicache.records import Tier
from hicache.storage.memory import MemoryBackend
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS
from hicache.testing.cudastreams import Gate
from hicache.testing.waits import eventually

pytestmark = pytest.mark.usefixtures("layer_by_layer")

PAGE = 4
GEOMETRY = hicache.KVGeometry.mha(layers=3, kv_heads=1, head_dim=4, dtype="float16")
NAMESPACE = hicache.Namespace("m", revision="r", geometry=GEOMETRY, page_size=PAGE, hash="sha256")
BYTES = GEOMETRY.page_bytes(PAGE)
DEVICE, HOST = 5, 14
STEPS, LOST = 30, 15
LIMIT = 30.0
PROMPTS = [[family, 0, 0, 0, *range(8 * one, 8 * one + 9)] for family in range(2) for one in range(3)]
"""Three pages and a token more; the first page is three prompts' own."""


def content(tokens: list[int], page: int) -> bytes:
    return random.Random(str(tokens[: (page + 1) * PAGE])).randbytes(BYTES)


class FaultyCuda(FakeCuda):
    """Calls of copy engines fail now and then; those of the engine's own kernels do not."""

    share = 0.0

    def memcpy_async(self, target: int, source: int, size: int, stream: Any) -> None:
        if threading.current_thread().name.endswith("-put") and self.timeline.random.random() < self.share:
            raise CudaError("cudaMemcpyAsync", "cudaErrorInvalidValue", 1)
        super().memcpy_async(target, source, size, stream)


class Engine:
    """An engine with one stream, and a cache over its pool."""

    def __init__(self, seed: int, *, share: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.cuda = FaultyCuda(seed=seed, memory=1 << 22, kernels=KERNELS)
        self.stream = self.cuda.stream()
        self.pool = CudaDevicePool.allocate(
            GEOMETRY,
            page_size=PAGE,
            slots=DEVICE,
            driver=self.cuda,
            stream=self.stream,
            options=CudaOptions(method="plain", in_flight_bytes=2 * BYTES),
        )
        self.cache = hicache.open(
            NAMESPACE, device=self.pool, host=HOST, storage=MemoryBackend(), canary=False, prefetch="wait_complete"
        )
        self.lanes = list(self.cuda.timeline.streams.values())[-2:]  # up and down
        self.cuda.share = share
        self.patience = LIMIT
        self.kernel = PlainExecutor(self.cuda)
        self.buffers: list[int] = []
        self.read: list[tuple[Bytes, bytes]] = []  # what kernels have read, and what they had to
        self.seen = {"layered": 0, "short": 0, "given up": 0, "written": 0}

    def launch(self, slot: int, page: Bytes, *, writes: bool, layer: int | None = None) -> None:
        """A kernel that fills a slot with a page, or reads a layer of one."""
        runs = self.pool.runs((HostPart.whole(page.ctypes.data, 1, BYTES),))
        layers = None if layer is None else (layer, layer + 1)
        self.kernel.run(
            runs.table(np.array([slot]), np.zeros(1, np.int64), to_device=writes, layers=layers), self.stream
        )

    def buffer(self) -> Bytes:
        self.buffers.append(self.cuda.host_alloc(BYTES))
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * BYTES).from_address(self.buffers[-1]))
        memory[:] = 0
        return memory

    def serve(self, tokens: list[int]) -> None:
        """One request: read by layer what comes, compute the rest, publish it behind an event."""
        with self.cache.request(np.array(tokens, np.uint32)) as request:
            load = request.load_by_layer()
            pages = [self.buffer() for _ in load.slots]
            copies = [copy for copy in load.copies if isinstance(copy, CudaCopy)]
            assert len(copies) == len(load.copies)
            for layer in range(self.pool.layers):
                if not all(copy.let_wait(layer, self.stream, LIMIT) for copy in copies):
                    break
                for slot, page in zip(load.slots.tolist(), pages, strict=True):
                    self.launch(slot, page, writes=False, layer=layer)
            self.seen["layered"] += bool(load.copies)
            if self.random.random() < 0.15:
                self.seen["given up"] += 1
                return
            slots = load.finish()
            self.seen["short"] += len(slots) < len(load.slots)
            assert slots[: len(load.slots)].tolist() == load.slots[: len(slots)].tolist()
            if not load.copies or all(copy.results and not any(copy.results) for copy in load.copies):
                self.read += [(page, content(tokens, at)) for at, page in enumerate(pages[: len(slots)])]
            self.compute(request, tokens, first=len(slots))

    def fail(self) -> list[Gate]:
        """The device fails while pages are on their way up and down. What they wait for opens their way again."""
        self.patience = 0.0  # for slots that never come back
        gates = [self.cuda.gate(lane) for lane in self.lanes]
        first, second = self.random.sample(PROMPTS, 2)
        with self.cache.request(np.array(first, np.uint32)) as request:
            load = request.load_by_layer()
            with self.cache.request(np.array(second, np.uint32)) as other:
                other.load_by_layer()
                self.compute(other, second, first=len(other._lease.usable_slots()))
            self.pool.record().wait(None)
            self.cuda.lose()
            load.finish()
        return gates

    def compute(self, request: hicache.Request, tokens: list[int], *, first: int) -> None:
        try:
            fresh = request.allocate(3 - first, deadline=self.patience)
        except OutOfSlots:
            return
        for page, slot in enumerate(fresh.tolist(), first):
            buffer = self.buffer()
            buffer[:] = np.frombuffer(content(tokens, page), np.uint8)
            self.launch(slot, buffer, writes=True)
        request.commit(upto=12, ready=self.pool.record())
        self.seen["written"] += len(fresh)

    def check_host(self) -> int:
        """What HOST shows is what it should be; how many pages there are."""
        assert self.cache.host is not None
        shown, width = 0, PAGE * 4
        with self.cache.parts.reducer.lock:
            for tree in self.cache.parts.core.trees:
                todo = [(child, b"") for child in tree.root.children.values()]
                while todo:
                    node, before = todo.pop()
                    whole = before + node.span
                    todo += [(child, whole) for child in node.children.values()]
                    tokens = np.frombuffer(whole, "<u4").tolist()
                    for at, slot in enumerate(node.slots[Tier.HOST][: node.resident[Tier.HOST]].tolist()):
                        assert self.cache.host.page(slot).tobytes() == content(tokens, len(before) // width + at)
                        shown += 1
        return shown

    def check_read(self) -> None:
        for found, wanted in self.read:
            assert found.tobytes() == wanted, "a kernel has read other bytes"

    def let_go(self) -> None:
        assert self.cache.host is not None
        self.cache.host.close()
        self.pool.close()
        self.buffers.clear()


@pytest.fixture
def layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.cuda.putting._STEP_BYTES", 1)


@pytest.mark.case("RACE-1", "RACE-3", "RACE-5")
@pytest.mark.parametrize("share", [0.0, 0.04])
def test_every_byte_is_right_whatever_fails_and_whoever_gives_up(share: float) -> None:
    seen = dict.fromkeys(("layered", "short", "given up", "written"), 0)
    for seed in range(3):
        engine = Engine(seed, share=share)
        for _ in range(STEPS):
            engine.serve(engine.random.choice(PROMPTS))
            engine.check_host()
        engine.cache.flush()
        engine.pool.record().wait(None)
        engine.check_read()
        engine.cache.check()
        assert engine.check_host()
        assert engine.read
        assert engine.cache.close(LIMIT).abandoned_pages == 0
        engine.let_go()
        seen = {name: seen[name] + engine.seen[name] for name in seen}
    assert all(count or (name == "short" and not share) for name, count in seen.items()), seen


@pytest.mark.case("RACE-1", "RACE-4")
def test_a_device_that_fails_in_the_middle_costs_no_byte_of_what_is_shown() -> None:
    """Requests end, HOST shows what it should, also when what was under way comes late, and closing ends."""
    stranded = 0
    before = len(KEPT)
    for seed in range(6):
        engine = Engine(seed)
        for step in range(STEPS):
            if step == LOST:
                gates = engine.fail()
            try:
                engine.serve(engine.random.choice(PROMPTS))
            except CudaError:
                assert step >= LOST  # the engine's own calls fail, too
            engine.check_host()
        statistics = engine.cache.statistics()
        assert statistics.open_requests == 0
        assert statistics.copies.lost
        eventually(lambda cache=engine.cache: cache.parts.reducer.idle, "the end of what was posted")  # type: ignore[misc]
        engine.cache.check()
        held = engine.cache.statistics().copies.stranded_pages
        report = engine.cache.close(LIMIT)
        assert report.stuck_threads == 0
        assert report.abandoned_pages == held
        stranded += report.abandoned_pages
        for gate in gates:
            gate.open()
        engine.cuda.finish()
        if report.abandoned_pages:  # else the memory was given back
            engine.check_host()
        engine.let_go()
    assert stranded
    del KEPT[before:]
