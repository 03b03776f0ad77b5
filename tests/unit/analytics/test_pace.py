"""Requests begin at their time, when the cache is quiet, or not at all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

import hicache
from hicache.analytics.pace import QUIET_SECONDS, Pace, wait_until_quiet
from hicache.analytics.run import ReplayOptions
from hicache.analytics.traces import open_trace
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import FaultyStorage, delay
from hicache.testing.gates import Gate


class Waits(threading.Event):
    """An event that notes how long somebody would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        return self.is_set()


def pace(trace: Path, stop: threading.Event, **options: Any) -> Pace:
    return Pace(open_trace([trace]), stop=stop, **options)


def test_recorded_times_are_kept_from_the_first_request_on(small_trace: Path) -> None:
    requests = [request for request in open_trace([small_trace]) if request.time >= 9][:2]
    stop = Waits()
    keep = pace(small_trace, stop, speed=2.0)
    assert all(keep(request) for request in requests)
    assert stop.waits[0] == 0
    gap = (requests[1].time - requests[0].time) / 2
    assert gap - 1 < stop.waits[1] <= gap


def test_times_beyond_what_can_be_waited_for_are_waited_for_all_the_same(small_trace: Path) -> None:
    early, *_, late = open_trace([small_trace])
    stop = Waits()
    keep = pace(small_trace, stop, speed=1e-320)
    assert all(keep(request) for request in (early, late))
    assert stop.waits[1] == threading.TIMEOUT_MAX


def test_stop_ends_the_wait(small_trace: Path) -> None:
    first = next(iter(open_trace([small_trace])))
    stop = Waits()
    keep = pace(small_trace, stop)
    assert keep(first)
    assert not keep.stopped
    stop.set()
    assert not keep(first)
    assert keep.stopped
    assert stop.waits == []


def test_progress_is_of_requests_or_of_the_file(small_trace: Path) -> None:
    first = next(iter(open_trace([small_trace])))
    shown: list[tuple[int, int]] = []
    pace(small_trace, Waits(), show=lambda *done: shown.append(done), requests=10)(first)
    pace(small_trace, Waits(), show=lambda *done: shown.append(done))(first)
    assert shown == [(0, 10), (0, small_trace.stat().st_size)]


def test_what_hangs_is_waited_for_once(small_trace: Path) -> None:
    asked: list[float] = []

    def settle(seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) < 2

    first = next(iter(open_trace([small_trace])))
    keep = pace(small_trace, Waits(), settle=settle)
    assert all(keep(first) for _ in range(5))
    assert asked == [QUIET_SECONDS] * 2


def test_quiet_is_when_the_last_write_has_ended() -> None:
    gate = Gate()
    storage = FaultyStorage(MemoryBackend())
    storage.always("put", delay(gate))
    options = ReplayOptions(device_pages=8, host_pages=8, page_bytes=64)
    with hicache.open(options.namespace(), device=8, host=8, storage=storage) as cache:
        with cache.request(np.arange(3, dtype=np.uint32), logits=False) as request:
            request.allocate()
            request.commit(ready=hicache.READY)
        assert not wait_until_quiet(cache, 0.0)
        gate.open()
        assert wait_until_quiet(cache, 30.0)
        assert cache.statistics().bytes_to_storage == 3 * 64
