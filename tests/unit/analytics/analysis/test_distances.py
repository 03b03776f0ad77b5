"""Stack distances and the curve, against a list that is searched, and against the production tree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.analytics.analysis.columns import Columns, read_columns
from hicache.analytics.analysis.curves import exact_curve, sampled_curve, sizes_of_interest
from hicache.analytics.analysis.distances import Uses, smaller_before, stack_distances
from hicache.analytics.run import ReplayOptions, replay
from hicache.analytics.trace import TraceRequest, pack_ids
from hicache.analytics.traces import open_trace


def requests(prompts: list[list[int]], *, unit: int = 4) -> Iterator[TraceRequest]:
    for number, ids in enumerate(prompts):
        yield TraceRequest(
            time=float(number),
            ids=pack_ids(ids),
            unit=unit,
            input_tokens=unit * len(ids),
            output_tokens=1,
            scope="",
            place=f"line {number}",
        )


def columns_of(prompts: list[list[int]]) -> Columns:
    return read_columns(requests(prompts))


def by_hand(prompts: list[list[int]]) -> list[int]:
    """Places of known pages in a stack that is kept as a list."""
    stack: list[tuple[int, ...]] = []
    found = []
    for ids in prompts:
        pages = [tuple(ids[: end + 1]) for end in range(len(ids))]
        found += [stack.index(page) for page in pages if page in stack]
        for page in reversed(pages):
            if page in stack:
                stack.remove(page)
            stack.insert(0, page)
    return found


def random_prompts(seed: int, *, count: int, heads: int) -> list[list[int]]:
    """Prompts that go on from each other, and from heads of which some are liked more than others."""
    random = np.random.default_rng(seed)
    known: list[list[int]] = [[head] for head in range(heads)]
    fresh = heads
    for _ in range(count):
        base = known[min(int(random.zipf(1.3)) - 1, len(known) - 1)]
        keep = int(random.integers(1, len(base) + 1))
        more = int(random.integers(0, 6))
        known.append(base[:keep] + list(range(fresh, fresh + more)))
        fresh += more
    return known


# Few ids, so that they meet again behind the same past and behind others.
PROMPTS = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=25)


@settings(max_examples=100)
@given(PROMPTS)
def test_distances_are_places_in_the_stack(prompts: list[list[int]]) -> None:
    columns = columns_of(prompts)
    uses = Uses(columns)
    distances = stack_distances(uses, uses.last >= 0, np.ones(columns.references, np.bool_))
    assert distances.tolist() == by_hand(prompts)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 50)), min_size=1, max_size=40))
def test_counting_smaller_values(rows: list[tuple[int, int, int]]) -> None:
    values, ends, limits = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    ends = np.minimum(ends, len(values))
    expected = [int((values[:end] < limit).sum()) for end, limit in zip(ends, limits, strict=True)]
    assert smaller_before(values, ends, limits).tolist() == expected


def test_nothing_has_no_distances() -> None:
    columns = columns_of([])
    assert (columns.requests, columns.references, columns.pages) == (0, 0, 0)
    assert exact_curve(columns, Uses(columns), sizes_of_interest(columns)).points == ()
    assert smaller_before(np.empty(0, np.int64), np.array([0]), np.array([3])).tolist() == [0]


def test_the_curve_is_that_of_the_cache(tmp_path: Path) -> None:
    """The production tree, replayed at each of 20 sizes, hits what the stack says."""
    prompts = random_prompts(0, count=120, heads=5)
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": n, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for n, ids in enumerate(prompts)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = read_columns(open_trace([trace]))
    least = int(columns.length.max())  # smaller ones refuse requests
    sizes = sorted({int(size) for size in np.geomspace(least, columns.pages, 20)})
    for point in exact_curve(columns, Uses(columns), sizes).points:
        replayed = replay(open_trace([trace]), ReplayOptions(device_pages=point.pages))
        assert abs(replayed.hit_rate_pages - point.hit_rate_pages) <= 0.002, point
        assert abs(replayed.hit_rate_tokens - point.hit_rate_tokens) <= 0.002, point


@pytest.mark.parametrize("share", [0.05, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_a_sampled_curve_keeps_its_bound(seed: int, share: float) -> None:
    columns = columns_of(random_prompts(seed, count=2000, heads=20))
    uses, sizes = Uses(columns), sizes_of_interest(columns)
    exact = exact_curve(columns, uses, sizes)
    for luck in range(4):
        sampled = sampled_curve(columns, uses, sizes, share=share, seed=luck)
        assert sampled.method == "sampled"
        assert sampled.sampled_references < columns.references
        for known, guessed in zip(exact.points, sampled.points, strict=True):
            assert abs(known.hit_rate_pages - guessed.hit_rate_pages) <= guessed.error_bound, known
    # At the largest size all that is used again hits, and how much that is, is known without a sample.
    assert sampled.points[-1].hit_rate_pages == pytest.approx(exact.points[-1].hit_rate_pages, abs=0.05)


def test_a_bound_tells_something() -> None:
    """A bound that is always wide would always hold."""
    columns = columns_of(random_prompts(0, count=12_000, heads=20))
    uses = Uses(columns)
    size = columns.pages // 4
    (point,) = sampled_curve(columns, uses, [size], share=0.2).points
    assert point.error_bound < 0.06


def test_too_small_a_sample_claims_nothing() -> None:
    columns = columns_of(random_prompts(1, count=60, heads=5))
    uses = Uses(columns)
    exact, guessed = (
        curve.points[0] for curve in (exact_curve(columns, uses, [8]), sampled_curve(columns, uses, [8], share=0.02))
    )
    assert guessed.error_bound > 0.3
    assert abs(exact.hit_rate_pages - guessed.hit_rate_pages) <= guessed.error_bound


def test_a_sample_of_all_is_exact() -> None:
    columns = columns_of(random_prompts(2, count=200, heads=5))
    uses, sizes = Uses(columns), sizes_of_interest(columns)
    sampled, exact = sampled_curve(columns, uses, sizes, share=1.0), exact_curve(columns, uses, sizes)
    for guessed, known in zip(sampled.points, exact.points, strict=True):
        assert (guessed.hit_rate_pages, guessed.error_bound) == (pytest.approx(known.hit_rate_pages), 0.0)
        assert guessed.hit_rate_tokens == pytest.approx(known.hit_rate_tokens)
