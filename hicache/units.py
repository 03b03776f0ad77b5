"""Numbers and sizes as people give them."""

from __future__ import annotations

import operator
import re
from typing import Any, Final

from hicache.errors import ConfigError

__all__ = ["LARGEST_SIZE", "format_size", "parse_size", "whole_number"]

LARGEST_SIZE: Final = 2**60
"""Sizes above one EiB are mistakes of the unit, not wishes."""

_UNITS: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "pb": 1000**5,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "pib": 2**50,
}
_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,9}))?\s*([A-Za-z]*)")


def whole_number(value: Any) -> int | None:
    """The value as an int where it is an integer, numpy's included; None for a bool and all else."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of numpy has the method, and only single numbers an answer
        return None


def parse_size(text: str) -> int:
    """Bytes of a size such as `20GiB`, `1.5 MB` or `4096`; a plain number is bytes, the case of the unit is free.

    Args:
        text: a number, and a unit of B, kB, MB, GB, TB, PB (powers of 1000) or KiB to PiB (powers of 1024).

    Raises:
        ConfigError: another form, not a whole number of bytes, or above one EiB.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[3].lower()) if found else None
    if found is None or unit is None:
        raise ConfigError(f"size {text!r:.60} is not a number with a unit: write it like 512MiB, 20GiB or 1.5GB")
    fraction = found[2] or ""
    scaled = int(found[1] + fraction) * unit
    digits: int = 10 ** len(fraction)
    size, rest = divmod(scaled, digits)
    if rest and unit == 1:
        raise ConfigError(f"size {text!r:.60} is not a whole number of bytes")
    if size > LARGEST_SIZE:
        raise ConfigError(f"size {text!r:.60} is above {format_size(LARGEST_SIZE)}: check the unit")
    return size


def format_size(size: int) -> str:
    """A size for people: `1.5 GiB`, `64 KiB`, `-3 B`. Two decimals at most, none where they are zero."""
    value = float(size)
    for unit in _BINARY:
        if abs(value) < 1024 or unit == _BINARY[-1]:
            break
        value /= 1024
    return f"{value:.2f}".rstrip("0").rstrip(".") + f" {unit}"
