from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hicache.core.keys import Shard
from hicache.core.layout import KVGeometry, LayerGroup
from hicache.core.partition import ShardPlan, plan_shards
from hicache.errors import GeometryError

PAGE = 4


def mha(**changes: Any) -> KVGeometry:
    fields: dict[str, Any] = {"layers": 4, "kv_heads": 8, "head_dim": 2, "dtype": "float32", "head_group": 1}
    return KVGeometry.mha(**(fields | changes))


def whole_page(geometry: KVGeometry) -> np.ndarray:
    """One page as (layer, 2, token, head, dim) of a model without any parallelism."""
    group = geometry.groups[0]
    shape = (group.layer_count, 2, PAGE, group.kv_heads, 2)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def local_buffer(geometry: KVGeometry, page: np.ndarray, heads: slice, layers: slice) -> bytes:
    """What a rank has: its own heads and layers in canonical order."""
    part = page[layers, :, :, heads]
    layer_count, _, _, head_count, dim = part.shape
    size = geometry.groups[0].head_group
    grouped = part.reshape(layer_count, 2, PAGE, head_count // size, size, dim)
    return grouped.transpose(3, 0, 1, 2, 4, 5).tobytes()


def put(plan: ShardPlan, buffer: bytes, store: dict[Shard, bytes]) -> None:
    assert len(buffer) == plan.page_bytes
    for part in plan.parts:
        held = store.setdefault(part.shard, buffer[part.offset : part.offset + part.length])
        assert held == buffer[part.offset : part.offset + part.length]


def get(plan: ShardPlan, store: dict[Shard, bytes]) -> bytes | None:
    buffer = bytearray(b"\xee" * plan.page_bytes)
    for part in plan.parts:
        if part.shard not in store:
            return None
        buffer[part.offset : part.offset + part.length] = store[part.shard]
    return bytes(buffer)


def topology(geometry: KVGeometry, tp: int, stages: list[tuple[int, int]]) -> list[tuple[ShardPlan, slice, slice]]:
    heads = geometry.groups[0].kv_heads
    own = max(1, heads // tp)
    ranks = []
    for stage in stages:
        for rank in range(tp):
            first = rank * heads // tp
            plan = plan_shards(geometry, PAGE, tp_rank=rank, tp_size=tp, pp_layers=stage)
            ranks.append((plan, slice(first, first + own), slice(*stage)))
    return ranks


TOPOLOGIES = [(1, [(0, 4)]), (2, [(0, 4)]), (4, [(0, 4)]), (8, [(0, 4)]), (1, [(0, 2), (2, 4)]), (4, [(0, 2), (2, 4)])]


@pytest.mark.case("PLUG-4")
@pytest.mark.parametrize("head_group", [1, 2])
@pytest.mark.parametrize("partition", [1, 2])
def test_any_topology_reads_what_any_other_wrote(head_group: int, partition: int) -> None:
    geometry = mha(head_group=head_group, layer_partition=partition)
    page = whole_page(geometry)
    fitting = [(tp, stages) for tp, stages in TOPOLOGIES if 8 // tp >= head_group]
    for writers_tp, writers_stages in fitting:
        store: dict[Shard, bytes] = {}
        for plan, heads, layers in topology(geometry, writers_tp, writers_stages):
            put(plan, local_buffer(geometry, page, heads, layers), store)
        assert len(store) == 4 // partition * (8 // head_group)
        for tp, stages in fitting:
            for plan, heads, layers in topology(geometry, tp, stages):
                assert get(plan, store) == local_buffer(geometry, page, heads, layers)


@pytest.mark.case("PLUG-4")
def test_a_missing_part_is_missed_by_those_who_need_it() -> None:
    geometry = mha(head_group=2)
    store: dict[Shard, bytes] = {}
    whole = plan_shards(geometry, PAGE)
    put(whole, bytes(whole.page_bytes), store)
    del store[whole.parts[2].shard]
    answers = [get(plan, store) is None for plan, _, _ in topology(geometry, 4, [(0, 4)])]
    assert answers == [False, False, True, False]
    assert [get(plan, store) is None for plan, _, _ in topology(geometry, 2, [(0, 4)])] == [False, True]
    assert get(whole, store) is None


@pytest.mark.case("PLUG-4")
def test_three_ranks_are_refused_with_a_number_that_fits() -> None:
    with pytest.raises(GeometryError, match="use tp_size=2"):
        plan_shards(mha(), PAGE, tp_size=3)


def test_one_agreement_names_the_same_shards_under_all_topologies() -> None:
    geometry = KVGeometry.mha(80, kv_heads=8, head_dim=128, dtype="bfloat16", head_group=2, layer_partition=40)
    named = []
    for tp, stages in ((1, [(0, 80)]), (2, [(0, 80)]), (4, [(0, 80)]), (2, [(0, 40), (40, 80)])):
        plans = [
            plan_shards(geometry, 64, tp_rank=rank, tp_size=tp, pp_layers=stage)
            for stage in stages
            for rank in range(tp)
        ]
        named.append({shard for plan in plans for shard in plan.shards})
        assert {plan.anchor for plan in plans} == {geometry.anchor(64)}
    assert named[0] == named[1] == named[2] == named[3]
    assert len(named[0]) == 8


def test_shards_go_layer_range_by_layer_range_and_lie_head_group_by_head_group() -> None:
    geometry = KVGeometry.mha(80, kv_heads=8, head_dim=128, dtype="bfloat16", head_group=2, layer_partition=40)
    plan = plan_shards(geometry, 64, tp_rank=1, tp_size=2)
    half = 40 * 2 * 64 * 2 * 128 * 2
    assert [(part.shard.layers, part.shard.head_group, part.offset) for part in plan.parts] == [
        ((0, 40), 2, 0),
        ((0, 40), 3, 2 * half),
        ((40, 80), 2, half),
        ((40, 80), 3, 3 * half),
    ]
    assert {part.length for part in plan.parts} == {half}
    assert plan.page_bytes == 4 * half


def test_a_page_without_parallelism_is_all_its_shards_anchor_first() -> None:
    geometry = mha(layer_partition=2)
    plan = plan_shards(geometry, PAGE)
    assert plan.page_bytes == geometry.page_bytes(PAGE)
    assert len(plan.parts) == 16
    assert plan.parts[0].shard == plan.anchor
    assert plan.writes(b"\0" * 16)[-1].shard == plan.anchor
    assert set(plan.writes(b"\xff" * 32)) == set(plan.parts)


@pytest.mark.parametrize("page_hash", [bytes(16), bytes([3]) + bytes(31), b"\xff" * 16])
def test_replicated_heads_have_one_writer_a_page(page_hash: bytes) -> None:
    geometry = mha(kv_heads=2)
    plans = [plan_shards(geometry, PAGE, tp_rank=rank, tp_size=8) for rank in range(8)]
    assert [plan.shards[0].head_group for plan in plans] == [0, 0, 0, 0, 1, 1, 1, 1]
    for head_group in (0, 1):
        holders = [plan for plan in plans if plan.shards[0].head_group == head_group]
        assert sum(bool(plan.writes(page_hash)) for plan in holders) == 1


def test_latents_are_held_by_all_and_written_by_each_in_turn() -> None:
    geometry = KVGeometry.mla(61, latent_dim=512, rope_dim=64, dtype="bfloat16")
    plans = [plan_shards(geometry, 64, tp_rank=rank, tp_size=4) for rank in range(4)]
    assert len({plan.shards for plan in plans}) == 1
    assert plans[0].shards[0].suffix.endswith("_L0-61")
    writers = [[plan for plan in plans if plan.writes(bytes([i]) + bytes(15))] for i in range(4)]
    assert [plans.index(writer[0]) for writer in writers] == [0, 1, 2, 3]
    assert all(len(writer) == 1 for writer in writers)


def test_groups_of_layers_lie_one_after_the_other() -> None:
    geometry = KVGeometry((LayerGroup((0, 4), 4, 1, 8), LayerGroup((4, 6), 2, 1, 16), LayerGroup((6, 7), 0, 0, 4)))
    plan = plan_shards(geometry, PAGE, tp_rank=3, tp_size=4)
    assert [
        (part.shard.layers, part.shard.head_group, part.offset, part.length, part.replicas) for part in plan.parts
    ] == [
        ((0, 4), 3, 0, 128, 1),
        ((4, 6), 1, 128, 128, 2),
        ((6, 7), None, 256, 16, 4),
    ]
    assert plan.page_bytes == 272
    assert plan_shards(geometry, PAGE, pp_layers=(4, 7)).page_bytes == 2 * 128 + 16


def test_opaque_cells_are_shared_by_layer_and_head_group() -> None:
    geometry = KVGeometry.opaque(
        engine="e", backend="b", version="1", shape="s", cell_bytes=100, layers=4, head_groups=4, layer_partition=2
    )
    plan = plan_shards(geometry, PAGE, tp_rank=1, tp_size=2, pp_layers=(2, 4))
    assert [(part.shard.layers, part.shard.head_group, part.length) for part in plan.parts] == [
        ((2, 4), 2, 200),
        ((2, 4), 3, 200),
    ]


@pytest.mark.parametrize(
    ("geometry", "ranks", "words"),
    [
        ({"head_group": 8}, {"tp_size": 2}, "use head_group=4"),
        ({"head_group": 4}, {"tp_size": 8}, "use head_group=1"),
        ({"kv_heads": 2, "head_group": 2}, {"tp_size": 4}, "use head_group=1"),
        ({"kv_heads": 12, "head_group": 4}, {"tp_size": 2}, "use head_group=2"),
        ({}, {"tp_size": 12}, "use tp_size=8"),
        ({}, {"pp_layers": (0, 2)}, "use layer_partition=2"),
        ({"layer_partition": 3}, {"pp_layers": (2, 4)}, "use layer_partition=1"),
        ({"layers": 30, "layer_partition": 16}, {"pp_layers": (0, 12)}, "use layer_partition=4"),
        ({}, {"pp_layers": (2, 2)}, "not inside"),
        ({}, {"pp_layers": (0, 5)}, "not inside"),
        ({}, {"pp_layers": (-1, 4)}, "not inside"),
        ({}, {"tp_size": 0}, "tp_size"),
        ({}, {"tp_size": 2, "tp_rank": 2}, "tp_rank"),
        ({}, {"tp_size": 2, "tp_rank": -1}, "tp_rank"),
        ({}, {"tp_size": 2.0}, "tp_size"),
    ],
)
def test_ranks_that_are_no_union_of_shards_are_told_what_fits(
    geometry: dict[str, Any], ranks: dict[str, Any], words: str
) -> None:
    with pytest.raises(GeometryError, match=words):
        plan_shards(mha(**geometry), PAGE, **ranks)


def test_last_stage_may_end_short() -> None:
    geometry = mha(layers=30, layer_partition=16)
    plans = [plan_shards(geometry, PAGE, pp_layers=stage) for stage in ((0, 16), (16, 30))]
    assert [plan.parts[0].shard.layers for plan in plans] == [(0, 16), (16, 30)]


def test_shards_of_costly_sizes_are_warned_about() -> None:
    llama = KVGeometry.mha(32, kv_heads=8, head_dim=128, dtype="bfloat16")
    assert plan_shards(llama, 64).warnings == ()
    assert "small" in plan_shards(mha(), PAGE).warnings[0]
    assert "large" in plan_shards(llama, 128).warnings[0]
