from __future__ import annotations

import threading

from hicache.events import Cleared
from hicache.runtime.events import Gap, Publisher


def _events(first: int, count: int) -> list[Cleared]:
    return [Cleared(bytes(16), generation) for generation in range(first, first + count)]


def test_every_listener_gets_every_event_in_order() -> None:
    publisher = Publisher()
    one, two = publisher.subscribe(limit=10), publisher.subscribe(limit=10)
    publisher.publish(_events(0, 3))
    publisher.publish(_events(3, 2))
    assert one.drain() == two.drain() == _events(0, 5)
    publisher.close()


def test_a_slow_listener_sees_where_events_are_missing_and_how_many() -> None:
    publisher = Publisher()
    slow = publisher.subscribe(limit=4)
    publisher.publish(_events(0, 3))
    publisher.publish(_events(3, 3))  # one fits
    publisher.publish(_events(6, 2))  # none does
    assert slow.get() == _events(0, 1)[0]
    assert slow.get() == _events(1, 1)[0]
    publisher.publish(_events(8, 2))  # the gap takes one place, so one of these fits
    assert slow.drain() == [*_events(2, 2), Gap(4), *_events(8, 1), Gap(1)]
    publisher.publish(_events(10, 1))
    assert slow.drain() == _events(10, 1)


def test_a_listener_that_is_full_never_blocks_the_publisher() -> None:
    publisher = Publisher()
    full = publisher.subscribe(limit=1)
    for i in range(1000):
        publisher.publish(_events(i, 1))
    assert full.drain() == [*_events(0, 1), Gap(999)]


def test_iterating_blocks_and_ends_with_the_stream() -> None:
    publisher = Publisher()
    subscription = publisher.subscribe(limit=10)
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.extend(subscription))
    thread.start()
    publisher.publish(_events(0, 2))
    publisher.close()
    thread.join(10)
    assert seen == _events(0, 2)


def test_who_has_left_gets_nothing_more_but_can_read_what_came() -> None:
    publisher = Publisher()
    left, stays = publisher.subscribe(limit=10), publisher.subscribe(limit=10)
    publisher.publish(_events(0, 1))
    left.close()
    left.close()
    publisher.publish(_events(1, 1))
    assert left.drain() == _events(0, 1)
    assert stays.drain() == _events(0, 2)
    publisher.close()
    assert publisher.subscribe(limit=10).get() is None
