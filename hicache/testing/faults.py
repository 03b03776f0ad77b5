"""Storage that misbehaves on command, and a way to stand between an object and its calls."""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from hicache.storage.base import ObjectKey, ObjectResult, ObjectStatus, StorageBackend, StoredObject
from hicache.storage.memory import Entry, MemoryBackend
from hicache.storage.wrappers import WrapperBackend
from hicache.testing.gates import Gate

__all__ = [
    "Call",
    "DamageableMemory",
    "Fault",
    "FaultyStorage",
    "Interposed",
    "LatencyStorage",
    "answer",
    "apply_then_raise",
    "chain",
    "delay",
    "drop_ack",
    "fail",
    "interpose",
    "refuse",
    "resize",
    "stop_at",
]

T = TypeVar("T")


class Call(NamedTuple):
    """One call of a backend's verb.

    Attributes:
        verb: the method's name.
        keys: what it was about.
        apply: does it, and gives the backend's answer.
        backend: the wrapped backend.
        buffers: of `get_into`, else empty.
    """

    verb: str
    keys: tuple[ObjectKey, ...]
    apply: Callable[[], Any]
    backend: StorageBackend
    buffers: tuple[memoryview, ...] = ()


class Fault(Protocol):
    """What happens instead of a call."""

    def __call__(self, call: Call) -> Any:
        """The answer of the call, which may be anything, or an exception."""
        ...


def delay(gate: Gate) -> Fault:
    """The call waits at the gate, and is done behind it."""

    def fault(call: Call) -> Any:
        gate.enter()
        return call.apply()

    return fault


def fail(error: BaseException) -> Fault:
    """The call raises; nothing is done."""

    def fault(call: Call) -> Any:
        del call
        raise error

    return fault


def apply_then_raise(error: BaseException) -> Fault:
    """The call is done, and raises all the same."""

    def fault(call: Call) -> Any:
        call.apply()
        raise error

    return fault


def drop_ack(reason: str = "timeout") -> Fault:
    """The call is done, and says FAILED (or False) for each key."""

    def fault(call: Call) -> Any:
        call.apply()
        lost: Any = ObjectResult(ObjectStatus.FAILED, reason) if call.verb in ("get_into", "put") else False
        return [lost] * len(call.keys)

    return fault


def answer(value: object) -> Fault:
    """Nothing is done; the answer is `value`: None, False, a number, anything."""

    def fault(call: Call) -> Any:
        del call
        return value

    return fault


def refuse(reason: str, status: ObjectStatus = ObjectStatus.FAILED) -> Fault:
    """Nothing is done; every key of a `get_into` or `put` ends so."""

    def fault(call: Call) -> Any:
        return [ObjectResult(status, reason)] * len(call.keys)

    return fault


def resize(by: int) -> Fault:
    """The call is done; the list of results has `by` items too many (repeats), or too few where negative."""

    def fault(call: Call) -> Any:
        results = list(call.apply())
        return results + results[:1] * by if by >= 0 else results[:by]

    return fault


def stop_at(byte: int) -> Fault:
    """The transfer of each payload ends after so many bytes.

    A put leaves that half object behind, where the store can hold one (`DamageableMemory`), else nothing, and raises.
    A read fills the rest of the buffer with 0xEE and says FAILED ("short").
    """

    def fault(call: Call) -> Any:
        if call.verb == "put":
            call.apply()
            for key in call.keys:
                if isinstance(call.backend, DamageableMemory):
                    call.backend.truncate(key, byte)
                else:
                    call.backend.delete([key])
            raise OSError(errno.EIO, "the write broke off")
        results = call.apply()
        for buffer in call.buffers:
            np.asarray(buffer)[byte:] = 0xEE
        return [ObjectResult(ObjectStatus.FAILED, "short") for _ in results]

    return fault


def chain(*faults: Fault) -> Fault:
    """Each fault around the next: `chain(delay(gate), fail(error))` waits, then raises."""

    def fault(call: Call) -> Any:
        for outer in reversed(faults):
            call = call._replace(apply=_bound(outer, call))
        return call.apply()

    return fault


def _bound(fault: Fault, call: Call) -> Callable[[], Any]:
    return lambda: fault(call)


class FaultyStorage(WrapperBackend):
    """A backend whose calls go wrong as scripted: one fault a call and verb, then everything is fine again.

    Thread-safe. Everything asked is in `calls`.

    Args:
        inner: the backend.
    """

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._scripts: dict[str, deque[Fault | None]] = {}
        self._always: dict[str, Fault] = {}
        self.calls: list[tuple[str, tuple[ObjectKey, ...]]] = []

    def script(self, verb: str, *faults: Fault | None) -> None:
        """Add faults for the next calls of a verb, in order; None = a call that goes well."""
        with self._lock:
            self._scripts.setdefault(verb, deque()).extend(faults)

    def always(self, verb: str, fault: Fault | None) -> None:
        """What happens in each call of a verb that has no script left; None = nothing."""
        with self._lock:
            self._always.pop(verb, None)
            if fault is not None:
                self._always[verb] = fault

    def count(self, verb: str) -> int:
        """Calls of a verb so far."""
        with self._lock:
            return sum(1 for called, _ in self.calls if called == verb)

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        return self._do("get_into", keys, lambda: self.inner.get_into(keys, buffers), buffers)

    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        return self._do("put", [stored.key for stored in objects], lambda: self.inner.put(objects))

    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        """See `StorageBackend`."""
        return self._do("contains", keys, lambda: self.inner.contains(keys, stop_at_first_miss=stop_at_first_miss))

    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        return self._do("touch", keys, lambda: self.inner.touch(keys))

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        return self._do("delete", keys, lambda: self.inner.delete(keys))

    def generation(self, namespace: bytes) -> int:
        """See `StorageBackend`."""
        return self._do("generation", [], lambda: self.inner.generation(namespace))

    def clear(self, namespace: bytes, generation: int) -> None:
        """See `StorageBackend`."""
        self._do("clear", [], lambda: self.inner.clear(namespace, generation))

    def _do(
        self, verb: str, keys: Sequence[ObjectKey], apply: Callable[[], T], buffers: Sequence[memoryview] = ()
    ) -> T:
        with self._lock:
            self.calls.append((verb, tuple(keys)))
            script = self._scripts.get(verb)
            fault = script.popleft() if script else self._always.get(verb)
        if fault is None:
            return apply()
        return cast("T", fault(Call(verb, tuple(keys), apply, self.inner, tuple(buffers))))


class LatencyStorage(WrapperBackend):
    """A backend that is far away: each call takes a while, and each byte too.

    Args:
        inner: the backend.
        per_call: seconds that every call takes.
        per_object: seconds more for each object that is read or put.
        bytes_per_second: payload bytes a second, in each direction; None = no limit.
        sleep: how time passes; a test gives a clock's.
    """

    def __init__(
        self,
        inner: StorageBackend,
        *,
        per_call: float,
        per_object: float = 0.0,
        bytes_per_second: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._per_call = per_call
        self._per_object = per_object
        self._per_byte = 1.0 / bytes_per_second if bytes_per_second else 0.0
        self._sleep = sleep

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """See `StorageBackend`. Only what is found takes the time of its bytes."""
        results = super().get_into(keys, buffers)
        found = [buffer for buffer, result in zip(buffers, results, strict=True) if result.status is ObjectStatus.OK]
        self._take_time(sum(buffer.nbytes for buffer in found), objects=len(found))
        return results

    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        self._take_time(sum(stored.payload.nbytes for stored in objects), objects=len(objects))
        return super().put(objects)

    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        """See `StorageBackend`."""
        self._take_time(0)
        return super().contains(keys, stop_at_first_miss=stop_at_first_miss)

    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        self._take_time(0)
        return super().touch(keys)

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        self._take_time(0)
        return super().delete(keys)

    def _take_time(self, moved: int, *, objects: int = 0) -> None:
        self._sleep(self._per_call + objects * self._per_object + moved * self._per_byte)


class DamageableMemory(MemoryBackend):
    """A store in memory whose content a test can spoil behind its back. Not for use with other threads at work."""

    def damage(self, key: ObjectKey, *, bit: int = 0) -> None:
        """Flip one bit of a stored payload."""
        self._entries[key].payload[bit // 8] ^= 1 << bit % 8

    def truncate(self, key: ObjectKey, length: int) -> None:
        """Cut a stored payload."""
        entry = self._entries[key]
        self._bytes -= entry.size
        entry.payload = entry.payload[:length].copy()
        self._bytes += entry.size

    def plant(self, key: ObjectKey, header: bytes, payload: bytes) -> None:
        """Put any bytes under a name."""
        self.delete([key])
        stored = np.frombuffer(payload, dtype=np.uint8).copy()
        self._enter(key, Entry(header, stored, depth=0, used=self._begin()))


class Interposed:
    """Made by `interpose`. Counts calls by name and number."""

    def __init__(self, inner: object, on_call: Callable[[str, int, tuple[Any, ...]], None]) -> None:
        self._inner = inner
        self._on_call = on_call
        self._count_lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        """The inner attribute; a method comes with the hook in front."""
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def method(*args: Any, **kwargs: Any) -> Any:
            with self._count_lock:
                number = self._counts[name] = self._counts.get(name, 0) + 1
            self._on_call(name, number, args)
            return value(*args, **kwargs)

        return method


def interpose(inner: T, on_call: Callable[[str, int, tuple[Any, ...]], None]) -> T:
    """Stand between an object and its callers.

    Args:
        inner: any object, e.g. the file backend's `FileSystem`.
        on_call: called before each method with its name, how often that name has been called (from 1), and the
            positional arguments. It may raise (the call is not made), wait, or end the process.

    Returns:
        Something that is used like `inner`.
    """
    return cast("T", Interposed(inner, on_call))
