"""Which slots hold bytes that this process has put there, so that none is published with what another left in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.core.residency import Slots

__all__ = ["Written"]


class Written:
    """What was written over one connection, or handed out as memory to be written. Thread-safe; for all its requests.

    A slot's generation word is noted with it: the next lease of that slot has another, and so begins unwritten.

    Args:
        slots: of the service's pool.
    """

    def __init__(self, slots: int) -> None:
        self._noted = np.zeros(max(slots, 1), np.uint64)  # one above the word; 0 is nothing

    def note(self, slots: Slots | int, words: npt.NDArray[Any]) -> None:
        """These slots are written, as what their words say they are."""
        self._noted.put(slots, words + np.uint64(1), mode="clip")

    def lack(self, slots: Slots, words: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which of the slots were not noted with these words, (n,)."""
        lacking: npt.NDArray[np.bool_] = self._noted.take(slots, mode="clip") != words + np.uint64(1)
        return lacking
