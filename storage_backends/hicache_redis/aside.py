"""What has no deadline of its own, in threads of its own: looking up names, handshakes, redis-py's own ways."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from .channel import Deadline
from .trouble import Trouble

__all__ = ["Aside"]

T = TypeVar("T")

MOST: Final = 16
"""Threads that may be inside at the same time; those that nobody waits for any more count until they end."""


class Aside:
    """Runs such work, and waits for it until the deadline of the call and no longer. Thread-safe.

    Redis-py bounds each step of what it does, but not their sum, and the system's look-up of a name is bounded by
    nobody. What is given up goes on in its thread; it gets no buffer of the caller, so it can do no harm.

    Args:
        most: of its threads.
    """

    def __init__(self, most: int = MOST) -> None:
        self._room = threading.BoundedSemaphore(most)

    def run(self, work: Callable[[], T], deadline: Deadline, *, late: Callable[[T], object] | None = None) -> T:
        """Do it in a thread, and wait for it.

        Args:
            work: what is done.
            deadline: of the call.
            late: takes, in that thread, what came when nobody waited any more.

        Raises:
            Trouble: "timeout": not in time.
            BaseException: whatever the work raised.
        """
        if not self._room.acquire(timeout=deadline.check()):
            raise Trouble("timeout")
        job = _Job(work, late, self._room.release)
        try:
            threading.Thread(target=job.run, name="hicache-redis-aside", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads
            self._room.release()
            raise Trouble("no_connection") from error
        return job.wait(deadline)


class _Job(Generic[T]):
    def __init__(
        self, work: Callable[[], T], late: Callable[[T], object] | None, release: Callable[[], object]
    ) -> None:
        self._work = work
        self._late = late
        self._release = release
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._given_up = False
        self._value: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value.append(self._work())
        except BaseException as error:
            self._error = error
        self._release()
        with self._lock:
            self._done.set()
            late = self._given_up
        if late and self._late is not None and self._value:
            self._late(self._value[0])

    def wait(self, deadline: Deadline) -> T:
        self._done.wait(deadline.remaining())
        with self._lock:
            if not self._done.is_set():
                self._given_up = True
                raise Trouble("timeout")
        if self._error is not None:
            raise self._error
        return self._value[0]
