"""One prompt whose pages pass between a service and the model's GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

import hicache
from hicache.cuda.blocks import good
from hicache.cuda.kept import keep
from hicache.cuda.lanes import CudaCopy
from hicache.errors import HicacheError
from hicache.rpc.client.loans import Loan
from hicache_transformers.gpuspans import GpuPages, Slots
from hicache_transformers.sources import Tokens, allocated
from hicache_transformers.storing import PageWriter, store_at_once
from hicache_transformers.tiers import Computed
from hicache_transformers.writers import Place, Writer, WriterInPieces, buffers

if TYPE_CHECKING:
    from hicache_transformers.connected import ConnectedGpuPages

__all__ = ["GpuRequest"]

_NONE: Final[Slots] = np.empty(0, np.int64)


@dataclass(slots=True)
class _UnderWay:
    """Pages on their way into slots of the window."""

    copy: CudaCopy
    loan: Loan
    slots: Slots

    def right(self) -> int:
        """Leading pages that came, and were still the request's behind the copy. Waits for its end."""
        self.copy.wait(None)
        if self.copy.stranded:  # nobody knows whether its bytes still move: nothing of it is ever given back
            return 0
        right = min(good(self.copy), self.loan.good())
        self.loan.read(right)
        self.loan.close()
        return right


class GpuRequest:
    """See `LayeredRequest`. Its verbs are called by the thread that generates and by the keeper, one at a time."""

    def __init__(self, request: hicache.ConnectedRequest, source: ConnectedGpuPages) -> None:
        self.verbs = threading.Lock()
        self.request = request
        self.source = source
        self.closed = False
        self.stranded = False  # the device has failed under copies of it, which keep what they touch
        self.lost = False  # pages that were to be stored were not: none behind them can be
        self._known = 0  # leading pages that the service has
        self._usable = 0  # of these, those that have come
        self._stored = 0
        self._under_way: _UnderWay | None = None
        self._checked = False
        self._pages = GpuPages(_NONE)
        self._writer: PageWriter | None = None
        self._behind = False  # whether the keeper has something of it

    # ---- loading

    def load(self, *, layered: bool = False) -> None:
        """See `PageRequest`."""
        count = self._known = len(self.request.load())
        if not count:
            return
        window = self.source.window
        loan = self.request.lend(0, count)
        slots = None if loan is None else window.reserve(count)
        if loan is None or slots is None:
            self._load_in_pieces(loan, count)
            return
        try:
            right = loan.good()
            copy = window.blocks.load(
                loan.memory, loan.slots[:right], slots[:right].tolist(), inside=0, behind=window.ends()
            )
        except BaseException:
            loan.close()
            window.release(slots)
            raise
        self._under_way = _UnderWay(copy, loan, slots)
        self._usable = right
        if not layered:
            self._usable, self._checked = self._under_way.right(), True
        self._pages = GpuPages(slots[: self._usable], (copy,) if layered else ())

    def _load_in_pieces(self, loan: Loan | None, count: int) -> None:
        """Through the window's lane into memory of its own; through main memory where the service's is out of reach."""
        window, done = self.source.window, 0
        try:
            apart = window.apart(count)
            with window.lane() as lane:
                while done < count:
                    part = lane[: min(len(lane), count - done)]
                    came = self._piece(loan, part, done)
                    window.take_apart(part[:came], apart, at=done)
                    done += came
                    if came < len(part):
                        break
            if loan is not None:
                done = min(done, loan.good())
                loan.read(done)
        finally:
            if loan is not None:
                loan.close()
        self._usable = done
        self._pages = GpuPages(np.arange(done), source=apart)

    def _piece(self, loan: Loan | None, slots: Slots, first: int) -> int:
        """Pages from the index `first` on into slots; how many have come."""
        blocks, ends = self.source.window.blocks, self.source.window.ends()
        if loan is not None:
            host = loan.slots[first : first + len(slots)]
            copy = blocks.load(loan.memory, host, slots.tolist(), inside=0, behind=ends)
            copy.wait(None)
            return good(copy)
        done = 0
        for at, buffer in buffers(blocks, len(slots)):
            came = self.request.read_into(buffer, first=first + at)
            copy = blocks.load(None, np.arange(came), slots[at : at + came].tolist(), inside=0, behind=ends)
            copy.wait(None)
            done = at + good(copy)
            if done < at + len(buffer):
                break
        return done

    @property
    def usable(self) -> int:
        """See `PageRequest`."""
        return self._usable

    def pages(self) -> GpuPages:
        """See `PageRequest`."""
        return self._pages

    def arrived(self) -> None:
        """See `PageRequest`."""
        way, self._under_way = self._under_way, None
        if way is None:
            self._pages = GpuPages(_NONE)
            return
        right = self._usable if self._checked else way.right()
        self._give_back(way)
        if right < self._usable:
            raise HicacheError(f"{self._usable - right} of {self._usable} pages from the service did not come")

    def _give_back(self, way: _UnderWay) -> None:
        if way.copy.stranded:
            self.stranded = True
        else:
            self.source.window.release(way.slots)

    # ---- storing

    def extend(self, more: Tokens) -> None:
        """See `LayeredRequest`."""
        with self.verbs:
            self.request.extend(more)

    def writer(self, *, wait: bool) -> PageWriter | None:
        """See `LayeredRequest`."""
        request, window = self.request, self.source.window
        with self.verbs:
            first = self._known + self._stored
            wanted = request.tokens // window.shape.tokens - first
            if wanted <= 0 or request.bypassed or request.lost is not None or self.lost:
                return None
            slots = window.reserve(wanted)
            if slots is None and not wait:
                return None
            try:
                count = len(allocated(request, wanted))
                loan = request.lend(first, count, write=True) if count else None
            except BaseException:
                window.release(_NONE if slots is None else slots)
                raise
        self._stored += count
        if loan is not None and not (loan.good() == count and all(one.writes for one in loan.memory.pages.memories)):
            loan.close()
            loan = None
        place = Place(first, count, wanted - count, loan)
        if slots is None:
            self._writer = WriterInPieces(self, place)
            return self._writer
        window.release(slots[count:])
        self._writer = Writer(self, place, slots[:count])
        return self._writer

    def committed(self, finish: Callable[[], None]) -> None:
        """A writer has all layers; the rest is for the keeper."""
        self._writer, self._behind = None, True
        self.source.keeper.add(finish)

    def abandoned(self, let_go: Callable[[], None]) -> None:
        """A writer comes to nothing: its slots were never written, and nothing behind them can be stored."""
        self.lost = True
        self.committed(let_go)

    def store(self, more: Tokens, computed: Computed) -> tuple[int, int]:
        """See `PageRequest`. What is stored is counted when that is known, and here it is nothing."""
        return store_at_once(self, more, computed)

    def close(self, *, aborted: bool = False) -> None:
        """See `PageRequest`. Behind copies that still use its pages, which the keeper waits for."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abandon()
        way, self._under_way = self._under_way, None
        self._pages = GpuPages(_NONE)
        if self.closed:
            return
        self.closed = True

        def end() -> None:
            if way is not None:
                if not self._checked:
                    way.right()
                self._give_back(way)
            if self.stranded:
                keep(self, "pages of a service, and the lease that holds them")
                return
            with self.verbs:
                self.request.close(aborted=aborted)

        if way is None and not self._behind:
            end()
        else:
            self.source.keeper.add(end)
