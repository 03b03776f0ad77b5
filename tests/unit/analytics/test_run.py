"""Options are checked before anything is opened, and what the cache finds wrong is reported."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from hicache.analytics import run
from hicache.analytics.run import ReplayOptions, replay
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


def test_broken_invariant_of_the_cache_is_a_problem(small_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cache: EmbeddedCache) -> None:
        raise HicacheInternalError("a slot is in two places")

    monkeypatch.setattr(EmbeddedCache, "check", broken)
    result = replay(open_trace([small_trace]), ReplayOptions(requests=2))
    assert result.problems == ("broken invariant: a slot is in two places",)
    assert result.requests == 2


def test_same_trace_same_numbers_through_all_tiers(small_trace: Path) -> None:
    options = ReplayOptions(requests=300, device_pages=300, host_pages=400, page_bytes=512, storage="memory://")
    first, second = (replay(open_trace([small_trace]), options).document() for _ in range(2))
    for changing in ("seconds", "requests_per_second"):
        first.pop(changing)
        second.pop(changing)
    assert first == second
    assert first["pages_storage"] > 0
    assert first["pages_wrong"] == 0
    assert not first["shed_by_reason"]


@pytest.mark.parametrize(("page_bytes", "speed", "waits"), [(512, None, 3), (512, 1e9, 0), (0, None, 0)])
def test_full_speed_with_bytes_waits_for_the_tiers(
    small_trace: Path, monkeypatch: pytest.MonkeyPatch, page_bytes: int, speed: float | None, waits: int
) -> None:
    waited: list[float] = []

    def wait(cache: EmbeddedCache, seconds: float) -> bool:
        waited.append(seconds)
        return True

    monkeypatch.setattr(run, "wait_until_quiet", wait)
    options = ReplayOptions(requests=3, device_pages=100, host_pages=100, page_bytes=page_bytes, speed=speed)
    assert replay(open_trace([small_trace]), options).requests == 3
    assert len(waited) == waits


def test_stop_after_the_end_is_no_interrupt(small_trace: Path) -> None:
    stop = threading.Event()
    whole = replay(open_trace([small_trace]), ReplayOptions(requests=2), stop=stop, progress=lambda *_: None)
    assert not whole.interrupted

    def stop_at_the_end(cache: EmbeddedCache) -> None:
        stop.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedCache, "check", stop_at_the_end)
        whole = replay(open_trace([small_trace]), ReplayOptions(requests=2), stop=stop)
    assert stop.is_set()
    assert not whole.interrupted
    assert replay(open_trace([small_trace]), ReplayOptions(requests=2), stop=stop).interrupted
