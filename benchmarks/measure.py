"""What all benchmarks share: timing, and the form of a row."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        name, value, unit: the figure.
        reference: the same unit, measured in the same run, or None where there is nothing to compare with.
        ratio: value / reference.
        bar: what `value` may be at most, or at least where `at_least` is said.
        ok: whether the bar was met.
        reason: why it was not, or what the reader should know.
    """

    name: str
    value: float
    unit: str
    reference: float | None
    ratio: float | None
    bar: float
    ok: bool
    reason: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def row(
    name: str,
    value: float,
    unit: str,
    *,
    bar: float,
    reference: float | None = None,
    at_least: bool = False,
    reason: str = "",
) -> Row:
    ok = value >= bar if at_least else value <= bar
    if not ok and not reason:
        reason = f"{value:.4g} {unit} where {'at least' if at_least else 'at most'} {bar:.4g} is asked"
    ratio = None if not reference else value / reference
    return Row(name, value, unit, reference, ratio, bar, ok, reason)


def microseconds(work: Callable[[], object], *, seconds: float = 0.4) -> float:
    """The median time of one call, over about that many seconds, after a warm-up."""
    for _ in range(3):
        work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 20:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6
