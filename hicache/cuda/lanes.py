"""One stream of copies: put in by a thread of its own, waited for by another, bounded in what is under way."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from hicache.cuda.driver import CudaDriver, Event, Priority, Stream
from hicache.memory.base import Copy, Done, Slots
from hicache.records import PageResult

__all__ = ["CudaCopy", "Job", "Lane", "Step"]

_LOG = logging.getLogger(__name__)
_JOIN_SECONDS: Final = 1.0
"""What `stop` gives threads that have nothing left to do."""


class CudaCopy(Copy):
    """A copy whose layers pass as events of CUDA, so that the engine's stream can wait for each without the host.

    `let_wait` promises order, not success: whether pages came is in the results, once it has ended.
    """

    __slots__ = ("_driver", "_events")

    def __init__(self, pages: int, changed: threading.Condition, driver: CudaDriver) -> None:
        super().__init__(pages, changed)
        self._driver = driver
        self._events: list[Event] = []

    def begun(self, events: list[Event]) -> None:
        """For engines: the copies of one more layer for each event are in their stream, in order."""
        with self._changed:
            self._events.extend(events)
            self._changed.notify_all()

    def let_wait(self, layer: int, stream: Stream, timeout: float | None = None) -> bool:
        """Let what is put into a stream from now on wait until a layer is complete in every page.

        Blocks the host only until the layer's copies are in their stream, which takes no time but where much else is
        under way.

        Returns:
            Whether the stream waits; False at the time-out, and where the copy ended before that layer began.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) > layer or self.results is not None, timeout)
            if len(self._events) <= layer:
                return False
            event = self._events[layer]
        self._driver.wait(stream, event)
        return True


@dataclass(slots=True, eq=False)
class Job:
    """One copy. Its slots are the caller's, pinned until `done` is called.

    Attributes:
        copy, down, device_slots, host_slots, done, layer_done, parts: as it was asked for.
        behind: events that its stream waits for.
        only: layers that are copied down, [first, end); None is all.
        broken: its writer's event raised.
        results: of its pages so far.
    """

    copy: CudaCopy
    down: bool
    device_slots: Slots
    host_slots: Slots
    done: Done
    layer_done: Callable[[int], None] | None = None
    parts: Slots | None = None
    behind: list[Event] = field(default_factory=list)
    only: tuple[int, int] | None = None
    broken: bool = False
    results: list[PageResult] = field(default_factory=list)

    def fail(self, pages: Slots) -> None:
        """These pages of it have failed."""
        for at in pages.tolist():
            self.results[at] = PageResult.FAILED


@dataclass(slots=True, eq=False)
class Step:
    """A part of a copy that is in its stream.

    Attributes:
        job: whose.
        event: passes behind it; None where nothing of it came into the stream, or it is loose.
        layers: that are complete then, [first, end); None for a whole copy.
        size: bytes.
        last: whether the copy ends with it.
        loose: something of it may be in the stream, without an event behind it.
    """

    job: Job
    event: Event | None
    layers: tuple[int, int] | None
    size: int
    last: bool = False
    loose: bool = False


class Lane:
    """Copies of one direction, in the order in which they were asked for.

    Args:
        driver: of the device.
        name: of the threads.
        priority: of the stream.
        bound: bytes under way; one step may always be.
        put: puts a job into the stream, calling `began` for each step; raises nothing.
        passed: called for each step that has passed, by the waiting thread: with the error of the device or None, and
            whether nothing of it moves any more. Where that is not so, nobody will ever know.

    Attributes:
        stream: its stream.
    """

    def __init__(
        self,
        driver: CudaDriver,
        *,
        name: str,
        priority: Priority,
        bound: int,
        put: Callable[[Lane, Job], None],
        passed: Callable[[Step, Exception | None, bool], None],
    ) -> None:
        self._driver = driver
        self._bound = bound
        self._put = put
        self._passed = passed
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._flying: deque[Step] = deque()
        self._putting: Job | None = None
        self._bytes = 0
        self._stopped = False
        self.stream = driver.stream(priority)
        self._threads = [
            threading.Thread(target=target, name=f"{name}-{what}", daemon=True)
            for what, target in (("put", self._run_put), ("wait", self._run_wait))
        ]
        for thread in self._threads:
            thread.start()

    def add(self, job: Job) -> None:
        """Take a job."""
        with self._changed:
            self._queue.append(job)
            self._changed.notify_all()

    def wait(self, events: Iterable[Event]) -> None:
        """Let what is put into the stream from now on wait for events."""
        for event in events:
            self._driver.wait(self.stream, event)

    def fence(self) -> Event:
        """An event behind all that is in the stream now."""
        event = self._driver.event()
        self._driver.record(event, self.stream)
        return event

    def began(self, step: Step) -> None:
        """A step is in the stream. Blocks while too much is under way before the next may follow."""
        with self._changed:
            self._flying.append(step)
            self._bytes += step.size
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._bytes <= self._bound or len(self._flying) <= 1)

    def drop(self) -> list[Job]:
        """Take out the jobs that were not begun."""
        with self._changed:
            jobs = list(self._queue)
            self._queue.clear()
            return jobs

    def begun(self) -> set[Job]:
        """Jobs that are in the stream, or on their way into it."""
        with self._changed:
            found = {step.job for step in self._flying}
            if self._putting is not None:
                found.add(self._putting)
            return found

    def stop(self) -> None:
        """End the threads once what was begun has passed; waits for them a moment."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if not self.begun():
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(_JOIN_SECONDS)

    def _run_put(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopped)
                if not self._queue:
                    return
                job = self._putting = self._queue.popleft()
            try:
                self._put(self, job)
            finally:
                with self._changed:
                    self._putting = None
                    self._changed.notify_all()

    def _run_wait(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._flying or (self._stopped and self._putting is None))
                if not self._flying:
                    return
                step = self._flying[0]
            self._passed(step, *self._ended(step))
            with self._changed:
                self._flying.popleft()
                self._bytes -= step.size
                self._changed.notify_all()

    def _ended(self, step: Step) -> tuple[Exception | None, bool]:
        """Wait for a step: what went wrong, and whether nothing of it moves any more."""
        error: Exception | None = None
        if step.event is None and not step.loose:
            return None, True
        try:
            if step.event is not None:
                self._driver.synchronize(step.event)
                return None, True
        except Exception as failed:
            error = failed
        try:
            # An event that failed tells nothing of what is in front of it; another one, behind that, does.
            self._driver.synchronize(self.fence())
        except Exception as failed:
            return error or failed, False
        return error, True
