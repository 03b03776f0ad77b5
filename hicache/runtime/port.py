"""The one place where the runtime calls a backend: it can be exchanged there, and calls are timed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from hicache.errors import StorageUnavailable
from hicache.storage.base import (
    Manifests,
    ObjectKey,
    ObjectResult,
    ObjectStatus,
    StorageBackend,
    StorageStatistics,
    StoredObject,
)

DETACHED: Final = "detached"
"""Reason of results while no backend is attached."""


class Calls:
    """Which thread is inside a backend, and since when. Thread-safe without a lock: each thread has its own entry.

    Args:
        now: a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since: dict[int | None, float] = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around a call."""
        ident = threading.get_ident()
        self._since[ident] = self._now()
        try:
            yield
        finally:
            self._since.pop(ident, None)

    def since(self, thread: threading.Thread) -> float | None:
        """When the call began that a thread is inside of; None if it is not."""
        return self._since.get(thread.ident)


class StoragePort(StorageBackend):
    """A backend that can be taken away and exchanged. Thread-safe; a call goes to what was attached when it began.

    Args:
        backend: the guarded backend, or None: then transfers are FAILED ("detached").
        owned: whether it was opened for this cache, and is closed with it.
        now: a monotonic clock in seconds.

    Attributes:
        calls: the calls that are running.
    """

    def __init__(self, backend: StorageBackend | None, *, owned: bool, now: Callable[[], float]) -> None:
        self.calls = Calls(now)
        self._backend = backend
        self._owned = owned

    @property
    def backend(self) -> StorageBackend | None:
        """What is attached."""
        return self._backend

    def attach(self, backend: StorageBackend, *, owned: bool) -> None:
        """From now on calls go there."""
        self._backend, self._owned = backend, owned

    def detach(self) -> StorageBackend | None:
        """From now on no call goes anywhere. Returns what its owner, this cache, must close, or None."""
        backend, self._backend = self._backend, None
        return backend if self._owned else None

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        backend = self._backend
        if backend is None:
            return [ObjectResult(ObjectStatus.FAILED, DETACHED)] * len(keys)
        with self.calls.inside():
            return backend.get_into(keys, buffers)

    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        backend = self._backend
        if backend is None:
            return [ObjectResult(ObjectStatus.FAILED, DETACHED)] * len(objects)
        with self.calls.inside():
            return backend.put(objects)

    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        """See `StorageBackend`."""
        backend = self._backend
        if backend is None:
            return [False] * len(keys)
        with self.calls.inside():
            return backend.contains(keys, stop_at_first_miss=stop_at_first_miss)

    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`.

        Raises:
            StorageUnavailable: none is attached.
        """
        backend = self._needed()
        with self.calls.inside():
            return backend.touch(keys)

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`.

        Raises:
            StorageUnavailable: none is attached.
        """
        backend = self._needed()
        with self.calls.inside():
            return backend.delete(keys)

    def generation(self, namespace: bytes) -> int:
        """See `StorageBackend`.

        Raises:
            StorageUnavailable: none is attached.
        """
        backend = self._needed()
        with self.calls.inside():
            return backend.generation(namespace)

    def clear(self, namespace: bytes, generation: int) -> None:
        """See `StorageBackend`.

        Raises:
            StorageUnavailable: none is attached.
        """
        backend = self._needed()
        with self.calls.inside():
            backend.clear(namespace, generation)

    def write_manifest(self, namespace: bytes, document: bytes) -> bool:
        """Keep a manifest where the backend can. Returns whether it was kept."""
        backend = self._backend
        if not isinstance(backend, Manifests):
            return False
        with self.calls.inside():
            backend.write_manifest(namespace, document)
        return True

    def statistics(self) -> StorageStatistics:
        """See `StorageBackend`; zeros while none is attached."""
        backend = self._backend
        return StorageStatistics() if backend is None else backend.statistics()

    def close(self) -> None:
        """Close the backend if it is this cache's own. Its statistics can still be read."""
        if self._owned and self._backend is not None:
            self._backend.close()

    def _needed(self) -> StorageBackend:
        backend = self._backend
        if backend is None:
            raise StorageUnavailable("no storage is attached: attach one with attach_storage")
        return backend
