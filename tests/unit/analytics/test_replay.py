"""The driver against a cache of a few lines, whose every answer is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hicache.analytics.content import PageContent
from hicache.analytics.prompts import IdPages
from hicache.analytics.replay import ALLOCATE_SECONDS, MOST_PROBLEMS, Replay
from hicache.analytics.result import ReplayResult
from hicache.analytics.trace import TraceRequest, pack_ids
from hicache.errors import HicacheInternalError, OutOfSlots, TraceError
from hicache.memory.writer import READY
from hicache.records import MissReason

NAMESPACE = b"n" * 16
PAGE_BYTES = 100


@dataclass
class Counts:
    asked: int = 0
    device: int = 0
    host: int = 0
    storage: int = 0
    missed: dict[MissReason, int] = field(default_factory=dict)


class PrefixCache:
    """Keeps every prefix for ever, in device slots; `capacity` limits one request's new pages."""

    def __init__(self, *, capacity: int = 10**9) -> None:
        self.slots: dict[bytes, int] = {}
        self.pages: dict[int, bytes] = {}
        self.capacity = capacity
        self.closed = 0
        self.opened = 0
        self.patience: list[float | None] = []

    def ask(self, tokens: np.ndarray[Any, Any]) -> PrefixRequest:
        self.opened += 1
        return PrefixRequest(self, tokens)

    def read_page(self, slot: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.pages[slot], np.uint8)

    def write_page(self, slot: int, page: np.ndarray[Any, Any]) -> None:
        self.pages[slot] = page.tobytes()


class PrefixRequest:
    def __init__(self, cache: PrefixCache, tokens: np.ndarray[Any, Any]) -> None:
        self.cache = cache
        self.prefixes = [tokens[: end + 1].tobytes() for end in range(len(tokens))]
        self.counts = Counts(asked=len(tokens))
        self.fresh: list[int] = []

    def load(self) -> np.ndarray[Any, Any]:
        found = []
        for prefix in self.prefixes:
            if prefix not in self.cache.slots:
                break
            found.append(self.cache.slots[prefix])
        self.counts.device = len(found)
        self.counts.missed = {MissReason.COLD: self.counts.asked - len(found)}
        return np.array(found, np.int64)

    def allocate(self, *, deadline: float | None = None) -> np.ndarray[Any, Any]:
        self.cache.patience.append(deadline)
        need = self.counts.asked - self.counts.device
        if need > self.cache.capacity:
            raise OutOfSlots(asked=need, free=self.cache.capacity, evictable=0, capacity=self.cache.capacity)
        start = len(self.cache.slots)
        self.fresh = list(range(start, start + need))
        return np.array(self.fresh, np.int64)

    def commit(self, *, upto: int, ready: Any) -> None:
        assert upto == len(self.prefixes)
        assert ready is READY
        for prefix, slot in zip(self.prefixes[self.counts.device :], self.fresh, strict=True):
            self.cache.slots[prefix] = slot

    def close(self) -> Counts:
        self.cache.closed += 1
        return self.counts


def requests(*prompts: list[int], unit: int = 10, short: int = 0) -> list[TraceRequest]:
    return [
        TraceRequest(
            time=float(number),
            ids=pack_ids(ids),
            unit=unit,
            input_tokens=len(ids) * unit - short,
            output_tokens=0,
            scope="",
            place=f"line {number + 1}",
        )
        for number, ids in enumerate(prompts)
    ]


def replay_of(cache: PrefixCache, *, content: bool = False) -> Replay:
    made = PageContent(namespace=NAMESPACE, page_tokens=1, page_bytes=PAGE_BYTES) if content else None
    return Replay(cache.ask, prompts=IdPages(), content=made, pages=cache)


def go_on(_: TraceRequest) -> bool:
    return True


def replayed(cache: PrefixCache, traced: Iterable[TraceRequest], *, content: bool = False) -> ReplayResult:
    replay = replay_of(cache, content=content)
    assert replay.run(traced, before=go_on)
    assert cache.opened == cache.closed
    return replay.result()


def test_counts_add_up() -> None:
    result = replayed(PrefixCache(), requests([1, 2, 3], [1, 2, 4], [1, 2, 3], [], short=0))
    assert (result.requests, result.pages_asked, result.pages_device, result.pages_missed) == (4, 9, 5, 4)
    assert result.misses_by_reason["cold"] == 4
    assert set(result.misses_by_reason) == {reason.value for reason in MissReason}
    assert result.hit_rate_pages == 5 / 9
    assert result.problems == ()


@pytest.mark.case("STAT-5")
def test_each_rate_has_its_own_weights() -> None:
    cache = PrefixCache()
    replayed(cache, requests(list(range(100))))
    one_large = requests(list(range(100)))
    nine_small = requests(*[[1000 + 10 * number + page for page in range(10)] for number in range(9)])
    result = replayed(cache, one_large + nine_small)
    assert result.hit_rate_tokens == pytest.approx(1000 / 1900)
    assert result.hit_rate_pages == pytest.approx(100 / 190)
    assert result.hit_rate_requests == pytest.approx(0.1)
    assert result.document()["definitions"].keys() >= {"hit_rate_pages", "hit_rate_tokens", "hit_rate_requests"}


def test_token_rate_counts_the_partial_last_page_as_what_it_is() -> None:
    result = replayed(PrefixCache(), requests([1, 2], [1, 2], short=7))
    assert (result.tokens_asked, result.tokens_hit) == (26, 13)


@pytest.mark.case("STAT-2")
@pytest.mark.parametrize("traced", [[], requests([]), requests([], [])])
def test_nothing_asked_is_zero_and_not_nan(traced: list[TraceRequest]) -> None:
    result = replayed(PrefixCache(), traced)
    assert (result.hit_rate_pages, result.hit_rate_tokens, result.hit_rate_requests) == (0.0, 0.0, 0.0)


@pytest.mark.case("STAT-6")
def test_every_returned_page_is_verified() -> None:
    result = replayed(PrefixCache(), requests([1, 2, 3], [1, 2, 4], [1, 2, 3]), content=True)
    assert (result.pages_verified, result.pages_wrong) == (5, 0)
    assert result.pages_verified == result.pages_device + result.pages_host + result.pages_storage


def test_wrong_byte_is_counted_and_named() -> None:
    cache = PrefixCache()
    replayed(cache, requests([1, 2, 3]), content=True)
    cache.pages[1] = cache.pages[1][:-1] + bytes([cache.pages[1][-1] ^ 1])
    result = replayed(cache, requests([1, 2, 3], [1, 2]), content=True)
    assert (result.pages_verified, result.pages_wrong) == (5, 2)
    assert result.problems[0] == "line 1, page 1: wrong bytes in device slot 1"


def test_page_of_another_past_is_wrong() -> None:
    cache = PrefixCache()
    replayed(cache, requests([1, 2], [3, 2]), content=True)
    cache.pages[1], cache.pages[3] = cache.pages[3], cache.pages[1]  # equal text, different pasts
    assert replayed(cache, requests([1, 2]), content=True).pages_wrong == 1


def test_wrong_pages_are_all_counted_and_some_named() -> None:
    cache = PrefixCache()
    replayed(cache, requests(list(range(50))), content=True)
    cache.pages = dict.fromkeys(cache.pages, bytes(PAGE_BYTES))
    result = replayed(cache, requests(list(range(50))), content=True)
    assert result.pages_wrong == 50
    assert len(result.problems) == MOST_PROBLEMS


def test_request_that_does_not_fit_is_refused_and_closed() -> None:
    result = replayed(PrefixCache(capacity=2), requests([1, 2, 3], [1, 2]))
    assert (result.requests_refused, result.requests, result.pages_missed) == (1, 2, 5)


def test_requests_wait_for_slots_only_where_bytes_are_copied() -> None:
    cache = PrefixCache()
    replayed(cache, requests([1]), content=True)
    replayed(cache, requests([1]))
    assert cache.patience == [ALLOCATE_SECONDS, None]


def test_stop_keeps_what_was_reached() -> None:
    cache = PrefixCache()
    replay = replay_of(cache)
    assert not replay.run(requests([1], [2], [3]), before=lambda request: request.time < 2)
    assert replay.result().requests == 2


def test_request_is_closed_when_the_cache_fails() -> None:
    cache = PrefixCache()
    cache.ask = lambda tokens: _Failing(cache, tokens)  # type: ignore[method-assign]
    replay = replay_of(cache)
    assert not replay.run(requests([1], [2]), before=go_on)
    result = replay.result()
    assert result.problems == ("broken invariant: pins below zero",)
    assert cache.closed == 1


class _Failing(PrefixRequest):
    def allocate(self, *, deadline: float | None = None) -> np.ndarray[Any, Any]:
        raise HicacheInternalError("pins below zero")


@pytest.mark.case("STAT-1")
def test_a_cache_that_counts_twice_is_found_out() -> None:
    cache = PrefixCache()
    cache.ask = lambda tokens: _Double(cache, tokens)  # type: ignore[method-assign]
    replay = replay_of(cache)
    replay.run(requests([1, 2], [1, 2]), before=go_on)
    (problem,) = replay.result().problems
    assert problem == "4 pages asked, but 4 came and 2 were missed"


class _Double(PrefixRequest):
    def load(self) -> np.ndarray[Any, Any]:
        slots = super().load()
        self.counts.host = self.counts.device
        return slots


def test_trace_error_leaves_the_counts() -> None:
    def broken() -> Iterator[TraceRequest]:
        yield from requests([1, 2])
        raise TraceError("line 2 is broken")

    replay = replay_of(PrefixCache())
    with pytest.raises(TraceError, match="line 2"):
        replay.run(broken(), before=go_on)
    assert replay.result().requests == 1
