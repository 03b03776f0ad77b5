"""A thread for what is left to do when copies have ended: nobody who generates waits for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Keeper"]

_log = logging.getLogger("hicache.transformers")


class Keeper:
    """Does work in the order in which it was given. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, work: Callable[[], None]) -> None:
        """Do this behind what was given before; at once, in the calling thread, where this is closed."""
        with self._changed:
            if not self._closed:
                self._queue.append(work)
                self._changed.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="hicache-transformers-keeper", daemon=True)
                    self._thread.start()
                return
        _do(work)

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until all that was given is done, at most so long; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, seconds)

    def close(self, seconds: float) -> bool:
        """End behind what was given, which is waited for at most so long; whether it was done. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return self.flush(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                work = self._queue.popleft()
                self._busy = True
            _do(work)
            del work  # with all that it keeps alive


def _do(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        _log.exception("hicache: what follows a copy has failed")
