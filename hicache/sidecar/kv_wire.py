"""KV events as routers read them: the MessagePack payloads that vLLM and SGLang publish, both ways.

A batch is `[timestamp, [events], dp_rank]`. Events are maps with `type` (the default), or arrays with the type first
for consumers from before that. A block of theirs is a page of ours. What has no place in an array is left out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

from hicache.errors import InvalidInput
from hicache.events import Stored
from hicache.records import Tier
from hicache.sidecar.residency import Scope

Encoding: TypeAlias = Literal["map", "array"]
Hashes: TypeAlias = Literal["bytes", "int64"]
BlockHash: TypeAlias = int | bytes

MEDIA: Final[Mapping[Tier, str]] = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORAGE: "DISK"}
"""What tiers are called on the wire unless it is said otherwise."""

_STORED, _REMOVED, _CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
_INT64: Final = 2**63
_ORDER: Final = {
    _STORED: (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    _REMOVED: ("block_hashes", "medium", "group_idx"),
    _CLEARED: (),
}
"""Fields by their place in an array, behind the type."""

Fields = dict[str, Any]


# ---- what is read


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that follow each other came into a medium.

    Attributes:
        block_hashes: integers as signed 64 bit, whatever they were written as; or bytes.
        parent_block_hash: hash of the block before the first, None at the start of a prompt or where not told.
        token_ids: of all blocks; empty where not told. Pairs, where the publisher hashes pairs.
        block_size: tokens a block.
        medium: where, in the publisher's word; None where not told. One that is not known is no GPU.
        lora_name, cache_salt: what separates these blocks from others, None for nothing or where not told.
        more: other fields, by name.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[Any, ...]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks left a medium; None: it is not told which."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The publisher holds nothing any more, in any medium."""


@dataclass(frozen=True, slots=True)
class OtherEvent:
    """An event of a type that this version does not know."""

    type: str


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared | OtherEvent


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """What one message carries.

    Attributes:
        timestamp: seconds since the epoch.
        events: in order.
        dp_rank: rank among data-parallel replicas, None where not told.
    """

    timestamp: float
    events: tuple[BlockEvent, ...]
    dp_rank: int | None = None


def decode_batch(payload: bytes) -> BlockBatch:
    """Read a payload of any publisher, in either form.

    Raises:
        InvalidInput: it is no batch of events.
    """
    try:
        outer = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise InvalidInput(f"a batch of KV events is no MessagePack: {error}") from None
    if isinstance(outer, dict):
        outer = [outer.get("ts"), outer.get("events"), outer.get("data_parallel_rank", outer.get("dp_rank"))]
    if not isinstance(outer, list) or len(outer) < 2 or not isinstance(outer[1], list):
        raise InvalidInput("a batch of KV events is [timestamp, [events], rank], and this is not")
    timestamp, events, *rest = outer
    rank = rest[0] if rest else None
    if not isinstance(timestamp, int | float) or not isinstance(rank, int | None):
        raise InvalidInput("a batch of KV events begins with its time and ends with a rank, and this does not")
    return BlockBatch(float(timestamp), tuple(_event(event) for event in events), rank)


def _event(event: object) -> BlockEvent:
    fields = _fields(event)
    kind = fields.pop("type", None)
    if not isinstance(kind, str):
        raise InvalidInput("a KV event has no type")
    try:
        if kind == _STORED:
            return _stored(fields)
        if kind == _REMOVED:
            return BlockRemoved(_hashes(fields["block_hashes"]), _text(fields.get("medium")))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"{kind} lacks a field, or has one of another type: {error}") from None
    return AllBlocksCleared() if kind == _CLEARED else OtherEvent(kind)


def _fields(event: object) -> Fields:
    """An event's fields by name, `type` among them."""
    if isinstance(event, dict):
        return dict(event)
    if not isinstance(event, list) or not event:
        raise InvalidInput("a KV event is a map, or an array that begins with its type")
    kind, *values = event
    # What a later version appends is left out.
    names = _ORDER.get(kind, ()) if isinstance(kind, str) else ()
    return {"type": kind, **dict(zip(names, values, strict=False))}


def _stored(fields: Fields) -> BlockStored:
    parent = fields.pop("parent_block_hash", None)
    block_size = fields.pop("block_size")
    if type(block_size) is not int or block_size < 1:
        raise ValueError(f"block_size {block_size!r:.40}")
    return BlockStored(
        _hashes(fields.pop("block_hashes")),
        None if parent is None else _hash(parent),
        tuple(tuple(token) if isinstance(token, list) else token for token in fields.pop("token_ids", None) or ()),
        block_size,
        _text(fields.pop("medium", None)),
        _text(fields.pop("lora_name", None)),
        _text(fields.pop("cache_salt", None)),
        {name: value for name, value in fields.items() if value is not None},
    )


def _hashes(values: object) -> tuple[BlockHash, ...]:
    if not isinstance(values, list):
        raise TypeError("block_hashes")
    return tuple(_hash(value) for value in values)


def _hash(value: object) -> BlockHash:
    if isinstance(value, bytes):
        return value
    if type(value) is not int:
        raise TypeError(f"hash {value!r:.40}")
    return value - 2 * _INT64 if value >= _INT64 else value


def _text(value: object) -> str | None:
    if not isinstance(value, str | None):
        raise TypeError(f"{value!r:.40} is no text")
    return value


# ---- what is written


class WireFormat:
    """How events are written. Immutable, safe in any thread.

    Args:
        encoding: "map", or "array" for consumers from before June 2026.
        hashes: "bytes", all of a page hash; or "int64": its first 8 bytes as a signed number, as SGLang has it.
        media: what tiers are called; one that is not here is not told of.
        salts: whether salts and tenants are told; routers that separate by them need them, everybody else who reads
            the stream learns them.
    """

    def __init__(
        self,
        *,
        encoding: Encoding = "map",
        hashes: Hashes = "bytes",
        media: Mapping[Tier, str] = MEDIA,
        salts: bool = False,
    ) -> None:
        self.media = dict(media)
        self._arrays = encoding == "array"
        self._salts = salts
        self._hash: Callable[[bytes], BlockHash] = short_hash if hashes == "int64" else bytes

    def stored(self, event: Stored, scope: Scope) -> Fields | None:
        """Pages of a scope that came; None for a tier that is not told of. The scope's namespace is known."""
        medium, derived = self.media.get(event.tier), scope.derived
        if medium is None or derived is None:
            return None
        heads = any(group.kv_heads for group in derived.base.geometry.groups)
        fields: Fields = {
            "type": _STORED,
            "block_hashes": [self._hash(page_hash) for page_hash in event.page_hashes],
            "parent_block_hash": None if event.parent_hash is None else self._hash(event.parent_hash),
            "token_ids": np.frombuffer(event.tokens, "<u4").tolist(),
            "block_size": derived.base.page_size,
            "lora_id": None,
            "medium": medium,
            "lora_name": None if derived.adapter is None else derived.adapter.name,
            "kv_cache_spec_kind": "full_attention" if heads else "mla_attention",
            "model_name": derived.base.model,
        }
        if self._salts:
            secret = {"cache_salt": derived.salt, "tenant_id": derived.tenant}
            fields |= {name: value for name, value in secret.items() if value is not None}
        return fields

    def removed(self, tier: Tier, page_hashes: Sequence[bytes]) -> Fields | None:
        """Pages that left, as a map; None for a tier that is not told of."""
        medium = self.media.get(tier)
        if medium is None:
            return None
        return {
            "type": _REMOVED,
            "block_hashes": [self._hash(page_hash) for page_hash in page_hashes],
            "medium": medium,
        }

    def cleared(self) -> Fields:
        """Everything left."""
        return {"type": _CLEARED}

    def batch(self, timestamp: float, events: Sequence[Fields], dp_rank: int | None) -> bytes:
        """The payload of a message."""
        written = [_array(event) for event in events] if self._arrays else events
        return msgspec.msgpack.encode([timestamp, written, dp_rank])


def short_hash(page_hash: bytes) -> int:
    """The first 8 bytes of a page hash as a signed number."""
    return int.from_bytes(page_hash[:8], "big", signed=True)


def _array(fields: Fields) -> list[Any]:
    """The fields in their places, as far as consumers of arrays know them: up to the adapter's name, or the medium."""
    kind = fields["type"]
    known = _ORDER[kind][: 7 if fields.get("lora_name") is not None else 6] if kind == _STORED else _ORDER[kind][:2]
    return [kind, *(fields.get(name) for name in known)]
