"""One connection to a service, from its first byte to its end: the stream, the lifeline, the shared memory.

Everything here runs on the client's own event loop, but for `Connection.call`, which any thread may use.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
from grpc import aio

from hicache.core.identity import Namespace
from hicache.errors import HicacheError, HicacheInternalError, ProtocolMismatch, ServiceUnavailable
from hicache.rpc.address import Address
from hicache.rpc.client.options import ClientOptions, Place, Secrets
from hicache.rpc.client.protocol import Away, Reply, SessionProtocol
from hicache.rpc.client.written import Written
from hicache.rpc.convert.admin import encode_target
from hicache.rpc.convert.session import decode_attached, decode_welcome, encode_attachment
from hicache.rpc.service import PROTOCOL, Attached, Attachment, Target, Welcome
from hicache.rpc.status import decode_error, details_of, from_status
from hicache.rpc.transport import CHANNEL_OPTIONS
from hicache.rpc.v1 import admin_pb2, admin_pb2_grpc, session_pb2_grpc
from hicache.rpc.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from hicache.rpc.client.lifeline import Lifeline
    from hicache.rpc.client.memory import SharedPages

ATTACHMENT: Final = 1
"""The number of a client's only attachment."""

T = TypeVar("T")

_log = logging.getLogger("hicache.client")
_CORE: Final = "Internal error from Core"
"""What grpc.aio says of a write into a stream that the other side has just ended, instead of why it has."""

_FAREWELL: Final = 1.0  # seconds that the service gets to answer a goodbye


class Connection:
    """A session that is attached to its model. Made by `Dialer.open`.

    Attributes:
        epoch: counts the connections of one client; its slots are told apart by it.
        protocol: its messages.
        welcome, attached: what the service has said.
        memory: the shared pages, which outlive it: who has requests may still copy. None where bytes are streamed, or
            nothing is read or written.
        lifeline: its lifeline, or None.
        written: which slots were written over it.
        draining: the service ends soon, so nothing new begins here.
        ending: done when it is over, with the reason.
    """

    def __init__(
        self, epoch: int, loop: asyncio.AbstractEventLoop, notice: Callable[[Connection, Reply], None]
    ) -> None:
        self.epoch = epoch
        self.protocol = SessionProtocol(decode_error, lambda reply: notice(self, reply))
        self.welcome: Welcome
        self.attached: Attached
        self.memory: SharedPages | None = None
        self.lifeline: Lifeline | None = None
        self.written: Written
        self.draining = False
        self._loop = loop
        self._dropped: deque[int] = deque()
        self._woken = asyncio.Event()
        self._waking = False
        self._timer: asyncio.TimerHandle | None = None
        self.ending: asyncio.Future[str] = loop.create_future()

    @property
    def usable(self) -> bool:
        """Whether new requests may begin here."""
        return not (self.draining or self.protocol.silent)

    def gone(self) -> bool:
        """Whether the service behind it may have ended, seen at once. Thread-safe."""
        return self.ending.done() or (self.lifeline is not None and self.lifeline.ended)

    def call(
        self,
        message: pb.Request,
        *,
        seconds: float,
        grace: float,
        sink: Callable[[pb.Bytes], None] | None = None,
        late: Callable[[Reply], None] | None = None,
        told: bool = True,
    ) -> Future[Reply]:
        """Send a request. Thread-safe, never blocks.

        Args:
            message: the request.
            seconds: its deadline from now.
            grace: for which the answer is waited for beyond that.
            sink: as in `SessionProtocol.begin`.
            late: as there.
            told: whether the service is told the deadline; without, its own default holds.
        """
        if told:
            message.deadline_ms = min(int(seconds * 1000), 2**31)
        expires = time.monotonic() + seconds + grace
        extra: dict[str, Any] = {} if late is None else {"late": late}
        future = self.protocol.begin(message, expires=expires, sink=sink, **extra)
        self.wake()
        return future

    def wake(self) -> None:
        """There is something to send. Thread-safe."""
        if not self._waking:
            self._waking = True
            # A loop that is closed has ended the protocol before, so nobody waits for what is not sent.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    def drop(self, lease: int) -> None:
        """Release a lease whose request was collected. For finalisers: takes no lock."""
        self._dropped.append(lease)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._release_dropped)

    def _release_dropped(self) -> None:
        while self._dropped:
            self.protocol.begin(pb.Request(release=pb.Release(lease=self._dropped.popleft(), aborted=True)))
        self._woken.set()

    def _wake(self) -> None:
        self._waking = False  # before anything is taken: what comes now wakes again
        self._woken.set()
        self._expire()

    def _expire(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        following = self.protocol.expire(time.monotonic())
        if self.protocol.silent:
            self._woken.set()  # its echo
        if following < inf:
            self._timer = self._loop.call_later(max(following - time.monotonic(), 0.0), self._expire)

    # ---- on the loop

    async def write(self, stream: Any) -> None:
        """Send what there is, for as long as the connection lives."""
        while not self.ending.done():
            await self._woken.wait()
            self._woken.clear()
            while (message := self.protocol.take()) is not None:
                await stream.write(message)

    async def read(self, stream: Any) -> None:
        """Take in what comes, until the stream ends."""
        while (message := await stream.read()) is not aio.EOF:
            unanswered = self.protocol.unanswered
            self.protocol.received(message)
            if unanswered >= self.protocol.most_requests:
                self._woken.set()  # what waited for room may go

    async def ask(self, message: pb.Request, seconds: float) -> Reply:
        """Send a request from the loop's thread, and wait for its reply."""
        return await asyncio.wrap_future(self.call(message, seconds=seconds, grace=0.0))

    def over(self, reason: str) -> None:
        """The connection has ended: whatever waits is answered at once. Idempotent."""
        self.protocol.end(reason)
        if self._timer is not None:
            self._timer.cancel()
        if not self.ending.done():
            self.ending.set_result(reason)
        self._woken.set()  # ends the writer


class Dialer:
    """Makes connections to one service, one after the other.

    Args:
        address, secrets, options, namespace, place: what to connect to, and as whom.
        notice: called with what the service says without being asked.

    Attributes:
        orderly: whether nothing here touches shared memory any more when the client is closed.
    """

    def __init__(
        self,
        address: Address,
        *,
        secrets: Secrets,
        options: ClientOptions,
        namespace: Namespace,
        place: Place,
        notice: Callable[[Connection, Reply], None],
    ) -> None:
        self.address = address
        self.options = options
        self.place = place
        self.orderly = True
        self._secrets = secrets
        self._namespace = namespace
        self._notice = notice
        self._epochs = itertools.count()

    @property
    def maps(self) -> bool:
        """Whether memory is shared with the service."""
        return self.address.is_unix and self.place.worker and not self.options.streamed

    async def run(self, begun: Callable[[Connection], None], closing: asyncio.Event) -> str:
        """Make one connection and serve it until it ends, or until it is to be closed; says why it ended.

        Args:
            begun: called when it is ready for requests.
            closing: set when it is to be closed.

        Raises:
            HicacheError: it could not be made.
        """
        connection = Connection(next(self._epochs), asyncio.get_running_loop(), self._notice)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(lambda: connection.over("the connection has ended"))
            try:
                async with asyncio.timeout(self.options.timeout):
                    await self._dial(connection, stack)
            except TimeoutError:
                raise ServiceUnavailable(f"{self.address} has not answered in {self.options.timeout:g} s") from None
            begun(connection)
            closed = asyncio.ensure_future(closing.wait())
            stack.callback(closed.cancel)
            await asyncio.wait((connection.ending, closed), return_when=asyncio.FIRST_COMPLETED)
            if connection.ending.done():
                return connection.ending.result()
            await self._goodbye(connection)
        return "the client is closed"

    async def _dial(self, connection: Connection, stack: contextlib.AsyncExitStack) -> None:
        if self.address.is_unix:
            await self._lifeline(connection, stack)
        channel = self.channel()
        stack.push_async_callback(channel.close)
        stream = session_pb2_grpc.SessionServiceStub(channel).Open(metadata=self.metadata())
        tasks = [
            asyncio.create_task(self._serve(connection, stream, part)) for part in (connection.read, connection.write)
        ]
        stack.push_async_callback(_hang_up, connection, stream, tasks)
        try:
            await self._introduce(connection)
        except Away as error:  # the stream has ended, and its status says why
            raise await _status(stream, error) or await self._asked_otherwise(channel, error) from None
        lifeline = connection.lifeline
        if lifeline is not None:
            if self.maps:
                await self._map(connection, lifeline)
            number = lifeline.fileno()
            loop = asyncio.get_running_loop()
            loop.add_reader(number, self._lifeline_ended, connection, number)
            stack.callback(loop.remove_reader, number)

    async def _asked_otherwise(self, channel: aio.Channel, error: HicacheError) -> HicacheError:
        """Why this client is refused, by a call that has nothing to write when it is."""
        try:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            await stub.Ping(admin_pb2.PingRequest(), timeout=_FAREWELL, metadata=self.metadata())
        except aio.AioRpcError as refused:
            details = details_of(refused.trailing_metadata())
            return from_status(refused.code(), refused.details() or "", details)
        return error

    def metadata(self, key: bytes = b"") -> tuple[tuple[str, str | bytes], ...]:
        """What goes with a call: who calls.

        Args:
            key: of the lifeline, for calls beside the session.
        """
        token = self._secrets.bearer()
        found: list[tuple[str, str | bytes]] = [] if token is None else [("authorization", f"Bearer {token}")]
        if key:
            found.append(("hicache-lifeline-bin", key))
        return tuple(found)

    def channel(self) -> aio.Channel:
        """A channel to the service."""
        secrets, target, options = self._secrets, self.address.target, list(CHANNEL_OPTIONS)
        if not secrets.tls:
            return aio.insecure_channel(target, options)
        credentials = grpc.ssl_channel_credentials(secrets.read("ca"), secrets.read("key"), secrets.read("cert"))
        return aio.secure_channel(target, credentials, options)

    async def _lifeline(self, connection: Connection, stack: contextlib.AsyncExitStack) -> None:
        from hicache.rpc.client.lifeline import Lifeline

        path, timeout = self.address.lifeline, self.options.timeout
        lifeline = await _in_thread(lambda: Lifeline(path, timeout=timeout), Lifeline.close)
        # Where memory is mapped, the lifeline lives as long as that.
        stack.callback(lambda: None if connection.memory is not None else lifeline.finish())
        connection.lifeline = lifeline

    async def _map(self, connection: Connection, lifeline: Lifeline) -> None:
        from hicache.rpc.client.memory import SharedPages

        attached, populate = connection.attached, self.options.populate
        connection.memory = await _in_thread(
            lambda: SharedPages(lifeline, attached, populate=populate), SharedPages.close
        )
        connection.written = connection.memory.written

    def _lifeline_ended(self, connection: Connection, number: int) -> None:
        asyncio.get_running_loop().remove_reader(number)
        connection.over(f"the service at {self.address} has ended")

    async def _introduce(self, connection: Connection) -> None:
        options, place, seconds = self.options, self.place, self.options.timeout
        hello = pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, client=options.name)
        if connection.lifeline is not None:
            hello.lifeline_key = connection.lifeline.key
        reply = await connection.ask(pb.Request(hello=hello), seconds)
        if reply.welcome.protocol != PROTOCOL:
            raise ProtocolMismatch(
                f"{self.address} speaks protocol {reply.welcome.protocol}, this client {PROTOCOL}: upgrade the older "
                "side"
            )
        connection.welcome = decode_welcome(reply.welcome)
        connection.protocol.message_bytes = connection.welcome.limits.message_bytes
        connection.protocol.most_requests = max(1, connection.welcome.limits.requests)
        attachment = Attachment(
            ATTACHMENT,
            self._namespace,
            group=place.group,
            tp_rank=place.tp_rank,
            tp_size=place.tp_size,
            pp_first_layers=place.pp_first_layers,
            pp_rank=place.pp_rank,
            pool_bytes=int(options.pool_size),
            streamed=place.worker and not self.maps,
            worker=place.worker,
        )
        reply = await connection.ask(pb.Request(attach=encode_attachment(attachment)), seconds)
        connection.attached = decode_attached(reply.attached)
        connection.written = Written(connection.attached.slots)

    async def _serve(self, connection: Connection, stream: Any, part: Callable[[Any], Any]) -> None:
        reason = f"the service at {self.address} has ended the session"
        try:
            await part(stream)
        except (aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError) as error:
            reason = f"the connection to {self.address} is lost"
            _log.debug("%s: %r", reason, error)
        except Exception:
            reason = "a bug of the client ended the session"
            _log.exception(reason)
        finally:
            connection.over(reason)

    async def _goodbye(self, connection: Connection) -> None:
        if self.orderly:
            with contextlib.suppress(HicacheError):
                await connection.ask(pb.Request(goodbye=pb.Goodbye()), _FAREWELL)


async def clear(dialer: Dialer, connection: Connection, target: Target, seconds: float) -> tuple[str, ...]:
    """Have the service forget pages; returns the namespaces for which storage has not confirmed it. On the loop.

    Raises:
        HicacheError: it was not done.
    """
    channel = dialer.channel()
    key = b"" if connection.lifeline is None else connection.lifeline.key
    request = admin_pb2.ClearRequest(target=encode_target(target))
    try:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        cleared = await stub.Clear(request, timeout=seconds + _FAREWELL, metadata=dialer.metadata(key))
    except aio.AioRpcError as error:
        raise from_status(error.code(), error.details() or "", details_of(error.trailing_metadata())) from None
    finally:
        await channel.close()
    return tuple(cleared.unconfirmed)


async def _in_thread(make: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Make something in a thread; if nobody waits for it any more when it is there, undo it."""
    making = asyncio.get_running_loop().run_in_executor(None, make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(lambda made: None if made.cancelled() or made.exception() else undo(made.result()))
        raise


async def _hang_up(connection: Connection, stream: Any, tasks: list[asyncio.Task[None]]) -> None:
    """End a stream and what works on it. All that gRPC has begun must have ended before the loop is closed."""
    connection.over("the connection has ended")
    stream.cancel()
    await asyncio.wait(tasks, timeout=_FAREWELL)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _status(stream: Any, error: HicacheError) -> HicacheError | None:
    """Why a stream has ended, as the other side says it; None where gRPC has lost its word."""
    try:
        async with asyncio.timeout(_FAREWELL):
            code, text = await stream.code(), await stream.details()
            details = details_of(await stream.trailing_metadata())
    except (TimeoutError, aio.AioRpcError, aio.UsageError):
        return error
    if code is grpc.StatusCode.OK:
        return error
    found = from_status(code, text, details)
    if not isinstance(found, HicacheInternalError):
        return found
    return None if text == _CORE else ServiceUnavailable(str(found))
