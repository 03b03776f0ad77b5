"""Bounded queues and the threads that empty them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_log = logging.getLogger("hicache.runtime")


def nothing() -> None:
    """What is called where nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How much may be under way in one queue, waiting and running together.

    Attributes:
        bytes: payload bytes.
        requests: jobs.
    """

    bytes: int
    requests: int


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """A snapshot of one queue.

    Attributes:
        waiting: jobs nobody has begun.
        running: jobs a thread works on.
        bytes: payload bytes of both.
        refused: jobs turned away at the bound, since the start.
        failed: jobs whose work raised, since the start.
        hung: jobs inside a storage call that counts as hung now; they are not in `running`.
        abandoned: calls that have counted as hung, since the start.
        replaced: threads started in the place of one that hung, since the start.
        stopped: whether so many calls hang that no more are made, but for a probe now and then.
        stopped_refused: jobs turned away for that, since the start.
    """

    waiting: int = 0
    running: int = 0
    bytes: int = 0
    refused: int = 0
    failed: int = 0
    hung: int = 0
    abandoned: int = 0
    replaced: int = 0
    stopped: bool = False
    stopped_refused: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One piece of work.

    Attributes:
        cost: payload bytes it holds until it has ended.
        work: does it, in a worker thread.
        fail: called instead of what `work` would have reported: it raised, or the queue was closed before.
    """

    cost: int
    work: Callable[[], None]
    fail: Callable[[], None]


class BoundedQueue:
    """First in, first out; at the bound it refuses instead of waiting. Thread-safe, and never blocks in `offer`.

    What is counted against the bound is what waits and what runs: a job gives its share back when it has ended. A job
    that is larger than the bound all by itself is accepted when nothing else is under way, otherwise it never could be.
    """

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._changed = threading.Condition(threading.Lock())
        self._jobs: deque[Job] = deque()
        self._running = 0
        self._abandoned: set[Job] = set()
        self._bytes = 0
        self._refused = 0
        self._failed = 0
        self._closed = False

    def offer(self, job: Job, *, first: bool = False) -> bool:
        """Queue a job, in front of all others with `first`; False at the bound or after `close`."""
        with self._changed:
            under_way = len(self._jobs) + self._running
            full = under_way >= self._bound.requests or self._bytes + job.cost > self._bound.bytes
            if self._closed or (full and under_way > 0):
                self._refused += 1
                return False
            if first:
                self._jobs.appendleft(job)
            else:
                self._jobs.append(job)
            self._bytes += job.cost
            self._changed.notify()
            return True

    def take(self) -> Job | None:
        """The next job; blocks until there is one. None when the queue is closed. Every job taken must be `ended`."""
        with self._changed:
            while not self._jobs:
                if self._closed:
                    return None
                self._changed.wait()
            self._running += 1
            return self._jobs.popleft()

    def carry_out(self, job: Job) -> None:
        """Do the work of a job that was taken. If it raises, that job alone fails."""
        failed = not _attempt(job.work)
        if failed:
            _attempt(job.fail)
        self.ended(job, failed=failed)

    def ended(self, job: Job, *, failed: bool = False) -> None:
        """Give back a job's share of the bound."""
        with self._changed:
            self._failed += failed
            if job in self._abandoned:
                self._abandoned.discard(job)
                return
            self._running -= 1
            self._bytes -= job.cost

    def abandon(self, job: Job) -> None:
        """A job that was taken hangs: it gives back its share now, as if it had ended, so that others can go on."""
        with self._changed:
            self._abandoned.add(job)
            self._running -= 1
            self._bytes -= job.cost

    def drop(self) -> list[Job]:
        """Take back the jobs that nobody has begun; the caller fails them. The queue stays open."""
        with self._changed:
            left = list(self._jobs)
            self._jobs.clear()
            self._bytes -= sum(job.cost for job in left)
            return left

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs, what was abandoned left out."""
        with self._changed:
            return bool(self._jobs or self._running)

    def room(self) -> Bound:
        """What `offer` would still take."""
        with self._changed:
            return Bound(
                max(self._bound.bytes - self._bytes, 0),
                max(self._bound.requests - len(self._jobs) - self._running, 0),
            )

    def close(self) -> list[Job]:
        """Take nothing more, wake all who wait in `take`, return the jobs nobody has begun; the caller fails them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return self.drop()

    def statistics(self) -> QueueStatistics:
        """A snapshot."""
        with self._changed:
            return QueueStatistics(len(self._jobs), self._running, self._bytes, self._refused, self._failed)


class Workers:
    """Threads that empty one queue. They survive whatever a job raises; that job alone fails.

    The threads are daemons: a backend call that never comes back must not keep the interpreter from ending. One that
    hangs in such a call can be given up: another takes its place, and it ends when the call does.

    `ended` is called from its thread after each job, once queue and workers count it no more.
    """

    def __init__(self, name: str, queue: BoundedQueue, *, threads: int, ended: Callable[[], None] = nothing) -> None:
        self._name = name
        self._queue = queue
        self._ended = ended
        self._lock = threading.Lock()
        self._jobs: dict[threading.Thread, Job | None] = {}
        self._given_up: set[threading.Thread] = set()
        self._started = 0
        for _ in range(threads):
            self.add()

    def add(self) -> None:
        """Start one more thread."""
        with self._lock:
            name = f"hicache-{self._name}-{self._started}"
            self._started += 1
            thread = threading.Thread(target=self._loop, name=name, daemon=True)
            self._jobs[thread] = None
        thread.start()

    def at_work(self) -> list[tuple[threading.Thread, Job]]:
        """Threads inside a job, those that were given up left out."""
        with self._lock:
            return [(t, job) for t, job in self._jobs.items() if job is not None and t not in self._given_up]

    def give_up(self, thread: threading.Thread, job: Job) -> bool:
        """Expect nothing more of a thread inside a job: it ends when it comes back. False if it has come back."""
        with self._lock:
            if self._jobs.get(thread) is not job or thread in self._given_up:
                return False
            self._given_up.add(thread)
            self._queue.abandon(job)
            return True

    @property
    def given_up(self) -> int:
        """Threads that were given up and have not come back."""
        with self._lock:
            return len(self._given_up)

    def join(self, wait: Callable[[threading.Thread], None]) -> int:
        """Wait for the threads after the queue's `close`; `wait` bounds each. Returns how many still run."""
        with self._lock:
            threads = list(self._jobs)
        for thread in threads:
            if thread is not threading.current_thread():
                wait(thread)
        return sum(thread.is_alive() for thread in threads)

    def _loop(self) -> None:
        thread = threading.current_thread()
        while (job := self._queue.take()) is not None:
            with self._lock:
                self._jobs[thread] = job
            self._queue.carry_out(job)
            with self._lock:
                self._jobs[thread] = None
                if thread in self._given_up:
                    break
            self._ended()
        with self._lock:
            self._jobs.pop(thread, None)
            self._given_up.discard(thread)
        self._ended()


def _attempt(call: Callable[[], None]) -> bool:
    try:
        call()
    except Exception:
        # One operation's trouble is that operation's alone; the thread goes on with the next.
        _log.exception("a job failed; the worker goes on")
        return False
    return True
