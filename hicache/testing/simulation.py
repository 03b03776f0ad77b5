"""An embedded cache in simulated time: its storage threads and copies take seconds that nobody has to wait for.

Everything happens in the thread that uses the cache, in the order of its simulated ends, so every run is the same.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from math import inf, nextafter
from typing import Any

import hicache
from hicache.core.identity import Namespace
from hicache.memory.base import CopyEngine, HostPool
from hicache.memory.device import TensorDevicePool
from hicache.runtime.cache import EmbeddedCache
from hicache.runtime.queues import BoundedQueue
from hicache.storage.base import StorageBackend
from hicache.testing.memory import ManualCopyEngine

__all__ = ["Simulation"]


class Simulation:
    """A clock, and everything that a cache would do in threads.

    Args:
        threads: storage reads that run side by side; writes take no time.
        page_copy: seconds in which a page is copied between device and host.
    """

    def __init__(self, *, threads: int = 1, page_copy: float = 0.0) -> None:
        self._threads = threads
        self._page_copy = page_copy
        self._now = 0.0
        self._took = 0.0
        self._running: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._cache: EmbeddedCache | None = None
        self._copies: ManualCopyEngine | None = None

    def now(self) -> float:
        """Seconds of simulated time."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """For storage: what it does takes so long."""
        self._took += seconds

    def wait(self, condition: threading.Condition, timeout: float | None) -> None:
        """Let go of the condition until something has happened or the time is over."""
        assert timeout is not None
        condition.release()
        try:
            self._next(max(self._now + timeout, nextafter(self._now, inf)))  # time never stands still
        finally:
            condition.acquire()

    def open(self, namespace: Namespace, *, device: int, storage: StorageBackend, **options: Any) -> EmbeddedCache:
        """A cache that lives in this time."""
        pool = TensorDevicePool.allocate(namespace.geometry, page_size=namespace.page_size, slots=device)
        simulation = self

        def copy_engine(host: HostPool | None) -> CopyEngine:
            simulation._copies = ManualCopyEngine(pool, host)
            return simulation._copies

        pool.copy_engine = copy_engine  # type: ignore[method-assign]
        self._cache = hicache.open(
            namespace, device=pool, storage=storage, clock=self, background=False, canary=False, **options
        )
        return self._cache

    def run(self, seconds: float) -> None:
        """Let so much time pass, and happen what happens in it."""
        until = self._now + seconds
        while self._now < until or self._something_at_once():
            self._next(until)
        self._settle()

    def _next(self, until: float) -> None:
        """Go on to what happens next, at most to `until`."""
        assert self._cache is not None
        io = self._cache.parts.storage
        assert io is not None
        while io.writes.statistics().waiting:
            self._begin(io.writes, at_once=True)
        while io.reads.statistics().waiting and len(self._running) < self._threads:
            self._begin(io.reads)
        if self._copies is not None and self._copies.pending:
            self._now += self._page_copy * self._copies.pending[0].copy.pages
            self._copies.end()
        elif self._running and self._running[0][0] <= until:
            at, _, end = heapq.heappop(self._running)
            self._now = max(self._now, at)
            end()
        else:
            self._now = max(self._now, until)
        self._settle()

    def _something_at_once(self) -> bool:
        assert self._cache is not None
        io = self._cache.parts.storage
        assert io is not None
        due = bool(self._running) and self._running[0][0] <= self._now
        return due or bool(io.writes.statistics().waiting or (self._copies is not None and self._copies.pending))

    def _begin(self, queue: BoundedQueue, *, at_once: bool = False) -> None:
        """Do a job now, and let what it reports come when its time is over."""
        assert self._cache is not None
        reducer = self._cache.parts.reducer
        job = queue.take()
        assert job is not None
        posted: list[tuple[Any, ...]] = []
        real = reducer.post
        reducer.post = lambda *call: posted.append(call)  # type: ignore[method-assign]
        self._took = 0.0
        try:
            queue.carry_out(job)
        finally:
            reducer.post = real  # type: ignore[method-assign]

        def end() -> None:
            for call in posted:
                real(*call)

        if at_once:
            end()
            return
        self._number += 1
        heapq.heappush(self._running, (self._now + self._took, self._number, end))

    def _settle(self) -> None:
        assert self._cache is not None
        reducer = self._cache.parts.reducer
        if reducer.lock.acquire(blocking=False):
            try:
                reducer.settle()
            finally:
                reducer.lock.release()
