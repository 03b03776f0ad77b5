"""Which larger size is worth it: against all sizes, one after another."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.analytics.analysis.knee import WORTH_DOUBLING
from hicache.analytics.analysis.larger import Larger, by_distances, by_estimates
from hicache.core.whatif import WhatIfPoint


def distances_of(*groups: tuple[int, int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Pairs of how many pages, and of their distance."""
    return np.sort(np.repeat([distance for _, distance in groups], [count for count, _ in groups])).astype(np.int64)


def test_the_smallest_size_that_has_the_gain() -> None:
    assert by_distances(distances_of((50, 10), (30, 200)), 1000, 20) == (201, 0.03)


@pytest.mark.parametrize(
    ("groups", "pages"),
    [
        ((), 20),
        (((80, 10),), 20),  # it hits all that can be hit
        (((50, 10), (9, 200)), 20),  # less than a point
        (tuple((4, 40 * 2**step) for step in range(8)), 20),  # more in all, and no doubling adds a point
    ],
)
def test_no_size_is_worth_it(groups: tuple[tuple[int, int], ...], pages: int) -> None:
    assert by_distances(distances_of(*groups), 1000, pages) is None


@pytest.mark.parametrize("seed", range(20))
def test_against_all_sizes(seed: int) -> None:
    """It gains what it says, no smaller one is as good, and no doubling from there on adds a point."""
    random = np.random.default_rng(seed)
    distances = np.sort(random.lognormal(4, 1.5, 300).astype(np.int64))
    asked, pages = 1000, int(random.integers(1, 200))

    def hit(size: int) -> float:
        return int((distances < size).sum()) / asked

    found = by_distances(distances, asked, pages)
    if found is None:
        assert hit(2 * pages) - hit(pages) < WORTH_DOUBLING
        return
    size, gain = found
    assert size > pages
    assert gain == pytest.approx(hit(size) - hit(pages))
    assert gain >= WORTH_DOUBLING
    assert hit(size) > hit(size - 1), "a smaller one hits less"
    assert hit(2 * size) - hit(size) < 2 * WORTH_DOUBLING, "what is beyond pays no more"


def estimate(factor: float, hit_rate: float | None, error: float | None = 0.0) -> WhatIfPoint:
    return WhatIfPoint(factor, int(100 * factor), 0, hit_rate, error)


def test_the_smallest_estimate_that_is_about_as_good_as_the_largest() -> None:
    found = by_estimates([estimate(0.5, 0.1), estimate(1, 0.2), estimate(2, 0.3, 0.02), estimate(4, 0.305, 0.02)])
    assert found == Larger(100, 200, 0.2, 0.3, 0.02)
    assert found.gain == pytest.approx(0.08)
    assert found.told(2**20) == "from 100 MiB to 200 MiB (200 pages): 20.0 % -> 30.0 ± 2.0 % of the pages asked"
    assert found.told(None).startswith("from 100 to 200 pages: ")


def test_what_tells_nothing_is_left_out() -> None:
    assert by_estimates([]) is None
    assert by_estimates([estimate(1, None, None), estimate(2, None, None)]) is None
    assert by_estimates([estimate(1, 0.2), estimate(2, 0.9, 0.5)]) is None
    assert by_estimates([estimate(1, 0.2, 0.6), estimate(2, 0.9)]) is None
