from __future__ import annotations

import queue
import threading

import pytest

from hicache.errors import CacheClosed
from hicache.memory.watcher import EventWatcher
from hicache.memory.writer import READY, Notifying, ThreadEvent

PATIENCE = 30.0


class PolledEvent:
    """An event that can only be asked, as those of a device."""

    def __init__(self) -> None:
        self.passed = False
        self.asked = threading.Semaphore(0)

    def query(self) -> bool:
        self.asked.release()
        return self.passed

    def wait(self, timeout: float | None) -> bool:
        return self.passed


class BrokenEvent(PolledEvent):
    def query(self) -> bool:
        raise RuntimeError("the device is gone")


class BrokenNotifier(PolledEvent):
    def on_passed(self, callback: object) -> None:
        raise RuntimeError("the device is gone")


@pytest.fixture
def answers() -> queue.Queue[tuple[str, bool]]:
    return queue.Queue()


def test_ready_has_passed() -> None:
    assert READY.query()
    assert READY.wait(None)
    assert repr(READY) == "hicache.READY"


def test_a_thread_event_passes_once_and_stays() -> None:
    event = ThreadEvent()
    called: list[int] = []
    event.on_passed(lambda: called.append(1))
    assert isinstance(event, Notifying)
    assert not event.query()
    assert not event.wait(0)
    event.set()
    event.set()
    event.on_passed(lambda: called.append(2))
    assert event.query()
    assert event.wait(0)
    assert called == [1, 2]


def test_a_waiter_wakes_when_the_writer_is_done() -> None:
    event = ThreadEvent()
    waiter = threading.Thread(target=event.wait, args=(PATIENCE,))
    waiter.start()
    event.set()
    waiter.join(PATIENCE)
    assert not waiter.is_alive()


def test_events_are_called_back_as_they_pass(answers: queue.Queue[tuple[str, bool]]) -> None:
    watcher = EventWatcher("test-events")
    late, polled, early = ThreadEvent(), PolledEvent(), ThreadEvent()
    for name, event in (("late", late), ("polled", polled), ("early", early)):
        watcher.watch(event, lambda passed, name=name: answers.put((name, passed)))  # type: ignore[misc]
    assert watcher.waiting == 3
    early.set()
    assert answers.get(timeout=PATIENCE) == ("early", True)
    polled.asked.acquire(timeout=PATIENCE)
    polled.passed = True
    assert answers.get(timeout=PATIENCE) == ("polled", True)
    late.set()
    assert answers.get(timeout=PATIENCE) == ("late", True)
    assert watcher.waiting == 0
    assert watcher.close(PATIENCE) == []


def test_an_event_that_has_passed_calls_back_from_another_thread(answers: queue.Queue[tuple[str, bool]]) -> None:
    watcher = EventWatcher("test-events")
    watcher.watch(READY, lambda passed: answers.put((threading.current_thread().name, passed)))
    assert answers.get(timeout=PATIENCE) == ("test-events", True)
    watcher.close(PATIENCE)


@pytest.mark.parametrize("event", [BrokenEvent(), BrokenNotifier()], ids=["query", "on_passed"])
def test_a_broken_event_has_not_passed(event: PolledEvent, answers: queue.Queue[tuple[str, bool]]) -> None:
    watcher = EventWatcher("test-events")
    watcher.watch(event, lambda passed: answers.put(("broken", passed)))
    assert answers.get(timeout=PATIENCE) == ("broken", False)
    watcher.close(PATIENCE)


@pytest.mark.case("THR-1")
@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_callback_that_raises_does_not_end_the_thread(
    error: type[BaseException], answers: queue.Queue[tuple[str, bool]]
) -> None:
    watcher = EventWatcher("test-events")

    def fail(passed: bool) -> None:
        raise error

    watcher.watch(READY, fail)
    watcher.watch(READY, lambda passed: answers.put(("next", passed)))
    assert answers.get(timeout=PATIENCE) == ("next", True)
    assert watcher.errors == 1
    watcher.close(PATIENCE)


def test_close_hands_back_what_it_did_not_call() -> None:
    watcher = EventWatcher("test-events")
    called: list[bool] = []
    event = ThreadEvent()
    watcher.watch(event, called.append)
    dropped = watcher.close(PATIENCE)
    event.set()
    assert len(dropped) == 1
    assert called == []
    assert watcher.close(PATIENCE) == []
    with pytest.raises(CacheClosed):
        watcher.watch(event, called.append)


def test_a_watcher_without_events_has_no_thread() -> None:
    before = threading.active_count()
    watcher = EventWatcher("test-events")
    assert threading.active_count() == before
    watcher.close(PATIENCE)
