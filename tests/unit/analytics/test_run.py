"""Options are checked before anything is opened, and time is kept as asked."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from hicache.analytics.run import ReplayOptions, _Pace, replay
from hicache.analytics.traces import open_trace
from hicache.errors import ConfigError, HicacheInternalError
from hicache.runtime.cache import EmbeddedCache


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"eviction": "random"}, "random"),
        ({"write_policy": "sometimes"}, "sometimes"),
        ({"prefetch": "maybe"}, "maybe"),
        ({"page_tokens": 0}, "--page-size 0"),
        ({"page_tokens": 10**6}, "--page-size 1000000"),
        ({"page_bytes": 1}, "--device unlimited"),
        ({"storage": "memory://", "host_pages": 1}, "--page-bytes above 0"),
        ({"storage": "memory://", "device_pages": 1, "page_bytes": 1}, "--host above 0"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ReplayOptions(**options)


@pytest.mark.case("KEY-5")
def test_what_decides_about_content_is_in_the_namespace() -> None:
    base = {"device_pages": 1, "page_bytes": 4096, "page_tokens": 16, "seed": 0}
    other = {"page_bytes": 8192, "page_tokens": 32, "seed": 1}
    digests = {ReplayOptions(**base).namespace().digest}
    digests |= {ReplayOptions(**{**base, name: value}).namespace().digest for name, value in other.items()}
    assert len(digests) == 4
    assert ReplayOptions(**base).namespace().digest in digests


class Waits(threading.Event):
    """An event that notes how long somebody would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        return self.is_set()


def pace(trace: Path, stop: threading.Event, show: Any = None, **options: Any) -> _Pace:
    return _Pace(open_trace([trace]), ReplayOptions(**options), stop, show)


def test_recorded_times_are_kept_from_the_first_request_on(small_trace: Path) -> None:
    requests = [request for request in open_trace([small_trace]) if request.time >= 9][:2]
    stop = Waits()
    keep = pace(small_trace, stop, speed=2.0)
    assert all(keep(request) for request in requests)
    assert stop.waits[0] == 0
    gap = (requests[1].time - requests[0].time) / 2
    assert gap - 1 < stop.waits[1] <= gap


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
    pace(small_trace, Waits(), lambda *done: shown.append(done), requests=10)(first)
    pace(small_trace, Waits(), lambda *done: shown.append(done))(first)
    assert shown == [(0, 10), (0, small_trace.stat().st_size)]


def test_broken_invariant_of_the_cache_is_a_problem(small_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cache: EmbeddedCache) -> None:
        raise HicacheInternalError("a slot is in two places")

    monkeypatch.setattr(EmbeddedCache, "check", broken)
    result = replay(open_trace([small_trace]), ReplayOptions(requests=2))
    assert result.problems == ("broken invariant: a slot is in two places",)
    assert result.requests == 2
