"""The guard against what backends may do wrong, the meter, and storage that fails on command."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hicache.errors import StorageError
from hicache.storage.base import Manifests, ObjectResult, ObjectStatus, Resting, StorageBackend
from hicache.storage.memory import MemoryBackend
from hicache.storage.wrappers import GuardedBackend, MeteredBackend, WrapperBackend
from hicache.testing import faults
from hicache.testing.faults import DamageableMemory, FaultyStorage, LatencyStorage, interpose
from hicache.testing.gates import Gate
from hicache.testing.storage import NAMESPACE, make_chain, make_key, read, status_of

SIZE = 4096
OK, FAILED, MISSING = ObjectStatus.OK, ObjectStatus.FAILED, ObjectStatus.MISSING
VERBS = ("get_into", "put", "contains", "touch", "delete")


def call(backend: StorageBackend, verb: str, count: int) -> Any:
    chain = make_chain(count, SIZE)
    keys = [stored.key for stored in chain]
    if verb == "put":
        return backend.put(chain)
    if verb == "get_into":
        return backend.get_into(keys, [memoryview(bytearray(SIZE)) for _ in keys])
    return getattr(backend, verb)(keys)


class OwnError(Exception):
    pass


FAULTS = {
    "none": faults.answer(None),
    "false": faults.answer(False),
    "true": faults.answer(True),
    "number": faults.answer(7),
    "empty": faults.answer([]),
    "text": faults.answer("ok" * 7),
    "dict": faults.answer({}),
    "nothings": faults.answer([None] * 7),
    "one_more": faults.resize(1),
    "twice": faults.resize(7),
    "one_less": faults.resize(-1),
    "oserror": faults.fail(OSError("disk")),
    "timeout": faults.fail(TimeoutError()),
    "valueerror": faults.fail(ValueError("x")),
    "own": faults.fail(OwnError()),
    "applied": faults.apply_then_raise(OwnError()),
    "lost_ack": faults.drop_ack(),
}


@pytest.mark.case("FAIL-4", "THR-1")
@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("touch", "contains")])
@pytest.mark.parametrize("name", FAULTS)
def test_the_guard_gives_one_result_a_key_whatever_happens(name: str, verb: str, count: int) -> None:
    faulty = FaultyStorage(MemoryBackend())
    backend = GuardedBackend(faulty)
    faulty.script(verb, FAULTS[name])
    results = call(backend, verb, count)
    assert isinstance(results, list)
    assert len(results) == count
    if verb in ("put", "get_into"):
        assert all(isinstance(result, ObjectResult) for result in results)
        if count:
            assert OK not in status_of(results)
    else:
        assert all(type(result) is bool for result in results)
    assert len(call(backend, verb, count)) == count, "the next call is fine"


@pytest.mark.case("FAIL-4", "THR-1")
@pytest.mark.parametrize("verb", ["touch", "contains"])
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in ("lost_ack", "nothings")])
def test_a_look_up_that_failed_says_so_and_not_that_all_objects_are_absent(name: str, verb: str) -> None:
    faulty = FaultyStorage(MemoryBackend())
    backend = GuardedBackend(faulty)
    faulty.script(verb, FAULTS[name])
    with pytest.raises(StorageError):
        call(backend, verb, 6)
    backend.put(make_chain(6, SIZE))
    assert call(backend, verb, 7) == [True] * 6 + [False], "the next call is fine"
    assert call(backend, verb, 0) == []


def test_one_wrong_item_fails_alone() -> None:
    faulty = FaultyStorage(MemoryBackend())
    backend = GuardedBackend(faulty)
    faulty.script("put", faults.answer([ObjectResult(OK), None, ObjectResult(OK)]))
    assert status_of(call(backend, "put", 3)) == [OK, FAILED, OK]
    faulty.script("get_into", faults.answer([ObjectResult(OK)]))
    assert call(backend, "get_into", 1)[0] == ObjectResult(FAILED, "contract"), "OK without a header is no hit"
    faulty.script("contains", faults.answer([1, True, "yes"]))
    assert call(backend, "contains", 3) == [False, True, False]


def test_the_guard_does_not_hide_what_the_caller_must_know() -> None:
    faulty = FaultyStorage(MemoryBackend())
    faulty.script("clear", faults.fail(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        GuardedBackend(faulty).clear(NAMESPACE, 1)


def test_wrappers_have_the_capabilities_of_what_they_wrap() -> None:
    with_manifests = MeteredBackend(GuardedBackend(MemoryBackend()))
    assert isinstance(with_manifests, Manifests)
    with_manifests.write_manifest(NAMESPACE, b"{}")
    assert with_manifests.read_manifests() == {NAMESPACE: b"{}"}

    class Bare(StorageBackend):
        get_into = put = contains = touch = delete = generation = clear = statistics = None  # type: ignore[assignment]

        def close(self) -> None:
            self.closed = True

    bare = Bare()
    wrapped = WrapperBackend(GuardedBackend(bare))
    assert not isinstance(wrapped, Manifests)
    wrapped.close()
    assert bare.closed

    class Tired(Bare):
        def resting(self) -> bool:
            return True

    rested = MeteredBackend(GuardedBackend(Tired()))
    assert isinstance(rested, Resting)
    assert rested.resting()
    assert not isinstance(wrapped, Resting)


@pytest.mark.case("STAT-6")
def test_the_meter_counts_verified_hits_only() -> None:
    times = iter(range(100))
    backend = MeteredBackend(MemoryBackend(), now=lambda: float(next(times)))
    chain = make_chain(8, SIZE)
    backend.put(chain[:3])
    call(backend, "get_into", 8)
    call(backend, "contains", 8)
    verbs = backend.verbs()
    assert (verbs["get_into"].calls, verbs["get_into"].objects, verbs["get_into"].ok) == (1, 8, 3)
    assert verbs["get_into"].bytes == 3 * SIZE
    assert (verbs["contains"].ok, verbs["contains"].bytes) == (3, 0)
    assert (verbs["put"].ok, verbs["put"].bytes, verbs["put"].seconds, verbs["put"].slowest) == (3, 3 * SIZE, 1.0, 1.0)
    faulty = FaultyStorage(MemoryBackend())
    faulty.script("put", faults.fail(OwnError()))
    backend = MeteredBackend(faulty)
    with pytest.raises(OwnError):
        backend.put(chain)
    assert (backend.verbs()["put"].errors, backend.verbs()["put"].ok) == (1, 0)


@pytest.mark.case("FAIL-1")
@pytest.mark.parametrize(
    "fault",
    [faults.stop_at(SIZE // 2), faults.answer(False), faults.fail(OSError("x"))],
    ids=["half", "false", "raises"],
)
def test_a_put_that_failed_is_never_a_hit_and_can_be_repeated(fault: faults.Fault) -> None:
    faulty = FaultyStorage(DamageableMemory())
    backend = GuardedBackend(faulty)
    (stored,) = make_chain(1, SIZE)
    faulty.script("put", fault)
    assert status_of(backend.put([stored])) == [FAILED]
    assert read(backend, stored.key, SIZE)[0].status is not OK
    assert backend.contains([stored.key]) == [False]
    assert status_of(backend.put([stored])) == [OK]
    assert read(backend, stored.key, SIZE)[1] == bytes(stored.payload)


def test_faults_come_in_order_and_end() -> None:
    faulty = FaultyStorage(MemoryBackend())
    faulty.script("contains", None, faults.answer([True]), None)
    faulty.always("contains", faults.answer([True, True]))
    key = make_key(1)
    assert [faulty.contains([key]) for _ in range(4)] == [[False], [True], [False], [True, True]]
    faulty.always("contains", None)
    assert faulty.contains([key]) == [False]
    assert faulty.count("contains") == 5
    assert faulty.calls[0] == ("contains", (key,))


def test_faults_can_be_chained_and_wait_at_a_gate() -> None:
    faulty, gate = FaultyStorage(MemoryBackend()), Gate()
    faulty.script("put", faults.chain(faults.delay(gate), faults.drop_ack("late")))
    results: list[ObjectResult] = []
    chain = make_chain(2, SIZE)
    thread = threading.Thread(target=lambda: results.extend(faulty.put(chain)))
    thread.start()
    gate.until_arrived()
    assert faulty.inner.contains([chain[0].key]) == [False]
    gate.open()
    thread.join(30)
    assert results == [ObjectResult(FAILED, "late")] * 2
    assert faulty.inner.contains([chain[0].key]) == [True]


def test_a_read_that_stops_spoils_the_rest_of_the_buffer() -> None:
    faulty = FaultyStorage(MemoryBackend())
    (stored,) = make_chain(1, SIZE)
    faulty.put([stored])
    faulty.script("get_into", faults.stop_at(100))
    result, buffer = read(faulty, stored.key, SIZE)
    assert result == ObjectResult(FAILED, "short")
    assert buffer == bytes(stored.payload[:100]) + b"\xee" * (SIZE - 100)


def test_distance_costs_time_per_call_and_per_byte_found() -> None:
    slept: list[float] = []
    backend = LatencyStorage(MemoryBackend(), per_call=0.5, bytes_per_second=SIZE, sleep=slept.append)
    backend.put(make_chain(2, SIZE))
    call(backend, "get_into", 4)
    call(backend, "contains", 4)
    assert slept == [2.5, 2.5, 0.5]


def test_interpose_counts_and_may_forbid() -> None:
    seen: list[tuple[str, int]] = []

    def hook(name: str, number: int, args: tuple[Any, ...]) -> None:
        seen.append((name, number))
        if name == "append" and args == (3,):
            raise OwnError

    items = interpose([1], hook)
    items.append(2)
    with pytest.raises(OwnError):
        items.append(3)
    assert items.copy() == [1, 2]
    assert seen == [("append", 1), ("append", 2), ("copy", 1)]
