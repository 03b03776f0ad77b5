"""Threads that talk to the service, so that the engine's scheduler never does."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["Tasks"]

_log = logging.getLogger("vllm.hicache")

_THREADS: Final = 4
_MOST: Final = 4096
"""Tasks that may wait; above that new ones are refused, since the service does not keep up."""


class Tasks:
    """A few daemon threads and a bounded queue. Thread-safe.

    Args:
        threads: how many; a call that hangs until its deadline occupies one.
        most: tasks that may wait.
    """

    def __init__(self, threads: int = _THREADS, most: int = _MOST) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(most)
        self._threads = [
            threading.Thread(target=self._run, name=f"hicache-vllm-{number}", daemon=True) for number in range(threads)
        ]
        self._closed = False
        for thread in self._threads:
            thread.start()

    def begin(self, task: Callable[[], None]) -> bool:
        """Run a task in one of the threads, soon; whether it was taken. Never waits. What it raises is logged."""
        if self._closed:
            return False
        try:
            self._queue.put_nowait(task)
        except queue.Full:
            return False
        return True

    def close(self, timeout: float) -> None:
        """End the threads behind what waits, as far as that takes no longer. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for _ in self._threads:
            try:
                self._queue.put(None, timeout=timeout)
            except queue.Full:
                return
        for thread in self._threads:
            thread.join(timeout)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except Exception:
                _log.exception("hicache: a call to the service has failed")
