"""One session's stream: bytes in, requests begun in order, replies out as they are done.

Knows nothing of gRPC: it reads from an async iterator and writes by a coroutine, so tests drive it alone.

What ends when:

    the client ends its half     nothing more is read; what was asked is answered, then the session ends
    goodbye                      what is not done is cancelled, the session ends in order, `Farewell` is the last word
    the call is cancelled        what is not done is cancelled, the session ends
    an error of the stream       the same, and the error is its status: no hello in time, a refused hello, more
                                 requests in a message than may be unanswered
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from google.protobuf.message import DecodeError

from hicache.errors import DeadlineExceeded, HicacheError, InvalidInput, LimitExceeded, ProtocolMismatch
from hicache.rpc.convert.session import check_name, encode_notice, encode_welcome
from hicache.rpc.latency import LatencyMeter
from hicache.rpc.outbox import Outbox
from hicache.rpc.service import PROTOCOL, Caller, Service, Session
from hicache.rpc.status import encode_error
from hicache.rpc.v1 import session_pb2 as pb
from hicache.rpc.verbs import LATER, LONGEST_DEADLINE, NOW, Call, Waiting

_log = logging.getLogger("hicache.rpc")

HELLO_SECONDS: Final = 10.0
"""For which a stream may be open without a session."""

GRACE: Final = 0.5
"""Seconds past its deadline after which a request is cancelled: the service itself answers by the deadline."""

_FLUSH_SECONDS: Final = 5.0  # for the last replies, to a client that does not read
_END_SECONDS: Final = 1.0  # for tasks that were cancelled
_TURN: Final = 32  # requests answered at once before others get their turn on the loop
_KEY: Final = 16


class SessionStream:
    """Serves one stream, once. Used on the loop's thread.

    Args:
        service: opens the session.
        authenticate: says who calls, given the key of its lifeline.
        write: sends one serialised `OpenResponse`.
        meter: counts what is answered.
    """

    def __init__(
        self,
        service: Service,
        authenticate: Callable[[bytes], Caller],
        write: Callable[[bytes], Awaitable[None]],
        meter: LatencyMeter,
    ) -> None:
        self._service = service
        self._authenticate = authenticate
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(write)
        self._session: Session | None = None
        self._limits = service.limits
        self._welcomed = asyncio.Event()
        self._hello = asyncio.timeout(HELLO_SECONDS)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._goodbye = 0
        self._turn = 0

    @property
    def begun(self) -> bool:
        """Whether it has said its hello, and a session was opened for it."""
        return self._session is not None

    async def run(self, messages: AsyncIterator[bytes]) -> None:
        """Serve until the stream ends, whoever ends it. The session has ended when this returns or raises.

        Raises:
            HicacheError: what ends the stream by an error.
        """
        sending = asyncio.create_task(self._outbox.run())
        refused: HicacheError | None = None
        try:
            try:
                await self._serve(messages, sending)
            except HicacheError as error:
                refused = error
            finally:
                await self._end()
            if self._goodbye:
                self._send(self._goodbye, pb.Reply(farewell=pb.Farewell()))
            await self._flush(sending)
        finally:
            sending.cancel()
            with suppress(Exception, asyncio.CancelledError):
                sending.result()  # a failed write is the client's end, which shows by itself
        if refused is not None:
            raise refused

    async def _serve(self, messages: AsyncIterator[bytes], sending: asyncio.Task[None]) -> None:
        reading = asyncio.create_task(self._read(messages))
        telling = asyncio.create_task(self._tell())
        try:
            await asyncio.wait((reading, telling, sending), return_when=asyncio.FIRST_COMPLETED)
            for part in (reading, telling):
                if part.done():
                    part.result()
            if reading.done() and self._tasks and not self._goodbye:
                await asyncio.wait(self._tasks.values())
        finally:
            reading.cancel()
            telling.cancel()
            await asyncio.wait((reading, telling), timeout=_END_SECONDS)

    async def _end(self) -> None:
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=_END_SECONDS)
        finally:
            if self._session is not None:
                self._session.end(orderly=self._goodbye > 0)

    async def _flush(self, sending: asyncio.Task[None]) -> None:
        drained = asyncio.create_task(self._outbox.drained())
        try:
            await asyncio.wait((drained, sending), timeout=_FLUSH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()

    async def _tell(self) -> None:
        await self._welcomed.wait()
        assert self._session is not None
        while True:
            notice = await self._session.next_notice()
            self._send(0, encode_notice(notice))
            await self._outbox.room()

    # ---- reading

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        try:
            async with self._hello:
                async for data in messages:
                    await self._take(data)
                    if self._goodbye:
                        return
        except TimeoutError:
            if not self._hello.expired():
                raise
            raise DeadlineExceeded(f"no hello within {HELLO_SECONDS:g} s: a session begins with one") from None

    async def _take(self, data: bytes) -> None:
        try:
            requests = pb.OpenRequest.FromString(data).requests
        except DecodeError:
            self._refuse(0, "unreadable", InvalidInput("a message that is no OpenRequest: see session.proto"))
            return
        limits = self._limits
        if len(requests) > limits.requests:
            raise LimitExceeded(f"{len(requests)} requests in one message: the limit is {limits.requests} at once")
        too_long = len(data) > limits.message_bytes
        for request in requests:
            await self._outbox.room()
            if too_long:
                text = f"a message of {len(data)} bytes: the limit is {limits.message_bytes}"
                self._refuse(request.id, "unreadable", LimitExceeded(text))
            else:
                await self._begin(request)
            if self._goodbye:
                return

    async def _begin(self, request: pb.Request) -> None:
        verb = request.WhichOneof("verb")
        error = self._wrong(request.id, verb)
        if error is not None:
            self._refuse(request.id, verb or "unknown", error)
        elif verb == "hello":
            await self._open(request)
        elif verb == "goodbye":
            self._goodbye = request.id
        elif verb in NOW:
            self._answer(request, verb)
            await self._give_way()
        else:
            assert verb is not None
            self._start(request, verb, LATER[verb])
            await asyncio.sleep(0)  # it begins before what stands behind it

    def _wrong(self, number: int, verb: str | None) -> HicacheError | None:
        """What is wrong with a request, whatever its verb."""
        if not number:
            return InvalidInput("a request without an id: give each one above 0")
        if number in self._tasks:
            return InvalidInput(f"id {number} is that of a request that is not answered yet: give each its own")
        if verb is None:
            return InvalidInput(f"request {number} has no verb that is known here: the service may be older")
        if (self._session is None) != (verb == "hello"):
            return InvalidInput(f"{verb}: a session begins with a hello, and with one")
        if verb in LATER and len(self._tasks) >= self._limits.requests:
            return LimitExceeded(f"{verb}: {len(self._tasks)} requests are not answered yet, and that is the limit")
        return None

    async def _open(self, request: pb.Request) -> None:
        began, hello = self._loop.time(), request.hello
        try:
            if not hello.protocol_min <= PROTOCOL <= hello.protocol_max:
                raise ProtocolMismatch(
                    f"the client speaks protocol {hello.protocol_min} to {hello.protocol_max}, this service {PROTOCOL}"
                )
            if len(hello.lifeline_key) not in (0, _KEY):
                raise InvalidInput(f"lifeline_key has {len(hello.lifeline_key)} bytes: it has {_KEY}, or none")
            caller = replace(self._authenticate(hello.lifeline_key), lifeline_key=hello.lifeline_key)
            self._session = await self._service.open_session(caller, check_name(hello.client, "client"))
            welcome = self._session.welcome
            self._limits = welcome.limits
            self._send(request.id, pb.Reply(welcome=encode_welcome(welcome, PROTOCOL)))
        except HicacheError as error:
            self._refuse(request.id, "hello", error, began)
            raise
        self._hello.reschedule(None)
        self._welcomed.set()
        self._meter.answered("hello", self._loop.time() - began, failed=False)

    async def _give_way(self) -> None:
        self._turn += 1
        if self._turn >= _TURN:
            self._turn = 0
            await asyncio.sleep(0)

    # ---- answering

    def _answer(self, request: pb.Request, verb: str) -> None:
        assert self._session is not None
        began = self._loop.time()
        try:
            self._send(request.id, NOW[verb](self._session, self._limits, getattr(request, verb)))
        except Exception as error:
            self._refuse(request.id, verb, error, began)
        else:
            self._meter.answered(verb, self._loop.time() - began, failed=False)

    def _start(self, request: pb.Request, verb: str, waiting: Waiting) -> None:
        assert self._session is not None
        asked = request.deadline_ms / 1000 if request.HasField("deadline_ms") else waiting.seconds
        seconds, number = min(asked, LONGEST_DEADLINE), request.id

        async def send(reply: bytes) -> None:
            await self._outbox.room()
            self._outbox.put(reply)

        until = self._loop.time() + seconds
        call = Call(self._session, self._limits, getattr(request, verb), until, seconds > 0, number, send)
        self._tasks[number] = asyncio.create_task(self._work(number, verb, waiting, call, seconds))

    async def _work(self, number: int, verb: str, waiting: Waiting, call: Call, seconds: float) -> None:
        began = self._loop.time()
        deadline = asyncio.timeout_at(call.until + GRACE)
        failed: Exception | None = None
        reply: pb.Reply | None = None
        try:
            async with deadline:
                reply = await waiting.run(call)
        except TimeoutError as error:
            failed = DeadlineExceeded(f"{verb}: no answer within {seconds:g} s") if deadline.expired() else error
        except Exception as error:
            failed = error
        finally:
            del self._tasks[number]
        if failed is not None:
            self._refuse(number, verb, failed, began)
        else:
            if reply is not None:
                self._send(number, reply)
            self._meter.answered(verb, self._loop.time() - began, failed=False)

    def _refuse(self, number: int, verb: str, error: Exception, began: float | None = None) -> None:
        session = None if self._session is None else self._session.welcome.session
        fields = {"request": number, "verb": verb, "session": session}
        _log.debug("%s", error, extra=fields)
        self._send(number, pb.Reply(error=encode_error(error, fields=fields)))
        now = self._loop.time()
        self._meter.answered(verb, 0.0 if began is None else now - began, failed=True)

    def _send(self, number: int, reply: pb.Reply) -> None:
        reply.id = number
        self._outbox.put(pb.OpenResponse(replies=(reply,)).SerializeToString())
