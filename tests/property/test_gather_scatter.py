"""Gather and scatter against a reference that walks over every row, for random geometries, layouts and strides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hicache.core.layout import KVGeometry
from hicache.memory.base import Bytes
from hicache.memory.device import TensorDevicePool
from hicache.memory.host import MmapHostPool

SLOTS = 5


@dataclass(frozen=True)
class Case:
    """One pool: sizes, layout, and gaps between the rows of a head."""

    layers: int
    heads: int
    head_group: int
    row: int
    tokens: int
    layout: str
    gap: int
    per_layer: bool
    seed: int

    def arrays(self) -> tuple[object, Bytes]:
        """What a pool is attached to, and the same memory as (slot, layer, plane, token, head, row byte)."""
        inner = (self.tokens, self.heads + self.gap, self.row)
        shape = (SLOTS, self.layers, 2, *inner) if self.layout == "page_first" else (self.layers, 2, SLOTS, *inner)
        memory = np.random.default_rng(self.seed).integers(0, 256, shape, np.uint8)
        tensor = memory[..., : self.heads, :]
        if self.layout == "page_first":
            return tensor, tensor
        attached = list(tensor) if self.per_layer else tensor
        return attached, tensor.transpose(2, 0, 1, 3, 4, 5)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    head_group = draw(st.integers(1, 3))
    return Case(
        layers=draw(st.integers(1, 4)),
        heads=head_group * draw(st.integers(1, 4)),
        head_group=head_group,
        # small and odd rows, rows on both sides of the sizes at which other ways of copying begin
        row=draw(st.sampled_from([1, 2, 7, 64, 96, 257, 512, 768, 4096])),
        tokens=draw(st.sampled_from([1, 2, 5, 16])),
        layout=draw(st.sampled_from(["layer_first", "page_first"])),
        gap=draw(st.sampled_from([0, 0, 0, 1])),
        per_layer=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def canonical(case: Case, page: Bytes) -> bytes:
    """A page (layer, plane, token, head, row byte) in canonical form, row by row."""
    rows: list[bytes] = []
    for first in range(0, case.heads, case.head_group):
        for layer in range(case.layers):
            for plane in range(2):
                for token in range(case.tokens):
                    rows.extend(
                        page[layer, plane, token, head].tobytes() for head in range(first, first + case.head_group)
                    )
    return b"".join(rows)


def pool_of(case: Case) -> tuple[TensorDevicePool, Bytes]:
    geometry = KVGeometry.mha(
        case.layers, kv_heads=case.heads, head_dim=case.row, dtype="int8", head_group=case.head_group
    )
    attached, by_slot = case.arrays()
    return TensorDevicePool.attach(attached, geometry, page_size=case.tokens, layout=case.layout), by_slot


slot_lists = st.lists(st.integers(0, SLOTS - 1), min_size=0, max_size=SLOTS, unique=True)


SHORT_ROWS = Case(2, 4, 1, 256, 64, "layer_first", 0, False, 0)  # down by index, up through views


@pytest.mark.case("PLUG-1")
@example(case=SHORT_ROWS, slots=[3, 0, 1], order=[4, 2, 3, 0, 1])
@given(case=cases(), slots=slot_lists, order=st.permutations(range(SLOTS)))
def test_gather_is_the_reference(case: Case, slots: list[int], order: list[int]) -> None:
    pool, by_slot = pool_of(case)
    host = MmapHostPool(SLOTS, pool.page_bytes)
    host.poison(np.arange(SLOTS))
    targets = order[: len(slots)]
    pool.gather(np.array(slots, np.int64), host, np.array(targets, np.int64))
    for slot, target in zip(slots, targets, strict=True):
        assert host.page(target).tobytes() == canonical(case, by_slot[slot])
    for untouched in order[len(slots) :]:
        assert set(host.page(untouched).tolist()) == {0xEE}
    host.close()


@pytest.mark.case("PLUG-1")
@example(case=SHORT_ROWS, slots=[3, 0, 1], order=[4, 2, 3, 0, 1], cut=(0.5, 1.0))
@given(
    case=cases(),
    slots=slot_lists,
    order=st.permutations(range(SLOTS)),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_scatter_is_the_inverse_of_the_reference(
    case: Case, slots: list[int], order: list[int], cut: tuple[float, float]
) -> None:
    """Whole pages, or a range of layers: exactly those rows change."""
    pool, by_slot = pool_of(case)
    first = round(cut[0] * (case.layers - 1))
    end = first + 1 + round(cut[1] * (case.layers - first - 1))
    before = by_slot.copy()
    host = MmapHostPool(SLOTS, pool.page_bytes)
    fresh = np.random.default_rng(case.seed + 1).integers(0, 256, by_slot.shape, np.uint8)
    sources = order[: len(slots)]
    for slot, source in zip(slots, sources, strict=True):
        host.page(source)[:] = np.frombuffer(canonical(case, fresh[slot]), np.uint8)
    pool.scatter(host, np.array(sources, np.int64), np.array(slots, np.int64), layers=(first, end))
    expected = before.copy()
    for slot in slots:
        expected[slot, first:end] = fresh[slot, first:end]
    assert np.array_equal(by_slot, expected)
    host.close()


@pytest.mark.parametrize(
    ("case", "way"),
    [
        (Case(1, 4, 1, 4096, 16, "layer_first", 0, False, 0), "_IndexMover"),
        (Case(2, 4, 1, 4096, 16, "page_first", 0, False, 0), "_IndexMover"),
        (Case(1, 4, 1, 4096, 16, "layer_first", 1, False, 0), "_ViewMover"),
        (Case(1, 4, 1, 64, 2, "layer_first", 0, False, 0), "_ViewMover"),
        (Case(2, 4, 4, 4096, 16, "layer_first", 0, False, 0), "_ViewMover"),
        (Case(2, 3, 3, 64, 2, "page_first", 0, False, 0), "_FlatMover"),
    ],
)
def test_the_properties_reach_every_way_of_copying(case: Case, way: str) -> None:
    movers = pool_of(case)[0]._converter._movers  # type: ignore[union-attr]
    assert [type(mover).__name__ for mover in movers] == [way]
