"""The unary calls of AdminService: a decoded request in, the reply's message or a stream of them out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message

from hicache.errors import InvalidInput
from hicache.rpc.convert.admin import (
    check_seconds,
    decode_target,
    encode_batch,
    encode_finding,
    encode_held,
    encode_ping,
    encode_pinned,
)
from hicache.rpc.convert.session import TOKEN_BYTES, check_glued, check_name
from hicache.rpc.service import Caller, Service, Target
from hicache.rpc.v1 import admin_pb2 as pb
from hicache.rpc.verbs import closing


class Unary(NamedTuple):
    """A call with one reply: its request's class, and what it does."""

    request: type[Message]
    run: Callable[[Service, Caller, Any], Awaitable[Message]]


class Streamed(NamedTuple):
    """A call with a stream of replies."""

    request: type[Message]
    run: Callable[[Service, Caller, Any], AsyncIterator[Message]]


async def _ping(service: Service, caller: Caller, request: pb.PingRequest) -> pb.PingResponse:
    del request
    return encode_ping(service.ping(caller))


async def _statistics(service: Service, caller: Caller, request: pb.GetStatisticsRequest) -> pb.GetStatisticsResponse:
    del request
    return pb.GetStatisticsResponse(json=service.statistics_json(caller))


async def _clear(service: Service, caller: Caller, request: pb.ClearRequest) -> pb.ClearResponse:
    target = decode_target(request.target) if request.HasField("target") else None
    namespaces, unconfirmed = await service.clear(caller, target)
    return pb.ClearResponse(namespaces=namespaces, unconfirmed=unconfirmed)


async def _pin(service: Service, caller: Caller, request: pb.PinRequest) -> pb.PinResponse:
    pinned = await service.pin(
        caller,
        _target(request),
        check_glued(request.tokens, TOKEN_BYTES, "tokens"),
        hard=request.hard,
        ttl_seconds=check_seconds(request.ttl_seconds, "ttl_seconds"),
        name=check_name(request.name, "the pin's name"),
    )
    return encode_pinned(pinned)


async def _unpin(service: Service, caller: Caller, request: pb.UnpinRequest) -> pb.UnpinResponse:
    return pb.UnpinResponse(pins=service.unpin(caller, check_name(request.name, "the pin's name")))


async def _pins(service: Service, caller: Caller, request: pb.ListPinsRequest) -> pb.ListPinsResponse:
    del request
    return pb.ListPinsResponse(pins=[encode_held(pinned) for pinned in service.pins_of(caller)])


async def _diagnose(service: Service, caller: Caller, request: pb.DiagnoseRequest) -> pb.DiagnoseResponse:
    del request
    return pb.DiagnoseResponse(findings=[encode_finding(finding) for finding in await service.diagnose(caller)])


async def _explain(service: Service, caller: Caller, request: pb.ExplainRequest) -> pb.ExplainResponse:
    tokens = check_glued(request.tokens, TOKEN_BYTES, "tokens")
    seconds = check_seconds(request.storage_seconds, "storage_seconds")
    return pb.ExplainResponse(json=await service.explain(caller, _target(request), tokens, storage_seconds=seconds))


async def _warm(service: Service, caller: Caller, request: pb.WarmRequest) -> AsyncIterator[pb.WarmResponse]:
    target = _target(request)
    prompts = [check_glued(prompt, TOKEN_BYTES, f"tokens of prompt {i}") for i, prompt in enumerate(request.prompts)]
    seconds = check_seconds(request.deadline_seconds, "deadline_seconds")
    async with closing(service.warm(caller, target, prompts, deadline_seconds=seconds)) as steps:
        async for done, host, missed in steps:
            yield pb.WarmResponse(prompts=done, host_pages=host, missed_pages=missed)


async def _watch(
    service: Service, caller: Caller, request: pb.WatchEventsRequest
) -> AsyncIterator[pb.WatchEventsResponse]:
    async with closing(service.watch_events(caller, request.from_sequence)) as batches:
        async for batch in batches:
            yield encode_batch(batch)


def _target(request: pb.PinRequest | pb.WarmRequest | pb.ExplainRequest) -> Target:
    if not request.HasField("target"):
        raise InvalidInput("the request has no target: name the model by its namespace digest, or by its name")
    return decode_target(request.target)


CALLS: Final[dict[str, Unary | Streamed]] = {
    "Ping": Unary(pb.PingRequest, _ping),
    "GetStatistics": Unary(pb.GetStatisticsRequest, _statistics),
    "Clear": Unary(pb.ClearRequest, _clear),
    "Pin": Unary(pb.PinRequest, _pin),
    "Unpin": Unary(pb.UnpinRequest, _unpin),
    "ListPins": Unary(pb.ListPinsRequest, _pins),
    "Warm": Streamed(pb.WarmRequest, _warm),
    "Diagnose": Unary(pb.DiagnoseRequest, _diagnose),
    "Explain": Unary(pb.ExplainRequest, _explain),
    "WatchEvents": Streamed(pb.WatchEventsRequest, _watch),
}
"""Every call of the service, by its name in admin.proto."""
