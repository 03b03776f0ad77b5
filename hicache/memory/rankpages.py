"""One rank's pages in a pool's arenas: as arrays where they lie, or copied to and from the rank's canonical form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.core.arenas import Run
from hicache.errors import CacheClosed, GeometryError
from hicache.memory.base import Bytes, Slots
from hicache.units import whole_number

__all__ = ["RankMemory", "RankPages"]

_WORD: Final = 8
_LARGE: Final = 4 << 20  # bytes


@dataclass(frozen=True, slots=True)
class RankMemory:
    """An arena's memory as a rank uses it.

    Attributes:
        rows: all slots, (slots, stride).
        runs: where the rank's bytes lie in a slot.
        writes: whether the rank writes them; else another does, and writes here leave them out.
    """

    rows: Bytes
    runs: tuple[Run, ...]
    writes: bool


class RankPages:
    """A rank's pages. Any thread may copy; who may touch which slot is the caller's business.

    Args:
        page_bytes: length of the rank's canonical page.
        memories: the arenas that the rank maps; their runs cover the page exactly.

    Attributes:
        page_bytes: as given.
        slots: number of slots.
        contiguous: whether a page is one run in one arena, so that `page` can give it as it lies.
        writes: whether the rank writes anything at all.

    Raises:
        GeometryError: runs that leave a gap, overlap, or leave their slots.
    """

    def __init__(self, page_bytes: int, memories: Sequence[RankMemory]) -> None:
        self.page_bytes = page_bytes
        self._memories: tuple[RankMemory, ...] | None = tuple(memories)
        self.slots = _common_slots(memories)
        _check_cover(page_bytes, memories)
        self.contiguous = len(memories) == 1 and len(memories[0].runs) == 1
        offsets = [number for memory in memories for run in memory.runs for number in _numbers(run)]
        self._aligned = not any(number % _WORD for number in (page_bytes, *offsets))
        self.writes = any(memory.writes for memory in memories)

    @property
    def memories(self) -> tuple[RankMemory, ...]:
        """The arenas, for those who copy without this.

        Raises:
            CacheClosed: closed.
        """
        return self._open()

    def page(self, slot: int) -> Bytes:
        """One page as it lies in shared memory, (page_bytes,): writable where the mapping is; not a copy.

        Raises:
            GeometryError: no such slot, or a page that does not lie in one run.
            CacheClosed: closed.
        """
        memories = self._open()
        if not self.contiguous:
            raise GeometryError(
                "a page of this rank lies in several places: use read_page and write_page, or gather and scatter"
            )
        run = memories[0].runs[0]
        page: Bytes = memories[0].rows[self._checked(slot), run.slot_offset : run.slot_offset + run.length]
        return page

    def read_page(self, slot: int) -> Bytes:
        """A copy of one page, (page_bytes,).

        Raises:
            GeometryError: no such slot.
            CacheClosed: closed.
        """
        return self.read(slot, 0, self.page_bytes)

    def write_page(self, slot: int, data: bytes | bytearray | memoryview | npt.NDArray[Any]) -> None:
        """Write one page; what another rank writes is left out.

        Raises:
            GeometryError: no such slot, or another number of bytes.
            CacheClosed: closed.
        """
        source = _as_bytes(data)
        if source.size != self.page_bytes:
            raise GeometryError(f"{source.size} bytes are no page of {self.page_bytes} bytes")
        self.write(slot, 0, source)

    def read(self, slot: int, offset: int, length: int) -> Bytes:
        """A copy of part of a page, (length,).

        Raises:
            GeometryError: no such slot, or a range that leaves the page.
            CacheClosed: closed.
        """
        self._check_range(offset, length)
        out = np.empty(length, np.uint8)
        for _, place, at in self._places(slot, offset, offset + length):
            _copy_run(out[at], place)
        return out

    def pieces(self, slot: int, most: int) -> Iterator[tuple[int, memoryview]]:
        """One page in pieces where it lies, in order: (offset, at most `most` bytes). Not copies.

        Raises:
            GeometryError: no such slot.
            CacheClosed: closed.
        """
        rows = sorted(
            ((run, memory.rows[self._checked(slot)]) for memory in self._open() for run in memory.runs),
            key=lambda pair: pair[0].page_offset,
        )
        for run, row in rows:
            for start in range(0, run.length, most):
                at = run.slot_offset + start
                yield run.page_offset + start, row[at : at + min(most, run.length - start)].data

    def write(self, slot: int, offset: int, data: bytes | bytearray | memoryview | npt.NDArray[Any]) -> None:
        """Write part of a page; what another rank writes is left out. Raises as `read` does."""
        source = _as_bytes(data)
        self._check_range(offset, source.size)
        for memory, place, at in self._places(slot, offset, offset + source.size):
            if memory.writes:
                _copy_run(place, source[at])

    def gather(self, slots: Slots, out: Bytes) -> None:
        """Copy pages out of shared memory. Releases the GIL while bytes move.

        Args:
            slots: (n,), any integers.
            out: (n, page_bytes), written.

        Raises:
            GeometryError: a slot that does not exist, or another shape; nothing was copied.
            CacheClosed: closed.
        """
        for _, shared, own in self._parts(slots, out):
            _copy(own, shared)

    def scatter(self, slots: Slots, pages: Bytes) -> None:
        """Copy pages into shared memory; what another rank writes is left out. As `gather` otherwise."""
        for memory, shared, own in self._parts(slots, pages):
            if memory.writes:
                _copy(shared, own)

    def close(self) -> None:
        """Let go of the arenas' memory. Idempotent."""
        self._memories = None

    def _open(self) -> tuple[RankMemory, ...]:
        if self._memories is None:
            raise CacheClosed("these pages are closed: their memory is let go")
        return self._memories

    def _checked(self, slot: int) -> int:
        number = slot if type(slot) is int else whole_number(slot)
        if number is None or not 0 <= number < self.slots:
            raise GeometryError(f"host slot {slot!r:.40} does not exist: the pool has {self.slots}")
        return number

    def _check_range(self, offset: int, length: int) -> None:
        if not 0 <= offset <= offset + length <= self.page_bytes:
            raise GeometryError(f"bytes {offset} to {offset + length} are not inside a page of {self.page_bytes} bytes")

    def _width(self, pages: Bytes) -> int:
        """Bytes of the elements as which pages can be copied: words where all of it is aligned for them, else 1."""
        aligned = not (pages.ctypes.data | pages.strides[0]) % _WORD and pages.strides[1] == 1
        return _WORD if self._aligned and aligned else 1

    def _places(self, slot: int, start: int, end: int) -> Iterator[tuple[RankMemory, Bytes, slice]]:
        """Where the bytes [start, end) of a page lie, each with its place in that range."""
        memories, slot = self._open(), self._checked(slot)
        for memory in memories:
            for run in memory.runs:
                low, high = max(start, run.page_offset), min(end, run.page_offset + run.length)
                if low < high:
                    at = run.slot_offset + low - run.page_offset
                    yield memory, memory.rows[slot, at : at + high - low], slice(low - start, high - start)

    def _parts(self, slots: Slots, pages: Bytes) -> Iterator[tuple[RankMemory, npt.NDArray[Any], npt.NDArray[Any]]]:
        """Where parts of pages lie in shared memory, each beside its place in `pages`, as elements of one width.

        Raises:
            GeometryError: a slot that does not exist, or another shape; before the first part.
        """
        memories, spans = self._open(), self._spans(slots, pages)
        width = self._width(pages)
        own = _words(pages, width)
        for memory in memories:
            rows = _words(memory.rows, width)
            for run in memory.runs:
                inner = _columns(run.slot_offset, run.length, width)
                outer = _columns(run.page_offset, run.length, width)
                for first, slot, count in spans:
                    yield memory, rows[slot : slot + count, inner], own[first : first + count, outer]

    def _spans(self, slots: Slots, pages: Bytes) -> list[tuple[int, int, int]]:
        """Neighbouring slots are copied at once: (first index, first slot, count)."""
        numbers = np.asarray(slots)
        if pages.shape != (len(numbers), self.page_bytes) or pages.dtype != np.uint8:
            raise GeometryError(
                f"pages must be bytes of shape {(len(numbers), self.page_bytes)}, not {pages.dtype} {pages.shape}"
            )
        if not len(numbers):
            return []
        if numbers.dtype.kind not in "iu" or int(numbers.min()) < 0 or int(numbers.max()) >= self.slots:
            raise GeometryError(f"slots must be integers of 0 to {self.slots - 1}")
        numbers = numbers.astype(np.int64, copy=False)
        edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        return [(first, int(numbers[first]), end - first) for first, end in pairwise(edges)]


def _as_bytes(data: bytes | bytearray | memoryview | npt.NDArray[Any]) -> Bytes:
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def _copy(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    # One large copy is a memcpy. Of a page's size, memcpy takes an instruction (rep movsb) that costs twice as much on
    # some processors where memory comes in pages of 4 KiB, as shared memory does: there numpy's own loop is better.
    # Both release the GIL.
    if target.dtype == np.uint8 or target.nbytes >= _LARGE:
        np.copyto(target, source)
    else:
        np.positive(source, out=target)


def _copy_run(target: Bytes, source: Bytes) -> None:
    if (target.ctypes.data | source.ctypes.data | target.size) % _WORD:
        np.copyto(target, source)
    else:
        _copy(target.view(np.uint64), source.view(np.uint64))


def _words(array: Bytes, width: int) -> npt.NDArray[Any]:
    return array if width == 1 else array.view(np.uint64)


def _columns(offset: int, length: int, width: int) -> slice:
    return slice(offset // width, (offset + length) // width)


def _numbers(run: Run) -> tuple[int, int, int]:
    return run.page_offset, run.slot_offset, run.length


def _common_slots(memories: Sequence[RankMemory]) -> int:
    found = {memory.rows.shape[0] for memory in memories}
    if len(found) != 1:
        raise GeometryError(f"a rank's arenas must have the same number of slots, and these have {sorted(found)}")
    return int(found.pop())


def _check_cover(page_bytes: int, memories: Sequence[RankMemory]) -> None:
    end = 0
    for run, stride in sorted(
        ((run, memory.rows.shape[1]) for memory in memories for run in memory.runs),
        key=lambda pair: pair[0].page_offset,
    ):
        if run.page_offset != end or run.length <= 0:
            raise GeometryError(f"the runs of a rank's page have a gap or overlap at byte {min(run.page_offset, end)}")
        if not 0 <= run.slot_offset <= run.slot_offset + run.length <= stride:
            raise GeometryError(f"a run of {run.length} bytes at {run.slot_offset} leaves its slot of {stride} bytes")
        end = run.page_offset + run.length
    if end != page_bytes:
        raise GeometryError(f"the runs of a rank's page cover {end} of its {page_bytes} bytes")
