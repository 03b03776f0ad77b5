"""Engines that still write when their request is over: no slot of it goes to others before they have ended."""

from __future__ import annotations

import threading

import pytest

import hicache
from hicache.testing.engine import prompt, small_namespace


def _settled(cache: hicache.EmbeddedCache, free: int) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if cache.statistics().core.device.free == free:
            return
        pause.wait(0.01)
    raise AssertionError(f"{cache.statistics().core.device} after 30 seconds, where {free} free slots were expected")


@pytest.mark.case("RACE-5", "LEAK-1")
@pytest.mark.parametrize("adapter", [None, hicache.Adapter("undigested")])
def test_slots_of_a_closed_request_wait_for_its_writer(adapter: hicache.Adapter | None) -> None:
    """Also the unaligned tail, and all slots of a request that goes past the cache."""
    with hicache.open(small_namespace(), device=8) as cache:
        tokens = prompt(1, 10)  # two pages and a tail of two tokens, at four tokens a page
        event = hicache.ThreadEvent()
        request = cache.request(tokens, adapter=adapter)
        slots = request.allocate()
        assert len(slots) == 3
        request.commit(ready=event)
        request.close()
        before = cache.statistics().core.device
        assert (before.free, before.quarantined + before.filling) == (5, 3)
        with cache.request(prompt(2, 32)) as other, pytest.raises(hicache.OutOfSlots):
            other.allocate()
        event.set()
        _settled(cache, 8 if adapter else 6)  # two pages were published
        cache.check()


class Unnoticed:
    """An event whose thread-side call-back never comes."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def wait(self, timeout: float | None) -> bool:
        return self.passed

    def on_passed(self, callback: object) -> None:
        pass


def test_a_request_sees_what_was_written_before_it_began() -> None:
    """Nobody waits for the thread that watches events, which may not have had its turn yet."""
    with hicache.open(small_namespace(), device=8) as cache:
        tokens, event = prompt(1, 13), Unnoticed()
        with cache.request(tokens) as request:
            request.allocate()
            request.commit(8, ready=event)
            request.commit(12, ready=hicache.READY)
        assert cache.match(tokens).device == 0
        event.passed = True
        with cache.request(tokens) as request:
            assert (request.match.device, len(request.load())) == (3, 3)
        assert cache.match(tokens).device == 3
        cache.check()
