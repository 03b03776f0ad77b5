from __future__ import annotations

import pytest

from hicache.core.arenas import MOST_RANKS, ArenaPlan, RankArena, Run, joined
from hicache.core.layout import KVGeometry, LayerGroup
from hicache.errors import GeometryError

GQA = KVGeometry.mha(32, kv_heads=8, head_dim=128, dtype="bfloat16", head_group=1, layer_partition=16)
MLA = KVGeometry.mla(8, latent_dim=512, rope_dim=64, dtype="bfloat16")


def test_one_rank_has_one_arena_that_is_the_page() -> None:
    plan = ArenaPlan.of(GQA, 64)
    assert len(plan.arenas) == 1
    assert plan.rank().arenas == (RankArena(0, (Run(0, 0, plan.page_bytes),), True),)
    assert plan.slot_bytes == plan.page_bytes == GQA.page_bytes(64)


@pytest.mark.case("PLUG-4")
def test_ranks_that_share_heads_and_layers_have_an_arena_each_with_their_page_as_one_run() -> None:
    """4 ranks x 2 stages: 8 arenas, none bigger than a rank's own page, each rank writes its own."""
    plan = ArenaPlan.of(GQA, 64, tp_size=4, pp_first_layers=(0, 16))
    assert [arena.holders for arena in plan.arenas] == [(0,), (4,), (1,), (5,), (2,), (6,), (3,), (7,)]
    for rank in plan.ranks:
        assert rank.page_bytes == plan.page_bytes // 8
        assert len(rank.arenas) == 1
        assert rank.arenas[0].runs == (Run(0, 0, rank.page_bytes),)
        assert rank.arenas[0].writes
    assert plan.rank(1, 1) is plan.ranks[5]


def test_latents_lie_once_for_all_ranks_and_one_of_them_writes() -> None:
    plan = ArenaPlan.of(MLA, 64, tp_size=4)
    assert plan.slot_bytes == plan.page_bytes == MLA.page_bytes(64)
    assert [arena.holders for arena in plan.arenas] == [(0, 1, 2, 3)]
    assert [rank.arenas[0].writes for rank in plan.ranks] == [True, False, False, False]


def test_replicated_heads_lie_once_and_their_writers_are_spread() -> None:
    """8 ranks share 4 heads: 4 arenas of 2 holders; of neighbours once the first writes, once the second."""
    geometry = KVGeometry.mha(2, kv_heads=4, head_dim=64, dtype="float16", head_group=1)
    plan = ArenaPlan.of(geometry, 16, tp_size=8)
    assert [arena.holders for arena in plan.arenas] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [arena.writer for arena in plan.arenas] == [0, 3, 4, 7]
    assert sum(arena.slot_bytes for arena in plan.arenas) == plan.page_bytes


def test_a_rank_with_own_heads_and_shared_latents_maps_two_arenas() -> None:
    groups = (LayerGroup((0, 2), 0, 0, 64, kind="mla"), LayerGroup((2, 4), 4, 2, 128))
    plan = ArenaPlan.of(KVGeometry(groups), 16, tp_size=2)
    assert [arena.holders for arena in plan.arenas] == [(0, 1), (0,), (1,)]
    latents = 2 * 64 * 16
    own = 2 * 128 * 16
    assert plan.rank(1).arenas == (
        RankArena(0, (Run(0, 0, latents),), False),
        RankArena(2, (Run(latents, 0, own),), True),
    )


def test_slots_that_are_mostly_padding_are_told() -> None:
    geometry = KVGeometry.mha(1, kv_heads=2, head_dim=8, dtype="float16", head_group=1)
    warnings = ArenaPlan.of(geometry, 16, tp_size=2).warnings
    assert "512 bytes of a page take 4096 in arena 1: larger pages waste less" in warnings


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        ({"tp_size": 3}, "3 ranks cannot share 8 kv heads evenly: use tp_size=2"),
        ({"tp_size": 0}, "tp_size 0 must be an integer of at least 1"),
        ({"tp_size": True}, "tp_size True must be an integer of at least 1"),
        ({"tp_size": 2**32 - 1}, f"1 pipeline stages of 4294967295 ranks are more than {MOST_RANKS} ranks"),
        ({"pp_first_layers": (0, 8)}, r"no union of shards \(layer_partition=16\): use layer_partition=8"),
        ({"pp_first_layers": (1, 16)}, r"pp_first_layers \(1, 16\) must be integers, the first of them 0"),
        ({"pp_first_layers": (0, 16, 16)}, "must rise, and end below the model's 32 layers"),
        ({"pp_first_layers": (0, 32)}, "must rise, and end below the model's 32 layers"),
    ],
)
def test_topologies_that_do_not_fit_are_refused_with_what_would(topology: dict[str, object], text: str) -> None:
    with pytest.raises(GeometryError, match=text):
        ArenaPlan.of(GQA, 64, **topology)  # type: ignore[arg-type]


def test_a_geometry_of_absurdly_many_shards_is_refused_before_it_is_planned() -> None:
    """Geometries come from clients: 2**32 shards must cost nothing but an answer."""
    geometry = KVGeometry((LayerGroup((0, 65_535), 65_535, 1, 1),), layer_partition=1)
    with pytest.raises(GeometryError, match="has 4294836225 shards on 1 ranks, and at most 65536 can be planned"):
        ArenaPlan.of(geometry, 64)


@pytest.mark.parametrize(("rank", "text"), [((4, 0), "tp_rank 4"), ((-1, 0), "tp_rank -1"), ((0, 1), "pp_rank 1")])
def test_ranks_that_do_not_exist_are_refused(rank: tuple[int, int], text: str) -> None:
    with pytest.raises(GeometryError, match=f"{text} must be an integer of 0 to"):
        ArenaPlan.of(GQA, 64, tp_size=4).rank(*rank)


def test_runs_are_joined_only_where_they_touch_in_page_and_slot() -> None:
    runs = [Run(20, 50, 10), Run(0, 0, 10), Run(10, 10, 10), Run(31, 61, 9), Run(30, 60, 1)]
    assert joined(runs) == (Run(0, 0, 20), Run(20, 50, 20))
