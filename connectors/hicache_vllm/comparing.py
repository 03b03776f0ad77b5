"""Whether two pages are the same numbers, as far as the engine's arithmetic repeats itself."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError

__all__ = ["Comparison"]

_TOLERANCE: Final = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
"""Relative difference of whole pages that other batches and chunks may cause; other weights cause ones near 1."""


class Comparison:
    """Compares pages of one dtype.

    Args:
        dtype: torch's name of the elements.
        tolerance: relative difference that is allowed; None: what the dtype allows.

    Raises:
        ConfigError: a dtype whose numbers are not known here.
    """

    def __init__(self, dtype: str, tolerance: float | None = None) -> None:
        if dtype not in _TOLERANCE:
            raise ConfigError(f"pages of {dtype} cannot be compared: set audit_probability to 0")
        self._dtype = dtype
        self._tolerance = _TOLERANCE[dtype] if tolerance is None else tolerance

    def outcome(self, one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> str:
        """How they differ: "equal" in all bits, "close" within the tolerance, else "different"."""
        if np.array_equal(one, other):
            return "equal"
        return "close" if self.difference(one, other) <= self._tolerance else "different"

    def difference(self, one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> float:
        """Length of the difference over that of `other`; infinite where a number is none."""
        first, second = (self._numbers(page) for page in (one, other))
        if not (np.isfinite(first).all() and np.isfinite(second).all()):
            return float("inf")
        return float(np.linalg.norm(first - second) / max(float(np.linalg.norm(second)), 1e-30))

    def _numbers(self, page: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        if self._dtype == "bfloat16":
            return (page.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return page.view(self._dtype).astype(np.float32)
