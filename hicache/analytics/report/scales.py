"""From values to places on a plot, and where its ticks stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, isclose, log2, log10
from typing import Final

from hicache.analytics.report.content import Axis
from hicache.analytics.report.words import significant
from hicache.units import format_size

__all__ = ["Scale", "scale_of", "tick_text"]

_GUTTER: Final = 0.07
"""Share of a logarithmic scale that 0 has for itself."""

_STEPS: Final = (1.0, 2.0, 5.0, 10.0)
_FINE: Final = tuple(part * 10.0**power for power in range(-6, 0) for part in (1, 2, 5))
_SECONDS: Final = (
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10_800,
    21_600,
    43_200,
    86_400,
    864_000,
)
_FEW: Final = 8  # values so few that each of them has a tick
_TIMES: Final = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 36_000.0, 86_400.0, 864_000.0)
_UNITS: Final = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_LARGE: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Scale:
    """Where values lie.

    Attributes:
        least, most: values at its ends; of a logarithmic one above 0.
        log: whether it is one.
        zero: whether a logarithmic one has a place for 0 before `least`.
        ticks: values that have one, ascending.
    """

    least: float
    most: float
    log: bool
    zero: bool
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        """The place of a value: 0 at the begin, 1 at the end; values beyond an end lie on it."""
        if not self.log:
            return min(1.0, max(0.0, (value - self.least) / (self.most - self.least)))
        begin = _GUTTER if self.zero else 0.0
        if value <= 0:
            return 0.0
        found = log10(value / self.least) / log10(self.most / self.least)
        return begin + (1 - begin) * min(1.0, max(0.0, found))


def scale_of(axis: Axis, values: Iterable[float], *, ticks: int) -> Scale:
    """A scale on which all values lie.

    Args:
        axis: what it is.
        values: those that are drawn.
        ticks: about how many at most.
    """
    found = sorted(set(values) | {end for end in (axis.least, axis.most) if end is not None})
    if axis.log:
        above = [value for value in found if value > 0]
        return _logarithmic(axis, above or [1.0], zero=len(above) < len(found), ticks=ticks)
    least, most = (found[0], found[-1]) if found else (0.0, 1.0)
    least = min(least, 0.0) if axis.least is None else axis.least
    if most <= least:
        most = least + (1.0 if axis.form != "percent" else 0.01)
    step = _step((most - least) / max(ticks, 1), axis.form)
    first, last = floor(least / step + 1e-9), ceil(most / step - 1e-9)
    ends = (first * step, last * step) if axis.most is None else (first * step, most)
    marks = tuple(number * step for number in range(first, last + 1) if number * step <= ends[1] * (1 + 1e-9))
    return Scale(ends[0], ends[1], False, False, marks)


def _step(rough: float, form: str) -> float:
    """The least round step that is not smaller; whole numbers of things, round ones of the unit that is shown."""
    if form == "seconds" and rough >= 1:
        return next((step for step in _SECONDS if step >= rough), _round(rough / 86_400.0) * 86_400.0)
    if form == "bytes":
        return max(1.0, 2.0 ** ceil(log2(rough)))
    return max(1.0, _round(rough)) if form == "count" else _round(rough)


def _round(rough: float) -> float:
    power = 10.0 ** floor(log10(rough))
    return next(step * power for step in _STEPS if step * power >= rough * (1 - 1e-9))


def _logarithmic(axis: Axis, values: Sequence[float], *, zero: bool, ticks: int) -> Scale:
    least, most = values[0], values[-1]
    if isclose(least, most):
        least, most = least / 2, most * 2
    if axis.each and len(values) <= _FEW:
        return Scale(least, most, True, zero, ((0.0,) if zero else ()) + tuple(values))
    if axis.form == "seconds":
        known = [time for time in _TIMES if least <= time <= most]
        if len(known) < 3:
            known = [float(time) for time in (*_FINE, *_SECONDS) if least <= time <= most]
    else:
        known = [10.0**power for power in range(ceil(log10(least) - 1e-9), floor(log10(most) + 1e-9) + 1)]
        if len(known) < 3:
            known = sorted({*known, *(each * part for each in (least, *known) for part in _ones(each, least, most))})
    every = max(1, ceil(len(known) / max(ticks, 1)))
    chosen = known[::every] or [least, most]
    return Scale(least, most, True, zero, ((0.0,) if zero else ()) + tuple(chosen))


def _ones(value: float, least: float, most: float) -> list[float]:
    """Factors that lead from a value to round ones on the scale."""
    power = 10.0 ** floor(log10(value))
    return [part * power / value for part in (1, 2, 5, 10, 20, 50) if least <= part * power <= most]


def tick_text(value: float, form: str) -> str:
    """A tick's value, as short as it can be."""
    if form == "percent":
        return f"{significant(100 * value)} %"
    if form == "seconds":
        unit, name = next(((unit, name) for unit, name in _UNITS if value >= unit * (1 - 1e-9)), _UNITS[-1])
        return f"{significant(value / unit)} {name}" if value else "0"
    if form == "bytes":
        return format_size(round(value)) if value else "0"
    for size, name in _LARGE:
        if abs(value) >= size:
            return f"{significant(value / size)}{name}"
    return significant(value)
