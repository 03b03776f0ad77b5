"""Gather and scatter: pages between an engine's layout and canonical form, at the speed of a memory copy.

All ways to move the bytes are single calls that release the GIL. Which is fast was measured, with pages of 8 MiB
against one plain copy of as many bytes:

- With one head group, canonical order is the engine's order inside a plane: a copy through transposed views has 1.0.
  Where a whole slot lies as in canonical form it is a plain copy, which is also cheapest to call.
- With several head groups, that copy reads rows with gaps (gather 0.45 to 0.7), as numpy walks in the order of the
  *destination*. Writing rows by index walks in the order of the source instead, one stream in and one per head group
  out: 0.85 to 1.2. Rows are cut into pieces of at most 256 bytes, since the C library's copy of 512 bytes to 2 KiB
  falls into slower paths.
- Back, the copy through views has 0.9 to 1.0, as it writes in the engine's order; but 0.6 with rows of 1 KiB, where
  a take by index into the planes has 0.9 to 1.1.

By index needs planes that lie in one run and costs a microsecond a call, so small planes and tensors with other
strides take the first way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.memory.base import Bytes, Slots
from hicache.memory.layout import PageLayout

__all__ = ["PageConverter", "Segment"]

_PIECE: Final = 256
"""Largest piece that is moved by index, bytes."""
_SMALLEST_PIECE: Final = 64
"""Below, a piece costs more in the loop around it than in the copy."""
_SMALLEST_PLANE: Final = 32 << 10
"""Below, a call per plane costs more than it saves, bytes."""

_LARGEST_VIEW_ROW: Final = 512
"""Up to here rows of a head group are scattered through views, bytes."""

_Pieces: TypeAlias = npt.NDArray[np.void]
_Index: TypeAlias = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory of consecutive layers of all slots.

    Attributes:
        first: the first layer.
        view: (slot, layer, plane, token, head, row byte).
    """

    first: int
    view: Bytes

    @property
    def end(self) -> int:
        """Behind the last layer."""
        return self.first + int(self.view.shape[1])


class PageConverter:
    """Moves whole pages, or ranges of their layers. Slots are not checked here. Any thread may use it.

    Args:
        page: sizes of a page.
        segments: the engine's memory, layers in order without gaps.
    """

    def __init__(self, page: PageLayout, segments: tuple[Segment, ...]) -> None:
        self.page = page
        self._movers = tuple(_mover(page, segment) for segment in segments)

    def gather(self, slots: Slots, host: Bytes, host_slots: Slots) -> None:
        """Pages to canonical form. `host` is (slots, page_bytes)."""
        runs = list(_runs(slots, host_slots))
        for mover in self._movers:
            for slot, host_slot, count in runs:
                mover.gather(slot, host, host_slot, count)

    def scatter(self, host: Bytes, host_slots: Slots, slots: Slots, layers: tuple[int, int]) -> None:
        """Canonical pages to the engine's layout, layers [first, end)."""
        runs = list(_runs(slots, host_slots))
        for mover in self._movers:
            first, end = max(layers[0], mover.segment.first), min(layers[1], mover.segment.end)
            if first < end:
                for slot, host_slot, count in runs:
                    mover.scatter(slot, host, host_slot, count, (first, end))


class _FlatMover:
    """Copies runs of slots whose bytes lie as in canonical form."""

    def __init__(self, page: PageLayout, segment: Segment) -> None:
        self.page = page
        self.segment = segment
        self._device = segment.view.reshape(segment.view.shape[0], -1)

    def gather(self, slot: int, host: Bytes, host_slot: int, count: int) -> None:
        first, end = self.segment.first * self.page.layer_bytes, self.segment.end * self.page.layer_bytes
        np.copyto(host[host_slot : host_slot + count, first:end], self._device[slot : slot + count])

    def scatter(self, slot: int, host: Bytes, host_slot: int, count: int, layers: tuple[int, int]) -> None:
        first, end = layers[0] * self.page.layer_bytes, layers[1] * self.page.layer_bytes
        offset = self.segment.first * self.page.layer_bytes
        target = self._device[slot : slot + count, first - offset : end - offset]
        np.copyto(target, host[host_slot : host_slot + count, first:end])


class _ViewMover:
    """Copies runs of slots through transposed views: any strides."""

    def __init__(self, page: PageLayout, segment: Segment) -> None:
        self.page = page
        self.segment = segment
        slots, layers, planes, tokens, _, row = segment.view.shape
        split = segment.view.reshape(slots, layers, planes, tokens, page.head_groups, page.head_group, row)
        # (slot, head group, layer, plane, token, head in group, row byte), as in canonical form
        self._device = split.transpose(0, 4, 1, 2, 3, 5, 6)

    def gather(self, slot: int, host: Bytes, host_slot: int, count: int) -> None:
        first, end = self.segment.first, self.segment.end
        np.copyto(self._canonical(host, host_slot, count)[:, :, first:end], self._device[slot : slot + count])

    def scatter(self, slot: int, host: Bytes, host_slot: int, count: int, layers: tuple[int, int]) -> None:
        first, end = layers[0] - self.segment.first, layers[1] - self.segment.first
        source = self._canonical(host, host_slot, count)[:, :, layers[0] : layers[1]]
        np.copyto(self._device[slot : slot + count, :, first:end], source)

    def _canonical(self, host: Bytes, slot: int, count: int) -> Bytes:
        return host[slot : slot + count].reshape(count, *self.page.canonical_shape)


class _IndexMover:
    """Moves pieces of rows by index, a run of planes a call: planes that lie in one run, several head groups."""

    def __init__(self, page: PageLayout, segment: Segment, piece: int) -> None:
        self.page = page
        self.segment = segment
        self._piece = np.dtype((np.void, piece))
        slots, layers, planes = segment.view.shape[:3]
        flat = segment.view.reshape(slots, layers, planes, page.plane_bytes)
        self._planes: _Pieces = flat.view(self._piece)
        # Planes of a layer, and layers, that follow each other without a gap are moved in one call.
        self._joined = _joined(flat)
        self._index = _piece_index(page, piece, planes=self._joined)
        self._step = page.tokens * page.head_group * page.row_bytes // piece  # pieces from plane to plane, canonical
        by_view = page.head_group * page.row_bytes <= _LARGEST_VIEW_ROW
        self._by_view = _ViewMover(page, segment) if by_view else None

    def gather(self, slot: int, host: Bytes, host_slot: int, count: int) -> None:
        layers = (self.segment.first, self.segment.end)
        for at in range(count):
            for target, index, source in self._runs(slot + at, host[host_slot + at], layers):
                target[index] = source

    def scatter(self, slot: int, host: Bytes, host_slot: int, count: int, layers: tuple[int, int]) -> None:
        if self._by_view is not None:
            self._by_view.scatter(slot, host, host_slot, count, layers)
            return
        for at in range(count):
            for source, index, target in self._runs(slot + at, host[host_slot + at], layers):
                # "clip" only says that numpy needs no buffer against bad indexes; there are none.
                np.take(source, index, out=target, mode="clip")

    def _runs(self, slot: int, page: Bytes, layers: tuple[int, int]) -> Iterator[tuple[_Pieces, _Index, _Pieces]]:
        """For each run of planes: the canonical page from its first plane on, where its pieces lie there, the run."""
        canonical: _Pieces = page.view(self._piece)
        first = self.segment.first
        mine = self._planes[slot, layers[0] - first : layers[1] - first]
        at = layers[0] * self.page.planes * self._step
        if self._joined > self.page.planes:
            yield canonical[at:], self._index[: mine.size], mine.reshape(-1)
            return
        for of_layer in mine:
            for run in of_layer.reshape(1, -1) if self._joined > 1 else of_layer:
                yield canonical[at:], self._index, run
                at += self._joined * self._step


def _mover(page: PageLayout, segment: Segment) -> _FlatMover | _ViewMover | _IndexMover:
    view = segment.view
    if not _in_one_run(view.shape[3:], view.strides[3:]):
        return _ViewMover(page, segment)
    slots, layers, planes = view.shape[:3]
    joined = _joined(view.reshape(slots, layers, planes, page.plane_bytes))
    if page.head_groups == 1:
        return _FlatMover(page, segment) if joined == layers * planes else _ViewMover(page, segment)
    piece = _piece(page.head_group * page.row_bytes)
    if piece is None or joined * page.plane_bytes < _SMALLEST_PLANE:
        return _ViewMover(page, segment)
    return _IndexMover(page, segment, piece)


def _in_one_run(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _joined(flat: Bytes) -> int:
    """How many planes of a slot lie in one run: one, those of a layer, or those of all layers of the segment."""
    layers, planes, size = (int(length) for length in flat.shape[1:])
    if planes > 1 and flat.strides[2] != size:
        return 1
    if layers > 1 and flat.strides[1] == planes * size:
        return layers * planes
    return planes


def _piece(row: int) -> int | None:
    """Size of the pieces that rows of `row` bytes are cut into; None where they are better not moved by index."""
    size = next(size for size in range(min(row, _PIECE), 0, -1) if row % size == 0)
    return size if size >= _SMALLEST_PIECE else None


def _piece_index(page: PageLayout, piece: int, *, planes: int) -> _Index:
    """Where the pieces of consecutive planes, in the engine's order (plane, token, head), lie in a canonical page."""
    per_group = page.head_group * page.row_bytes // piece
    shape = (page.head_groups, page.layers * page.planes, page.tokens, per_group)
    canonical: _Index = np.arange(page.page_bytes // piece, dtype=np.intp).reshape(shape)
    return np.ascontiguousarray(canonical[:, :planes].transpose(1, 2, 0, 3)).reshape(-1)


def _runs(slots: Slots, host_slots: Slots) -> Iterator[tuple[int, int, int]]:
    """Stretches where both follow each other: (slot, host slot, count)."""
    if len(slots) <= 1:
        yield from ((int(slot), int(host_slot), 1) for slot, host_slot in zip(slots, host_slots, strict=True))
        return
    breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(host_slots) != 1)) + 1
    starts: list[int] = [0, *breaks.tolist(), len(slots)]
    for start, end in itertools.pairwise(starts):
        yield int(slots[start]), int(host_slots[start]), end - start
