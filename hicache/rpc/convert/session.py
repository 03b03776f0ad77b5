"""Requests and replies of a session, to messages and back.

What is glued (hashes, slots, words, tokens) passes as it is: its length is checked where it comes in.
"""

from __future__ import annotations

from typing import Final

from hicache.core.arenas import Run
from hicache.errors import GeometryError, InvalidInput, LimitExceeded
from hicache.records import MissReason
from hicache.rpc.convert.identity import decode_namespace, encode_namespace
from hicache.rpc.service import (
    ArenaView,
    Attached,
    Attachment,
    Counts,
    Draining,
    Leased,
    Limits,
    Loaded,
    Matched,
    Notice,
    Piece,
    Reserved,
    Revoked,
    Welcome,
)
from hicache.rpc.v1 import session_pb2 as pb

HASH_BYTES: Final = 32
TOKEN_BYTES: Final = 4
EXTRAS_BYTES: Final = 16

MAX_NAME: Final = 256
"""Bytes of a client's name, and of a group's."""

_MAX_RANKS: Final = 1024
_MILLISECONDS: Final = 1000
_MAX_U32: Final = 2**32 - 1


def check_glued(data: bytes, width: int, what: str, *, most: int | None = None) -> bytes:
    """The data, if it is whole items of a width.

    Raises:
        InvalidInput: a length that is no multiple of the width.
        LimitExceeded: more items than `most`.
    """
    if len(data) % width:
        raise InvalidInput(f"{what} have {len(data)} bytes: a multiple of {width} is needed, {width} bytes each")
    if most is not None and len(data) > most * width:
        raise LimitExceeded(f"{len(data) // width} {what}: the limit is {most}")
    return data


def check_name(text: str, what: str) -> str:
    """The text, if it is short enough for a name.

    Raises:
        InvalidInput: it is longer than `MAX_NAME` bytes.
    """
    if len(text) > MAX_NAME or len(text.encode()) > MAX_NAME:
        raise InvalidInput(f"{what} has more than {MAX_NAME} bytes: use a shorter one")
    return text


# ---- beginning


def encode_limits(limits: Limits) -> pb.Limits:
    """The limits as a message."""
    return pb.Limits(
        message_bytes=limits.message_bytes,
        pages=limits.pages,
        leases=limits.leases,
        requests=limits.requests,
        quarantined_slots=limits.quarantined_slots,
        lease_seconds=limits.lease_seconds,
        chunk_bytes=limits.chunk_bytes,
    )


def decode_limits(message: pb.Limits) -> Limits:
    """The limits of a message."""
    return Limits(
        message_bytes=message.message_bytes,
        pages=message.pages,
        leases=message.leases,
        requests=message.requests,
        quarantined_slots=message.quarantined_slots,
        lease_seconds=message.lease_seconds,
        chunk_bytes=message.chunk_bytes,
    )


def encode_welcome(welcome: Welcome, protocol: int) -> pb.Welcome:
    """The welcome as a message, with the version that both sides speak from now on."""
    return pb.Welcome(
        protocol=protocol,
        server=welcome.server,
        boot=welcome.boot,
        session=welcome.session,
        limits=encode_limits(welcome.limits),
        tenant=welcome.tenant or "",
        capabilities=welcome.capabilities,
    )


def decode_welcome(message: pb.Welcome) -> Welcome:
    """The welcome of a message."""
    return Welcome(
        message.server,
        message.boot,
        message.session,
        decode_limits(message.limits),
        message.tenant or None,
        tuple(message.capabilities),
    )


def encode_attachment(attachment: Attachment) -> pb.Attach:
    """The attachment as a message."""
    return pb.Attach(
        attachment=attachment.number,
        namespace=encode_namespace(attachment.namespace),
        group=attachment.group,
        tp_rank=attachment.tp_rank,
        tp_size=attachment.tp_size,
        pp_first_layers=attachment.pp_first_layers,
        pp_rank=attachment.pp_rank,
        pool_bytes=attachment.pool_bytes,
        streamed=attachment.streamed,
        worker=attachment.worker,
    )


def decode_attachment(message: pb.Attach) -> Attachment:
    """The attachment of a message.

    Raises:
        InvalidInput: no number, or a group's name that is too long.
        NamespaceError, GeometryError: what the namespace has wrong, or a rank outside its topology.
    """
    if not message.attachment:
        raise InvalidInput("attachment 0: choose a number above 0 for it")
    stages = tuple(message.pp_first_layers[: _MAX_RANKS + 1])
    size = message.tp_size or 1
    if size > _MAX_RANKS or len(stages) > _MAX_RANKS:
        raise GeometryError(f"{size} ranks and {len(stages)} stages: at most {_MAX_RANKS} of each")
    if message.tp_rank >= size:
        raise GeometryError(f"tp_rank {message.tp_rank} of {size} ranks: ranks are 0 to {size - 1}")
    if message.pp_rank >= max(len(stages), 1):
        raise GeometryError(
            f"pp_rank {message.pp_rank} of {max(len(stages), 1)} pipeline stages: give the first layer of each stage"
        )
    return Attachment(
        number=message.attachment,
        namespace=decode_namespace(message.namespace),
        group=check_name(message.group, "group"),
        tp_rank=message.tp_rank,
        tp_size=size,
        pp_first_layers=stages,
        pp_rank=message.pp_rank,
        pool_bytes=message.pool_bytes,
        streamed=message.streamed,
        worker=message.worker,
    )


def encode_attached(attached: Attached) -> pb.Attached:
    """The answer to an attachment as a message."""
    arenas = [
        pb.Arena(
            id=arena.id,
            stride=arena.stride,
            size=arena.size,
            writes=arena.writes,
            runs=[
                pb.Run(page_offset=run.page_offset, slot_offset=run.slot_offset, length=run.length)
                for run in arena.runs
            ],
        )
        for arena in attached.arenas
    ]
    return pb.Attached(
        slots=attached.slots,
        page_bytes=attached.page_bytes,
        arenas=arenas,
        namespace_digest=attached.namespace_digest,
        words_id=attached.words_id,
        rank_page_bytes=attached.rank_page_bytes,
        warnings=attached.warnings,
        newest_lease=attached.newest_lease,
    )


def decode_attached(message: pb.Attached) -> Attached:
    """The answer of a message."""
    arenas = tuple(
        ArenaView(
            id=arena.id,
            stride=arena.stride,
            size=arena.size,
            runs=tuple(Run(run.page_offset, run.slot_offset, run.length) for run in arena.runs),
            writes=arena.writes,
        )
        for arena in message.arenas
    )
    return Attached(
        slots=message.slots,
        page_bytes=message.page_bytes,
        rank_page_bytes=message.rank_page_bytes,
        namespace_digest=message.namespace_digest,
        arenas=arenas,
        words_id=message.words_id,
        warnings=tuple(message.warnings),
        newest_lease=message.newest_lease,
    )


# ---- replies


def encode_matched(matched: Matched) -> pb.Matched:
    """The match as a message."""
    return pb.Matched(device=matched.device, host=matched.host, storage=matched.storage, generation=matched.generation)


def decode_matched(message: pb.Matched) -> Matched:
    """The match of a message."""
    return Matched(message.device, message.host, message.storage, message.generation)


def encode_leased(leased: Leased) -> pb.Leased:
    """The lease as a message."""
    return pb.Leased(
        lease=leased.lease,
        host=leased.host,
        storage=leased.storage,
        slots=leased.slots,
        bypassed=leased.bypassed,
        words=leased.words,
        generation=leased.generation,
    )


def decode_leased(message: pb.Leased) -> Leased:
    """The lease of a message."""
    return Leased(
        lease=message.lease,
        host=message.host,
        storage=message.storage,
        slots=message.slots,
        words=message.words,
        bypassed=message.bypassed,
        generation=message.generation,
    )


def encode_loaded(loaded: Loaded) -> pb.Loaded:
    """What was loaded as a message."""
    return pb.Loaded(slots=loaded.slots, words=loaded.words, storage=loaded.storage)


def decode_loaded(message: pb.Loaded) -> Loaded:
    """What was loaded of a message."""
    return Loaded(message.slots, message.words, message.storage)


def encode_reserved(reserved: Reserved) -> pb.Reserved:
    """The reservation as a message."""
    return pb.Reserved(slots=reserved.slots, words=reserved.words, first_page=reserved.first_page)


def decode_reserved(message: pb.Reserved) -> Reserved:
    """The reservation of a message."""
    return Reserved(message.slots, message.words, message.first_page)


def encode_counts(counts: Counts) -> pb.Released:
    """What a lease was counted as, as a message."""
    missed = {reason.value: pages for reason, pages in counts.missed.items()}
    return pb.Released(asked=counts.asked, host=counts.host, storage=counts.storage, missed=missed)


_REASONS: Final = {reason.value: reason for reason in MissReason}


def decode_counts(message: pb.Released) -> Counts:
    """What a lease was counted as. A reason that only a newer service knows is COLD here: the sum stays right."""
    missed: dict[MissReason, int] = {}
    for name, pages in message.missed.items():
        reason = _REASONS.get(name, MissReason.COLD)
        missed[reason] = missed.get(reason, 0) + pages
    return Counts(message.asked, message.host, message.storage, missed)


def encode_piece(number: int, piece: Piece, *, more: bool) -> bytes:
    """A reply with part of a page as a whole `OpenResponse`, serialised.

    Put together by hand, since protobuf would copy the data three times: into the message, the reply and the response.
    """
    head = pb.Bytes(page=piece.page, offset=piece.offset).SerializeToString()
    head += _field(pb.Bytes.DATA_FIELD_NUMBER, len(piece.data))
    reply = pb.Reply(id=number, more=more).SerializeToString()
    reply += _field(pb.Reply.BYTES_FIELD_NUMBER, len(head) + len(piece.data)) + head
    return b"".join((_field(pb.OpenResponse.REPLIES_FIELD_NUMBER, len(reply) + len(piece.data)), reply, piece.data))


def _field(number: int, length: int) -> bytes:
    """What stands before so many bytes of a field."""
    return _varint(number << 3 | 2) + _varint(length)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_piece(message: pb.Bytes | pb.PutBytes) -> Piece:
    """Part of a page of a message, in either direction."""
    return Piece(message.page, message.offset, message.data)


# ---- notices


def encode_notice(notice: Notice) -> pb.Reply:
    """The notice as a reply to nobody."""
    if isinstance(notice, Revoked):
        return pb.Reply(revoked=pb.Revoked(leases=notice.leases, reason=notice.reason))
    left = min(round(max(notice.seconds, 0.0) * _MILLISECONDS), _MAX_U32)
    return pb.Reply(draining=pb.Draining(milliseconds=left))


def decode_notice(message: pb.Reply) -> Notice | None:
    """The notice of a reply to nobody; None where only a newer client knows it."""
    kind = message.WhichOneof("result")
    if kind == "revoked":
        return Revoked(tuple(message.revoked.leases), message.revoked.reason)
    if kind == "draining":
        return Draining(message.draining.milliseconds / _MILLISECONDS)
    return None
