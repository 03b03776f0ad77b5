"""The numbered stream under random histories: what watchers know is what there is, over gaps and restarts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.events import Cleared, Event, Removed, Stored
from hicache.records import Tier
from hicache.rpc.service import EventBatch
from hicache.sidecar.events import EventLog
from hicache.testing.choices import Choices, DrawnChoices, SeededChoices
from hicache.testing.kvevents import EventMirror, places

NAMESPACES = [bytes([number]) * 16 for number in range(3)]
SOURCES = ("tp1", "tp2")
WIDTH = 3
DEPTH = 4


def page_hash(path: tuple[int, ...]) -> bytes:
    return sha256(bytes(path)).digest()


class History:
    """Two sources that change random pages, and a model of what they hold.

    The sources break every rule that they may break: they tell twice, and remove what is not there.
    """

    def __init__(self, choices: Choices) -> None:
        self._choose = choices.integer
        self.held: Counter[tuple[str, bytes, int, Tier, bytes]] = Counter()
        self.generations: Counter[tuple[str, bytes]] = Counter()

    @property
    def pages(self) -> set[tuple[bytes, int, Tier, bytes]]:
        """What is resident."""
        return {place[1:] for place in self.held}

    def change(self) -> tuple[str, list[Event]]:
        """The next change of one source."""
        source = SOURCES[self._choose(0, 1)]
        return source, [self._event(source) for _ in range(self._choose(1, 3))]

    def forget(self) -> str:
        """A source is over."""
        source = SOURCES[self._choose(0, 1)]
        self.held = Counter({place: 1 for place in self.held if place[0] != source})
        return source

    def _event(self, source: str) -> Event:
        namespace = NAMESPACES[self._choose(0, len(NAMESPACES) - 1)]
        generation = self.generations[source, namespace]
        tier = Tier(self._choose(0, 2))
        kind = self._choose(0, 9)
        if kind == 0:
            self.generations[source, namespace] += self._choose(0, 1)
            gone = [place for place in self.held if place[:3] == (source, namespace, generation)]
            for place in gone:
                del self.held[place]
            return Cleared(namespace, generation)
        path = tuple(self._choose(0, WIDTH - 1) for _ in range(self._choose(1, DEPTH)))
        first = self._choose(0, len(path) - 1)
        hashes = tuple(page_hash(path[: end + 1]) for end in range(first, len(path)))
        if kind < 6:
            for found in hashes:
                self.held[source, namespace, generation, tier, found] = 1
            parent = page_hash(path[:first]) if first else None
            return Stored(namespace, generation, tier, hashes, parent, first, b"".join(hashes))
        for found in hashes:
            self.held.pop((source, namespace, generation, tier, found), None)
        return Removed(namespace, generation, tier, hashes[::-1], "evicted")


class Watcher:
    """Reads when it is told to, and again from where it was when it was cut off or the service was new."""

    def __init__(self) -> None:
        self.mirror = EventMirror()
        self._stream: AsyncIterator[EventBatch] | None = None

    async def read(self, log: EventLog, most: int | None) -> None:
        """Take so many batches, None: all up to the log's last number."""
        if self._stream is None:
            self._stream = log.watch(self.mirror.next_number)
        taken = 0
        while taken != most and not self._is_current(log):
            self.mirror.apply(await asyncio.wait_for(anext(self._stream), 30))
            taken += 1

    def _is_current(self, log: EventLog) -> bool:
        mirror = self.mirror
        return bool(mirror.snapshots) and not mirror.incomplete and mirror.next_number == log.statistics().next_number

    async def cut(self) -> None:
        """The connection is lost."""
        if self._stream is not None:
            await self._stream.aclose()  # type: ignore[attr-defined]
            self._stream = None


class Life:
    """A log with a small ring that is told the history, and watchers that are slow, or cut off, or neither."""

    def __init__(self, choices: Choices) -> None:
        self._choose = choices.integer
        self.history = History(choices)
        self.watchers = [Watcher() for _ in range(3)]
        self.seen: Counter[str] = Counter()
        self._soon: list[Callable[[], None]] = []
        self._seconds = 1_000_000.0
        self.log = self._new_log()

    def _new_log(self) -> EventLog:
        self._seconds += 1.0
        later = self._soon.append if self._choose(0, 1) else None
        return EventLog(most_events=6, buckets=32, wall=lambda: self._seconds, later=later)

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            await self.step()
        await self.check()
        for watcher in self.watchers:
            await watcher.cut()

    async def step(self) -> None:
        what = self._choose(0, 39)
        watcher = self.watchers[self._choose(0, len(self.watchers) - 1)]
        if what < 20:
            source, events = self.history.change()
            self.log.append(events, source=source)
        elif what < 30:
            await watcher.read(self.log, self._choose(1, 3))
        elif what < 34:
            await self.check()
        elif what < 36:
            self.log.forget(self.history.forget())
        elif what < 39:
            self.seen["cut"] += 1
            await watcher.cut()
        elif not self._choose(0, 2):
            await self.restart()

    async def restart(self) -> None:
        """Another life of the service: memory is gone, storage and engines tell anew."""
        self.seen["restart"] += 1
        for watcher in self.watchers:
            await watcher.cut()
        self._soon.clear()
        self.log = self._new_log()
        self.history.held.clear()

    def settle(self) -> None:
        while self._soon:
            self._soon.pop(0)()

    async def check(self) -> None:
        """All that is told arrives, and is what there is."""
        self.settle()
        with self.log.lock:
            assert places(self.log.view()) == self.history.pages
        for watcher in self.watchers:
            await watcher.read(self.log, None)
            assert watcher.mirror.pages == self.history.pages
        self.seen["lost"] = sum(watcher.mirror.lost for watcher in self.watchers)
        self.seen["snapshots"] = sum(watcher.mirror.snapshots for watcher in self.watchers)


@pytest.mark.slow
@pytest.mark.case("STAT-3", "STAT-4")
def test_events_replayed_are_residency() -> None:
    """Over random histories of two sources, restarts, lost connections and gaps."""
    seen: Counter[str] = Counter()
    for seed in range(settings().max_examples):
        life = Life(SeededChoices(seed))
        asyncio.run(life.run(200))
        seen.update(life.seen)
    assert min(seen[what] for what in ("cut", "restart", "lost", "snapshots")) >= settings().max_examples, seen


@pytest.mark.slow
@given(data=st.data())
def test_histories_that_shrink(data: st.DataObject) -> None:
    asyncio.run(Life(DrawnChoices(data)).run(20))
