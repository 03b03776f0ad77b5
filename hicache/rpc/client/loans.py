"""Pages of a lease whose bytes somebody else copies: a device, straight from and to shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicache.core.residency import Slots
from hicache.errors import CacheClosed

if TYPE_CHECKING:
    from hicache.rpc.client.memory import SharedPages
    from hicache.rpc.client.pages import LeasedPages

__all__ = ["Loan"]


class Loan:
    """Pages that somebody copies himself, without this client in between. A context manager, for one thread at a time.

    Attributes:
        memory: where they are.
        slots: theirs, in order.
    """

    def __init__(self, pages: LeasedPages, memory: SharedPages, slots: Slots, words: npt.NDArray[np.uint64]) -> None:
        self.memory = memory
        self.slots = slots
        self._pages = pages
        self._words = words
        self._read = self._written = 0
        self._open = True

    def good(self) -> int:
        """Leading pages whose slots are still this lease's. To be asked behind a copy out: those it has read rightly.

        In front of a copy in: those that it may write.
        """
        try:
            unchanged = self.memory.unchanged(self.slots, self._words)
        except CacheClosed:
            return 0
        if self._pages.connection.gone():
            return 0  # whoever came after that service may use the slots, and has words of its own
        return len(unchanged) if unchanged.all() else int(np.argmin(unchanged))

    def read(self, pages: int) -> None:
        """So many of them were copied out."""
        self._read += pages

    def wrote(self, pages: int) -> None:
        """So many of them, from the first on, were copied in."""
        self.memory.wrote(self.slots[:pages])
        self._written += pages

    def close(self) -> None:
        """Nothing of them is touched any more. Idempotent."""
        if self._open:
            self._open = False
            self._pages.returned(read=self._read, written=self._written)

    def __enter__(self) -> Loan:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
