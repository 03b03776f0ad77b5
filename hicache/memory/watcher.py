"""One thread that waits for any number of writers' events."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hicache.errors import CacheClosed
from hicache.memory.writer import Notifying, WriterEvent

__all__ = ["EventWatcher", "look"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.001
"""Between two looks at events that cannot call back. A kernel takes as long; the looks cost under 1 % of a core."""

Passed = Callable[[bool], None]


@dataclass(slots=True, eq=False)
class _Watch:
    event: WriterEvent
    passed: Passed
    polled: bool


class EventWatcher:
    """Calls back when events pass: `passed(True)`, or `passed(False)` for an event that raised.

    Callbacks come from the watcher's thread, one after the other, without a lock held; what they raise is counted in
    `errors`. The thread starts with the first event and sleeps while there is nothing to look at. Thread-safe.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._watches: dict[_Watch, None] = {}  # in the order they came
        self._settled: deque[tuple[_Watch, bool]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.errors = 0

    @property
    def waiting(self) -> int:
        """Events that have not been called back."""
        with self._changed:
            return len(self._watches)

    def watch(self, event: WriterEvent, passed: Passed) -> None:
        """Call `passed` once when the event has passed, also if it already has. Does not block.

        Raises:
            CacheClosed: after `close`.
        """
        watch = _Watch(event, passed, polled=not isinstance(event, Notifying))
        with self._changed:
            if self._closed:
                raise CacheClosed("the copy engine is closed: nothing waits for events any more")
            self._watches[watch] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()
        if isinstance(event, Notifying):
            try:
                event.on_passed(lambda: self._settle(watch, passed=True))
            except Exception:
                _LOG.exception("a writer's event raised: its pages count as not written")
                self._settle(watch, passed=False)

    def close(self, timeout: float) -> list[Passed]:
        """Stop watching and end the thread, waiting at most `timeout` seconds for a callback that runs. Idempotent.

        Returns:
            The callbacks that will not be called.
        """
        with self._changed:
            self._closed = True
            dropped = [watch.passed for watch in self._watches]
            self._watches.clear()
            self._settled.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        return dropped

    def _settle(self, watch: _Watch, *, passed: bool) -> None:
        with self._changed:
            if watch in self._watches:
                self._settled.append((watch, passed))
                self._changed.notify_all()

    def _run(self) -> None:
        while not self._closed:
            for watch, passed in self._take():
                try:
                    watch.passed(passed)
                except BaseException:  # the thread serves everybody and survives whatever a callback does
                    self.errors += 1
                    _LOG.exception("a callback of a writer's event raised")
            for watch in self._polled():
                passed_now = look(watch.event)
                if passed_now is not None:
                    self._settle(watch, passed=passed_now)

    def _take(self) -> list[tuple[_Watch, bool]]:
        """Watches that have settled, in the order they came; blocks while there is nothing to do."""
        with self._changed:
            while not (self._settled or self._closed or any(watch.polled for watch in self._watches)):
                self._changed.wait()
            if not self._settled and not self._closed:
                self._changed.wait(_POLL_SECONDS)
            batch = [(watch, passed) for watch, passed in self._settled if self._watches.pop(watch, False) is None]
            self._settled.clear()
            return batch

    def _polled(self) -> list[_Watch]:
        with self._changed:
            return [watch for watch in self._watches if watch.polled]


def look(event: WriterEvent) -> bool | None:
    """Whether an event has passed: True, None while it has not, False if it is broken (it raised)."""
    try:
        return True if event.query() else None
    except Exception:
        _LOG.exception("a writer's event raised: its pages count as not written")
        return False
