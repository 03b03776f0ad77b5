"""Commits behind writers' events: in order, never past a writer that has not ended."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest

from hicache.errors import HashMismatch
from hicache.memory.watcher import EventWatcher
from hicache.memory.writer import READY, ThreadEvent
from hicache.rpc.client.commits import Commits
from hicache.rpc.client.flow import run
from hicache.rpc.client.statistics import Counters

PATIENCE = 10.0


class Recording:
    """Commits that note what was published."""

    def __init__(self, watcher: EventWatcher) -> None:
        self.published: list[int] = []
        self.refuse = False
        self.counters = Counters()
        self.commits = Commits(watcher, self.counters, self.publish)
        self.finished = Event()

    async def publish(self, end: int) -> None:
        if self.refuse:
            raise HashMismatch("other tokens")
        self.published.append(end)

    async def finish(self) -> None:
        self.finished.set()


@pytest.fixture
def watcher() -> Iterator[EventWatcher]:
    watcher = EventWatcher("test-events")
    yield watcher
    watcher.close(PATIENCE)


def test_what_is_written_is_published_at_once(watcher: EventWatcher) -> None:
    recording = Recording(watcher)
    run(recording.commits.add(3, READY, wait=True))
    run(recording.commits.add(5, None, wait=True))
    assert recording.published == [3, 5]
    assert not recording.commits.pending


def test_pages_wait_for_all_writers_before_them(watcher: EventWatcher) -> None:
    recording = Recording(watcher)
    first, second = ThreadEvent(), ThreadEvent()
    run(recording.commits.add(2, first, wait=True))
    run(recording.commits.add(4, second, wait=True))
    run(recording.commits.add(6, READY, wait=True))
    assert recording.commits.then(recording.finish)
    second.set()
    assert recording.published == []
    first.set()
    assert recording.finished.wait(PATIENCE)
    assert recording.published == [6]


class Broken:
    """An event that cannot be asked any more."""

    def __init__(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        if self.asked > 1:
            raise RuntimeError("the device is lost")
        return False

    def wait(self, timeout: float | None) -> bool:
        return False


def test_nothing_behind_a_broken_writer_is_published_but_what_was_before_it_is(watcher: EventWatcher) -> None:
    recording = Recording(watcher)
    good = ThreadEvent()
    run(recording.commits.add(2, good, wait=True))
    run(recording.commits.add(4, Broken(), wait=True))
    run(recording.commits.add(6, READY, wait=True))
    assert recording.commits.then(recording.finish)
    good.set()
    assert recording.finished.wait(PATIENCE)
    assert recording.published == [2]
    assert recording.counters.get("failed_commits") == 2


def test_nobody_waits_behind_writers_that_have_ended(watcher: EventWatcher) -> None:
    recording = Recording(watcher)
    assert not recording.commits.then(recording.finish)
    assert not recording.finished.is_set()


def test_what_is_written_need_not_be_waited_for(watcher: EventWatcher, caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording(watcher)
    run(recording.commits.add(3, READY, wait=False))
    assert recording.published == [3]
    recording.refuse = True
    run(recording.commits.add(5, READY, wait=False))
    assert recording.counters.get("failed_commits") == 1
    assert "other tokens" in caplog.text


def test_a_refusal_is_raised_where_the_commit_was_made_and_counted_where_it_waited(
    watcher: EventWatcher, caplog: pytest.LogCaptureFixture
) -> None:
    recording = Recording(watcher)
    recording.refuse = True
    with pytest.raises(HashMismatch):
        run(recording.commits.add(1, READY, wait=True))
    written = ThreadEvent()
    run(recording.commits.add(2, written, wait=True))
    assert recording.commits.then(recording.finish)
    written.set()
    assert recording.finished.wait(PATIENCE)
    assert recording.counters.get("failed_commits") == 1
    assert "other tokens" in caplog.text
