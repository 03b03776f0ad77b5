"""Run tables against a reference that walks over every row: every layout, head group, page size and stride."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.core.arenas import Run
from hicache.core.layout import KVGeometry
from hicache.cuda.regions import DEVICE_LAYOUTS, TensorMemory, regions_of
from hicache.cuda.runs import HostPart, PageRuns, RunTable
from hicache.memory.layout import PageLayout

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
SLOTS = 6
POISON = 0xEE


@dataclass(frozen=True)
class Case:
    """One pool of an engine and one of the host."""

    layout: str
    mla: bool
    layers: int
    heads: int
    head_group: int
    row: int
    tokens: int
    parts: int
    gap: int
    listed: bool
    host_gap: int
    host_cuts: tuple[float, ...]
    seed: int

    @property
    def page(self) -> PageLayout:
        if self.layout == "opaque":
            geometry = KVGeometry.opaque(engine="e", backend="b", version="1", shape="s", page_bytes=self.row)
        elif self.mla:
            geometry = KVGeometry.mla(self.layers, latent_dim=self.row, rope_dim=0, dtype="uint8")
        else:
            geometry = KVGeometry.mha(
                self.layers, kv_heads=self.heads, head_dim=self.row, dtype="uint8", head_group=self.head_group
            )
        return PageLayout.of(geometry, self.tokens)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(st.sampled_from(sorted(DEVICE_LAYOUTS)))
    mla = layout not in {"rows", "opaque"} and draw(st.booleans())
    group = 1 if mla else draw(st.integers(1, 3))
    parts = 1 if layout == "opaque" else draw(st.sampled_from([1, 1, 2, 3]))
    return Case(
        layout=layout,
        mla=mla,
        layers=draw(st.integers(1, 4)),
        heads=1 if mla else group * draw(st.integers(1, 3)),
        head_group=group,
        row=draw(st.sampled_from([1, 3, 16, 64])),
        tokens=parts * draw(st.sampled_from([1, 2, 5])),
        parts=parts,
        gap=draw(st.sampled_from([0, 0, 1])),
        listed=draw(st.booleans()),
        host_gap=draw(st.sampled_from([0, 0, 5])),
        host_cuts=tuple(draw(st.lists(st.floats(0, 1), max_size=2))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


class Device:
    """An engine's memory, as tensors and as (slot, layer, plane, token, head, row byte), written independently."""

    def __init__(self, case: Case) -> None:
        page, tokens, slots = case.page, case.tokens // case.parts, SLOTS * case.parts
        lengths = {"slot": slots, "layer": page.layers, "plane": page.planes, "token": tokens, "head": page.heads}
        if case.layout == "opaque":
            tokens, lengths = 1, {"slot": slots, "byte": page.page_bytes}
        lengths["dim"] = page.row_bytes
        lengths["content"] = page.planes * page.row_bytes
        axes = [axis for axis in DEVICE_LAYOUTS[case.layout] if not (case.mla and axis in {"plane", "head"})]
        count = 1
        if "layer" not in axes and case.layout != "opaque":
            count = page.layers * (page.planes if case.layout == "planes" else 1)
        elif case.layout == "layer_first" and case.listed:
            count = page.layers
            axes.remove("layer")
        random = np.random.default_rng(case.seed)
        shape = [lengths[axis] for axis in axes]
        # A gap behind the axis before the rows, so that the strides are not those of a dense tensor.
        wide = list(shape)
        wide[-2] += case.gap
        self.memory = [random.integers(0, 256, wide, np.uint8) for _ in range(count)]
        self.tensors = [one[..., : shape[-2], :] for one in self.memory]
        self.single = "layer" in axes or case.layout == "opaque"
        self.axes, self.case, self.tokens = axes, case, tokens

    def row(self, slot: int, layer: int, plane: int, token: int, head: int) -> Bytes:
        """Where one row lies, found by the names of the axes."""
        case, row = self.case, self.case.page.row_bytes
        if case.layout == "opaque":
            return self.tensors[0][slot]
        at = {"slot": slot, "layer": layer, "plane": plane, "token": token, "head": head}
        tensor = self.tensors[0]
        if case.layout == "planes":
            tensor = self.tensors[layer * case.page.planes + plane]
        elif "layer" not in self.axes:
            tensor = self.tensors[layer]
        for axis in self.axes[:-1]:
            tensor = tensor[at[axis]]
        return tensor[plane * row : (plane + 1) * row] if self.axes[-1] == "content" else tensor


class Host:
    """Memories that hold canonical pages, whole or cut anywhere."""

    def __init__(self, case: Case) -> None:
        size = case.page.page_bytes
        edges = sorted({0, size, *(round(cut * size) for cut in case.host_cuts)})
        self.runs = [(start, end - start) for start, end in itertools.pairwise(edges)]
        self.memories: list[Bytes] = []
        self.parts: list[HostPart] = []
        for at, (start, length) in enumerate(self.runs):
            memory = np.full((SLOTS, length + case.host_gap), POISON, np.uint8)
            self.memories.append(memory)
            offset = case.host_gap if at % 2 else 0
            self.parts.append(HostPart(memory.ctypes.data, SLOTS, memory.strides[0], (Run(start, offset, length),)))

    def page(self, slot: int) -> Bytes:
        """A copy of one canonical page."""
        return np.concatenate([self._piece(at, slot) for at in range(len(self.runs))])

    def put(self, slot: int, page: Bytes) -> None:
        """Write one canonical page."""
        for at, (start, length) in enumerate(self.runs):
            self._piece(at, slot)[:] = page[start : start + length]

    def _piece(self, at: int, slot: int) -> Bytes:
        offset = self.parts[at].runs[0].slot_offset
        return self.memories[at][slot, offset : offset + self.runs[at][1]]


def runs_of(case: Case, device: Device, host: Host) -> PageRuns:
    tensors = [TensorMemory.of_array(tensor) for tensor in device.tensors]
    regions = regions_of(tensors[0] if device.single else tensors, case.layout, case.page, tokens=device.tokens)
    return PageRuns(case.page, regions, host.parts)


def move(table: RunTable, device: Device, host: Host) -> None:
    """Carry out a table, whose runs must not leave the memory in which they begin."""
    memories = [(one.ctypes.data, one.ctypes.data + one.nbytes) for one in (*device.memory, *host.memories)]
    for source, target, length in zip(
        table.source.tolist(), table.destination.tolist(), table.length.tolist(), strict=True
    ):
        for start in (source, target):
            assert any(first <= start and start + length <= end for first, end in memories), "a run leaves its memory"
        ctypes.memmove(target, source, length)


def each_row(case: Case, layers: range, groups: range) -> Any:
    """(offset in the canonical page, layer, plane, token, head) of every row, written as the format's text says."""
    page, offset = case.page, 0
    for group in range(page.head_groups):
        for layer in range(page.layers):
            for plane in range(page.planes):
                for token in range(page.tokens):
                    for head in range(group * page.head_group, (group + 1) * page.head_group):
                        if layer in layers and group in groups:
                            yield offset, layer, plane, token, head
                        offset += page.row_bytes


def ranges(draw: st.DrawFn, count: int) -> tuple[int, int]:
    first = draw(st.integers(0, count - 1))
    return first, draw(st.integers(first + 1, count))


@pytest.mark.case("PLUG-1")
@given(case=cases(), data=st.data(), up=st.booleans())
def test_a_table_moves_exactly_the_rows_of_the_reference(case: Case, data: st.DataObject, up: bool) -> None:
    device, host = Device(case), Host(case)
    runs, page = runs_of(case, device, host), case.page
    count = data.draw(st.integers(0, SLOTS))
    device_slots = data.draw(st.permutations(range(SLOTS * case.parts)))[: count * case.parts]
    host_slots = data.draw(st.permutations(range(SLOTS)))[:count]
    layers = data.draw(st.one_of(st.none(), st.composite(ranges)(page.layers)))
    groups = data.draw(st.one_of(st.none(), st.composite(ranges)(page.head_groups)))
    random = np.random.default_rng(case.seed + 1)
    for memory in host.memories:
        memory[:] = random.integers(0, 256, memory.shape, np.uint8)

    expected_device = [one.copy() for one in device.memory]
    expected_host = [one.copy() for one in host.memories]
    model, kept = Device(case), Host(case)
    model.memory, kept.memories = expected_device, expected_host
    model.tensors = [one[..., : other.shape[-2], :] for one, other in zip(expected_device, device.tensors, strict=True)]
    tokens = case.tokens // case.parts
    wanted = (range(*(layers or (0, page.layers))), range(*(groups or (0, page.head_groups))))
    for at, host_slot in enumerate(host_slots):
        page_bytes = kept.page(host_slot)
        for offset, layer, plane, token, head in each_row(case, *wanted):
            part, inside = divmod(token, tokens) if case.layout != "opaque" else (0, 0)
            row = model.row(device_slots[at * case.parts + part], layer, plane, inside, head)
            if up:
                row[:] = page_bytes[offset : offset + page.row_bytes]
            else:
                page_bytes[offset : offset + page.row_bytes] = row
        kept.put(host_slot, page_bytes)

    table = runs.table(
        np.array(device_slots, np.int64),
        np.repeat(np.array(host_slots, np.int64), case.parts),
        to_device=up,
        layers=layers,
        groups=groups,
        parts=np.tile(np.arange(case.parts), count) if case.parts > 1 else None,
    )
    move(table, device, host)
    assert table.total == count * page.page_bytes * len(wanted[0]) * len(wanted[1]) // (page.layers * page.head_groups)
    assert all(np.array_equal(a, b) for a, b in zip(device.memory, expected_device, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(host.memories, expected_host, strict=True))
    assert_joined(table)


def assert_joined(table: RunTable) -> None:
    """No run goes on where another ends, on both sides; none is empty; none overlaps another."""
    assert (table.length > 0).all()
    starts = set(zip(table.source.tolist(), table.destination.tolist(), strict=True))
    ends = zip((table.source + table.length).tolist(), (table.destination + table.length).tolist(), strict=True)
    assert not starts.intersection(ends)
    order = np.argsort(table.destination)
    assert (table.destination[order][1:] >= (table.destination + table.length)[order][:-1]).all()


@given(case=cases(), most=st.integers(1, 40))
def test_tables_of_few_runs_are_the_same_copy(case: Case, most: int) -> None:
    device, host = Device(case), Host(case)
    runs = runs_of(case, device, host)
    slots = np.arange(SLOTS * case.parts)
    of_host, parts = slots // case.parts, slots % case.parts if case.parts > 1 else None
    tables = list(runs.tables(slots, of_host, to_device=False, parts=parts, most=most))
    assert sum(table.total for table in tables) == SLOTS * case.page.page_bytes
    for table in tables:
        assert len(table) <= max(most, case.parts * runs.runs_per_page())
        move(table, device, host)
    done = [memory.copy() for memory in host.memories]
    for memory in host.memories:
        memory[:] = POISON
    move(runs.table(slots, of_host, to_device=False, parts=parts), device, host)
    assert all(np.array_equal(a, b) for a, b in zip(done, host.memories, strict=True))
