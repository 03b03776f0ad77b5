"""Administration and residency events, to messages and back."""

from __future__ import annotations

import math
from typing import Final

from hicache.errors import InvalidInput
from hicache.events import Cleared, Event, Removed, Stored
from hicache.records import Tier
from hicache.rpc.convert.identity import decode_scope, encode_scope
from hicache.rpc.convert.session import HASH_BYTES, check_glued
from hicache.rpc.service import PROTOCOL, EventBatch, Finding, Ping, Pinned, Target
from hicache.rpc.v1 import admin_pb2 as pb

_DIGEST: Final = 16
_LONGEST: Final = 10 * 365 * 86_400.0
_TIERS: Final = {Tier.DEVICE: pb.TIER_DEVICE, Tier.HOST: pb.TIER_HOST, Tier.STORAGE: pb.TIER_STORAGE}
_TIER_OF: Final = {number: tier for tier, number in _TIERS.items()}


def check_seconds(value: float, what: str) -> float:
    """The value, if it is a duration.

    Raises:
        InvalidInput: negative, not finite, or above ten years.
    """
    if not math.isfinite(value) or not 0 <= value <= _LONGEST:
        raise InvalidInput(f"{what} {value!r} is no duration: give seconds from 0 to {_LONGEST:.0f}")
    return value


def encode_target(target: Target) -> pb.Target:
    """The target as a message."""
    message = pb.Target(scope=encode_scope(target.scope), tenant=target.tenant)
    if target.namespace_digest:
        message.namespace_digest = target.namespace_digest
    else:
        message.model = target.model
    return message


def decode_target(message: pb.Target) -> Target:
    """The target of a message.

    Raises:
        InvalidInput: neither a digest of 16 bytes nor a model's name.
        NamespaceError: a scope that is none.
    """
    if len(message.namespace_digest) not in (0, _DIGEST):
        raise InvalidInput(
            f"namespace_digest has {len(message.namespace_digest)} bytes: it has {_DIGEST}, as Attached says"
        )
    if not message.namespace_digest and not message.model:
        raise InvalidInput("the target names no model: give its namespace digest, or its name")
    return Target(
        namespace_digest=message.namespace_digest,
        model=message.model,
        scope=decode_scope(message.scope),
        tenant=message.tenant if message.HasField("tenant") else None,
    )


def encode_ping(ping: Ping) -> pb.PingResponse:
    """The answer to a ping as a message."""
    return pb.PingResponse(
        server=ping.server,
        boot=ping.boot,
        protocol_min=PROTOCOL,
        protocol_max=PROTOCOL,
        uptime_seconds=ping.uptime_seconds,
        ready=ping.ready,
        degraded=ping.degraded,
        tenant=ping.tenant or "",
    )


def decode_ping(message: pb.PingResponse) -> Ping:
    """The answer of a message."""
    return Ping(
        message.server,
        message.boot,
        message.uptime_seconds,
        message.ready,
        tuple(message.degraded),
        message.tenant or None,
    )


def encode_pinned(pinned: Pinned) -> pb.PinResponse:
    """A new pin as a message."""
    return pb.PinResponse(name=pinned.name, pages=pinned.pages, bytes=pinned.bytes, of_pages=pinned.of_pages)


def decode_pinned(message: pb.PinResponse) -> Pinned:
    """A new pin of a message; what was asked for is not in it."""
    return Pinned(message.name, message.pages, message.bytes, message.of_pages)


def encode_held(pinned: Pinned) -> pb.HeldPin:
    """A pin in the list of all as a message."""
    return pb.HeldPin(
        name=pinned.name,
        tenant=pinned.tenant or "",
        namespace_digest=pinned.namespace_digest,
        hard=pinned.hard,
        pages=pinned.pages,
        bytes=pinned.bytes,
        seconds_left=pinned.seconds_left,
    )


def decode_held(message: pb.HeldPin) -> Pinned:
    """A pin of the list; of how many pages the prompt is, the list does not say, so it is the pinned ones here."""
    return Pinned(
        name=message.name,
        pages=message.pages,
        bytes=message.bytes,
        of_pages=message.pages,
        hard=message.hard,
        tenant=message.tenant or None,
        namespace_digest=message.namespace_digest,
        seconds_left=message.seconds_left,
    )


def encode_finding(finding: Finding) -> pb.Finding:
    """A finding as a message."""
    return pb.Finding(check=finding.check, good=finding.good, text=finding.text)


def decode_finding(message: pb.Finding) -> Finding:
    """A finding of a message."""
    return Finding(message.check, message.good, message.text)


# ---- events


def encode_event(event: Event) -> pb.ResidencyEvent:
    """The event as a message. Symbols do not travel: in trees of hashes they are the hashes once more."""
    message = pb.ResidencyEvent(namespace_digest=event.namespace, generation=event.generation)
    if isinstance(event, Stored):
        message.stored.tier = _TIERS[event.tier]
        message.stored.page_hashes = b"".join(event.page_hashes)
        message.stored.parent_hash = event.parent_hash or b""
        message.stored.first_page = event.first_page
        message.stored.tokens = event.tokens
    elif isinstance(event, Removed):
        message.removed.tier = _TIERS[event.tier]
        message.removed.page_hashes = b"".join(event.page_hashes)
        message.removed.reason = event.reason
    else:
        message.cleared.SetInParent()
    return message


def decode_event(message: pb.ResidencyEvent) -> Event:
    """The event of a message.

    Raises:
        InvalidInput: no known change, a tier that is none, hashes that are cut.
    """
    namespace, generation, kind = message.namespace_digest, message.generation, message.WhichOneof("change")
    if kind == "stored":
        stored = message.stored
        hashes = _hashes(stored.page_hashes)
        return Stored(
            namespace,
            generation,
            _tier(stored.tier),
            hashes,
            stored.parent_hash or None,
            stored.first_page,
            symbols=b"",
            tokens=stored.tokens,
        )
    if kind == "removed":
        removed = message.removed
        return Removed(namespace, generation, _tier(removed.tier), _hashes(removed.page_hashes), removed.reason)
    if kind == "cleared":
        return Cleared(namespace, generation)
    raise InvalidInput("an event without a change that is known here: upgrade the client")


def _tier(number: pb.Tier.ValueType) -> Tier:
    tier = _TIER_OF.get(number)
    if tier is None:
        raise InvalidInput(f"tier {number} is none that is known here: upgrade the client")
    return tier


def _hashes(glued: bytes) -> tuple[bytes, ...]:
    check_glued(glued, HASH_BYTES, "page hashes")
    return tuple(glued[at : at + HASH_BYTES] for at in range(0, len(glued), HASH_BYTES))


def encode_batch(batch: EventBatch) -> pb.WatchEventsResponse:
    """The batch as a message."""
    return pb.WatchEventsResponse(
        sequence=batch.sequence,
        timestamp_ms=batch.timestamp_ms,
        events=[encode_event(event) for event in batch.events],
        lost=batch.lost,
        snapshot=batch.snapshot,
        snapshot_end=batch.snapshot_end,
    )


def decode_batch(message: pb.WatchEventsResponse) -> EventBatch:
    """The batch of a message.

    Raises:
        InvalidInput: an event that is none.
    """
    return EventBatch(
        sequence=message.sequence,
        timestamp_ms=message.timestamp_ms,
        events=tuple(decode_event(event) for event in message.events),
        lost=message.lost,
        snapshot=message.snapshot,
        snapshot_end=message.snapshot_end,
    )
