"""Where a page's bytes lie when the ranks of a model share one pool: arena by arena.

An arena is one shared memory with as many slots as the pool, and a slot number means the same page in each. It holds
those shards of every page that the same ranks hold, so each rank maps its own bytes and no others, and what several
ranks hold alike (latents of MLA, replicated kv heads) is there once. A page is whole when every arena has its part.

Parts lie in the order of the whole canonical page. Each rank's canonical page keeps that order too, so a rank whose
shards are its own alone finds its page as one run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hicache.core.keys import Shard
from hicache.core.layout import KVGeometry
from hicache.core.partition import ShardPlan, plan_shards
from hicache.errors import GeometryError

__all__ = [
    "MOST_PARTS",
    "MOST_RANKS",
    "SLOT_ALIGNMENT",
    "ArenaPart",
    "ArenaPlan",
    "ArenaShape",
    "RankArena",
    "RankPlan",
    "Run",
]

SLOT_ALIGNMENT: Final = 4096
"""Slots are multiples of it: direct I/O and pinning need that, and no two slots share a page of the machine."""

MOST_RANKS: Final = 4096
MOST_PARTS: Final = 2**16
"""Shards of a page, each counted once for every rank that holds it. Topologies come from clients: plans stay small."""

_PADDING_WORTH_A_WARNING: Final = 4  # one part in so many of a slot


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that are contiguous both in a canonical page and in a slot.

    Attributes:
        page_offset: first byte in the canonical page.
        slot_offset: first byte in the slot.
        length: bytes.
    """

    page_offset: int
    slot_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ArenaPart:
    """One shard in an arena's slots.

    Attributes:
        shard: the shard, in absolute coordinates.
        page_offset: first byte in the whole canonical page.
        slot_offset: first byte in the slot.
        length: bytes.
    """

    shard: Shard
    page_offset: int
    slot_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """One arena: whose it is and what lies in its slots.

    Attributes:
        index: its number in the plan.
        holders: ranks that hold its shards, by `ArenaPlan.number`; at least one.
        writer: the one of them that writes it.
        slot_bytes: bytes that the parts of one page take.
        stride: bytes from slot to slot, a multiple of `SLOT_ALIGNMENT`.
        parts: the shards, without gaps, in the order of the whole page.
        runs: the same bytes, neighbours in page and slot joined; `page_offset` is in the whole page.
    """

    index: int
    holders: tuple[int, ...]
    writer: int
    slot_bytes: int
    stride: int
    parts: tuple[ArenaPart, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class RankArena:
    """An arena as one rank sees it.

    Attributes:
        index: of the arena.
        runs: where its bytes lie in the rank's canonical page, in that page's order.
        writes: whether the rank is the one that writes it.
    """

    index: int
    runs: tuple[Run, ...]
    writes: bool


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank maps.

    Attributes:
        page_bytes: length of its canonical page; the runs of its arenas cover it exactly.
        arenas: the arenas that it holds, by index.
    """

    page_bytes: int
    arenas: tuple[RankArena, ...]


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """All arenas of one geometry under one topology. Make it with `of`.

    Attributes:
        geometry: digest of the geometry.
        page_size: tokens a page.
        page_bytes: bytes of a whole page.
        tp_size: ranks that share the heads of a layer.
        stages: absolute layer range of each pipeline stage.
        arenas: in the order of their first byte in the whole page.
        ranks: what each rank maps, by `number`.
        warnings: what works but costs, in words.
    """

    geometry: str
    page_size: int
    page_bytes: int
    tp_size: int
    stages: tuple[tuple[int, int], ...]
    arenas: tuple[ArenaShape, ...]
    ranks: tuple[RankPlan, ...]
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, geometry: KVGeometry, page_size: int, *, tp_size: int = 1, pp_first_layers: Sequence[int] = ()
    ) -> ArenaPlan:
        """Plan the arenas.

        Args:
            geometry: of the whole model.
            page_size: tokens a page.
            tp_size: ranks that share the heads.
            pp_first_layers: first layer of each pipeline stage; empty: one stage.

        Raises:
            GeometryError: a topology that does not fit; the text says what would.
        """
        stages = _stages(geometry, tuple(pp_first_layers))
        _check_bounds(geometry, tp_size, len(stages))
        whole = plan_shards(geometry, page_size)
        plans = [
            plan_shards(geometry, page_size, tp_rank=tp_rank, tp_size=tp_size, pp_layers=stage)
            for stage in stages
            for tp_rank in range(tp_size)
        ]
        arenas = _arenas(whole, plans)
        return cls(
            geometry=whole.geometry,
            page_size=page_size,
            page_bytes=whole.page_bytes,
            tp_size=tp_size,
            stages=stages,
            arenas=arenas,
            ranks=_ranks(arenas, plans),
            warnings=(*whole.warnings, *_padding(arenas)),
        )

    @property
    def slot_bytes(self) -> int:
        """Memory that one slot takes in all arenas, padding included."""
        return sum(arena.stride for arena in self.arenas)

    def number(self, tp_rank: int, pp_rank: int) -> int:
        """Number of a rank.

        Raises:
            GeometryError: no such rank in this topology.
        """
        for value, what, count in ((tp_rank, "tp_rank", self.tp_size), (pp_rank, "pp_rank", len(self.stages))):
            if type(value) is not int or not 0 <= value < count:
                raise GeometryError(f"{what} {value!r:.40} must be an integer of 0 to {count - 1}")
        return pp_rank * self.tp_size + tp_rank

    def rank(self, tp_rank: int = 0, pp_rank: int = 0) -> RankPlan:
        """What one rank maps.

        Raises:
            GeometryError: no such rank in this topology.
        """
        return self.ranks[self.number(tp_rank, pp_rank)]


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs in the order of the page, with neighbours in page and slot made one."""
    made: list[Run] = []
    for run in sorted(runs, key=lambda run: run.page_offset):
        last = made[-1] if made else None
        if (
            last is not None
            and last.page_offset + last.length == run.page_offset
            and last.slot_offset + last.length == run.slot_offset
        ):
            made[-1] = Run(last.page_offset, last.slot_offset, last.length + run.length)
        else:
            made.append(run)
    return tuple(made)


def _arenas(whole: ShardPlan, plans: Sequence[ShardPlan]) -> tuple[ArenaShape, ...]:
    holders: dict[Shard, list[int]] = {}
    for number, plan in enumerate(plans):
        for part in plan.parts:
            holders.setdefault(part.shard, []).append(number)
    grouped: dict[tuple[int, ...], list[ArenaPart]] = {}
    fill: dict[tuple[int, ...], int] = {}
    for part in sorted(whole.parts, key=lambda part: part.offset):
        ranks = tuple(holders[part.shard])
        at = fill.get(ranks, 0)
        grouped.setdefault(ranks, []).append(ArenaPart(part.shard, part.offset, at, part.length))
        fill[ranks] = at + part.length
    return tuple(
        ArenaShape(
            index=index,
            holders=ranks,
            writer=ranks[index % len(ranks)],  # spreads the work over the holders
            slot_bytes=fill[ranks],
            stride=-(-fill[ranks] // SLOT_ALIGNMENT) * SLOT_ALIGNMENT,
            parts=tuple(parts),
            runs=joined(Run(part.page_offset, part.slot_offset, part.length) for part in parts),
        )
        for index, (ranks, parts) in enumerate(grouped.items())
    )


def _ranks(arenas: Sequence[ArenaShape], plans: Sequence[ShardPlan]) -> tuple[RankPlan, ...]:
    places = {part.shard: (arena.index, part.slot_offset) for arena in arenas for part in arena.parts}
    ranks = []
    for number, plan in enumerate(plans):
        runs: dict[int, list[Run]] = {}
        for part in plan.parts:
            index, slot_offset = places[part.shard]
            runs.setdefault(index, []).append(Run(part.offset, slot_offset, part.length))
        seen = (RankArena(index, joined(runs[index]), arenas[index].writer == number) for index in sorted(runs))
        ranks.append(RankPlan(plan.page_bytes, tuple(seen)))
    return tuple(ranks)


def _stages(geometry: KVGeometry, first_layers: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    first, last = geometry.layers
    if not first_layers:
        return ((first, last),)
    if any(type(layer) is not int for layer in first_layers) or first_layers[0] != first:
        raise GeometryError(f"pp_first_layers {_shown(first_layers)} must be integers, the first of them {first}")
    edges = (*first_layers, last)
    if any(before >= after for before, after in pairwise(edges)):
        raise GeometryError(
            f"pp_first_layers {_shown(first_layers)} must rise, and end below the model's {last} layers"
        )
    return tuple(pairwise(edges))


def _check_bounds(geometry: KVGeometry, tp_size: int, stages: int) -> None:
    if type(tp_size) is not int or tp_size < 1:
        raise GeometryError(f"tp_size {tp_size!r:.40} must be an integer of at least 1")
    if tp_size * stages > MOST_RANKS:
        raise GeometryError(
            f"{stages} pipeline stages of {tp_size} ranks are more than {MOST_RANKS} ranks: use several groups"
        )
    cuts = [start for start, _ in geometry.layer_cuts()]
    parts = 0
    for group in geometry.groups:
        inside = bisect_left(cuts, group.layers[1]) - bisect_left(cuts, group.layers[0])
        replicas = max(1, tp_size // group.kv_heads) if group.kv_heads else tp_size
        parts += inside * group.head_groups * replicas
    if parts > MOST_PARTS:
        raise GeometryError(
            f"a page of this geometry has {parts} shards on {tp_size} ranks, and at most {MOST_PARTS} can be planned: "
            "use a larger layer_partition or head_group, or fewer ranks"
        )


def _padding(arenas: Sequence[ArenaShape]) -> tuple[str, ...]:
    return tuple(
        f"{arena.slot_bytes} bytes of a page take {arena.stride} in arena {arena.index}: larger pages waste less"
        for arena in arenas
        if (arena.stride - arena.slot_bytes) * _PADDING_WORTH_A_WARNING > arena.stride
    )


def _shown(layers: tuple[int, ...]) -> str:
    return f"{layers!r:.80}"
