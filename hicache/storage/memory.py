"""A store in this process's memory: for tests, and for a storage tier that need not outlive the process."""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from hicache.errors import CacheClosed, InvalidInput
from hicache.storage import codec
from hicache.storage.base import (
    MAX_MANIFEST,
    ObjectKey,
    ObjectResult,
    ObjectStatus,
    StorageBackend,
    StorageStatistics,
    StorageUrl,
    StoredObject,
)

__all__ = ["MemoryBackend"]

_OK: Final = ObjectResult(ObjectStatus.OK)


@dataclass(slots=True)
class Entry:
    """One stored object; `MemoryBackend` alone makes and reads it."""

    header: bytes
    payload: npt.NDArray[np.uint8]  # never written again once it is in the table: readers copy it without the lock
    depth: int
    used: int  # number of the call that used it last

    @property
    def size(self) -> int:
        """Bytes that it counts."""
        return len(self.header) + self.payload.nbytes


class MemoryBackend(StorageBackend):
    """Objects in a dict, with a byte limit. Nothing survives `close`.

    Recency counts calls: all keys of one call are equally recent, and among equals the deepest page goes first, so
    that what stays of a chain is its head. Thread-safe; payloads are copied outside the lock.

    Args:
        capacity: most bytes of headers and payloads, or None.
    """

    def __init__(self, *, capacity: int | None = None) -> None:
        self._capacity: Final = capacity
        self._lock = threading.Lock()
        self._entries: dict[ObjectKey, Entry] = {}
        self._order: list[tuple[int, int, int, ObjectKey]] = []  # lazy heap: (used, -depth, tie, key)
        self._ties = 0
        self._calls = 0
        self._bytes = 0
        self._generations: dict[bytes, int] = {}
        self._manifests: dict[bytes, bytes] = {}
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._closed = False

    @classmethod
    def from_url(cls, url: StorageUrl) -> Self:
        """`memory://?capacity=1GiB`."""
        capacity = url.take_size("capacity")
        url.done()
        return cls(capacity=capacity)

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        call = self._begin()
        return [self._get(key, buffer, call) for key, buffer in zip(keys, buffers, strict=True)]

    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        """See `StorageBackend`. What is larger than the whole capacity is refused ("too_large"), evicting nothing."""
        call = self._begin()
        return [self._put(stored, call) for stored in objects]

    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        """See `StorageBackend`."""
        del stop_at_first_miss  # a look into a dict is cheaper than the test
        self._check_open()
        with self._lock:
            return [key in self._entries for key in keys]

    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`. Each key is a use of its own, so that the last is the newest."""
        return [self._use(key, self._begin()) is not None for key in keys]

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        self._check_open()
        with self._lock:
            return [self._drop(key) for key in keys]

    def generation(self, namespace: bytes) -> int:
        """See `StorageBackend`."""
        with self._lock:
            return self._generations.get(namespace, 0)

    def clear(self, namespace: bytes, generation: int) -> None:
        """See `StorageBackend`."""
        self._check_open()
        with self._lock:
            floor = max(generation, self._generations.get(namespace, 0))
            self._generations[namespace] = floor
            for key in [key for key in self._entries if key.namespace == namespace and key.generation < floor]:
                self._drop(key)

    def statistics(self) -> StorageStatistics:
        """See `StorageBackend`."""
        with self._lock:
            return StorageStatistics(
                objects=len(self._entries),
                bytes_used=self._bytes,
                capacity=self._capacity,
                puts=self._counts["puts"],
                gets=self._counts["gets"],
                hits=self._counts["hits"],
                bytes_written=self._counts["bytes_written"],
                bytes_read=self._counts["bytes_read"],
                evicted=self._counts["evicted"],
                by_reason=dict(self._reasons),
            )

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._order.clear()
            self._bytes = 0

    def write_manifest(self, namespace: bytes, document: bytes) -> None:
        """See `Manifests`."""
        if len(document) > MAX_MANIFEST:
            raise InvalidInput(f"manifest of {len(document)} bytes is above {MAX_MANIFEST}: leave out what is long")
        with self._lock:
            self._manifests[namespace] = bytes(document)

    def read_manifests(self) -> dict[bytes, bytes]:
        """See `Manifests`."""
        with self._lock:
            return dict(self._manifests)

    def _check_open(self) -> None:
        if self._closed:
            raise CacheClosed("memory storage is closed")

    def _begin(self) -> int:
        self._check_open()
        with self._lock:
            self._calls += 1
            return self._calls

    def _get(self, key: ObjectKey, buffer: memoryview, call: int) -> ObjectResult:
        entry = self._use(key, call)
        with self._lock:
            self._counts["gets"] += 1
        if entry is None:
            return self._not_ok(ObjectStatus.MISSING, "absent")
        if entry.payload.nbytes != buffer.nbytes:
            verdict = codec.verify(key, entry.header, entry.payload.data)
            return self._not_ok(ObjectStatus.FAILED, "size") if verdict.ok else self._disbelieve(key, entry, verdict)
        np.copyto(np.asarray(buffer), entry.payload)
        verdict = codec.verify(key, entry.header, buffer)
        if not verdict.ok:
            return self._disbelieve(key, entry, verdict)
        with self._lock:
            self._counts["hits"] += 1
            self._counts["bytes_read"] += buffer.nbytes
        return ObjectResult(ObjectStatus.OK, header=verdict.header)

    def _disbelieve(self, key: ObjectKey, entry: Entry, verdict: codec.Verdict) -> ObjectResult:
        """A dict holds nothing of other programs, so whatever does not verify is withdrawn, and a put replaces it."""
        with self._lock:
            if self._entries.get(key) is entry:
                self._drop(key)
        result = ObjectResult.of(verdict)
        return self._not_ok(result.status, result.reason)

    def _put(self, stored: StoredObject, call: int) -> ObjectResult:
        with self._lock:
            self._counts["puts"] += 1
            known = stored.key in self._entries
            late = stored.key.generation < self._generations.get(stored.key.namespace, 0)
        if known:
            self._use(stored.key, call)
            return _OK
        if late:
            return self._not_ok(ObjectStatus.FAILED, "cleared")
        try:
            header = codec.decode_header(stored.header, likely=stored.key)
        except codec.HeaderError as error:
            return self._not_ok(ObjectStatus.FAILED, f"header:{error.reason}")
        if header.key != stored.key or header.payload_length != stored.payload.nbytes:
            return self._not_ok(ObjectStatus.FAILED, "header:identity")
        payload = np.empty(stored.payload.nbytes, dtype=np.uint8)
        np.copyto(payload, np.asarray(stored.payload))
        entry = Entry(bytes(stored.header), payload, header.depth, call)
        with self._lock:
            reason = self._insert(stored.key, entry)
        return self._not_ok(ObjectStatus.FAILED, reason) if reason else _OK

    def _insert(self, key: ObjectKey, entry: Entry) -> str:
        if self._closed:
            return "closed"
        if key.generation < self._generations.get(key.namespace, 0):
            return "cleared"  # cleared while the payload was copied
        if self._capacity is not None and entry.size > self._capacity:
            return "too_large"
        self._drop(key)  # another thread may have stored it meanwhile
        while self._capacity is not None and self._bytes + entry.size > self._capacity:
            self._evict_one()
        self._enter(key, entry)
        self._counts["bytes_written"] += entry.payload.nbytes
        return ""

    def _enter(self, key: ObjectKey, entry: Entry) -> None:
        self._entries[key] = entry
        self._bytes += entry.size
        self._file(key, entry)

    def _use(self, key: ObjectKey, call: int) -> Entry | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.used < call:
                entry.used = call
                self._file(key, entry)
            return entry

    def _file(self, key: ObjectKey, entry: Entry) -> None:
        self._ties += 1
        heapq.heappush(self._order, (entry.used, -entry.depth, self._ties, key))
        if len(self._order) > 2 * len(self._entries) + 64:
            self._order = [(e.used, -e.depth, tie, k) for tie, (k, e) in enumerate(self._entries.items())]
            self._ties = len(self._order)
            heapq.heapify(self._order)

    def _evict_one(self) -> None:
        while True:
            used, _, _, key = heapq.heappop(self._order)
            entry = self._entries.get(key)
            if entry is not None and entry.used == used:
                self._drop(key)
                self._counts["evicted"] += 1
                return

    def _drop(self, key: ObjectKey) -> bool:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.size
        return entry is not None

    def _not_ok(self, status: ObjectStatus, reason: str) -> ObjectResult:
        with self._lock:
            self._reasons[reason] += 1
        return ObjectResult(status, reason)
