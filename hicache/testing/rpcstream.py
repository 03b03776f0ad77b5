"""A session's stream on a fake service, without a network: what its tests begin with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from hicache.core.identity import Namespace
from hicache.core.layout import KVGeometry
from hicache.errors import HicacheError
from hicache.rpc.convert.session import encode_attachment
from hicache.rpc.latency import LatencyMeter
from hicache.rpc.service import Attachment, Caller
from hicache.rpc.stream import SessionStream
from hicache.rpc.v1 import error_pb2
from hicache.rpc.v1 import session_pb2 as pb
from hicache.testing.rpcservice import FakeService, FakeSession

__all__ = ["ATTACH", "GOODBYE", "HASHES", "HELLO", "NAMESPACE", "RAW_TOKENS", "TOKENS", "Served", "Wire", "serving"]

PAGE = 4
GEOMETRY = KVGeometry.mha(layers=1, kv_heads=1, head_dim=4, dtype="float16")
NAMESPACE = Namespace("org/tiny", geometry=GEOMETRY, page_size=PAGE, hash="sha256")
TOKENS = list(range(3 * PAGE))
RAW_TOKENS = b"".join(token.to_bytes(4, "little") for token in TOKENS)
HASHES = NAMESPACE.derive().hasher().extend(None, RAW_TOKENS, 3)
HELLO = pb.Request(id=1, hello=pb.Hello(protocol_min=1, protocol_max=3, client="test"))
ATTACH = pb.Request(id=2, attach=encode_attachment(Attachment(1, NAMESPACE, streamed=True)))
GOODBYE = pb.Request(id=99, goodbye=pb.Goodbye())


class Wire:
    """A client's end of a stream without a network. Used on the loop's thread.

    Attributes:
        replies: all that came, in order; `messages`: how many messages they came in.
        open: cleared by a test whose client does not read.
    """

    def __init__(self) -> None:
        self.replies: list[pb.Reply] = []
        self.messages = 0
        self.open = asyncio.Event()
        self.open.set()
        self._sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._came = asyncio.Condition()

    def send(self, *requests: pb.Request) -> None:
        """One message with these requests."""
        self.send_bytes(pb.OpenRequest(requests=requests).SerializeToString())

    def send_bytes(self, data: bytes) -> None:
        """One message that is whatever it is."""
        self._sent.put_nowait(data)

    def half_close(self) -> None:
        """Nothing more is sent."""
        self._sent.put_nowait(None)

    async def answer(self, number: int) -> pb.Reply:
        """The last reply to a request, once it is there."""
        async with self._came:
            await self._came.wait_for(lambda: any(reply.id == number and not reply.more for reply in self.replies))
        return next(reply for reply in reversed(self.replies) if reply.id == number)

    async def ask(self, request: pb.Request) -> pb.Reply:
        """Send a request and wait for its reply."""
        self.send(request)
        return await self.answer(request.id)

    # ---- the server's side

    async def read(self) -> AsyncIterator[bytes]:
        """What was sent."""
        while (data := await self._sent.get()) is not None:
            yield data

    async def write(self, data: bytes) -> None:
        """Take a message, when the client reads."""
        await self.open.wait()
        async with self._came:
            self.messages += 1
            self.replies += pb.OpenResponse.FromString(data).replies
            self._came.notify_all()


class Served:
    """A stream that runs beside the test, and what it is made of."""

    def __init__(self, service: FakeService, authenticate: Callable[[bytes], Caller] = lambda _: Caller()) -> None:
        self.service = service
        self.wire = Wire()
        self.meter = LatencyMeter()
        self.stream = SessionStream(service, authenticate, self.wire.write, self.meter)
        self.task = asyncio.create_task(self.stream.run(self.wire.read()))

    @property
    def session(self) -> FakeSession:
        """The only session."""
        return next(iter(self.service.sessions.values()))

    async def begin(self) -> None:
        """Say hello and attach, as number 1."""
        assert (await self.wire.ask(HELLO)).WhichOneof("result") == "welcome"
        assert (await self.wire.ask(ATTACH)).WhichOneof("result") == "attached"

    async def lease(self, number: int = 10) -> int:
        """Lease the three pages of `HASHES`. Returns the lease."""
        lease = pb.Lease(attachment=1, page_hashes=HASHES, tokens=len(TOKENS), limit=3)
        reply = await self.wire.ask(pb.Request(id=number, lease=lease))
        assert reply.leased.lease, reply
        return reply.leased.lease

    async def error(self, request: pb.Request) -> error_pb2.Error:
        """Ask what is refused. Returns the error."""
        reply = await self.wire.ask(request)
        assert reply.WhichOneof("result") == "error", reply
        return reply.error

    async def failed(self) -> HicacheError:
        """The error with which the stream ends."""
        try:
            await self.task
        except HicacheError as error:
            return error
        raise AssertionError("the stream has ended without an error")


@asynccontextmanager
async def serving(service: FakeService | None = None, *, begun: bool = True) -> AsyncIterator[Served]:
    """A stream that is cancelled at the end; then nothing of it may be left."""
    served = Served(service or FakeService())
    try:
        if begun:
            await served.begin()
        yield served
    finally:
        served.task.cancel()
        with suppress(asyncio.CancelledError, HicacheError):
            await served.task
    assert not served.service.sessions
    assert not served.service.waiting
    assert len(served.service.free) + len(served.service.pages) == served.service.slots
    await asyncio.sleep(0)  # an iterator that was left is closed by the loop
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1, "tasks outlived the stream"
