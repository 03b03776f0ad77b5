"""Run tables: what a copy of pages moves, as arrays of (source, destination, bytes).

A pool's slots lie alike, so the runs of one page are found once, when the pools are attached, and a copy only adds the
addresses of its slots. Runs are as long as both sides allow: neighbours are joined wherever source and destination go
on without a gap, inside a page and from page to page. All of it is arithmetic on arrays; no Python runs per run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.core.arenas import Run
from hicache.cuda.regions import Region
from hicache.errors import GeometryError
from hicache.memory.base import Slots
from hicache.memory.layout import PageLayout

__all__ = ["MOST_RUNS", "HostPart", "Numbers", "PageRuns", "RunTable"]

Numbers: TypeAlias = npt.NDArray[np.int64]

MOST_RUNS: Final = 1 << 18
"""Runs of one table, 6 MiB of numbers. Copies with more are several tables."""


@dataclass(frozen=True, slots=True)
class RunTable:
    """Runs of bytes. No two overlap in the destination, so they may be copied in any order.

    Attributes:
        source: absolute addresses, int64.
        destination: as many.
        length: bytes of each, 1 or more.
    """

    source: Numbers
    destination: Numbers
    length: Numbers

    def __len__(self) -> int:
        return len(self.length)

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return int(self.length.sum())

    def __getitem__(self, at: slice) -> RunTable:
        return RunTable(self.source[at], self.destination[at], self.length[at])


@dataclass(frozen=True, slots=True)
class HostPart:
    """One memory of a host pool, which holds some bytes of every canonical page.

    Attributes:
        address: of slot 0.
        slots: number of slots.
        stride: bytes from one slot to the next.
        runs: which bytes of a page lie where in a slot.
        writes: whether it is mapped for writing too.
    """

    address: int
    slots: int
    stride: int
    runs: tuple[Run, ...]
    writes: bool = True

    @classmethod
    def whole(cls, address: int, slots: int, page_bytes: int, stride: int | None = None) -> HostPart:
        """A memory with whole pages, by default without gaps between them."""
        return cls(address, slots, page_bytes if stride is None else stride, (Run(0, 0, page_bytes),))


@dataclass(frozen=True, slots=True)
class _Cells:
    """Runs of one page, in the order of the canonical page.

    Attributes:
        offset: in the canonical page.
        device, host: absolute addresses for slot 0 of both sides.
        device_step, host_step: bytes from slot to slot.
        length: bytes.
        label: layer and head group, as one number; cells of different labels can be asked for separately.
    """

    offset: Numbers
    device: Numbers
    host: Numbers
    device_step: Numbers
    host_step: Numbers
    length: Numbers
    label: Numbers

    def __getitem__(self, at: npt.NDArray[np.bool_] | npt.NDArray[np.intp] | slice) -> _Cells:
        return _Cells(
            *(column[at] for column in (self.offset, self.device, self.host, self.device_step, self.host_step)),
            *(column[at] for column in (self.length, self.label)),
        )

    def joined(self, *, within: bool) -> _Cells:
        """Neighbours that go on without a gap on both sides made one; only `within` one label, or across."""
        if not len(self.length):
            return self
        apart = (self.device[1:] != self.device[:-1] + self.length[:-1]) | (
            self.host[1:] != self.host[:-1] + self.length[:-1]
        )
        apart |= (self.device_step[1:] != self.device_step[:-1]) | (self.host_step[1:] != self.host_step[:-1])
        if within:
            apart |= self.label[1:] != self.label[:-1]
        starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
        first = self[starts]
        return _Cells(
            *(first.offset, first.device, first.host, first.device_step, first.host_step),
            *(np.add.reduceat(self.length, starts), first.label),
        )


class PageRuns:
    """The runs of pages between one device pool and one host pool. Immutable but for a memo; any thread may ask.

    Args:
        page: sizes of a page, and how canonical pages are ordered.
        device: regions that hold every byte of a page once.
        host: memories that hold every byte of a page once.

    Attributes:
        page: as given.
        parts: slots of the device that make a page: 1, or more where an engine's blocks are smaller.
        device_slots: slots of each region.
        host_slots: slots of each memory.

    Raises:
        GeometryError: bytes of a page that lie nowhere, or twice; memories with different numbers of slots.
    """

    def __init__(self, page: PageLayout, device: Sequence[Region], host: Sequence[HostPart]) -> None:
        self.page = page
        self.device_slots = _common([region.slots for region in device], "regions", "slots")
        self.host_slots = _common([part.slots for part in host], "host memories", "slots")
        self.parts = page.tokens // _common([region.tokens for region in device], "regions", "tokens a slot")
        places = _places(page, host)
        shift = page.tokens // self.parts * page.head_group * page.row_bytes
        cells = [_sorted(page, device, part * shift) for part in range(self.parts)]
        _check_cover(page, cells)
        self._cells = tuple(_on_host(one, places).joined(within=True) for one in cells)
        self._memo: dict[tuple[int, int, int, int], tuple[_Cells, ...]] = {}

    def runs_per_page(self, layers: tuple[int, int] | None = None, groups: tuple[int, int] | None = None) -> int:
        """Runs of one page before those of neighbouring pages are joined."""
        return sum(len(cells.length) for cells in self._selected(layers, groups))

    def tables(
        self,
        device_slots: Slots,
        host_slots: Slots,
        *,
        to_device: bool,
        layers: tuple[int, int] | None = None,
        groups: tuple[int, int] | None = None,
        parts: Slots | None = None,
        most: int = MOST_RUNS,
    ) -> Iterator[RunTable]:
        """The runs of a copy, in tables of about `most` runs, each of whole pages.

        Args:
            device_slots: int64, one a page; or one an engine's block where `parts` are given.
            host_slots: int64, as many.
            to_device: from the host up; else down.
            layers: range [first, end) of the page's layers; None is all.
            groups: range [first, end) of its head groups; None is all.
            parts: which part of its page each block is, 0 for the first; needed where pages have several.
            most: runs of a table; 1 or more.

        Raises:
            GeometryError: a slot or part that does not exist, or numbers that do not pair. Nothing was made.
        """
        self._check(device_slots, host_slots, parts)
        selected = self._selected(layers, groups)
        each = max(len(cells.length) for cells in selected) or 1
        step = max(1, most // each)
        for at in range(0, len(device_slots), step):
            batch = slice(at, at + step)
            of_parts = None if parts is None else parts[batch]
            found = self._addresses(selected, device_slots[batch], host_slots[batch], of_parts)
            device, host, length = _merged(*found)
            if len(length):
                yield RunTable(host, device, length) if to_device else RunTable(device, host, length)

    def table(
        self,
        device_slots: Slots,
        host_slots: Slots,
        *,
        to_device: bool,
        layers: tuple[int, int] | None = None,
        groups: tuple[int, int] | None = None,
        parts: Slots | None = None,
    ) -> RunTable:
        """As `tables`, all of it in one."""
        found = list(
            self.tables(
                device_slots, host_slots, to_device=to_device, layers=layers, groups=groups, parts=parts, most=1 << 62
            )
        )
        return found[0] if found else RunTable(_NONE, _NONE, _NONE)

    def _addresses(
        self, selected: tuple[_Cells, ...], device_slots: Slots, host_slots: Slots, parts: Slots | None
    ) -> tuple[Numbers, Numbers, Numbers]:
        """(device, host, length), so ordered that what can be joined lies side by side."""
        if parts is None:
            return _expanded(selected[0], device_slots, host_slots)
        found = []
        for part in range(self.parts):
            mine = parts == part
            found.append(_expanded(selected[part], device_slots[mine], host_slots[mine]))
        device, host, length = (np.concatenate(columns) for columns in zip(*found, strict=True))
        order = np.argsort(host, kind="stable")
        return device[order], host[order], length[order]

    def _selected(self, layers: tuple[int, int] | None, groups: tuple[int, int] | None) -> tuple[_Cells, ...]:
        """Each part's runs of these layers and head groups."""
        page = self.page
        first, end = _range(layers, page.layers, "layers")
        first_group, end_group = _range(groups, page.head_groups, "head groups")
        key = (first, end, first_group, end_group)
        found = self._memo.get(key)
        if found is None:
            found = tuple(self._choose(cells, *key) for cells in self._cells)
            self._memo[key] = found  # at most a few ranges are ever asked: steps of loads, and shards
        return found

    def _choose(self, cells: _Cells, first: int, end: int, first_group: int, end_group: int) -> _Cells:
        layer, group = np.divmod(cells.label, self.page.head_groups)
        wanted = (layer >= first) & (layer < end) & (group >= first_group) & (group < end_group)
        return cells[wanted].joined(within=False)

    def _check(self, device_slots: Slots, host_slots: Slots, parts: Slots | None) -> None:
        if device_slots.shape != host_slots.shape or (parts is not None and parts.shape != host_slots.shape):
            raise GeometryError(f"{len(device_slots)} device slots do not pair with {len(host_slots)} host slots")
        if (parts is None) != (self.parts == 1):
            raise GeometryError(f"pages have {self.parts} parts on the device: give the part of each slot if several")
        for numbers, count, what in (
            (device_slots, self.device_slots, "device slot"),
            (host_slots, self.host_slots, "host slot"),
            (parts, self.parts, "part of a page"),
        ):
            if numbers is not None and len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
                bad = int(numbers[(numbers < 0) | (numbers >= count)][0])
                raise GeometryError(f"{what} {bad} does not exist: there are {count}")


_NONE: Final[Numbers] = np.empty(0, np.int64)


def _common(counts: Sequence[int], what: str, of: str) -> int:
    if len(set(counts)) != 1 or counts[0] < 1:
        raise GeometryError(f"{what} with {sorted(set(counts))} {of}: give each as many, at least one")
    return counts[0]


def _range(given: tuple[int, int] | None, count: int, what: str) -> tuple[int, int]:
    first, end = (0, count) if given is None else given
    if not 0 <= first < end <= count:
        raise GeometryError(f"{what} {first} to {end} of pages that have {count}: use a range inside")
    return first, end


def _places(page: PageLayout, host: Sequence[HostPart]) -> Numbers:
    """The host's runs in the order of the page, a row each: page offset, length, address for slot 0, stride."""
    runs = sorted(
        (run.page_offset, run.length, part.address + run.slot_offset, part.stride) for part in host for run in part.runs
    )
    reached = 0
    for offset, length, *_ in runs:
        if offset != reached or length < 1:
            raise GeometryError(f"byte {min(offset, reached)} of a page lies twice or nowhere in the host's memories")
        reached += length
    if reached != page.page_bytes:
        raise GeometryError(f"the host memories hold {reached} bytes a page, the geometry has {page.page_bytes}")
    return np.array(runs, np.int64)


def _sorted(page: PageLayout, device: Sequence[Region], shift: int) -> _Cells:
    """Every row of the regions as a cell with its place in the canonical page, in the order of that."""
    found = [_rows(page, region, shift) for region in device]
    offset, address, step, label = (np.concatenate(columns) for columns in zip(*found, strict=True))
    order = np.argsort(offset, kind="stable")
    length = np.full(len(order), page.row_bytes, np.int64)
    offset = offset[order]
    # The host's side is not known before runs are cut where its memories change: the page's own offsets stand for it.
    cells = _Cells(offset, address[order], offset, step[order], np.zeros_like(length), length, label[order])
    return cells.joined(within=True)


def _rows(page: PageLayout, region: Region, shift: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """For each row of a region: (offset in the canonical page, address for slot 0, step from slot to slot, label)."""
    _, layers, planes, tokens, heads = region.shape
    slot_step, *steps = region.strides
    row = page.row_bytes
    plane = page.tokens * page.head_group * row  # of one head group, as in canonical form
    layer_at, plane_at = np.arange(layers) + region.first_layer, np.arange(planes) + region.first_plane
    group_at, head_at = np.divmod(np.arange(heads), page.head_group)
    offset = _grid(
        layer_at * (page.planes * plane),
        plane_at * plane,
        np.arange(tokens) * (page.head_group * row) + shift,
        group_at * (page.layers * page.planes * plane) + head_at * row,
    )
    address = _grid(*(np.arange(size) * step for size, step in zip(region.shape[1:], steps, strict=True)))
    label = _grid(layer_at * page.head_groups, np.zeros(planes), np.zeros(tokens), group_at)
    return offset, address + region.address, np.full_like(offset, slot_step), label


def _grid(*axes: npt.NDArray[np.generic]) -> Numbers:
    """Sums of one number of each axis, the first axis slowest."""
    total = np.zeros((1,) * len(axes), np.int64)
    for at, axis in enumerate(axes):
        total = total + axis.astype(np.int64).reshape((1,) * at + (-1,) + (1,) * (len(axes) - at - 1))
    return total.reshape(-1)


def _check_cover(page: PageLayout, cells: Sequence[_Cells]) -> None:
    """See that all parts together hold every byte of a page once."""
    offset, length = (np.concatenate([getattr(one, name) for one in cells]) for name in ("offset", "length"))
    order = np.argsort(offset, kind="stable")
    reached = np.cumsum(length[order])
    wrong = np.flatnonzero(offset[order] != reached - length[order])
    if len(wrong):
        raise GeometryError(
            f"byte {int(offset[order][wrong[0]])} of a page lies twice on the device, or one before it nowhere: "
            "give each layer, keys and values, once"
        )
    if int(reached[-1]) != page.page_bytes:
        raise GeometryError(f"the regions hold {int(reached[-1])} bytes a page, the geometry has {page.page_bytes}")


def _on_host(cells: _Cells, places: Numbers) -> _Cells:
    """Cells with their addresses on the host, cut in pieces where its memories or runs change."""
    edges, _, address, stride = places.T
    first = np.searchsorted(edges, cells.offset, "right") - 1
    last = np.searchsorted(edges, cells.offset + cells.length, "left") - 1
    count = last - first + 1
    which = np.repeat(np.arange(len(count)), count)
    place = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + first[which]
    pieces, ends = cells[which], np.append(edges[1:], np.iinfo(np.int64).max)
    start = np.maximum(pieces.offset, edges[place])
    length = np.minimum(pieces.offset + pieces.length, ends[place]) - start
    device, host = pieces.device + (start - pieces.offset), address[place] + (start - edges[place])
    return _Cells(start, device, host, pieces.device_step, stride[place], length, pieces.label)


def _expanded(cells: _Cells, device_slots: Slots, host_slots: Slots) -> tuple[Numbers, Numbers, Numbers]:
    """The runs of all pages: page after page, or run after run where those of neighbouring slots go on."""
    across = bool(np.any((cells.length == cells.device_step) & (cells.length == cells.host_step)))
    if across:
        order = np.argsort(host_slots, kind="stable")
        device_slots, host_slots = device_slots[order], host_slots[order]
    device = device_slots[:, None] * cells.device_step + cells.device
    host = host_slots[:, None] * cells.host_step + cells.host
    length = np.broadcast_to(cells.length, device.shape)
    if across:
        return device.T.reshape(-1), host.T.reshape(-1), length.T.reshape(-1)
    return device.reshape(-1), host.reshape(-1), length.reshape(-1)


def _merged(device: Numbers, host: Numbers, length: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Neighbours that go on without a gap on both sides made one."""
    if len(length) < 2:
        return device, host, length
    apart = (device[1:] != device[:-1] + length[:-1]) | (host[1:] != host[:-1] + length[:-1])
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    if len(starts) == len(length):
        return device, host, length
    return device[starts], host[starts], np.add.reduceat(length, starts)
