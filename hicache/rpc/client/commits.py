"""Commits of one request, in the order of its pages: none goes out before the writers of all pages up to its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from hicache.errors import CacheClosed, HicacheError
from hicache.memory.watcher import EventWatcher
from hicache.memory.writer import READY, WriterEvent
from hicache.rpc.client.flow import Flow, launch
from hicache.rpc.client.statistics import Counters

_log = logging.getLogger("hicache.client")


@dataclass(slots=True, eq=False)
class _Waiting:
    end: int
    passed: bool


class Commits:
    """Publishes pages when their writers' events have passed. Thread-safe.

    Args:
        watcher: waits for events.
        counters: gets `failed_commits`.
        publish: tells the service that the pages up to an index are written.
    """

    def __init__(self, watcher: EventWatcher, counters: Counters, publish: Callable[[int], Flow[None]]) -> None:
        self._watcher = watcher
        self._counters = counters
        self._publish = publish
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._writers = 0  # events that have not passed, those behind a broken one included
        self._then: Callable[[], Flow[None]] | None = None

    @property
    def pending(self) -> bool:
        """Whether a writer may still be at work."""
        with self._lock:
            return self._writers > 0

    async def add(self, end: int, event: WriterEvent | None, *, wait: bool) -> None:
        """The pages up to an index are written when the event passes; None: they are.

        With `wait`, what is published at once is waited for.

        Raises:
            HicacheError: what was published at once was refused.
        """
        passed = event is None or event is READY or event.query()
        entry = _Waiting(end, passed)
        with self._lock:
            at_once = passed and not self._waiting
            if not at_once:
                self._waiting.append(entry)
            self._writers += not passed
        if at_once and wait:
            await self._publish(end)
        elif at_once:
            launch(self._quietly(end))
        elif not passed:
            assert event is not None
            try:
                self._watcher.watch(event, lambda passed: self._event(entry, passed=passed))
            except CacheClosed:  # with the cache; its slots stay in quarantine, as the writer may go on
                return

    def then(self, flow: Callable[[], Flow[None]]) -> bool:
        """Run a flow behind the last writer, in the background. False: nobody writes, so nothing was done."""
        with self._lock:
            if not self._writers:
                return False
            self._then = flow
            return True

    def _event(self, entry: _Waiting, *, passed: bool) -> None:
        end = 0
        with self._lock:
            self._writers -= 1
            entry.passed = passed
            if entry in self._waiting and not passed:  # broken: nothing from here on is known to be written
                at = self._waiting.index(entry)
                self._counters.add("failed_commits", len(self._waiting) - at)
                del self._waiting[at:]
            while self._waiting and self._waiting[0].passed:
                end = max(end, self._waiting.pop(0).end)
            then = self._then if not self._writers else None
        if end:
            launch(self._quietly(end))
        if then is not None:
            launch(then())

    async def _quietly(self, end: int) -> None:
        try:
            await self._publish(end)
        except HicacheError:
            self._counters.add("failed_commits")
            _log.exception("a commit that nobody waited for has failed: its pages are not published")
