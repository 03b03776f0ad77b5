"""The thread that moves bytes: loads before stores, each in bulk, while the engine computes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["Copier"]

_log = logging.getLogger("vllm.hicache")

CLOSE_SECONDS: Final = 5.0


class Copier:
    """Runs loads and stores one after another in a thread of its own, loads first. Thread-safe.

    Blocks that a load writes are never read by a store that waits here: they were given to it only after the engine
    had waited for that store, or been told that it is over.

    Args:
        apart: for copies that a device orders itself: loads and stores each have a thread, and none waits for another.
    """

    def __init__(self, *, apart: bool = False) -> None:
        self._lock = threading.Condition()
        self._loads: deque[Callable[[], None]] = deque()
        self._stores: deque[Callable[[], None]] = deque()
        self._closed = False
        queues = ((self._loads,), (self._stores,)) if apart else ((self._loads, self._stores),)
        self._threads = [
            threading.Thread(target=self._run, args=(of_one,), name=f"hicache-vllm-copier-{at}", daemon=True)
            for at, of_one in enumerate(queues)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, work: Callable[[], None]) -> None:
        """Run this soon, before all stores."""
        with self._lock:
            self._loads.append(work)
            self._lock.notify_all()

    def store(self, work: Callable[[], None]) -> None:
        """Run this when no load waits."""
        with self._lock:
            self._stores.append(work)
            self._lock.notify_all()

    def wait_for(self, over: Callable[[], bool], seconds: float | None) -> bool:
        """Block until something is so, asked behind each piece of work, or the time is over; whether it is so."""
        with self._lock:
            return self._lock.wait_for(lambda: over() or self._closed, seconds)

    def notify(self) -> None:
        """Let those who wait look again."""
        with self._lock:
            self._lock.notify_all()

    def close(self) -> None:
        """End the thread behind what it does now. Idempotent."""
        with self._lock:
            self._closed = True
            self._loads.clear()
            self._stores.clear()
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def _run(self, queues: tuple[deque[Callable[[], None]], ...]) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: any(queues) or self._closed)
                if self._closed:
                    return
                work = next(queue for queue in queues if queue).popleft()
            try:
                work()
            except Exception:
                _log.exception("hicache: a copy has failed")
            with self._lock:
                self._lock.notify_all()
