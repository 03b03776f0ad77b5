"""Simulations whose answers are known: by hand, by the stack algorithm, and by replaying the same trace."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.analytics.analysis.columns import Columns, read_columns
from hicache.analytics.analysis.curves import exact_curve
from hicache.analytics.analysis.distances import Uses
from hicache.analytics.run import ReplayOptions, replay
from hicache.analytics.simulate.advice import advice
from hicache.analytics.simulate.result import SimulationResult
from hicache.analytics.simulate.run import Simulation
from hicache.analytics.simulate.settings import Costs, SimulationSettings
from hicache.analytics.trace import TraceRequest, pack_ids
from hicache.analytics.traces import open_trace
from hicache.errors import ConfigError

UNIT = 16
PAGE = UNIT * 1000  # bytes, at 1,000 a token


def columns_of(*requests: tuple[float, list[int]], unit: int = UNIT, tail: int = 0) -> Columns:
    """A trace of (seconds, ids); prompts are of whole pages, or `tail` tokens shorter."""
    return read_columns(
        TraceRequest(
            time=at,
            ids=pack_ids(ids),
            unit=unit,
            input_tokens=unit * len(ids) - tail,
            output_tokens=1,
            scope="",
            place=f"line {number}",
        )
        for number, (at, ids) in enumerate(requests)
    )


COSTS: dict[str, Any] = {
    "token_bytes": 1000,
    "prefill_rate": 1000.0,
    "device_link": 1e6,
    "storage_read": 1e5,
    "storage_write": 1e5,
    "storage_latency": 0.01,
}


def simulated(columns: Columns, *, costs: dict[str, Any] | None = None, **given: Any) -> SimulationResult:
    simulation = Simulation(columns, SimulationSettings(costs=Costs(**(COSTS | (costs or {}))), **given))
    result = simulation.run()
    simulation.check()
    assert result.problems == ()
    reasons = sum(result.misses_by_reason.values())
    assert result.pages_asked == result.pages_device + result.pages_host + result.pages_storage + reasons
    assert reasons == result.pages_missed
    assert result.tokens_asked == result.tokens_hit + result.tokens_missed + result.tokens_unaligned_tail
    assert min(result.tokens_hit, result.tokens_missed, result.tokens_unaligned_tail) >= 0
    return result


def missed(result: SimulationResult) -> dict[str, int]:
    return {reason: pages for reason, pages in result.misses_by_reason.items() if pages}


def test_one_tier_is_the_stack(small_trace: Path) -> None:
    columns = read_columns(open_trace([small_trace]))
    for point in exact_curve(columns, Uses(columns), [6000]).points:
        result = simulated(columns, device=point.pages, instant=True)
        assert result.hit_rate_pages == point.hit_rate_pages
        assert result.hit_rate_tokens == pytest.approx(point.hit_rate_tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"eviction": "slru", "write_policy": "write_through"},
        {"eviction": "lfu", "write_policy": "write_through_selective"},
        {"eviction": "lru", "write_policy": "write_back"},
    ],
)
def test_two_tiers_are_the_replayed_cache(small_trace: Path, options: dict[str, str]) -> None:
    """It is the same core: tier by tier and reason by reason."""
    columns = read_columns(itertools.islice(open_trace([small_trace]), 400))
    mine = simulated(columns, device=400, host=1200, instant=True, **options)
    theirs = replay(
        open_trace([small_trace]), ReplayOptions(device_pages=400, host_pages=1200, requests=400, **options)
    )
    for name in ("pages_asked", "pages_device", "pages_host", "pages_missed", "hit_rate_tokens", "hit_rate_requests"):
        assert getattr(mine, name) == pytest.approx(getattr(theirs, name)), name
    assert missed(mine) == {reason: pages for reason, pages in theirs.misses_by_reason.items() if pages}


def test_times_by_hand() -> None:
    """Four pages are computed; then they are in the device; then only in the host."""
    columns = columns_of((0.0, [1, 2, 3, 4]), (10.0, [1, 2, 3, 4]), (20.0, [5, 6, 7, 8]), (30.0, [1, 2, 3, 4]))
    result = simulated(columns, device=4, host=16)
    prefill, copy = 64 / 1000, 4 * PAGE / 1e6
    assert result.first_token_seconds.most == pytest.approx(prefill)
    assert result.first_token_seconds.mean == pytest.approx((prefill + 0 + prefill + copy) / 4)
    assert result.first_token_seconds_without.mean == pytest.approx(prefill)
    assert (result.pages_device, result.pages_host, result.pages_missed) == (4, 4, 8)
    assert (result.gpu_seconds, result.gpu_seconds_saved) == pytest.approx((2 * prefill, 2 * prefill))
    device, host, storage = result.traffic
    assert (host.bytes_written, host.bytes_read, host.write_amplification) == (8 * PAGE, 4 * PAGE, 1.0)
    assert (device.bytes_written, device.write_amplification) == (12 * PAGE, 1.5)
    assert (storage.bytes_written, result.pages_put) == (0, 0)


def test_storage_takes_its_time() -> None:
    columns = columns_of((0.0, [1, 2]), (50.0, [3, 4]), (100.0, [5, 6]), (150.0, [1, 2]))
    result = simulated(columns, device=2, host=2, storage=None)
    assert result.pages_storage == 2
    fetch = 0.01 + 2 * PAGE / 1e5
    up = 2 * PAGE / 1e6
    # Both pages are believed to be there, so nothing is asked; each comes in a transfer of its own or both in one.
    assert result.first_token_seconds.most == pytest.approx(fetch + up, rel=0.2)
    assert (result.pages_put, result.pages_put_never_read) == (6, 4)


def test_prefetch_decides_how_long_storage_is_waited_for() -> None:
    columns = columns_of((0.0, [1, 2]), (50.0, [3, 4]), (100.0, [5, 6]), (150.0, [1, 2]))
    result = simulated(columns, device=2, host=2, storage=None, prefetch="best_effort")
    assert (result.pages_storage, missed(result)) == (0, {"cold": 6, "late": 2})
    slow = {"storage_read": 100.0}
    result = simulated(columns, device=2, host=2, storage=None, prefetch="timeout", costs=slow)
    assert missed(result) == {"cold": 6, "late": 2}
    assert result.first_token_seconds.most < 0.5


def test_a_prompt_on_its_way_is_nobodys_hit() -> None:
    """The second request comes while the first is computed; the third when it is done."""
    columns = columns_of((0.0, [1, 2, 3, 4]), (0.01, [1, 2, 3, 4]), (1.0, [1, 2, 3, 4]))
    result = simulated(columns, device=16)
    assert (result.pages_device, missed(result)) == (4, {"cold": 8})
    assert simulated(columns, device=16, instant=True).pages_device == 8


def test_requests_wait_for_slots() -> None:
    """Two prompts of four pages, room for four: the second computes when the first has ended."""
    columns = columns_of((0.0, [1, 2, 3, 4]), (0.01, [5, 6, 7, 8]))
    result = simulated(columns, device=4)
    assert result.requests_refused == 0
    assert result.first_token_seconds.most == pytest.approx(0.064 + 0.064 - 0.01)


def test_every_reason_is_counted_exactly() -> None:
    columns = columns_of(
        (0.0, [1, 2, 3]),  # three cold
        (10.0, [4, 5, 6]),  # three cold; they evict the others
        (20.0, [1, 2, 3]),  # three evicted
        (30.0, list(range(100, 110))),  # ten that never fit
    )
    result = simulated(columns, device=3)
    assert missed(result) == {"cold": 6, "evicted": 3, "over_budget": 10}
    assert result.requests_refused == 1
    told = list(advice(result))
    assert "over_budget" in told[0]
    assert "a larger --device would keep them" in told[2]


def test_pages_of_other_instances_have_their_reason() -> None:
    same = [1, 2, 3]
    columns = columns_of((0.0, same), (10.0, same), (20.0, same), (30.0, [*same, 4]))
    turns = simulated(columns, device=16, instances=2, routing="round_robin")
    # The second goes to an instance that has nothing, the others to where it is all.
    assert missed(turns) == {"cold": 4, "other_instance": 3}
    assert [part.requests for part in turns.instances] == [2, 2]
    knowing = simulated(columns, device=16, instances=2, routing="prefix_aware")
    assert missed(knowing) == {"cold": 4}
    assert [part.requests for part in knowing.instances] == [4, 0]
    assert "other_instance" in "".join(advice(turns))


def test_sticky_routing_keeps_sessions_together() -> None:
    columns = columns_of((0.0, [1]), (1.0, [9]), (2.0, [1, 2]), (3.0, [9, 10]), (4.0, [1, 2, 3]))
    result = simulated(columns, device=16, instances=2, routing="sticky", instant=True)
    assert missed(result) == {"cold": 5}
    assert [part.requests for part in result.instances] == [3, 2]


def test_instances_share_the_storage() -> None:
    columns = columns_of((0.0, [1, 2]), (10.0, [1, 2]))
    result = simulated(columns, device=4, host=4, storage=None, instances=2)
    assert (result.pages_storage, missed(result)) == (2, {"cold": 2})


def test_a_store_of_a_size_evicts_what_is_oldest() -> None:
    requests = [(10.0 * n, [10 * n, 10 * n + 1]) for n in range(1, 6)]
    again = (100.0, [10, 11])
    kept = simulated(columns_of(*requests, again), device=2, host=2, storage=None, instant=True)
    gone = simulated(columns_of(*requests, again), device=2, host=2, storage=4, instant=True)
    assert (kept.pages_storage, gone.pages_storage) == (2, 0)
    assert gone.pages_missed == 12
    assert gone.pages_put_never_read == gone.pages_put


def test_admission_writes_less() -> None:
    requests = [(float(n), [n]) for n in range(20)] + [(float(n), [0]) for n in range(20, 25)]
    all_of_it = simulated(columns_of(*requests), device=4, host=64, storage=None, instant=True)
    twice = simulated(columns_of(*requests), device=4, host=64, storage=None, instant=True, admission=2)
    assert all_of_it.pages_put == 20
    assert twice.pages_put == 1
    assert "--admission 2" in "".join(advice(all_of_it))
    assert "--admission 2" not in "".join(advice(twice))


def test_slow_storage_sheds_and_says_so() -> None:
    requests = [(0.001 * n, [10 * n, 10 * n + 1]) for n in range(50)]
    costs = {"storage_write": 1e4, "token_bytes": 2**24, "device_link": 1e12}
    result = simulated(columns_of(*requests), device=200, host=200, storage=None, costs=costs)
    assert result.shed_by_reason["queue_full"] > 0
    assert "the queue to storage was full (room for" in "".join(advice(result))


def test_prompts_whose_copies_are_not_made_are_told() -> None:
    """Prompts of 200 large pages, one after another, faster than their link."""
    requests = [(0.001 * n, list(range(1000 * n, 1000 * n + 200))) for n in range(8)]
    costs = {"token_bytes": 2**24, "device_link": 1e10, "prefill_rate": 1e12}
    result = simulated(columns_of(*requests), device=2000, host=2000, costs=costs)
    assert result.shed_by_reason["copy_queue_full"] > 0
    told = "".join(advice(result))
    assert "were not copied to host memory" in told
    assert "at most 256 pages" in told
    quick = simulated(columns_of(*requests), device=2000, host=2000, costs=costs | {"device_link": 1e15})
    assert "copied" not in "".join(advice(quick))


def test_load_or_recompute() -> None:
    """A host link that is slower than the engine: what it has is computed again."""
    requests = [(float(n), [n % 8, 100 + n % 8]) for n in range(32)]
    costs = {"device_link": 2e4, "prefill_rate": 1e5}
    loads = simulated(columns_of(*requests), device=8, host=64, costs=costs)
    decides = simulated(columns_of(*requests), device=8, host=64, costs=costs, decide=True)
    assert decides.first_token_seconds.mean < loads.first_token_seconds.mean
    assert missed(decides)["over_budget"] > 0
    assert "--decide" in "".join(advice(loads))


@pytest.mark.parametrize("page_size", [4, 8, 16, 32, 64])
def test_page_sizes(page_size: int) -> None:
    """Two prompts of 52 tokens; 48 of them, three blocks of 16, are the same."""
    columns = columns_of((0.0, [1, 2, 3, 4]), (10.0, [1, 2, 3, 5]), tail=12)
    result = simulated(columns, device=None, page_size=page_size)
    assert (result.page_tokens, result.page_bytes) == (page_size, page_size * 1000)
    whole = 52 // page_size * 2
    assert result.pages_asked == whole
    assert result.pages_device == min(48 // page_size, 52 // page_size)
    assert result.tokens_hit == 48 // page_size * page_size
    assert result.tokens_unaligned_tail == 2 * (52 % page_size)


def test_the_traces_own_pages_have_partial_tails() -> None:
    columns = columns_of((0.0, [1, 2]), (10.0, [1, 2]), tail=10)
    result = simulated(columns, device=None)
    assert (result.pages_asked, result.pages_device, result.tokens_hit) == (4, 2, 22)


def test_pages_that_do_not_go_with_the_trace() -> None:
    with pytest.raises(ConfigError, match="--page-size 10 does not divide"):
        simulated(columns_of((0.0, [1])), page_size=10)
    mixed = read_columns(TraceRequest(0.0, pack_ids([1]), unit, unit, 1, "", "line") for unit in (16, 64))
    with pytest.raises(ConfigError, match="blocks of 16, 64 tokens"):
        simulated(mixed)


@pytest.mark.case("STAT-2")
@pytest.mark.parametrize("requests", [[], [(0.0, [])] * 3])
def test_nothing_is_no_number_that_is_none(requests: list[tuple[float, list[int]]]) -> None:
    result = simulated(columns_of(*requests), device=4, host=4, storage=4)
    json.dumps(result.document(), allow_nan=False)
    assert (result.hit_rate_pages, result.hit_rate_tokens, result.hit_rate_requests) == (0.0, 0.0, 0.0)
    assert list(advice(result)) == ["Nothing was asked, so nothing can be said."]


@pytest.mark.case("STAT-5")
def test_each_rate_has_its_own_weights() -> None:
    """A prompt of 1,000 tokens that hits, and ten that do not: itself before, and nine of 100."""
    long = list(range(10))
    short = [(float(n), [100 + n]) for n in range(20, 29)]
    result = simulated(columns_of((0.0, long), (10.0, long), *short, unit=100), device=None)
    assert result.hit_rate_tokens == pytest.approx(1000 / 2900)
    assert result.hit_rate_pages == pytest.approx(10 / 29)
    assert result.hit_rate_requests == pytest.approx(1 / 11)
    tiers = result.hit_rate_pages_device + result.hit_rate_pages_host + result.hit_rate_pages_storage
    assert tiers == pytest.approx(result.hit_rate_pages)


def test_stopping_keeps_what_was_reached() -> None:
    columns = columns_of(*[(float(n), [n]) for n in range(200)])
    seen: list[int] = []
    simulation = Simulation(columns, SimulationSettings(device=8))
    result = simulation.run(stopped=lambda: len(seen) == 2, progress=lambda done, _: seen.append(done))
    assert (result.interrupted, result.requests, result.pages_asked) == (True, 128, 128)
    simulation.check()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": 0}, "--device 0: must be 1 to"),
        ({"host": -1}, "--host -1"),
        ({"storage": 5}, "--storage needs a host tier"),
        ({"eviction": "best"}, "best"),
        ({"prefetch": "never"}, "--prefetch never: use one of"),
        ({"routing": "random"}, "--routing random: use one of"),
        ({"instances": 0}, "--instances 0"),
        ({"speed": 0.0}, "--speed 0"),
        ({"speed": float("nan")}, "--speed nan"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SimulationSettings(**given)


@pytest.mark.parametrize("given", [{"prefill_rate": 0.0}, {"token_bytes": 0}, {"storage_latency": -1.0}])
def test_costs_that_cannot_be(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be (0|1 or more)"):
        Costs(**given)


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="tables of device and host pools"):
        Simulation(columns_of((0.0, [1])), SimulationSettings(device=2**31, host=2**31, instances=1000))


PROMPTS = st.lists(st.tuples(st.floats(0, 3), st.lists(st.integers(0, 4), max_size=6)), min_size=1, max_size=25)


@settings(max_examples=60)
@given(
    prompts=PROMPTS,
    device=st.one_of(st.none(), st.integers(1, 12)),
    host=st.integers(0, 12),
    storage=st.one_of(st.none(), st.integers(0, 12)),
    eviction=st.sampled_from(["lru", "lfu", "slru", "priority"]),
    write_policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
    prefetch=st.sampled_from(["best_effort", "timeout", "wait_complete"]),
    routing=st.sampled_from(["round_robin", "sticky", "prefix_aware"]),
    instances=st.integers(1, 3),
    instant=st.booleans(),
    decide=st.booleans(),
    page_size=st.sampled_from([None, 4, 16, 32]),
)
def test_sums_hold_whatever_is_simulated(prompts: list[tuple[float, list[int]]], **given: Any) -> None:
    """asked = hits by tier + misses by reason, every request ends, and no invariant breaks (in `simulated`)."""
    if not given["host"]:
        given["storage"] = 0
    columns = columns_of(*[(sum(gap for gap, _ in prompts[:n]), ids) for n, (_, ids) in enumerate(prompts, start=1)])
    result = simulated(columns, **given)
    assert sum(part.requests for part in result.instances) == result.requests == len(prompts)
    assert sum(part.pages_asked for part in result.instances) == result.pages_asked
    # What forgets nothing and waits for nothing hits the most.
    ideal = simulated(columns, device=None, instant=True, page_size=given["page_size"])
    assert result.pages_asked - result.pages_missed <= ideal.pages_device
    assert result.pages_put_never_read <= result.pages_put
    assert np.isfinite(result.first_token_seconds.mean)
    json.dumps(result.document(), allow_nan=False)
