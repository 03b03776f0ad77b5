"""Pages on their way from a model on a GPU to a service: put into slots of the window, copied down, and published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from hicache.cuda.blocks import CudaBlocks, good
from hicache.cuda.events import CudaEvent
from hicache.cuda.lanes import CudaCopy
from hicache.errors import HicacheError
from hicache.rpc.client.loans import Loan
from hicache_transformers.convert import Bytes
from hicache_transformers.gpuspans import Slots

if TYPE_CHECKING:
    from hicache_transformers.gpurequest import GpuRequest

__all__ = ["Place", "Writer", "WriterInPieces", "buffers"]

STAGED_BYTES: Final = 32 << 20
"""Of pages in main memory on their way over the network."""

STEP_BYTES: Final = 1 << 20
"""Of layers that are copied down together, at least: each copy costs an event and a wake-up."""


def buffers(blocks: CudaBlocks, pages: int) -> Iterator[tuple[int, Bytes]]:
    """Pinned memory of the calling thread for so many pages, piece by piece; and the number of the first page."""
    step = max(1, min(pages, STAGED_BYTES // blocks.page_bytes))
    for at in range(0, pages, step):
        yield at, blocks.buffer(step)[: min(step, pages - at)]


@dataclass(frozen=True, slots=True)
class Place:
    """Where pages of a prompt go.

    Attributes:
        first: index of the first.
        count: how many.
        dropped: how many more there were, for which the service had no room.
        loan: of their slots; None where the service's memory is out of reach.
    """

    first: int
    count: int
    dropped: int
    loan: Loan | None

    def written(self, pages: int) -> int:
        """So many leading ones were copied into the loan; how many of them count."""
        if self.loan is None:
            return pages
        pages = min(pages, self.loan.good())
        self.loan.wrote(pages)
        return pages


class _Base:
    """What both kinds do when the bytes are on their way."""

    def __init__(self, request: GpuRequest, place: Place) -> None:
        self.done = 0
        self.dropped = place.dropped
        self._request = request
        self._window = request.source.window
        self._place = place

    def _publish(self, written: int) -> None:
        """Pages are in the service's memory. By the keeper."""
        request, place = self._request, self._place
        try:
            written = 0 if request.lost else written
            if written:
                with request.verbs:
                    request.request.commit(upto=(place.first + written) * self._window.shape.tokens)
        except Exception as error:
            request.source.counters.failed("storing pages", error)
            written = 0
        request.lost = request.lost or written < place.count
        request.source.counters.add(stored_pages=written, dropped_pages=place.count - written)

    def _failed(self, pages: int) -> None:
        error = HicacheError(f"{pages} of {self._place.count} pages could not be copied from the GPU")
        self._request.source.counters.failed("storing pages", error)

    def _over_network(self, first: int, slots: Slots, behind: CudaEvent) -> int:
        """Send slots, pages from the index `first` on; how many leading ones have arrived."""
        blocks, done = self._window.blocks, 0
        for at, buffer in buffers(blocks, len(slots)):
            part = slots[at : at + len(buffer)]
            copy = blocks.store(None, np.arange(len(part)), part.tolist(), behind=behind)
            copy.wait(None)
            if (right := good(copy)) < len(part):
                self._failed(len(slots) - at - right)
            with self._request.verbs:
                done = at + self._request.request.write_from(buffer[:right], first=first + at)
            if done < at + len(part):
                break
        return done

    def _close_loan(self) -> None:
        if self._place.loan is not None and not self._request.stranded:
            self._place.loan.close()


class Writer(_Base):
    """See `PageWriter`. Has a slot of the window for each page.

    Args:
        request: whose pages.
        place: where they go.
        slots: of the window; given back when all has ended.
    """

    def __init__(self, request: GpuRequest, place: Place, slots: Slots) -> None:
        super().__init__(request, place)
        self._slots = slots
        self._index: torch.Tensor | None = None
        self._event: CudaEvent | None = None
        self._begun = 0
        self._copies: list[CudaCopy] = []

    def layer(self, pair: tuple[Any, Any], *, row: int, padding: int) -> None:
        """See `PageWriter`."""
        window = self._window
        begin = padding + self._place.first * window.shape.tokens
        if self._index is None:
            self._index = window.index(self._slots)
        with window.use(writes=True) as used:
            window.scatter(self.done, self._index, pair, row=row, begin=begin)
        self._event = used[0]
        self.done += 1
        if self._place.loan is not None:
            self._copy_down(self._place.loan, used[0])

    def _copy_down(self, loan: Loan, behind: CudaEvent) -> None:
        layers = self._window.shape.layers
        size = (self.done - self._begun) * self._window.shape.page_bytes // layers * len(self._slots)
        if (size < STEP_BYTES and self.done < layers) or loan.good() < len(self._slots):
            return  # what is lost stays so: no more is written there, and nothing is published
        part = (self._begun, self.done)
        copy = self._window.blocks.store(loan.memory, loan.slots, self._slots.tolist(), behind=behind, layers=part)
        self._copies.append(copy)
        self._begun = self.done

    def commit(self) -> tuple[int, int]:
        """See `PageWriter`."""
        self._request.committed(self._finish)
        return 0, self.dropped

    def abandon(self) -> None:
        """See `PageWriter`."""
        self._request.abandoned(self._let_go)

    def _finish(self) -> None:
        """By the keeper, behind the last layer."""
        written = 0
        try:
            if self._place.loan is None:
                assert self._event is not None, "committed behind its last layer"
                written = self._over_network(self._place.first, self._slots, self._event)
            else:
                written = self._place.written(self._copied())
        except Exception as error:
            self._request.source.counters.failed("storing pages", error)
        finally:
            self._let_go()
        self._publish(written)

    def _copied(self) -> int:
        """Leading pages of which every layer was copied."""
        for copy in self._copies:
            copy.wait(None)
        if self._begun < self._window.shape.layers:
            return 0
        right = min(good(copy) for copy in self._copies)
        if right < len(self._slots):
            self._failed(len(self._slots) - right)
        return right

    def _let_go(self) -> None:
        for copy in self._copies:
            copy.wait(None)
        if any(copy.stranded for copy in self._copies):
            self._request.stranded = True
            return
        self._close_loan()
        self._window.release(self._slots)


class WriterInPieces(_Base):
    """See `PageWriter`. For more pages than the window has slots for: they wait until all layers are there."""

    def __init__(self, request: GpuRequest, place: Place) -> None:
        super().__init__(request, place)
        self._layers: list[tuple[Any, Any]] = []
        self._row = self._padding = 0

    def layer(self, pair: tuple[Any, Any], *, row: int, padding: int) -> None:
        """See `PageWriter`."""
        self._layers.append(pair)
        self._row, self._padding = row, padding
        self.done += 1

    def commit(self) -> tuple[int, int]:
        """See `PageWriter`. Waits for the copies."""
        done, count = 0, self._place.count
        try:
            with self._window.lane() as lane:
                while done < count:
                    part = lane[: min(len(lane), count - done)]
                    came = self._piece(part, done)
                    done += came
                    if came < len(part):
                        break
            done = self._place.written(done)
        except BaseException:
            self.abandon()
            raise
        self._layers.clear()
        self._close_loan()
        self._request.committed(lambda: self._publish(done))
        return 0, self.dropped

    def abandon(self) -> None:
        """See `PageWriter`."""
        self._layers.clear()
        self._request.abandoned(self._close_loan)

    def _piece(self, slots: Slots, at: int) -> int:
        window, place = self._window, self._place
        first, index = place.first + at, window.index(slots)
        with window.use(writes=True) as used:
            for layer, pair in enumerate(self._layers):
                begin = self._padding + first * window.shape.tokens
                window.scatter(layer, index, pair, row=self._row, begin=begin)
        if place.loan is None:
            return self._over_network(first, slots, used[0])
        if place.loan.good() < place.count:
            return 0
        host = place.loan.slots[at : at + len(slots)]
        copy = window.blocks.store(place.loan.memory, host, slots.tolist(), behind=used[0])
        copy.wait(None)
        self._request.stranded |= copy.stranded
        if (right := good(copy)) < len(slots):
            self._failed(place.count - at - right)
        return right
