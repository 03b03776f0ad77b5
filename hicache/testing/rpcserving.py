"""A real gRPC server on a fake service, and a plain client: what tests over sockets begin with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from hicache.errors import (
    HicacheError,
)
from hicache.rpc.address import Address
from hicache.rpc.convert.session import encode_attachment
from hicache.rpc.server import Listener, RpcServer
from hicache.rpc.service import Attachment, Caller, Peer
from hicache.rpc.status import details_of, from_status
from hicache.rpc.transport import CHANNEL_OPTIONS
from hicache.rpc.v1 import session_pb2 as pb
from hicache.rpc.v1 import session_pb2_grpc
from hicache.testing.rpcservice import FakeService
from hicache.testing.rpcstream import HASHES, HELLO, NAMESPACE

__all__ = ["PATIENCE", "TCP", "Client", "anybody", "client", "failure", "run", "serving", "until"]

PATIENCE = 30.0
"""Real seconds for whatever comes by itself."""

TCP = Address(host="127.0.0.1")
"""Any free port."""


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test on a loop of its own, for two minutes at most."""

    async def bounded() -> None:
        async with asyncio.timeout(120):
            await main

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that comes by itself, or fail."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


def anybody(peer: Peer) -> Caller:
    """Who may do everything."""
    del peer
    return Caller()


@asynccontextmanager
async def serving(
    service: FakeService,
    *listeners: Listener,
    authenticate: Callable[[Peer], Caller] = anybody,
    options: tuple[tuple[str, int], ...] = (),
) -> AsyncIterator[RpcServer]:
    """A server on these listeners, or on a free port; when it has stopped, nothing is held any more."""
    server = RpcServer(service, listeners or [Listener(TCP)], authenticate=authenticate, options=options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)
    assert not service.sessions
    assert not service.waiting
    assert not service.reading


class Client:
    """A stream, asked one request at a time."""

    def __init__(self, channel: aio.Channel) -> None:
        self.call: Any = session_pb2_grpc.SessionServiceStub(channel).Open()
        self.replies: list[pb.Reply] = []

    async def send(self, *requests: pb.Request) -> None:
        """One message."""
        await self.call.write(pb.OpenRequest(requests=requests))

    async def ask(self, request: pb.Request) -> pb.Reply:
        """Send a request, wait for its last reply."""
        await self.send(request)
        return await self.answer(request.id)

    async def answer(self, number: int) -> pb.Reply:
        """The last reply to a request."""
        while True:
            for reply in self.replies:
                if reply.id == number and not reply.more:
                    return reply
            message = await self.call.read()
            assert message is not aio.EOF
            self.replies += message.replies

    async def begin(self) -> Client:
        """Say hello and attach as number 1."""
        await self.ask(HELLO)
        await self.ask(pb.Request(id=2, attach=encode_attachment(Attachment(1, NAMESPACE, streamed=True))))
        return self

    async def lease(self, number: int) -> int:
        """Lease the three pages of `HASHES`."""
        lease = pb.Lease(attachment=1, page_hashes=HASHES, limit=3)
        return (await self.ask(pb.Request(id=number, lease=lease))).leased.lease


@asynccontextmanager
async def client(
    server: RpcServer, options: tuple[tuple[str, int], ...] = CHANNEL_OPTIONS, *, at: int = 0
) -> AsyncIterator[Client]:
    """A client of one of the server's addresses, that has said hello and is attached."""
    async with aio.insecure_channel(server.addresses[at].target, options) as channel:
        yield await Client(channel).begin()


async def failure(call: Awaitable[Any]) -> HicacheError:
    """The error by which a call fails, as a client reads it."""
    try:
        await call
    except aio.AioRpcError as error:
        return from_status(error.code(), error.details() or "", details_of(error.trailing_metadata()))
    raise AssertionError("the call has not failed")
