from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.core.layout import KVGeometry, LayerGroup
from hicache.core.partition import ShardPlan, plan_shards
from hicache.errors import GeometryError


@st.composite
def geometries(draw: st.DrawFn) -> KVGeometry:
    groups, start = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 3))):
        end = start + draw(st.integers(1, 6))
        head_group = draw(st.sampled_from([0, 1, 1, 2, 3]))
        heads = head_group * draw(st.sampled_from([1, 2, 4]))
        groups.append(LayerGroup((start, end), heads, head_group, draw(st.integers(1, 9))))
        start = end
    return KVGeometry(tuple(groups), layer_partition=draw(st.none() | st.integers(1, 5)))


def all_ranks(geometry: KVGeometry, page_size: int, tp_size: int, edges: list[int]) -> list[ShardPlan]:
    return [
        plan_shards(geometry, page_size, tp_rank=rank, tp_size=tp_size, pp_layers=(start, end))
        for start, end in pairwise(edges)
        for rank in range(tp_size)
    ]


@pytest.mark.case("PLUG-4")
@given(geometries(), st.integers(1, 5), st.integers(1, 8), st.data())
def test_ranks_cover_the_page_or_are_refused(
    geometry: KVGeometry, page_size: int, tp_size: int, data: st.DataObject
) -> None:
    first, last = geometry.layers
    inner = data.draw(st.sets(st.integers(first + 1, last - 1), max_size=2)) if last - first > 1 else set()
    edges = [first, *sorted(inner), last]
    whole = plan_shards(geometry, page_size)
    try:
        plans = all_ranks(geometry, page_size, tp_size, edges)
    except GeometryError:
        return  # what a refusal has to say is the next test's
    assert {shard for plan in plans for shard in plan.shards} == set(whole.shards)
    lengths = {part.shard: part.length for part in whole.parts}
    for plan in plans:
        at = 0
        for part in sorted(plan.parts, key=lambda part: part.offset):
            assert part.offset == at
            assert part.length == lengths[part.shard]
            at += part.length
        assert at == plan.page_bytes
    holders = {shard: [part for plan in plans for part in plan.parts if part.shard == shard] for shard in whole.shards}
    for shard, parts in holders.items():
        assert sorted(part.replica for part in parts) == list(range(len(parts))), shard
        assert {part.replicas for part in parts} == {len(parts)}
    page_hash = data.draw(st.binary(min_size=16, max_size=16))
    written = [part.shard for plan in plans for part in plan.writes(page_hash)]
    assert sorted(written, key=str) == sorted(whole.shards, key=str)


def refusal(geometry: KVGeometry, tp_size: int, stage: tuple[int, int]) -> str | None:
    try:
        all_ranks(geometry, 4, tp_size, list(stage))
    except GeometryError as error:
        return str(error)
    return None


@pytest.mark.case("PLUG-4")
@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), st.integers(1, 12), st.none() | st.integers(1, 5), st.data())
def test_the_value_that_a_refusal_names_fits(
    heads: int, tp_size: int, partition: int | None, data: st.DataObject
) -> None:
    head_group = data.draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    geometry = KVGeometry.mha(
        8, kv_heads=heads, head_dim=2, dtype="int8", head_group=head_group, layer_partition=partition
    )
    start, end = sorted(data.draw(st.sets(st.integers(0, 8), min_size=2, max_size=2)))
    for _ in range(3):  # at most one change to each of the three agreements
        message = refusal(geometry, tp_size, (start, end))
        if message is None:
            return
        found = re.search(r"use (tp_size|head_group|layer_partition)=(\d+)$", message)
        assert found is not None, message
        name, value = found[1], int(found[2])
        if name == "tp_size":
            tp_size = value
        elif name == "layer_partition":
            geometry = replace(geometry, layer_partition=value)
        else:
            geometry = KVGeometry.mha(
                8, kv_heads=heads, head_dim=2, dtype="int8", head_group=value, layer_partition=geometry.layer_partition
            )
    assert refusal(geometry, tp_size, (start, end)) is None


@given(geometries(), st.integers(1, 5))
def test_a_whole_page_is_all_its_bytes(geometry: KVGeometry, page_size: int) -> None:
    plan = plan_shards(geometry, page_size)
    assert sum(part.length for part in plan.parts) == plan.page_bytes == geometry.page_bytes(page_size)
    assert plan.parts[0].shard == plan.anchor == geometry.anchor(page_size)
    assert len(set(plan.shards)) == len(plan.parts)
