"""What a cache is to the calls that use it, wherever it keeps its pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

import hicache
from hicache.core.identity import Adapter
from hicache_transformers.tiers import Computed, PageSpan

__all__ = ["PageRequest", "PageSource", "Separation", "Tokens", "allocated"]

Tokens: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Separation:
    """What separates a call's pages from others' besides their tokens."""

    adapter: Adapter | None = None
    tenant: str | None = None
    salt: str | None = None


class PageRequest(Protocol):
    """One prompt. For one thread at a time."""

    @property
    def usable(self) -> int:
        """Leading pages that came from the cache; 0 before `load`."""
        ...

    def load(self, *, layered: bool = False) -> None:
        """Wait until its pages are here, at most until the deadline.

        With `layered`, and where the source can, copies to the GPU are not waited for: spans wait for each layer when
        it is put together.
        """
        ...

    def pages(self) -> Any:
        """These pages, for a span of the source: a sequence, to be read only; valid until `arrived`."""
        ...

    def arrived(self) -> None:
        """The model has all layers of these pages: whoever wants to see them does not ask again.

        Waits for the end of copies that bring them. What came counts only if this does not raise.

        Raises:
            HicacheError: they did not come as they should have.
        """
        ...

    def store(self, more: Tokens, computed: Computed) -> tuple[int, int]:
        """Publish the pages that were computed: of the prompt, and of `more` behind it.

        Returns:
            How many were handed over, and for how many, at the end, there was no room.

        Raises:
            HicacheError: it could not be done.
        """
        ...

    def close(self, *, aborted: bool = False) -> None:
        """Let go of the pages. Idempotent."""
        ...


class PageSource(Protocol):
    """A cache. Thread-safe.

    Attributes:
        cache: below it: `hicache.EmbeddedCache`, or `hicache.ConnectedCache`.
    """

    cache: Any

    def begin(self, tokens: Tokens, whose: Separation, *, deadline: float | None) -> PageRequest:
        """Look a prompt up, and begin to fetch its pages. The deadline, in seconds, runs from now on."""
        ...

    def span(self, *, batch: int, tokens: int) -> PageSpan:
        """A span of zeros, for its requests' pages."""
        ...

    def flush(self) -> None:
        """Wait until what was stored is where it should be."""
        ...

    def clear(self, whose: Separation) -> None:
        """Forget the pages of one adapter, tenant and salt; errors are those of `PrefixCache.clear`."""
        ...

    def close(self) -> None:
        """Bring what is under way to its end, and let go of everything. Idempotent."""
        ...


def allocated(request: hicache.Request | hicache.ConnectedRequest, wanted: int) -> npt.NDArray[np.int64]:
    """Slots for so many pages, or for as many as there is room: the beginning is what others can use."""
    try:
        return request.allocate(wanted)
    except hicache.OutOfSlots as full:
        return request.allocate(min(wanted, full.free + full.evictable))
