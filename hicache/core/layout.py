"""Geometry: how many bytes a page has, in which cells, in which order.

A cell is one page x one layer x one head group. A geometry lists layer groups, each with its layers, head groups and
bytes per cell; head sizes and dtypes are labels that enter the digest, and nothing else computes with them. So packed
4-bit rows, FP8 latents with scales in the row, or layers with different head counts need no special case.

Format `canonical-v1`: layer group after layer group, inside each `(head_group, layer, 2, token, head in group, dim)`
with keys before values; latent state (MLA) is `(layer, token, dim)`. Every shard is then one contiguous run, and
moving to another topology moves whole cells.

`head_group` (kv heads a shard) and `layer_partition` (layers a shard) are agreements of all who share a store; they
are part of the digest, so those who did not agree miss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Any, Final

from hicache.core.cells import DTYPE_BYTES, LayerGroup, check_count, check_label, check_layers, dtype_name, row_length
from hicache.core.framing import frame, frame_number, frame_text
from hicache.core.keys import MAX_HEAD_GROUPS, MAX_LAYERS, Shard
from hicache.core.symbols import check_page_size
from hicache.errors import GeometryError

__all__ = ["CANONICAL", "DTYPE_BYTES", "KVGeometry", "LayerGroup"]

CANONICAL: Final = "canonical-v1"
_RECORD_TAG: Final = b"hicache-geometry-v1"


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of a model's KV state. Immutable, hashable, compared by value.

    Use `mha`, `mla` or `opaque`; the plain constructor is for models whose layers differ.

    Attributes:
        groups: layer groups in layer order, without gaps or overlaps.
        format: what is inside the cells: "canonical-v1" or "opaque:...".
        layer_partition: layers a shard, counted from layer 0; None = a layer group is one shard, also where a larger
            number was given.

    Raises:
        GeometryError: groups that leave a gap or overlap, a bad format or partition.
    """

    groups: tuple[LayerGroup, ...]
    format: str = CANONICAL
    layer_partition: int | None = None

    def __post_init__(self) -> None:
        if type(self.groups) is not tuple or not self.groups:
            raise GeometryError("a geometry needs at least one layer group, as a tuple")
        for before, after in pairwise(self.groups):
            if before.layers[1] != after.layers[0]:
                raise GeometryError(f"layer groups {before.layers} and {after.layers} leave a gap or overlap")
        if self.format != CANONICAL:
            _check_opaque(self.format)
        if self.layer_partition is not None:
            partition = check_count(self.layer_partition, "layer_partition", most=MAX_LAYERS)
            # At or above the layers it cuts nothing: the same agreement as none, so it must have the same digest.
            object.__setattr__(self, "layer_partition", partition if partition < self.layers[1] else None)

    @classmethod
    def mha(
        cls,
        layers: int | tuple[int, int],
        *,
        kv_heads: int,
        head_dim: int,
        dtype: Any,
        head_group: int | None = None,
        layer_partition: int | None = None,
        row_bytes: int | None = None,
    ) -> KVGeometry:
        """Multi-head attention; grouped-query and multi-query attention are the same with fewer `kv_heads`.

        Args:
            layers: number of layers, or their absolute range.
            kv_heads: key-value heads of the whole model, before any tensor parallelism.
            head_dim: elements of one head.
            dtype: name of the elements' type, see `DTYPE_BYTES`, or torch's or numpy's dtype of that name; any label
                with `row_bytes`.
            head_group: kv heads a shard; by default all. Tensor parallelism needs a divisor of the heads of a rank.
            layer_partition: layers a shard; by default all. Pipeline stages must begin on its multiples.
            row_bytes: bytes of one key (or value) row, one token and head, where elements are packed.
        """
        kv_heads = check_count(kv_heads, "kv_heads", most=MAX_HEAD_GROUPS)
        head_dim = check_count(head_dim, "head_dim")
        dtype = dtype_name(dtype)
        heads = kv_heads if head_group is None else check_count(head_group, "head_group", most=MAX_HEAD_GROUPS)
        row = row_length(head_dim, dtype, row_bytes)
        group = LayerGroup(check_layers(layers), kv_heads, heads, 2 * heads * row, 0, "mha", dtype, str(head_dim))
        return cls((group,), layer_partition=layer_partition)

    @classmethod
    def mla(
        cls,
        layers: int | tuple[int, int],
        *,
        latent_dim: int,
        rope_dim: int,
        dtype: Any,
        layer_partition: int | None = None,
        row_bytes: int | None = None,
    ) -> KVGeometry:
        """Multi-head latent attention: one latent row a token, the same on each rank of a tensor-parallel group.

        Args:
            layers: number of layers, or their absolute range.
            latent_dim: elements of the compressed latent.
            rope_dim: elements of the decoupled rotary key, stored behind the latent.
            dtype: name of the elements' type, see `DTYPE_BYTES`, or torch's or numpy's dtype of that name; any label
                with `row_bytes`.
            layer_partition: layers a shard; by default all.
            row_bytes: bytes of one token's row, where it is packed or carries scales.
        """
        latent_dim = check_count(latent_dim, "latent_dim")
        rope_dim = check_count(rope_dim, "rope_dim", least=0)
        dtype = dtype_name(dtype)
        row = row_length(latent_dim + rope_dim, dtype, row_bytes)
        group = LayerGroup(check_layers(layers), 0, 0, row, 0, "mla", dtype, f"{latent_dim}+{rope_dim}")
        return cls((group,), layer_partition=layer_partition)

    @classmethod
    def opaque(
        cls,
        *,
        engine: str,
        backend: str,
        version: str,
        shape: str,
        page_bytes: int | None = None,
        cell_bytes: int | None = None,
        layers: int | tuple[int, int] = 1,
        head_groups: int | None = None,
        dtype: str = "uint8",
        layer_partition: int | None = None,
    ) -> KVGeometry:
        """Pages whose inside is the engine's own: kept and given back, sharable by cell, never across engines.

        Args:
            engine: name of the engine that lays out the rows.
            backend: its attention backend.
            version: version of that layout.
            shape: what else decides the bytes, such as "2x64x8x128".
            page_bytes: bytes of a whole page, divided evenly over layers and head groups; or
            cell_bytes: bytes of one layer and head group of a page. They hold for one page size, which is in the
                digest.
            layers: number of layers, or their absolute range.
            head_groups: cells a layer that ranks hold separately; None where each rank holds all.
            dtype: label.
            layer_partition: layers a shard; by default all.
        """
        bounds = check_layers(layers)
        head_groups = None if head_groups is None else check_count(head_groups, "head_groups")
        cells = (bounds[1] - bounds[0]) * (head_groups or 1)
        group = LayerGroup(
            bounds,
            head_groups or 0,
            0 if head_groups is None else 1,
            0,
            _opaque_cell(page_bytes, cell_bytes, cells),
            "opaque",
            dtype,
            check_label(shape, "shape"),
        )
        parts = (check_label(engine, "engine"), check_label(backend, "backend"), check_label(version, "version"), shape)
        return cls((group,), format="opaque:" + "/".join(parts), layer_partition=layer_partition)

    @property
    def layers(self) -> tuple[int, int]:
        """Absolute range of all layers."""
        return self.groups[0].layers[0], self.groups[-1].layers[1]

    @property
    def layer_count(self) -> int:
        """Number of layers."""
        return self.layers[1] - self.layers[0]

    @property
    def dtype(self) -> str:
        """Label of the elements: the groups' dtypes, each once."""
        return "+".join(dict.fromkeys(group.dtype for group in self.groups))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers and heads; 0 where pages have a fixed size."""
        return sum(group.layer_count * group.head_groups * group.token_bytes for group in self.groups)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page in all layers and heads."""
        page_size = check_page_size(page_size)
        return sum(group.layer_count * group.head_groups * group.cell_bytes(page_size) for group in self.groups)

    def record(self, page_size: int) -> bytes:
        """Geometry, agreements and page size as framed fields: what the digest is over."""
        head = frame_text(self.format) + frame_number(check_page_size(page_size)) + frame_number(self.layer_partition)
        return frame(_RECORD_TAG) + head + b"".join(frame(group.record()) for group in self.groups)

    def digest(self, page_size: int) -> str:
        """`hg1-` and the first 16 hex digits of the record's sha256."""
        return _digest(self, page_size)

    def layer_cuts(self) -> tuple[tuple[int, int], ...]:
        """The layer ranges of shards, in order: multiples of the partition, and where layer groups meet."""
        cuts: list[tuple[int, int]] = []
        for group in self.groups:
            start, end = group.layers
            step = self.layer_partition or MAX_LAYERS
            inner = range(start - start % step + step, end, step)
            edges = (start, *inner, end)
            cuts.extend(pairwise(edges))
        return tuple(cuts)

    def anchor(self, page_size: int) -> Shard:
        """The shard of the first layers and head group 0. It is put last, so that it tells for the page."""
        first = self.groups[0]
        return Shard(self.digest(page_size), self.layer_cuts()[0], 0 if first.kv_heads else None)

    def describe(self) -> dict[str, Any]:
        """The geometry for people and manifests; JSON types only."""
        return {
            "format": self.format,
            "layer_partition": self.layer_partition,
            "groups": [group.describe() for group in self.groups],
        }


@lru_cache(maxsize=256)
def _digest(geometry: KVGeometry, page_size: int) -> str:
    return "hg1-" + sha256(geometry.record(page_size)).hexdigest()[:16]


def _opaque_cell(page_bytes: int | None, cell_bytes: int | None, cells: int) -> int:
    if (page_bytes is None) == (cell_bytes is None):
        raise GeometryError("an opaque geometry needs either page_bytes or cell_bytes: give exactly one")
    if cell_bytes is not None:
        return check_count(cell_bytes, "cell_bytes")
    total = check_count(page_bytes, "page_bytes")
    if total % cells:
        raise GeometryError(
            f"page_bytes={total} is no multiple of its {cells} cells: use {total - total % cells + cells}"
        )
    return total // cells


def _check_opaque(text: object) -> None:
    if not isinstance(text, str) or not text.startswith("opaque:") or text.count("/") != 3:
        raise GeometryError(f"format {text!r:.80} is not {CANONICAL!r} or 'opaque:ENGINE/BACKEND/VERSION/SHAPE'")
    for part in text.removeprefix("opaque:").split("/"):
        check_label(part, "part of the opaque format")
