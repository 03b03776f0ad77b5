"""Where a curve of diminishing returns bends."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Final

WORTH_DOUBLING: Final = 0.01
"""Hit rate that twice the memory must add at least to be called worth it."""

NEAR_IDEAL: Final = 0.001
"""Hit rate below the ideal within which a size is said to reach it: a tenth of a point."""

UNTOLD: Final = 0.5
"""Error of an estimated hit rate from which on it tells nothing."""


def enough(gains: Sequence[float], ideal: float) -> int | None:
    """Index of the smallest size that reaches the ideal; None where none does.

    Args:
        gains: hit rates at sizes, which ascend.
        ideal: hit rate without a limit.
    """
    return next((place for place, gain in enumerate(gains) if ideal - gain <= NEAR_IDEAL), None)


def knee(sizes: Sequence[float], gains: Sequence[float]) -> int | None:
    """Index of the largest size whose last doubling still added `WORTH_DOUBLING`; None where none did.

    A hit rate over the logarithm of the memory has no one bend by itself, and methods that seek the point farthest
    from a chord move with the range that is looked at. What twice the memory adds does not.

    Args:
        sizes: above 0, ascending.
        gains: hit rates at these sizes.
    """
    found = None
    for place, size in enumerate(sizes):
        if gains[place] - _at(sizes, gains, size / 2) >= WORTH_DOUBLING:
            found = place
    return found


def _at(sizes: Sequence[float], gains: Sequence[float], size: float) -> float:
    """The gain at a size, between points in a straight line over the logarithm; 0 of nothing."""
    if size < sizes[0]:
        return gains[0] * size / sizes[0]
    place = max(at for at, known in enumerate(sizes) if known <= size)
    if place == len(sizes) - 1:
        return gains[place]
    step = log2(size / sizes[place]) / log2(sizes[place + 1] / sizes[place])
    return gains[place] + step * (gains[place + 1] - gains[place])
