"""Which shards of a page a rank holds, where they lie in its page buffer, and who writes what several ranks hold.

Topology is tensor parallelism over kv heads times pipeline stages over layers. Ranges are absolute, so plans of one
geometry name the same shards under every topology that fits it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Final

from hicache.core.keys import Shard
from hicache.core.layout import KVGeometry, LayerGroup
from hicache.core.symbols import check_page_size
from hicache.errors import GeometryError

__all__ = ["SHARD_BYTES_HIGH", "SHARD_BYTES_LOW", "ShardPart", "ShardPlan", "plan_shards"]

SHARD_BYTES_LOW: Final = 64 * 1024
SHARD_BYTES_HIGH: Final = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ShardPart:
    """One shard in a rank's page buffer: always one contiguous run.

    Attributes:
        shard: the shard, in absolute coordinates.
        offset: first byte in the rank's canonical page buffer.
        length: bytes.
        replica: which of the ranks that hold this shard this one is.
        replicas: how many ranks hold it.
    """

    shard: Shard
    offset: int
    length: int
    replica: int = 0
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """All shards of a page that one rank needs.

    Attributes:
        geometry: digest of the geometry.
        page_size: tokens a page.
        parts: the shards, layer range by layer range, inside it by head group.
        page_bytes: length of the rank's page buffer; the parts cover it exactly.
        anchor: the shard of the whole page that is put last. It need not be one of this rank's.
        warnings: what works but will cost, in words.
    """

    geometry: str
    page_size: int
    parts: tuple[ShardPart, ...]
    page_bytes: int
    anchor: Shard
    warnings: tuple[str, ...] = ()

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards without their places."""
        return tuple(part.shard for part in self.parts)

    def writes(self, page_hash: bytes) -> tuple[ShardPart, ...]:
        """The parts that this rank puts for a page, in the order in which to put them: the first shard last.

        Of the ranks that hold a shard, the page's hash elects one.
        """
        elected = int.from_bytes(page_hash[:8], "little")
        return tuple(part for part in reversed(self.parts) if elected % part.replicas == part.replica)


def plan_shards(
    geometry: KVGeometry,
    page_size: int,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_layers: tuple[int, int] | None = None,
) -> ShardPlan:
    """The shards of one rank; by default those of a whole page.

    Args:
        geometry: of the whole model.
        page_size: tokens a page.
        tp_rank: this rank among those that share the heads.
        tp_size: how many share them. With more ranks than heads, neighbours hold the same head.
        pp_layers: absolute layer range of this rank's pipeline stage; None = all.

    Raises:
        GeometryError: the rank's ranges are no union of shards; the text names a value that would fit.
    """
    check_page_size(page_size)
    _check_ranks(geometry, tp_rank, tp_size)
    stage = _check_stage(geometry, pp_layers)
    digest = geometry.digest(page_size)
    parts: list[ShardPart] = []
    base = 0
    for group in geometry.groups:
        cuts = [cut for cut in geometry.layer_cuts() if _inside(cut, group.layers) and _inside(cut, stage)]
        if cuts:
            own = _own_groups(group, tp_rank, tp_size)
            parts.extend(_parts(group, digest, page_size, own, cuts, base))
            base = parts[-1].offset + parts[-1].length
    anchor = geometry.anchor(page_size)
    return ShardPlan(digest, page_size, tuple(parts), base, anchor, _size_warnings(parts))


@dataclass(frozen=True, slots=True)
class _Own:
    """A rank's head groups of one layer group, and its place among the ranks with the same ones."""

    first: int
    count: int
    replica: int
    replicas: int


def _parts(
    group: LayerGroup, digest: str, page_size: int, own: _Own, cuts: list[tuple[int, int]], base: int
) -> list[ShardPart]:
    cell = group.cell_bytes(page_size)
    first_layer, layers = cuts[0][0], cuts[-1][1] - cuts[0][0]
    parts = []
    for start, end in cuts:
        for local in range(own.count):
            head_group = own.first + local if group.kv_heads else None
            offset = base + (local * layers + start - first_layer) * cell
            shard = Shard(digest, (start, end), head_group)
            parts.append(ShardPart(shard, offset, (end - start) * cell, own.replica, own.replicas))
    return parts


def _own_groups(group: LayerGroup, tp_rank: int, tp_size: int) -> _Own:
    heads = group.kv_heads
    if heads == 0:
        return _Own(0, 1, tp_rank, tp_size)
    replicas = max(1, tp_size // heads)
    local = max(1, heads // tp_size)
    if local % group.head_group:
        fits = gcd(local, group.head_group)
        raise GeometryError(
            f"head_group={group.head_group} does not divide the {local} of {heads} kv heads that each of {tp_size} "
            f"ranks holds: use head_group={fits}"
        )
    first_head = tp_rank // replicas * local
    return _Own(first_head // group.head_group, local // group.head_group, tp_rank % replicas, replicas)


def _shares_evenly(group: LayerGroup, tp_size: int) -> bool:
    heads = group.kv_heads
    return heads == 0 or heads % tp_size == 0 or tp_size % heads == 0


def _check_ranks(geometry: KVGeometry, tp_rank: int, tp_size: int) -> None:
    if type(tp_size) is not int or tp_size < 1:
        raise GeometryError(f"tp_size {tp_size!r:.40} must be an integer of at least 1")
    if type(tp_rank) is not int or not 0 <= tp_rank < tp_size:
        raise GeometryError(f"tp_rank {tp_rank!r:.40} must be an integer of 0 to {tp_size - 1}")
    for group in geometry.groups:
        if not _shares_evenly(group, tp_size):
            fits = next(
                size for size in range(tp_size, 0, -1) if all(_shares_evenly(other, size) for other in geometry.groups)
            )
            raise GeometryError(f"{tp_size} ranks cannot share {group.kv_heads} kv heads evenly: use tp_size={fits}")


def _check_stage(geometry: KVGeometry, pp_layers: tuple[int, int] | None) -> tuple[int, int]:
    first, last = geometry.layers
    if pp_layers is None:
        return first, last
    start, end = pp_layers
    if not first <= start < end <= last:
        raise GeometryError(f"pipeline stage of layers {start} to {end} is not inside the model's {first} to {last}")
    cuts = geometry.layer_cuts()
    if start not in {cut[0] for cut in cuts} or end not in {cut[1] for cut in cuts}:
        inner = [edge for edge in (start, end) if edge not in (first, last)]
        fits = gcd(*inner, geometry.layer_partition or 0)
        raise GeometryError(
            f"pipeline stage of layers {start} to {end} is no union of shards "
            f"(layer_partition={geometry.layer_partition}): use layer_partition={fits}"
        )
    return start, end


def _inside(cut: tuple[int, int], bounds: tuple[int, int]) -> bool:
    return bounds[0] <= cut[0] and cut[1] <= bounds[1]


def _size_warnings(parts: list[ShardPart]) -> tuple[str, ...]:
    smallest = min(part.length for part in parts)
    largest = max(part.length for part in parts)
    warnings = []
    if smallest < SHARD_BYTES_LOW:
        warnings.append(
            f"shards of {smallest} bytes are small: larger pages, head groups or layer partitions cost less a byte"
        )
    if largest > SHARD_BYTES_HIGH:
        warnings.append(f"shards of {largest} bytes are large: a smaller layer_partition or head_group spreads them")
    return tuple(warnings)
