from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache.core.layout import KVGeometry
from hicache.core.partition import plan_shards
from hicache.core.prompt import PageIdentity
from hicache.memory.host import MmapHostPool
from hicache.records import PageResult
from hicache.runtime.absent import AbsentPages
from hicache.runtime.objects import PageObjects
from hicache.runtime.options import Options
from hicache.runtime.port import StoragePort
from hicache.runtime.queues import Bound
from hicache.runtime.storage_io import Probe, StorageIO
from hicache.runtime.tokens import SymbolTokens
from hicache.storage.base import StorageBackend
from hicache.storage.memory import MemoryBackend
from hicache.storage.wrappers import GuardedBackend
from hicache.testing.clock import ManualClock
from hicache.testing.faults import FaultyStorage, delay, fail
from hicache.testing.gates import Gate

P = 4
GEOMETRY = KVGeometry.mha(layers=1, kv_heads=1, head_dim=4, dtype="float16")
PAGE = GEOMETRY.page_bytes(P)
NAMESPACE = b"n" * 16
OK, FAILED = PageResult.OK, PageResult.FAILED
PAGES = tuple(
    PageIdentity(bytes([i + 1]) * 16, bytes([i]) * 16 if i else None, i, bytes([i]) * 4 * P) for i in range(8)
)


class _Setup:
    """Storage threads over a backend, and what they answered."""

    def __init__(self, backend: StorageBackend, **options: Any) -> None:
        self.host = MmapHostPool(8, PAGE)
        self.clock = ManualClock()
        port = StoragePort(GuardedBackend(backend), owned=False, now=self.clock.now)
        objects = PageObjects(port, buffer=self.host.buffer, plan=plan_shards(GEOMETRY, P), tokens=SymbolTokens(4 * P))
        settings = Options(**({"read_threads": 1, "write_threads": 1} | options))
        self.io = StorageIO(
            port,
            objects=objects,
            options=settings,
            absent=AbsentPages(self.clock, seconds=1.0),
            page_bytes=PAGE,
            now=self.clock.now,
        )
        self._changed = threading.Condition()
        self.ended: dict[int, list[PageResult]] = {}
        self.found: list[tuple[int, bool]] = []

    def done(self, number: int, results: Sequence[PageResult]) -> None:
        with self._changed:
            assert number not in self.ended
            self.ended[number] = list(results)
            self._changed.notify_all()

    def transfer(self, number: int, first: int = 0, end: int = 8) -> Any:
        slots = np.arange(first, end, dtype=np.int64)
        return SimpleNamespace(
            id=number,
            tree=SimpleNamespace(namespace=NAMESPACE, generation=0),
            pages=PAGES[first:end],
            count=end - first,
            cancelled=False,
            source_slots=slots,
            target_slots=slots,
        )

    def result(self, number: int) -> list[PageResult]:
        with self._changed:
            assert self._changed.wait_for(lambda: number in self.ended, 30)
            return self.ended[number]

    def ask(self, *, wanted: bool = True, pages: int = 8) -> list[tuple[int, bool | str]]:
        """All answers to one probe; "failed" stands for the final word where there was none."""
        answers: list[tuple[int, bool | str]] = []

        def found(count: int, final: bool | str) -> None:
            with self._changed:
                answers.append((count, final))
                self._changed.notify_all()

        hashes = [page.hash for page in PAGES[:pages]]
        self.io.probe(Probe(NAMESPACE, 0, hashes, found, lambda count: found(count, "failed"), lambda: wanted))
        with self._changed:
            assert self._changed.wait_for(lambda: answers and answers[-1][1], 30)
        return answers

    def close(self) -> int:
        return self.io.close(lambda thread: thread.join(30))


def test_what_was_put_is_read_and_found() -> None:
    setup = _Setup(MemoryBackend())
    for slot in range(8):
        setup.host.page(slot)[:] = slot
    assert setup.io.put(setup.transfer(1), setup.done)
    assert setup.result(1) == [OK] * 8
    setup.host.pages[:] = 0
    assert setup.io.fetch(setup.transfer(2), setup.done)
    assert setup.result(2) == [OK] * 8
    assert [int(setup.host.page(slot)[0]) for slot in range(8)] == list(range(8))
    assert setup.ask()[-1] == (8, True)
    assert setup.close() == 0


@pytest.mark.case("FAIL-3")
def test_absent_pages_are_asked_for_again_only_after_a_while_or_once_they_are_stored() -> None:
    storage = FaultyStorage(MemoryBackend())
    setup = _Setup(storage)
    setup.io.put(setup.transfer(1, 0, 3), setup.done)
    setup.result(1)
    assert setup.ask() == [(3, True)]
    assert storage.count("contains") == 1
    assert setup.ask() == [(3, True)]
    assert storage.calls[-1][1] == tuple(key for key in storage.calls[-1][1] if key.page_hash != PAGES[3].hash)
    setup.clock.advance(1.0)
    assert setup.ask() == [(3, True)]
    asked = [key.page_hash for key in storage.calls[-1][1]]
    assert PAGES[3].hash in asked
    setup.io.put(setup.transfer(2, 3, 8), setup.done)
    setup.result(2)
    assert setup.ask()[-1] == (8, True)
    assert setup.close() == 0


@pytest.mark.case("FAIL-3")
def test_a_page_that_failed_its_read_counts_as_absent() -> None:
    store = MemoryBackend()
    setup = _Setup(store)
    setup.io.put(setup.transfer(1), setup.done)
    setup.result(1)
    store.delete([key for key in store._entries if key.page_hash == PAGES[2].hash])
    setup.io.fetch(setup.transfer(2), setup.done)
    assert setup.result(2)[:4] == [OK, OK, PageResult.SOURCE_GONE, FAILED]
    assert setup.ask() == [(2, True)]
    assert setup.close() == 0


def test_a_probe_that_nobody_waits_for_asks_nothing() -> None:
    storage = FaultyStorage(MemoryBackend())
    setup = _Setup(storage)
    assert setup.ask(wanted=False) == [(0, True)]
    assert storage.count("contains") == 0
    assert setup.close() == 0


def test_a_probe_goes_in_front_of_reads() -> None:
    storage, gate = FaultyStorage(MemoryBackend()), Gate()
    setup = _Setup(storage)
    setup.io.put(setup.transfer(1), setup.done)
    setup.result(1)
    storage.script("get_into", delay(gate))
    for number in (2, 3, 4):
        setup.io.fetch(setup.transfer(number), setup.done)
    gate.until_arrived()
    answers: list[tuple[int, bool]] = []
    page = [PAGES[0].hash]
    setup.io.probe(Probe(NAMESPACE, 0, page, lambda *answer: answers.append(answer), answers.remove, lambda: True))
    gate.open()
    setup.result(4)
    verbs = [verb for verb, _ in storage.calls if verb != "put"]
    assert verbs == ["get_into", "contains", "get_into", "get_into"]
    assert setup.close() == 0
    assert answers == [(1, True)]


def test_a_question_that_fails_is_no_answer_and_makes_no_page_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.runtime.storage_io.FIRST_PROBE", 3)
    storage = FaultyStorage(MemoryBackend())
    setup = _Setup(storage)
    setup.io.put(setup.transfer(1), setup.done)
    setup.result(1)
    storage.script("contains", None, fail(OSError("x")))
    assert setup.ask() == [(3, False), (3, "failed")]
    storage.script("contains", fail(OSError("x")))
    assert setup.ask() == [(0, "failed")]
    assert setup.ask()[-1] == (8, True)
    assert setup.close() == 0


@pytest.mark.case("THR-1")
@pytest.mark.parametrize("error", [OSError("x"), TimeoutError(), ValueError("x"), MemoryError()])
def test_an_error_fails_one_operation_and_the_threads_live(error: Exception) -> None:
    storage = FaultyStorage(MemoryBackend())
    setup = _Setup(storage)
    storage.script("put", None, None, fail(error))
    for number in range(10):
        setup.io.put(setup.transfer(number, 0, 1), setup.done)
    assert [setup.result(number) for number in range(10)].count([FAILED]) == 1
    reads, writes = setup.io.statistics()
    assert reads.bytes == 0
    assert setup.close() == 0
    assert setup.io.statistics()[1].bytes == 0
    del writes


def test_an_error_of_ours_fails_the_operation_too(caplog: pytest.LogCaptureFixture) -> None:
    setup = _Setup(MemoryBackend())
    transfer = setup.transfer(1)
    transfer.pages = PAGES[:3]  # fewer than it counts
    with caplog.at_level(logging.CRITICAL):
        setup.io.put(transfer, setup.done)
        assert setup.result(1) == [FAILED] * 8
        setup.io.put(setup.transfer(2), setup.done)
        assert setup.result(2) == [OK] * 8
    assert setup.close() == 0


@pytest.mark.case("EVICT-6")
def test_full_queues_refuse_and_call_nobody() -> None:
    storage, gate = FaultyStorage(MemoryBackend()), Gate()
    setup = _Setup(storage, write_bound=Bound(bytes=3 * PAGE, requests=10))
    storage.script("put", delay(gate))
    assert setup.io.put(setup.transfer(1, 0, 2), setup.done)
    assert not setup.io.put(setup.transfer(2, 0, 2), setup.done)
    assert setup.io.put(setup.transfer(3, 2, 3), setup.done)
    gate.open()
    assert setup.result(1) == [OK] * 2
    assert setup.result(3) == [OK]
    assert setup.close() == 0
    assert sorted(setup.ended) == [1, 3]
    assert setup.io.statistics()[1].refused == 1


@pytest.mark.case("THR-2")
def test_closing_fails_what_nobody_has_begun() -> None:
    storage, gate = FaultyStorage(MemoryBackend()), Gate()
    setup = _Setup(storage)
    storage.script("put", delay(gate))
    for number in range(5):
        setup.io.put(setup.transfer(number), setup.done)
    gate.until_arrived()
    assert setup.io.close(lambda thread: thread.join(0.0)) >= 1
    assert [setup.result(number) for number in range(1, 5)] == [[FAILED] * 8] * 4
    assert not setup.io.put(setup.transfer(9), setup.done)
    gate.open()
    assert setup.result(0) == [OK] * 8
    assert setup.close() == 0


def test_a_manifest_is_tried_again_until_it_is_written_and_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryBackend()
    setup = _Setup(store)
    asked = []

    def manifest(namespace: bytes) -> bytes:
        asked.append(namespace)
        if len(asked) == 1:
            raise RuntimeError("no")
        return b"{}"

    setup.io.manifest = manifest
    with caplog.at_level(logging.CRITICAL):
        for number in range(4):
            setup.io.put(setup.transfer(number, number, number + 1), setup.done)
            assert setup.result(number) == [OK]
    assert setup.close() == 0
    assert asked == [NAMESPACE] * 2
    assert store.read_manifests() == {NAMESPACE: b"{}"}
