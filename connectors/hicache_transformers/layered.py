"""Prompts whose pages are in the memory of the model's GPU: read and written layer by layer."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

import hicache
from hicache.errors import HicacheError
from hicache.records import PageResult
from hicache.runtime.layered import LayeredLoad
from hicache_transformers.convert import PageShape
from hicache_transformers.sources import Tokens, allocated
from hicache_transformers.storing import PageWriter, store_at_once
from hicache_transformers.tiers import Computed, DeviceTier

__all__ = ["LayeredEmbeddedRequest", "LayeredTier"]


@runtime_checkable
class LayeredTier(DeviceTier, Protocol):
    """A device tier whose readers wait for each layer of copies that still bring pages."""

    def pages(self, slots: npt.NDArray[np.int64], under_way: LayeredLoad | None = None) -> Any:
        """As in `DeviceTier`; and what still brings some of them."""
        ...

    def index(self, slots: npt.NDArray[np.int64]) -> Any:
        """Slots as `write_layer` takes them."""
        ...

    def write_layer(
        self, layer: int, index: Any, pair: tuple[Any, Any], *, row: int, begin: int
    ) -> hicache.WriterEvent:
        """Write one layer of pages into private slots: those of a row, from token `begin` on.

        Returns:
            The event behind which they are written.
        """
        ...


class LayeredEmbeddedRequest:
    """See `LayeredRequest`.

    Args:
        request: the prompt.
        tier: where its pages are.
        shape: sizes of a page.
    """

    def __init__(self, request: hicache.Request, tier: LayeredTier, shape: PageShape) -> None:
        self._request = request
        self._tier = tier
        self._shape = shape
        self._slots: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._stored = 0
        self._over = False  # slots were taken and not written: nothing behind them can be stored
        self._under_way: LayeredLoad | None = None

    def load(self, *, layered: bool = False) -> None:
        """See `PageRequest`."""
        if layered:
            self._under_way = self._request.load_by_layer()
            self._slots = self._under_way.slots
        else:
            self._slots = self._request.load()

    @property
    def usable(self) -> int:
        """See `PageRequest`."""
        return len(self._slots)

    def pages(self) -> Any:
        """See `PageRequest`."""
        return self._tier.pages(self._slots, self._under_way)

    def arrived(self) -> None:
        """See `PageRequest`. What was withdrawn meanwhile is stored again: the model has it."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._slots = under_way.finish()
            if any(result is not PageResult.OK for copy in under_way.copies for result in copy.results or ()):
                raise HicacheError("pages that were on their way to the GPU did not come")

    def extend(self, more: Tokens) -> None:
        """See `LayeredRequest`."""
        self._request.extend(more)

    def writer(self, *, wait: bool) -> PageWriter | None:
        """See `LayeredRequest`."""
        if self._under_way is not None:
            if not wait and any(not copy.finished for copy in self._under_way.copies):
                return None
            self.arrived()
        request = self._request
        first = self.usable + self._stored
        wanted = request.tokens // self._shape.tokens - first
        if wanted <= 0 or request.bypassed or self._over:
            return None
        slots = allocated(request, wanted)
        self._stored += len(slots)
        return _Writer(self, slots, first=first, dropped=wanted - len(slots))

    def store(self, more: Tokens, computed: Computed) -> tuple[int, int]:
        """See `PageRequest`."""
        return store_at_once(self, more, computed)

    def close(self, *, aborted: bool = False) -> None:
        """See `PageRequest`."""
        self._request.close(aborted=aborted)


class _Writer:
    """See `PageWriter`."""

    def __init__(
        self, request: LayeredEmbeddedRequest, slots: npt.NDArray[np.int64], *, first: int, dropped: int
    ) -> None:
        self.done = 0
        self._owner = request
        self._count = len(slots)
        self._first = first
        self._dropped = dropped
        self._index = request._tier.index(slots)
        self._ready: hicache.WriterEvent = hicache.READY

    def layer(self, pair: tuple[Any, Any], *, row: int, padding: int) -> None:
        if self._count:
            owner = self._owner
            begin = padding + self._first * owner._shape.tokens
            self._ready = owner._tier.write_layer(self.done, self._index, pair, row=row, begin=begin)
        self.done += 1

    def commit(self) -> tuple[int, int]:
        owner = self._owner
        if self._count:
            owner._request.commit(upto=(self._first + self._count) * owner._shape.tokens, ready=self._ready)
        return self._count, self._dropped

    def abandon(self) -> None:
        self._owner._over = True
