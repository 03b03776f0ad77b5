"""Streams, events and the order in which a fake device does their work, drawn from a seed."""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from hicache.cuda.driver import CudaError, Priority

__all__ = ["FakeEvent", "FakeStream", "Gate", "Timeline", "Work"]

_NEW_ORDER: Final = 0.15
"""How often the streams change places, per step: seldom enough that one runs far ahead of the others."""


class FakeEvent:
    """An event. `recorded` counts how often it was, `passed` how many of those have passed, `at` is when."""

    def __init__(self, ptr: int, *, timing: bool = False) -> None:
        self.ptr = ptr
        self.timing = timing
        self.recorded = 0
        self.passed = 0
        self.at = 0.0


@dataclass(slots=True, eq=False)
class Work:
    """One entry of a stream: what it does when it begins and when it ends, and what lets it begin."""

    end: Callable[[], None]
    begin: Callable[[], None] | None = None
    may: Callable[[], bool] = lambda: True
    seconds: float = 0.0
    begun: bool = False


@dataclass(eq=False)
class FakeStream:
    """A stream. `work` is what has not been done."""

    ptr: int
    priority: Priority
    work: deque[Work] = field(default_factory=deque)
    rank: float = 0.0


class Gate:
    """Holds a stream until it is opened."""

    def __init__(self, opened: Callable[[], None]) -> None:
        self._opened = opened
        self.is_open = False

    def open(self) -> None:
        """Let the stream go on. Idempotent."""
        self.is_open = True
        self._opened()


class Timeline:
    """All streams of a device. Thread-safe; its lock is held while work is done, and work may put in more.

    Args:
        seed: of the order.

    Attributes:
        lock: guards all of it.
        now: seconds of all work that was done.
        broken: the error that ended everything, if one has.
        lost: the error that ended everything but the work that was there.
        random: what is drawn from.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311  an order, not a secret
        self.lock = threading.Condition(threading.RLock())
        self.now = 0.0
        self.broken: CudaError | None = None
        self.lost: CudaError | None = None
        self.streams: dict[int, FakeStream] = {}
        self.events: dict[int, FakeEvent] = {}
        self._numbers = itertools.count(1)

    def stream(self, priority: Priority) -> FakeStream:
        """A new stream."""
        with self.lock:
            made = FakeStream(next(self._numbers), priority, rank=self.random.random())
            self.streams[made.ptr] = made
            return made

    def event(self, *, timing: bool = False) -> FakeEvent:
        """A new event."""
        with self.lock:
            made = FakeEvent(next(self._numbers), timing=timing)
            self.events[made.ptr] = made
            return made

    def put(self, stream: FakeStream, work: Work) -> None:
        """Add work to a stream."""
        with self.lock:
            stream.work.append(work)
            self.lock.notify_all()

    def gate(self, stream: FakeStream) -> Gate:
        """Hold a stream at this point."""
        gate = Gate(self.notify)
        self.put(stream, Work(lambda: None, may=lambda: gate.is_open))
        return gate

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        """Let the event pass behind what is in the stream now."""
        with self.lock:
            event.recorded += 1
            number = event.recorded

            def passes() -> None:
                event.passed = max(event.passed, number)
                event.at = self.now

            self.put(stream, Work(passes))

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        """Let the stream wait for the event as it was recorded last."""
        with self.lock:
            number = event.recorded
            self.put(stream, Work(lambda: None, may=lambda: event.passed >= number))

    def synchronize(self, event: FakeEvent) -> None:
        """Do steps until the event has passed, or block where none can be done."""
        while True:
            with self.lock:
                self.raise_broken()
                if event.passed >= event.recorded:
                    return
                if not self.step():
                    self.lock.wait()

    def drive(self, steps: int) -> int:
        """Do so many steps of the work that waits; how many there were."""
        done = 0
        while done < steps and self.step():
            done += 1
        return done

    def step(self) -> bool:
        """Go on by one step in the stream that comes first; whether there was one."""
        with self.lock:
            if self.broken is not None:
                return False
            if self.random.random() < _NEW_ORDER:
                for stream in self.streams.values():
                    stream.rank = self.random.random()
            ready = [stream for stream in self.streams.values() if stream.work and stream.work[0].may()]
            if not ready:
                return False
            try:
                self._go_on(min(ready, key=lambda one: one.rank))
            except CudaError as error:
                self.broken = error
            self.lock.notify_all()
            return True

    def raise_broken(self) -> None:
        """Raise what has ended everything."""
        ended = self.broken or self.lost
        if ended is not None:
            raise ended

    def lose(self, error: CudaError) -> None:
        """Answer everybody by an error from now on."""
        with self.lock:
            self.lost = error
            self.lock.notify_all()

    def notify(self) -> None:
        """Let those who wait look again."""
        with self.lock:
            self.lock.notify_all()

    def _go_on(self, stream: FakeStream) -> None:
        work = stream.work[0]
        if work.begin is not None and not work.begun:
            work.begun = True
            work.begin()
            return
        work.end()
        self.now += work.seconds
        stream.work.popleft()
