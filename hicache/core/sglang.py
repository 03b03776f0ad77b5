"""SGLang's own geometry digest, for tools and tests that meet its objects. hicache's objects never carry it."""

from __future__ import annotations

from hashlib import sha256

import msgspec

from hicache.errors import GeometryError

__all__ = ["sglang_ukv_digest"]


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    # The fields' names and order are the encoding: SGLang digests this record as a MessagePack map.
    schema_version: int = 1
    model_id: str
    dtype: str
    page_size: int
    rank_replicated: bool
    total_kv_heads: int
    layer_partition: int = 0
    head_group: int
    object_layout: str = "page-unified-v1"


def sglang_ukv_digest(
    *,
    model_id: str,
    dtype: str,
    page_size: int,
    total_kv_heads: int,
    head_group: int,
    layer_partition: int = 0,
    rank_replicated: bool = False,
) -> str:
    """`ukv1-` and 16 hex digits, as SGLang 0.5.23 derives it for `{page_hash}_{digest}_L{start}-{end}[_H{group}]`.

    Args:
        model_id: as the engine was given it.
        dtype: logical element type, such as "bfloat16".
        page_size: tokens a page.
        total_kv_heads: of the whole model; 0 if replicated.
        head_group: kv heads an object; 0 if replicated.
        layer_partition: layers an object; 0 = a stage's layers.
        rank_replicated: state without a head axis (MLA).

    Raises:
        GeometryError: what SGLang refuses too.
    """
    if not model_id:
        raise GeometryError("model_id is empty: give the engine's model")
    if rank_replicated and (total_kv_heads or head_group):
        raise GeometryError("replicated state has no head axis: total_kv_heads and head_group must be 0")
    if not rank_replicated and (head_group < 1 or total_kv_heads % head_group):
        raise GeometryError(f"head_group={head_group} does not divide {total_kv_heads} kv heads")
    record = _Record(
        model_id=model_id,
        dtype=dtype,
        page_size=page_size,
        rank_replicated=rank_replicated,
        total_kv_heads=total_kv_heads,
        layer_partition=layer_partition,
        head_group=head_group,
    )
    return "ukv1-" + sha256(msgspec.msgpack.encode(record)).hexdigest()[:16]
