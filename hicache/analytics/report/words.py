"""Figures and names as people read them."""

from __future__ import annotations

from math import isfinite
from typing import Final

from hicache.units import format_size

__all__ = ["count", "duration", "ending", "percent", "points", "shown", "squeezed", "visible"]

LONGEST_NAME: Final = 200
_TIMES: Final = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def visible(text: str, most: int = LONGEST_NAME) -> str:
    """Text of others in one line: what cannot be seen, or turns what comes after it around, is written as its code."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(each if each.isprintable() else f"\\u{ord(each):04x}" for each in cut)


def ending(text: str, most: int) -> str:
    """The end of a long name, which tells files apart."""
    return visible(text if len(text) <= most else "…" + text[1 - most :])


def squeezed(text: str, most: int) -> str:
    """Text of at most so many characters: the middle gives way, as names differ at their ends."""
    end = most // 2
    return text if len(text) <= most else text[: max(0, most - 1 - end)] + "…" + text[len(text) - end :]


def count(value: float) -> str:
    """A number of things."""
    return f"{value:,.0f}"


def percent(value: float, digits: int = 2) -> str:
    """A fraction of 1."""
    return f"{100 * value:.{digits}f} %"


def points(value: float) -> str:
    """A difference of two fractions, in points of 100."""
    shown_value = round(100 * value, 2)
    return f"{shown_value + 0.0:+.2f}"


def share(part: float, whole: float) -> str:
    """A share; n/a of nothing."""
    return percent(part / whole) if whole else "n/a"


def duration(seconds: float) -> str:
    """Seconds in the unit that fits."""
    size = abs(seconds)
    if not size:
        return "0 s"
    unit, name = next(((unit, name) for unit, name in _TIMES if size >= unit), _TIMES[-1])
    return f"{significant(seconds / unit)} {name}"


def significant(value: float) -> str:
    """Three significant digits, or all before the point."""
    if not value or not isfinite(value):
        return "0"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def shown(value: float, form: str) -> str:
    """A value of an axis; see `Axis.form`."""
    if form == "percent":
        return percent(value)
    if form == "seconds":
        return duration(value)
    if form == "bytes":
        return format_size(round(value))
    return count(value) if form == "count" else significant(value)
