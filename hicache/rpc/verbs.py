"""What each verb of a session does: a request's message in, the reply's message out.

Verbs that never wait are answered where they are read. The others are tasks with a deadline. Every field that has a
form is checked here, so that whoever implements `Session` sees only values that can mean something.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from hicache.errors import HicacheInternalError, InvalidInput, LimitExceeded
from hicache.rpc.convert.identity import decode_scope
from hicache.rpc.convert.session import (
    EXTRAS_BYTES,
    HASH_BYTES,
    TOKEN_BYTES,
    check_glued,
    decode_attachment,
    decode_piece,
    encode_attached,
    encode_counts,
    encode_leased,
    encode_loaded,
    encode_matched,
    encode_piece,
    encode_reserved,
)
from hicache.rpc.service import Limits, Piece, Session
from hicache.rpc.v1 import session_pb2 as pb

LONGEST_DEADLINE: Final = 600.0
"""Seconds; a longer deadline of a client is this one."""


T = TypeVar("T")


class Call(NamedTuple):
    """One request while it is worked on.

    Attributes:
        session: whose it is.
        limits: of the session.
        request: the verb's own message.
        until: moment of the loop's clock by which it is to be answered.
        waits: whether that was in the future when the request came.
        number: id of the request.
        send: sends a serialised reply, when there is room for it.
    """

    session: Session
    limits: Limits
    request: Any
    until: float
    waits: bool
    number: int
    send: Callable[[bytes], Awaitable[None]]


Now: TypeAlias = Callable[[Session, Limits, Any], pb.Reply]
Later: TypeAlias = Callable[[Call], Awaitable[pb.Reply | None]]
"""Gives the reply, or None where it has sent all replies itself."""


@asynccontextmanager
async def closing(items: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """The items; a generator is closed at the end, not when it happens to be collected."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


def _hashes(data: bytes, limits: Limits) -> bytes:
    return check_glued(data, HASH_BYTES, "page hashes", most=limits.pages)


# ---- answered at once


def _match(session: Session, limits: Limits, request: pb.MatchPages) -> pb.Reply:
    scope = decode_scope(request.scope)
    matched = session.match(request.attachment, scope, _hashes(request.page_hashes, limits))
    return pb.Reply(matched=encode_matched(matched))


def _extend(session: Session, limits: Limits, request: pb.Extend) -> pb.Reply:
    session.extend(request.lease, _hashes(request.page_hashes, limits), request.tokens)
    return pb.Reply(extended=pb.Extended())


def _commit(session: Session, limits: Limits, request: pb.Commit) -> pb.Reply:
    del limits  # pages and tokens of a lease are bounded by what the lease names
    tokens = check_glued(request.tokens, TOKEN_BYTES, "tokens")
    extras = check_glued(request.extras, EXTRAS_BYTES, "extras")
    visible = session.commit(
        request.lease,
        request.upto,
        tokens=tokens,
        first_page=request.first_page,
        extras=extras,
        by_hash=request.by_hash,
    )
    return pb.Reply(committed=pb.Committed(visible=visible))


def _release(session: Session, limits: Limits, request: pb.Release) -> pb.Reply:
    del limits
    return pb.Reply(released=encode_counts(session.release(request.lease, aborted=request.aborted)))


def _report_device(session: Session, limits: Limits, request: pb.ReportDevice) -> pb.Reply:
    if len(request.parent_hash) not in (0, HASH_BYTES):
        raise InvalidInput(
            f"parent_hash has {len(request.parent_hash)} bytes: {HASH_BYTES}, or none at a prompt's start"
        )
    session.report_device(
        request.attachment,
        decode_scope(request.scope),
        stored=_hashes(request.stored, limits),
        parent_hash=request.parent_hash,
        first_page=request.first_page,
        removed=_hashes(request.removed, limits),
        cleared=request.cleared,
    )
    return pb.Reply(device_reported=pb.DeviceReported())


def _report_prefill(session: Session, limits: Limits, request: pb.ReportPrefill) -> pb.Reply:
    del limits
    if not 0 < request.seconds < 86_400:
        raise InvalidInput(
            f"prefill of {request.tokens} tokens in {request.seconds!r} s: give seconds above 0, up to a day"
        )
    session.report_prefill(request.attachment, request.tokens, request.seconds)
    return pb.Reply(prefill_reported=pb.PrefillReported())


def _few(leases: Sequence[int], limits: Limits) -> Sequence[int]:
    if len(leases) > limits.leases:
        raise LimitExceeded(f"{len(leases)} leases at once: the limit is {limits.leases}")
    return leases


def _acknowledge(session: Session, limits: Limits, request: pb.Acknowledge) -> pb.Reply:
    session.acknowledge(_few(request.leases, limits))
    return pb.Reply(acknowledged=pb.Acknowledged())


def _renew(session: Session, limits: Limits, request: pb.Renew) -> pb.Reply:
    session.renew(_few(request.leases, limits))
    return pb.Reply(renewed=pb.Renewed())


def _echo(session: Session, limits: Limits, request: pb.Echo) -> pb.Reply:
    del session, limits
    return pb.Reply(echoed=pb.Echoed(data=request.data))


NOW: Final[dict[str, Now]] = {
    "match": _match,
    "extend": _extend,
    "commit": _commit,
    "release": _release,
    "report_device": _report_device,
    "report_prefill": _report_prefill,
    "acknowledge": _acknowledge,
    "renew": _renew,
    "echo": _echo,
}
"""Verbs that never wait."""


# ---- answered when they are done


async def _attach(call: Call) -> pb.Reply:
    attached = await call.session.attach(decode_attachment(call.request))
    return pb.Reply(attached=encode_attached(attached))


async def _lease(call: Call) -> pb.Reply:
    request: pb.Lease = call.request
    leased = await call.session.lease(
        request.attachment,
        decode_scope(request.scope),
        _hashes(request.page_hashes, call.limits),
        tokens=request.tokens,
        limit=request.limit,
        priority=request.priority,
        until=call.until,
    )
    return pb.Reply(leased=encode_leased(leased))


async def _load(call: Call) -> pb.Reply:
    return pb.Reply(loaded=encode_loaded(await call.session.load(call.request.lease, until=call.until)))


async def _prefetch(call: Call) -> pb.Reply:
    request: pb.Prefetch = call.request
    scope, hashes = decode_scope(request.scope), _hashes(request.page_hashes, call.limits)
    host, storage = await call.session.prefetch(request.attachment, scope, hashes, until=call.until)
    return pb.Reply(prefetching=pb.Prefetching(host=host, storage=storage))


async def _reserve(call: Call) -> pb.Reply:
    request: pb.Reserve = call.request
    if request.pages > call.limits.pages:
        raise LimitExceeded(f"{request.pages} pages reserved at once: the limit is {call.limits.pages}")
    reserved = await call.session.reserve(request.lease, request.pages, until=call.until if call.waits else None)
    return pb.Reply(reserved=encode_reserved(reserved))


async def _put_bytes(call: Call) -> pb.Reply:
    request: pb.PutBytes = call.request
    if len(request.data) > call.limits.chunk_bytes:
        raise LimitExceeded(f"{len(request.data)} bytes in one put_bytes: the limit is {call.limits.chunk_bytes}")
    await call.session.put_bytes(request.lease, decode_piece(request))
    return pb.Reply(bytes_put=pb.BytesPut())


async def _get_bytes(call: Call) -> None:
    request: pb.GetBytes = call.request
    if request.first_page >= request.end_page:
        raise InvalidInput(f"pages {request.first_page} to {request.end_page} are none: end_page is behind the last")
    held: Piece | None = None
    async with closing(call.session.get_bytes(request.lease, request.first_page, request.end_page)) as pieces:
        async for piece in pieces:
            data = bytes(piece.data)  # before anything is waited for: the slot behind it may be another page's then
            if held is not None:
                await call.send(encode_piece(call.number, held, more=True))
            held = Piece(piece.page, piece.offset, data)
    if held is None:
        raise HicacheInternalError("get_bytes gave no bytes")
    await call.send(encode_piece(call.number, held, more=False))


class Waiting(NamedTuple):
    """A verb that may wait, and for how many seconds where the client does not say."""

    run: Later
    seconds: float


LATER: Final = {
    "attach": Waiting(_attach, 60.0),
    "lease": Waiting(_lease, 1.0),
    "load": Waiting(_load, 10.0),
    "prefetch": Waiting(_prefetch, 1.0),
    "reserve": Waiting(_reserve, 0.0),
    "put_bytes": Waiting(_put_bytes, 30.0),
    "get_bytes": Waiting(_get_bytes, 60.0),
}
"""Verbs that may wait."""
