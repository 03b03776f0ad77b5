"""A GPU that fails for good, under a whole cache: what ends, what stays, what nobody else gets, and what is said."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

import hicache
from hicache.core.residency import SlotState
from hicache.cuda import CudaDevicePool, CudaError, CudaOptions
from hicache.cuda.engine import CudaCopyStatistics
from hicache.cuda.kept import KEPT
from hicache.errors import OutOfSlots
from hicache.records import MissReason, Tier
from hicache.storage.memory import MemoryBackend
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS
from hicache.testing.waits import eventually

PAGE = 4
GEOMETRY = hicache.KVGeometry.mha(layers=2, kv_heads=1, head_dim=4, dtype="float16")
NAMESPACE = hicache.Namespace("m", revision="r", geometry=GEOMETRY, page_size=PAGE, hash="sha256")
DEVICE, HOST = 4, 8
LIMIT = 20.0
PROMPTS = [np.arange(13, dtype=np.uint32) + 100 * number for number in range(8)]
"""Three whole pages each, and a token more."""


def content(number: int, page: int) -> bytes:
    return bytes([16 * number + page + 1]) * GEOMETRY.page_bytes(PAGE)


class Cache:
    """A cache over a fake GPU, and what tests do with it."""

    def __init__(self, storage: MemoryBackend) -> None:
        self.cuda = FakeCuda(memory=1 << 22, kernels=KERNELS)
        self.pool = CudaDevicePool.allocate(
            GEOMETRY, page_size=PAGE, slots=DEVICE, driver=self.cuda, options=CudaOptions(method="plain")
        )
        self.cache = hicache.open(
            NAMESPACE,
            device=self.pool,
            host=HOST,
            storage=storage,
            canary=False,
            retry=None,
            prefetch="wait_complete",
        )
        self.up, self.down = list(self.cuda.timeline.streams.values())[-2:]  # of its copies

    def compute(self, number: int) -> None:
        with self.cache.request(PROMPTS[number]) as request:
            for page, slot in enumerate(request.allocate(3).tolist()):
                self.pool.write_page(slot, content(number, page))
            request.commit(upto=12, ready=hicache.READY)

    def commit_ready(self, number: int, *, pages: int = 3) -> None:
        """An engine says that pages are written; they may be garbage."""
        with self.cache.request(PROMPTS[number]) as request:
            request.allocate(pages)
            request.commit(upto=pages * PAGE, ready=hicache.READY)

    def check_host(self) -> dict[int, bytes]:
        """Every page that HOST shows has its own bytes: what they are, by slot."""
        found: dict[int, bytes] = {}
        width = PAGE * 4
        for tree in self.cache.parts.core.trees:
            todo = list(tree.root.children.values())
            while todo:
                node = todo.pop()
                todo += node.children.values()
                for at, slot in enumerate(node.slots[Tier.HOST][: node.resident[Tier.HOST]].tolist()):
                    number, token = divmod(int.from_bytes(node.span[at * width : at * width + 4], "little"), 100)
                    found[slot] = content(number, token // PAGE)
        assert self.cache.host is not None
        for slot, data in found.items():
            assert self.cache.host.page(slot).tobytes() == data, f"other bytes in host slot {slot}"
        return found

    def copies(self) -> CudaCopyStatistics:
        found = self.cache.statistics().copies
        assert isinstance(found, CudaCopyStatistics)
        return found

    def stranded(self, pages: int) -> None:
        eventually(lambda: self.copies().stranded_pages == pages, f"{pages} stranded pages")
        eventually(lambda: self.cache.parts.reducer.idle, "the end of what was posted")
        self.cache.check()

    def slots(self, tier: Tier, state: SlotState) -> set[int]:
        table = self.cache.parts.core.registry.tables[tier]
        return set(np.flatnonzero(table.state == state).tolist())


@pytest.fixture
def kept() -> Iterator[list[object]]:
    """What is kept for good, let go of behind the test."""
    before = len(KEPT)
    yield KEPT
    del KEPT[before:]


@pytest.fixture
def made(kept: list[object]) -> Iterator[Cache]:
    storage = MemoryBackend()
    with hicache.open(NAMESPACE, device=4, host=4, storage=storage, canary=False) as before:
        for number in range(4, 7):
            with before.request(PROMPTS[number]) as request:
                for page, slot in enumerate(request.allocate(3).tolist()):
                    before.device.write_page(slot, content(number, page))
                request.commit(upto=12, ready=hicache.READY)
            assert before.flush()
    cache = Cache(storage)
    yield cache
    cache.cache.close(1.0)
    cache.cuda.finish()  # into memory that is still there
    assert cache.cache.host is not None
    cache.cache.host.close()
    cache.pool.close()


def test_a_load_under_way_ends_and_nobody_gets_its_slots(made: Cache, caplog: pytest.LogCaptureFixture) -> None:
    for number in (0, 1):
        made.compute(number)
        made.cache.flush()
    gate = made.cuda.gate(made.up)
    with made.cache.request(PROMPTS[0]) as request:
        assert (request.match.device, request.match.host) == (1, 2)
        under_way = request.load_by_layer()
        (copy,) = under_way.copies
        eventually(lambda: "plain up" in made.copies().tables, "the copy's way into its stream")
        made.cuda.lose()
        assert under_way.finish().tolist() == under_way.slots[:1].tolist()
        assert copy.stranded
        assert copy.wait(LIMIT)
        held = set(under_way.slots[1:].tolist())
        assert made.slots(Tier.DEVICE, SlotState.QUARANTINED) == held
        with pytest.raises(OutOfSlots):
            request.allocate(2)
        assert not held & set(request.allocate(1).tolist())
    assert request.counts.missed == {MissReason.FAILED: 2}
    assert len(made.check_host()) == 6  # none was taken from HOST, and all can be read
    gate.open()
    made.cuda.finish()
    assert made.slots(Tier.DEVICE, SlotState.QUARANTINED) == held
    made.cache.check()
    assert [record.levelname for record in caplog.records if "nothing is copied to it" in record.message] == ["ERROR"]


@pytest.mark.case("RACE-4")
def test_bytes_that_come_late_find_their_slots_as_they_were(made: Cache) -> None:
    """Pages on their way down when the device fails: HOST never shows them, and others take other slots."""
    gate = made.cuda.gate(made.down)
    made.compute(0)
    eventually(lambda: "plain down" in made.copies().tables, "the copy's way into its stream")
    made.cuda.lose()
    made.stranded(3)
    held = made.slots(Tier.HOST, SlotState.QUARANTINED)
    assert len(held) == 3
    assert made.check_host() == {}
    for number in (4, 5, 6):
        with made.cache.request(PROMPTS[number]) as request:
            assert len(request.load()) == 0
            assert request.match.storage == 3
            assert len(made.check_host()) >= 3
    gate.open()
    made.cuda.finish()
    assert made.cache.host is not None
    late = {made.cache.host.page(slot).tobytes() for slot in held}
    assert late == {content(0, page) for page in range(3)}
    assert len(made.check_host()) == HOST - len(held)
    assert not held & set(made.check_host())


def test_host_and_storage_go_on_and_the_cache_says_what_does_not(made: Cache) -> None:
    made.compute(0)
    made.cache.flush()
    made.cuda.lose()
    for number in (4, 5, 4):
        with made.cache.request(PROMPTS[number]) as request:
            assert len(request.load()) == 0
        assert request.counts.missed[MissReason.FAILED] == 3
    assert len(made.check_host()) == HOST
    made.commit_ready(1)
    assert made.cache.flush() is False
    statistics = made.cache.statistics()
    assert statistics.degraded == (f"device: {statistics.copies.lost}",)
    assert statistics.copies.lost == "CUDA device 0 has failed (the device: cudaErrorIllegalAddress (700): injected)"
    assert statistics.failed_pages["load"] == 9
    assert statistics.open_requests == 0


def test_what_was_being_written_is_not_shown_and_its_slots_come_back(made: Cache) -> None:
    gate = made.cuda.gate(made.cuda.default)
    with made.cache.request(PROMPTS[0]) as request:
        request.allocate(3)
        request.commit(upto=8, ready=made.pool.record())
        late = made.pool.record()
        made.cuda.lose()
        eventually(lambda: not made.cache.statistics().core.transfers, "the end of the write")
        with pytest.raises(CudaError, match="cudaErrorIllegalAddress"):
            request.commit(upto=12, ready=late)
        with pytest.raises(CudaError, match="cudaErrorIllegalAddress"):
            made.pool.record()
    assert made.cache.match(PROMPTS[0]).pages == 0
    assert made.slots(Tier.DEVICE, SlotState.FREE) == set(range(DEVICE))
    gate.open()


def test_closing_ends_and_leaves_what_may_still_be_written(
    made: Cache, kept: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    gate = made.cuda.gate(made.down)
    made.compute(0)
    eventually(lambda: "plain down" in made.copies().tables, "the copy's way into its stream")
    made.cuda.lose()
    made.stranded(3)
    began = time.monotonic()
    assert not made.cache.flush(LIMIT)
    report = made.cache.close(LIMIT)
    assert time.monotonic() - began < LIMIT  # what has no end is not waited for
    assert report.abandoned_pages == 3
    assert not report.complete
    assert report.stuck_threads == 0
    assert made.cuda.registered  # not even tried: bytes may move
    assert "unpinned" not in caplog.text
    assert "of host memory, CUDA device 0 has failed" in caplog.text
    assert made.cache.parts.pools.copies in kept
    gate.open()
    made.cuda.finish()  # into memory that nobody has unmapped
    assert made.cache.host is not None
    assert {made.cache.host.page(slot).tobytes() for slot in made.slots(Tier.HOST, SlotState.QUARANTINED)}


def test_a_device_that_fails_while_nothing_moves_leaves_nothing_behind(
    made: Cache, kept: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    made.compute(0)
    made.cache.flush()
    before = len(kept)
    made.cuda.lose()
    report = made.cache.close(LIMIT)
    assert (report.abandoned_pages, report.stuck_threads) == (0, 0)
    assert "could not be unpinned: the device: cudaErrorIllegalAddress" in caplog.text
    assert len(kept) == before
    made.pool.close()
    assert "a device pool's memory could not be given back" in caplog.text


def test_the_first_copies_behind_a_failure_are_stranded_and_the_next_fail_at_once(made: Cache) -> None:
    """Whether a call that raised has put anything into the stream is not known; later copies are not even tried."""
    made.cuda.lose()
    made.commit_ready(0)
    made.stranded(3)
    calls = made.cuda.calls["memcpy_async"]
    made.commit_ready(1, pages=1)
    eventually(lambda: made.copies().failed_pages == 4, "the next copy")
    assert made.copies().stranded_pages == 3
    assert made.cuda.calls["memcpy_async"] == calls
