"""Backends around backends: what must hold for every store is written once, here.

A wrapper has the capability protocols of what it wraps, so `isinstance(wrapped, Manifests)` stays true or false.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from hicache.errors import StorageError
from hicache.storage.base import (
    ListedObject,
    Listing,
    Manifests,
    ObjectKey,
    ObjectResult,
    ObjectStatus,
    RawMedium,
    Resting,
    StorageBackend,
    StorageStatistics,
    StoredObject,
)
from hicache.storage.codec import Verdict

__all__ = ["CALL_BOUNDS", "GuardedBackend", "MeteredBackend", "VerbStatistics", "WrapperBackend"]

T = TypeVar("T")

CALL_BOUNDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds, in seconds, of a call's buckets in `VerbStatistics`; one more bucket has no bound."""


class WrapperBackend(StorageBackend):
    """Passes everything on. Subclasses change what they are about.

    The wrapped backend belongs to the wrapper: closing one closes the other.
    """

    def __new__(cls, inner: StorageBackend, *_args: Any, **_kwargs: Any) -> WrapperBackend:
        """An instance that has the capabilities of `inner`."""
        added = [
            mixin
            for capability, mixin in _CAPABILITIES
            if isinstance(inner, capability) and not issubclass(cls, capability)
        ]
        if added:
            cls = type(cls.__name__, (cls, *added), {"__module__": cls.__module__})  # noqa: PLW0642
        return super().__new__(cls)

    def __init__(self, inner: StorageBackend) -> None:
        self.inner: Final = inner

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        return self.inner.get_into(keys, buffers)

    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        return self.inner.put(objects)

    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        """See `StorageBackend`."""
        return self.inner.contains(keys, stop_at_first_miss=stop_at_first_miss)

    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        return self.inner.touch(keys)

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        return self.inner.delete(keys)

    def generation(self, namespace: bytes) -> int:
        """See `StorageBackend`."""
        return self.inner.generation(namespace)

    def clear(self, namespace: bytes, generation: int) -> None:
        """See `StorageBackend`."""
        self.inner.clear(namespace, generation)

    def statistics(self) -> StorageStatistics:
        """See `StorageBackend`."""
        return self.inner.statistics()

    def close(self) -> None:
        """See `StorageBackend`."""
        self.inner.close()


class _ManifestWrapper:
    inner: Any

    def write_manifest(self, namespace: bytes, document: bytes) -> None:
        self.inner.write_manifest(namespace, document)

    def read_manifests(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = self.inner.read_manifests()
        return found


class _ListingWrapper:
    inner: Any

    def list_objects(self) -> Iterator[ListedObject]:
        found: Iterator[ListedObject] = self.inner.list_objects()
        return found

    def check_object(self, key: ObjectKey) -> Verdict | None:
        verdict: Verdict | None = self.inner.check_object(key)
        return verdict


class _RawWrapper:
    inner: Any

    def raw_loop(self, payloads: Sequence[memoryview], buffers: Sequence[memoryview]) -> tuple[float, float]:
        seconds: tuple[float, float] = self.inner.raw_loop(payloads, buffers)
        return seconds


class _RestingWrapper:
    inner: Any

    def resting(self) -> bool:
        resting: bool = self.inner.resting()
        return resting


_CAPABILITIES: Final[tuple[tuple[type, type], ...]] = (
    (Manifests, _ManifestWrapper),
    (Listing, _ListingWrapper),
    (RawMedium, _RawWrapper),
    (Resting, _RestingWrapper),
)


class GuardedBackend(WrapperBackend):
    """Makes any backend keep the form of the contract: one result of the right type per key, and no exception.

    What a backend gets wrong as a whole (too many, too few, no list, an exception) says nothing about any key, so
    each of its keys is FAILED; what it gets wrong for one key ("contract") fails that key alone. Exceptions of
    `generation` and `clear` pass, and `contains` and `touch` raise where they failed as a whole: callers must know.
    """

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """See `StorageBackend`; never raises."""
        if len(keys) != len(buffers):
            return [_failed("contract")] * len(keys)
        results = self._results(len(keys), lambda: self.inner.get_into(keys, buffers))
        return [
            _failed("contract") if result.status is ObjectStatus.OK and result.header is None else result
            for result in results
        ]

    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        """See `StorageBackend`; never raises."""
        return self._results(len(objects), lambda: self.inner.put(objects))

    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        """See `StorageBackend`.

        Raises:
            StorageError: the backend failed; False for all would say of pages that are there that they are not.
        """
        return self._told("contains", keys, lambda: self.inner.contains(keys, stop_at_first_miss=stop_at_first_miss))

    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`.

        Raises:
            StorageError: the backend failed; False for all would take beliefs away that are right.
        """
        return self._told("touch", keys, lambda: self.inner.touch(keys))

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`; never raises."""
        return self._answers(len(keys), lambda: self.inner.delete(keys))

    def _results(self, count: int, call: Callable[[], object]) -> list[ObjectResult]:
        answer, reason = _call(count, call)
        if answer is None:
            return [_failed(reason)] * count
        return [item if isinstance(item, ObjectResult) else _failed("contract") for item in answer]

    def _told(self, verb: str, keys: Sequence[ObjectKey], call: Callable[[], object]) -> list[bool]:
        answer, reason = _call(len(keys), call)
        if answer is None:
            raise StorageError(f"{verb}: {reason}")
        return [item is True for item in answer]

    def _answers(self, count: int, call: Callable[[], object]) -> list[bool]:
        answer, _ = _call(count, call)
        return [False] * count if answer is None else [item is True for item in answer]


def _call(count: int, call: Callable[[], object]) -> tuple[Sequence[object] | None, str]:
    """The answer if it is a list or tuple of the right length, else None and a reason."""
    if count == 0:
        return (), ""
    try:
        answer = call()
    except Exception as error:  # whatever a plug-in raises, its caller's worker must live
        return None, f"exception:{type(error).__name__}"
    if not isinstance(answer, (list, tuple)) or len(answer) != count:
        return None, "contract"
    return answer, ""


def _failed(reason: str) -> ObjectResult:
    return ObjectResult(ObjectStatus.FAILED, reason)


@dataclass(frozen=True, slots=True)
class VerbStatistics:
    """What one verb did since opening.

    Attributes:
        calls: calls, of any batch size.
        objects: keys in all calls.
        ok: objects that ended OK, or were answered True.
        bytes: payload bytes of OK objects (get_into, put); 0 for other verbs.
        seconds: time in the calls, added up over threads.
        slowest: seconds of the slowest call.
        errors: calls that raised.
        buckets: calls by what they took, one number for each of `CALL_BOUNDS` and one for those above; not cumulative.
    """

    calls: int = 0
    objects: int = 0
    ok: int = 0
    bytes: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    errors: int = 0
    buckets: tuple[int, ...] = ()


class MeteredBackend(WrapperBackend):
    """Counts calls, objects, bytes and time per verb. Only verified hits count as OK.

    Args:
        inner: what is measured.
        scheme: of the URL by which it was opened, for messages; empty for an object.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self, inner: StorageBackend, *, scheme: str = "", now: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(inner)
        self.scheme = scheme
        self._now = now
        self._lock = threading.Lock()
        self._verbs: dict[str, VerbStatistics] = {}
        self._buckets: dict[str, list[int]] = {}

    def verbs(self) -> dict[str, VerbStatistics]:
        """A snapshot per verb that was called."""
        with self._lock:
            return {verb: replace(seen, buckets=tuple(self._buckets[verb])) for verb, seen in self._verbs.items()}

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        sizes = [buffer.nbytes for buffer in buffers]
        return self._measure("get_into", len(keys), lambda: self.inner.get_into(keys, buffers), sizes)

    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        sizes = [stored.payload.nbytes for stored in objects]
        return self._measure("put", len(objects), lambda: self.inner.put(objects), sizes)

    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        """See `StorageBackend`."""
        return self._measure(
            "contains", len(keys), lambda: self.inner.contains(keys, stop_at_first_miss=stop_at_first_miss)
        )

    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        return self._measure("touch", len(keys), lambda: self.inner.touch(keys))

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        return self._measure("delete", len(keys), lambda: self.inner.delete(keys))

    def _measure(self, verb: str, count: int, call: Callable[[], list[T]], sizes: Sequence[int] = ()) -> list[T]:
        start = self._now()
        answer: list[T] | None = None
        try:
            answer = call()
        finally:
            self._record(verb, count, self._now() - start, answer, sizes)
        return answer

    def _record(
        self, verb: str, count: int, seconds: float, answer: Sequence[object] | None, sizes: Sequence[int]
    ) -> None:
        good = [_is_ok(item) for item in answer or ()]
        moved = sum(size for size, ok in zip(sizes, good, strict=False) if ok)
        with self._lock:
            before = self._verbs.get(verb, VerbStatistics())
            self._buckets.setdefault(verb, [0] * (len(CALL_BOUNDS) + 1))[bisect_left(CALL_BOUNDS, seconds)] += 1
            self._verbs[verb] = VerbStatistics(
                calls=before.calls + 1,
                objects=before.objects + count,
                ok=before.ok + sum(good),
                bytes=before.bytes + moved,
                seconds=before.seconds + seconds,
                slowest=max(before.slowest, seconds),
                errors=before.errors + (answer is None),
            )


def _is_ok(item: object) -> bool:
    return item is True or (isinstance(item, ObjectResult) and item.status is ObjectStatus.OK)
