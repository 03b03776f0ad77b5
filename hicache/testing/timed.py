"""How long calls of a backend and waits of requests take."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import hicache
from hicache.core.keys import ObjectKey
from hicache.storage.base import ObjectResult, ObjectStatus, StorageBackend, StoredObject
from hicache.storage.wrappers import WrapperBackend

__all__ = ["PATIENCE", "TimedBackend", "TimedRequest"]

PATIENCE: Final = 120.0
"""Seconds after which something that should have happened counts as never happening."""


class TimedBackend(WrapperBackend):
    """Notes how long calls take, what failed, and when objects were last read and answered for. Thread-safe.

    Attributes:
        seconds: of each call.
        reasons: results that are neither OK nor "absent", by reason.
    """

    def __init__(self, inner: StorageBackend, *, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._now = now
        self._changed = threading.Condition()
        self.seconds: list[float] = []
        self.reasons: Counter[str] = Counter()
        self._hit_at = self._written_at = self._answered_at = -math.inf

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        return self._transfer(lambda: self.inner.get_into(keys, buffers), reads=True)

    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        return self._transfer(lambda: self.inner.put(objects), reads=False)

    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        """See `StorageBackend`."""
        with self._timed():
            return self.inner.contains(keys, stop_at_first_miss=stop_at_first_miss)

    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        with self._timed():
            return self.inner.touch(keys)

    def generation(self, namespace: bytes) -> int:
        """See `StorageBackend`."""
        with self._timed():
            return self.inner.generation(namespace)

    def wait_answered(self, since: float) -> float:
        """Seconds from `since` until something was read or written after it; infinite if nothing ever was."""
        return self._wait(lambda: self._answered_at, since)

    def wait_written(self, since: float) -> float:
        """Seconds from `since` until an object was written well after it; infinite if none ever was."""
        return self._wait(lambda: self._written_at, since)

    def wait_hit(self, since: float) -> float:
        """Seconds from `since` until an object was read well after it; infinite if none ever was."""
        return self._wait(lambda: self._hit_at, since)

    def _wait(self, at: Callable[[], float], since: float) -> float:
        with self._changed:
            found = self._changed.wait_for(lambda: at() > since, PATIENCE)
            return at() - since if found else math.inf

    def _transfer(self, call: Callable[[], list[ObjectResult]], *, reads: bool) -> list[ObjectResult]:
        with self._timed():
            results = call()
        now = self._now()
        with self._changed:
            for result in results:
                if result.status is not ObjectStatus.OK and result.reason != "absent":
                    self.reasons[result.reason] += 1
            if any(result.status is not ObjectStatus.FAILED for result in results):
                self._answered_at = now
            if any(result.status is ObjectStatus.OK for result in results):
                if reads:
                    self._hit_at = now
                else:
                    self._written_at = now
            self._changed.notify_all()
        return results

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.seconds.append(self._now() - start)


class TimedRequest:
    """A request whose waits are noted.

    Args:
        request: the request.
        started: when it was made, on the monotonic clock.
        waits: gets the seconds from there to the end of its load.
        allocated: gets the seconds of each allocation.
    """

    def __init__(self, request: hicache.Request, started: float, waits: list[float], allocated: list[float]) -> None:
        self._request = request
        self._started = started
        self._waits = waits
        self._allocated = allocated

    def load(self) -> Any:
        """See `hicache.Request`."""
        slots = self._request.load()
        self._waits.append(time.monotonic() - self._started)
        return slots

    def allocate(self, *arguments: Any, **options: Any) -> Any:
        """See `hicache.Request`."""
        start = time.monotonic()
        try:
            return self._request.allocate(*arguments, **options)
        finally:
            self._allocated.append(time.monotonic() - start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
