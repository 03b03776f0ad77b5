"""Storage work in one direction: a queue, its threads, and what happens when calls do not come back.

A call into a backend cannot be interrupted. One that takes longer than a time counts as hung: whoever waited for it
has his own deadline, its slots belong to the transfer until it really ends, and its thread is given up and replaced.
When so many hang that no more threads shall be spent, the lane stops: it refuses work at once, but for one probe now
and then, and goes on when a probe or enough of the calls come back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from hicache.runtime.port import Calls
from hicache.runtime.queues import Bound, BoundedQueue, Job, QueueStatistics, Workers, nothing

_log = logging.getLogger("hicache.runtime")


class Lane:
    """Thread-safe; nothing here blocks. Hung calls are found by whoever calls `look`, there is no thread for it.

    Args:
        name: of the threads, and in messages: "read" or "write".
        bound: what may be under way.
        threads: how many empty the queue; 0 for tests that do it themselves.
        calls: which thread is inside the backend, and since when.
        now: a monotonic clock in seconds.
        call_timeout: seconds after which a call counts as hung.
        most_hung: threads that are replaced; with so many hung calls the lane stops.
        probe_seconds: between two probes of a lane that has stopped.
        ended: called from a worker thread after each job, once it is counted no more.

    Attributes:
        queue: the queue.
    """

    def __init__(
        self,
        name: str,
        bound: Bound,
        *,
        threads: int,
        calls: Calls,
        now: Callable[[], float],
        call_timeout: float,
        most_hung: int,
        probe_seconds: float,
        ended: Callable[[], None] = nothing,
    ) -> None:
        self.name = name
        self.queue = BoundedQueue(bound)
        self._workers = Workers(name, self.queue, threads=threads, ended=ended)
        self._calls = calls
        self._now = now
        self._call_timeout = call_timeout
        self._most_hung = most_hung
        self._probe_seconds = probe_seconds
        self._lock = threading.Lock()
        self._abandoned = 0
        self._replaced = 0
        self._refused = 0
        self._stopped = False
        self._probe_at = 0.0
        self._probe: Job | None = None
        self._unreplaced: set[Job] = set()  # jobs that hang, whose threads nobody replaces any more

    def offer(self, job: Job, *, first: bool = False) -> bool:
        """Queue a job, in front of all others with `first`; False at the bound, while stopped, or after `close`."""
        if self._stopped and not self._may_probe():
            return False
        if self._stopped:
            return self._offer_probe(job)
        return self.queue.offer(job, first=first)

    @property
    def stopped(self) -> bool:
        """Whether so many calls hang that it refuses work."""
        return self._stopped

    def look(self) -> float | None:
        """Give up threads whose call hangs. Returns seconds until that could be so for the next, None when idle."""
        now = self._now()
        soonest: float | None = None
        at_work = self._workers.at_work()
        if self._unreplaced:
            with self._lock:
                self._unreplaced &= {job for _, job in at_work}
        for thread, job in at_work:
            since = self._calls.since(thread)
            if since is None:
                continue
            left = since + self._call_timeout - now
            if left > 0:
                soonest = left if soonest is None else min(soonest, left)
            elif job not in self._unreplaced:
                self._hangs(thread, job, now)
        if self._stopped and self._hung < self._most_hung:
            self._go_on("calls have come back")
        return self._call_timeout if soonest is None and self.queue.busy else soonest

    def abandon(self) -> None:
        """Give up every thread inside the backend now: another one comes, and must not wait for this one."""
        now = self._now()
        for thread, job in self._workers.at_work():
            if self._calls.since(thread) is not None and job not in self._unreplaced:
                self._hangs(thread, job, now)

    def drop(self) -> None:
        """Fail what nobody has begun."""
        for job in self.queue.drop():
            job.fail()

    def close(self, join: Callable[[threading.Thread], None]) -> int:
        """Fail what nobody has begun, end the threads. Returns how many are still inside the backend."""
        for job in self.queue.close():
            job.fail()
        return self._workers.join(join)

    @property
    def idle(self) -> bool:
        """Whether no job waits, runs or hangs."""
        self.look()  # else calls that have come back may still count as hung
        return not self.queue.busy and not self._hung

    def statistics(self) -> QueueStatistics:
        """A snapshot."""
        self.look()
        with self._lock:
            return replace(
                self.queue.statistics(),
                hung=self._hung,
                abandoned=self._abandoned,
                replaced=self._replaced,
                stopped=self._stopped,
                stopped_refused=self._refused,
            )

    @property
    def _hung(self) -> int:
        return self._workers.given_up + len(self._unreplaced)

    def _hangs(self, thread: threading.Thread, job: Job, now: float) -> None:
        replace_it = False
        with self._lock:
            if self._stopped or self._hung >= self._most_hung:
                self._unreplaced.add(job)  # at most as many as there are threads
            elif self._workers.give_up(thread, job):
                replace_it = True
                self._replaced += 1
            else:
                return
            self._abandoned += 1
            stops = self._hung >= self._most_hung
        _log.warning("a storage %s does not come back; its thread is given up", self.name)
        if stops:
            self._stop(now)
        if replace_it:
            self._workers.add()  # after the stop has emptied the queue: it is there for probes then

    # ---- stopped

    def _stop(self, now: float) -> None:
        with self._lock:
            if not self._stopped:
                _log.error("%d storage %ss hang: none is begun any more, but for probes", self._hung, self.name)
            self._stopped = True
            self._probe = None
            self._probe_at = now + self._probe_seconds
        self.drop()  # what waits would only hang as well

    def _go_on(self, why: str) -> None:
        with self._lock:
            if self._stopped:
                _log.warning("storage %ss go on: %s", self.name, why)
            self._stopped = False
            self._probe = None

    def _may_probe(self) -> bool:
        now = self._now()
        self.look()
        with self._lock:
            if not self._stopped:
                return True
            if self._probe is None and now >= self._probe_at:
                return True
            self._refused += 1
            return False

    def _offer_probe(self, job: Job) -> bool:
        """Let one job through; when its calls have come back in time, the lane goes on."""

        def work() -> None:
            try:
                job.work()
            finally:
                self._probed(probe)

        def fail() -> None:
            self._probed(probe)
            job.fail()

        probe = Job(job.cost, work, fail)
        with self._lock:
            if self._probe is not None:
                self._refused += 1
                return False
            self._probe = probe
        if self.queue.offer(probe, first=True):
            return True
        self._probed(probe)
        return False

    def _probed(self, probe: Job) -> None:
        with self._lock:
            late = probe in self._unreplaced
            mine = self._probe is probe
            if mine:
                self._probe = None
        if mine and not late:
            self._go_on("a probe came back")
