from __future__ import annotations

from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.core.transfers import TransferKind
from hicache.errors import ConfigError
from hicache.records import PageResult
from hicache.runtime.meter import Meter
from hicache.runtime.planner import EXPLORE_PAGES, EXPLORE_SECONDS, Planner, check_rate
from hicache.testing.clock import ManualClock


def transfer(number: int, kind: TransferKind, pages: int, *, cancelled: bool = False) -> Any:
    return SimpleNamespace(id=number, kind=kind, count=pages, cancelled=cancelled)


class Seen:
    """A planner that has seen transfers of one tier."""

    def __init__(self, rate: float | None = 1000.0, *, fetch_pages: int = 4) -> None:
        self.clock = ManualClock()
        self.planner = Planner(page_size=10, fetch_pages=fetch_pages, rate=rate, now=self.clock.now)
        self.number = 0

    def see(self, kind: TransferKind, pages: int, seconds: float, *, good: int | None = None) -> None:
        self.number += 1
        moved = transfer(self.number, kind, pages)
        self.planner.begun(moved)
        self.clock.advance(seconds)
        good = pages if good is None else good
        self.planner.ended(moved, [PageResult.OK] * good + [PageResult.FAILED] * (pages - good))


@pytest.mark.parametrize("rate", [0, -1.0, nan, inf, True, "fast", None])
def test_a_rate_is_a_number_above_zero(rate: object) -> None:
    with pytest.raises(ConfigError, match="prefill"):
        check_rate("prefill", rate)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (100, 0.0), (-5, 1.0), (100, nan)])
def test_a_report_is_two_numbers_above_zero(tokens: int, seconds: float) -> None:
    with pytest.raises(ConfigError, match="of the prefill"):
        Seen().planner.report(tokens, seconds)


def test_without_a_rate_nothing_is_decided_until_one_is_reported() -> None:
    planner = Seen(None).planner
    assert not planner.decides
    assert planner.statistics().prefill_tokens_per_second is None
    planner.report(500, 1.0)
    assert planner.decides
    assert planner.statistics().prefill_tokens_per_second == 500
    planner.report(1000, 1.0)
    assert 500 < planner.statistics().prefill_tokens_per_second < 1000  # type: ignore[operator]


def test_a_meter_learns_a_line() -> None:
    seen = Seen()
    for pages in (1, 4, 2, 3):
        seen.see(TransferKind.FETCH, pages, 0.5 + 0.25 * pages)
    learnt = seen.planner.statistics().storage
    assert learnt.seconds == pytest.approx(0.5)
    assert learnt.seconds_per_page == pytest.approx(0.25)
    assert (learnt.gap_per_page, learnt.waiting, learnt.seen) == (None, 0, 4)


@given(st.lists(st.tuples(st.integers(0, 64), st.floats(0, 10)), min_size=1, max_size=12))
def test_a_meter_never_says_less_than_nothing(seen: list[tuple[int, float]]) -> None:
    meter, now = Meter(), 0.0
    for number, (pages, seconds) in enumerate(seen):
        meter.begin(number, pages, now)
        now += seconds
        meter.end(number, pages, now)
    start, slope = meter.line()
    assert start >= 0
    assert slope >= 0
    if not any(pages for pages, _ in seen):
        assert (start, slope) == (inf, inf)  # it takes its time and brings nothing


def test_what_runs_side_by_side_is_seen_by_the_ends() -> None:
    meter = Meter()
    for number in range(4):
        meter.begin(number, 4, 0.0)
    meter.end(0, 4, 1.0)
    assert list(meter.arrivals([4, 4], 1.0)) == pytest.approx([3 * 4 * 0.25 + 1.0, 3 + 2.0])  # as if one by one
    for number in range(1, 4):
        meter.end(number, 4, 1.0)
    assert list(meter.arrivals([4, 4, 4], 1.0)) == [1.0, 1.0, 1.0]
    for number in range(4, 8):
        meter.begin(number, 4, 1.0)
    for number in range(4, 8):
        meter.end(number, 4, number - 2.0)  # now they come one after the other, a second each
    first, second = meter.arrivals([4, 4], 6.0)
    assert second - first > 0.25


def test_what_hangs_is_expected_to_hang_on() -> None:
    meter = Meter()
    meter.begin(1, 4, 0.0)
    meter.end(1, 4, 1.0)
    assert meter.delay(1.0) == 0.0
    meter.begin(2, 4, 1.0)
    assert meter.delay(1.5) == pytest.approx(1.0)
    assert meter.delay(31.0) == 30.0
    meter.end(2, 4, 31.0, learn=False)
    assert meter.delay(31.0) == 0.0
    assert meter.line() == (0.0, 0.25)  # nothing was learnt from it
    meter.end(7, 1, 32.0)  # nobody knows it
    assert meter.statistics().seen == 1


def test_the_plan_is_the_best_of_all() -> None:
    seen = Seen(rate=100.0)  # 0.1 s a page
    for pages in (1, 4):
        seen.see(TransferKind.FETCH, pages, 0.15 + 0.05 * pages)
        seen.see(TransferKind.LOAD, pages, 0.01 * pages)
    plan = seen.planner.plan(0, 10)
    # Transfers of 4, 4, 2 pages: 0.35, 0.35 and 0.25 s for what computes in 0.4, 0.4 and 0.2 s.
    assert (plan.planned_host, plan.planned_storage, plan.declined) == (0, 8, 2)
    assert plan.compute_seconds == pytest.approx(1.0)
    assert plan.seconds == pytest.approx(0.7 + 0.08 + 0.2)
    assert plan.saved == pytest.approx(0.02)
    assert seen.planner.plan(3, 2).planned == 3  # two pages more would take 0.25 s, and compute in 0.2
    assert seen.planner.plan(0, 0).planned == 0
    more = seen.planner.plan(0, 10, coming=4)
    assert more.planned_storage >= 4  # what is under way is not unmade
    assert seen.planner.plan(0, 10, coming=4, queued=4).seconds > more.seconds


def test_a_queue_in_front_makes_it_dearer() -> None:
    seen = Seen(rate=100.0)
    for pages in (1, 4):
        seen.see(TransferKind.FETCH, pages, 0.05 * pages)
    assert seen.planner.plan(0, 4).planned == 4
    for number in range(100, 110):
        seen.planner.begun(transfer(number, TransferKind.FETCH, 4))
    assert seen.planner.plan(0, 4).planned == 0
    assert seen.planner.plan(4, 4).planned == 4  # HOST does not wait for STORAGE


def test_a_slow_host_is_not_used_either() -> None:
    seen = Seen(rate=100.0)
    assert seen.planner.plan(5, 0).planned_host == 5  # until it is known
    seen.see(TransferKind.LOAD, 4, 4.0)
    plan = seen.planner.plan(5, 0)
    assert (plan.planned, plan.declined) == (0, 5)


def test_a_tier_that_fails_is_a_slow_one() -> None:
    seen = Seen(rate=100.0)
    seen.see(TransferKind.FETCH, 4, 0.1)
    assert seen.planner.plan(0, 4).planned == 4
    for _ in range(5):
        seen.see(TransferKind.FETCH, 4, 1.0, good=0)
    assert seen.planner.plan(0, 4).planned == 0


def test_looking_is_bounded() -> None:
    seen = Seen()
    planner = seen.planner
    assert planner.explore(TransferKind.FETCH, 0) == 0
    assert planner.explore(TransferKind.FETCH, 100) == EXPLORE_PAGES
    assert planner.explore(TransferKind.LOAD, 3) == 3
    seen.clock.advance(EXPLORE_SECONDS - 0.1)
    assert planner.explore(TransferKind.FETCH, 100) == 0
    seen.clock.advance(0.1)
    planner.begun(transfer(1, TransferKind.FETCH, 4))
    assert planner.explore(TransferKind.FETCH, 100) == 0  # what is under way will tell
    planner.ended(transfer(1, TransferKind.FETCH, 4, cancelled=True), [PageResult.FAILED] * 4)
    assert planner.statistics().storage.seen == 0
    assert planner.explore(TransferKind.FETCH, 100) == EXPLORE_PAGES
    assert planner.statistics().explored == 3


def test_an_answer_is_waited_for_where_that_pays() -> None:
    seen = Seen(rate=100.0)
    seen.see(TransferKind.FETCH, 4, 0.1)
    planner = seen.planner
    assert planner.could_pay(0, 0, 20)
    assert not planner.probe_pays(0, 0, 20)  # nobody knows how long the answer takes
    planner.probed(seconds=0.2, asked=10, found=10)
    assert planner.probe_pays(0, 0, 20)
    assert not planner.probe_pays(0, 0, 1)
    for _ in range(60):
        planner.probed(seconds=0.2, asked=10, found=0)
    assert not planner.probe_pays(0, 0, 20)  # it never has anything
    seen.see(TransferKind.FETCH, 4, 100.0)
    assert not planner.could_pay(0, 0, 20)


@given(
    host=st.integers(0, 50),
    storage=st.integers(0, 50),
    coming=st.integers(0, 50),
    times=st.lists(
        st.tuples(st.sampled_from([TransferKind.LOAD, TransferKind.FETCH]), st.integers(0, 8), st.floats(0, 5))
    ),
    rate=st.floats(1e-3, 1e9),
)
def test_a_plan_is_never_worse_than_computing(
    host: int, storage: int, coming: int, times: list[tuple[TransferKind, int, float]], rate: float
) -> None:
    seen = Seen(rate=rate)
    for kind, pages, seconds in times:
        seen.see(kind, pages, seconds)
    plan = seen.planner.plan(host, storage)
    assert 0 <= plan.seconds <= plan.compute_seconds
    assert plan.planned + plan.declined == host + storage
    assert not plan.planned_storage or plan.planned_host == host
    more = seen.planner.plan(host, storage, coming=min(coming, storage))
    assert more.planned_storage >= min(coming, storage)
