from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.core.arenas import SLOT_ALIGNMENT, ArenaPlan
from hicache.core.layout import KVGeometry, LayerGroup
from hicache.core.partition import plan_shards
from hicache.errors import GeometryError


@st.composite
def topologies(draw: st.DrawFn) -> tuple[KVGeometry, int, int, tuple[int, ...]]:
    groups, start = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 3))):
        end = start + draw(st.integers(1, 6))
        head_group = draw(st.sampled_from([0, 1, 1, 2]))
        heads = head_group * draw(st.sampled_from([1, 2, 4]))
        groups.append(LayerGroup((start, end), heads, head_group, draw(st.integers(1, 9))))
        start = end
    geometry = KVGeometry(tuple(groups), layer_partition=draw(st.none() | st.integers(1, 3)))
    first, last = geometry.layers
    cuts = [cut[0] for cut in geometry.layer_cuts()]
    inner = draw(st.sets(st.sampled_from(cuts) | st.integers(first, last - 1), max_size=2)) - {first}
    stages = draw(st.sampled_from([(), (first, *sorted(inner))]))
    return geometry, draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 4, 8])), stages


def planned(topology: tuple[KVGeometry, int, int, tuple[int, ...]]) -> ArenaPlan | None:
    """The plan of a topology; None where it is refused: what a refusal says is the unit tests' business."""
    geometry, page_size, tp_size, first_layers = topology
    try:
        return ArenaPlan.of(geometry, page_size, tp_size=tp_size, pp_first_layers=first_layers)
    except GeometryError:
        return None


@pytest.mark.case("PLUG-4")
@given(topologies())
def test_each_byte_of_a_page_lies_in_one_arena_and_each_rank_finds_all_of_its_own(
    topology: tuple[KVGeometry, int, int, tuple[int, ...]],
) -> None:
    """A page written through the arenas, read back rank by rank, is the page that each rank holds by its own plan."""
    geometry, page_size, tp_size, first_layers = topology
    plan = planned(topology)
    if plan is None:
        return
    whole = plan_shards(geometry, page_size)
    page = np.random.default_rng(7).integers(0, 256, whole.page_bytes, dtype=np.uint8)
    seen = np.zeros(whole.page_bytes, int)
    slots = [np.zeros(arena.stride, np.uint8) for arena in plan.arenas]
    for arena, slot in zip(plan.arenas, slots, strict=True):
        filled = np.zeros(arena.stride, int)
        for run in arena.runs:
            seen[run.page_offset : run.page_offset + run.length] += 1
            filled[run.slot_offset : run.slot_offset + run.length] += 1
            slot[run.slot_offset : run.slot_offset + run.length] = page[run.page_offset : run.page_offset + run.length]
        assert filled.tolist() == [1] * arena.slot_bytes + [0] * (arena.stride - arena.slot_bytes)
        assert arena.stride % SLOT_ALIGNMENT == 0
        assert sum(part.length for part in arena.parts) == arena.slot_bytes
    assert set(seen.tolist()) == {1}
    stages = plan.stages
    assert stages == tuple(pairwise((*(first_layers or geometry.layers[:1]), geometry.layers[1])))
    for pp_rank, stage in enumerate(stages):
        for tp_rank in range(tp_size):
            own = plan_shards(geometry, page_size, tp_rank=tp_rank, tp_size=tp_size, pp_layers=stage)
            rank = plan.rank(tp_rank, pp_rank)
            got = np.zeros(rank.page_bytes, np.uint8)
            covered = np.zeros(rank.page_bytes, int)
            for view in rank.arenas:
                for run in view.runs:
                    place = slice(run.page_offset, run.page_offset + run.length)
                    got[place] = slots[view.index][run.slot_offset : run.slot_offset + run.length]
                    covered[place] += 1
            assert set(covered.tolist()) == {1}
            offsets = {part.shard: part for part in whole.parts}
            for part in own.parts:
                place = offsets[part.shard]
                expected = page[place.offset : place.offset + place.length]
                assert np.array_equal(got[part.offset : part.offset + part.length], expected)


@given(topologies())
def test_ranks_map_only_what_they_hold_and_one_of_them_writes_it(
    topology: tuple[KVGeometry, int, int, tuple[int, ...]],
) -> None:
    """An arena is mapped by exactly its holders, written by exactly one, and no two arenas have the same holders."""
    plan = planned(topology)
    if plan is None:
        return
    assert [arena.index for arena in plan.arenas] == list(range(len(plan.arenas)))
    assert len({arena.holders for arena in plan.arenas}) == len(plan.arenas)
    for arena in plan.arenas:
        mapped = [n for n, rank in enumerate(plan.ranks) if any(view.index == arena.index for view in rank.arenas)]
        writers = [
            n
            for n, rank in enumerate(plan.ranks)
            if any(view.index == arena.index and view.writes for view in rank.arenas)
        ]
        assert mapped == list(arena.holders)
        assert writers == [arena.writer]
        assert arena.writer in arena.holders
    assert plan.slot_bytes == sum(arena.stride for arena in plan.arenas)
