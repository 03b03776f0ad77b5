"""The releases of transformers that this connector was run with."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Final

__all__ = ["NEWEST", "OLDEST", "outside_the_range"]

OLDEST: Final = (4, 57)
NEWEST: Final = (5, 19)


def outside_the_range() -> list[str]:
    """A warning, where the installed release lies outside the range; nothing where it does not, or is not known."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return []
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if OLDEST <= numbers <= NEWEST:
        return []
    known = " to ".join(".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
    return [f"transformers {found} is outside {known}, with which this connector was run"]
