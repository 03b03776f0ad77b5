"""One session's messages, without any I/O: requests go in, messages come out, replies end futures by their ids.

What happens to a call, whoever drives the bytes:

    begin -> queued -> taken (sent) -> answered: its future has the reply, or raises the error in it
    not answered until it expires:     `NoAnswer`; a reply that still comes goes to `late`
    not answered when the session ends: `Away`, at once
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from typing import Final, TypeAlias

from hicache.errors import DeadlineExceeded, HicacheError, LimitExceeded, ServiceUnavailable
from hicache.rpc.v1 import error_pb2
from hicache.rpc.v1 import session_pb2 as pb

Reply: TypeAlias = pb.Reply

MESSAGE_BYTES: Final = 4 * 2**20 - 65_536
"""Bytes of one message before the service has told its limit: what any gRPC peer takes, and room for framing."""


_SLACK: Final = 256  # deadlines of calls that were answered, kept until it pays to drop them


class Away(ServiceUnavailable):
    """There is no session: the call was not answered, and will not be."""


class NoAnswer(DeadlineExceeded):
    """The service has not answered in time. It may have done what was asked, or do it yet."""


class _Call:
    __slots__ = ("expires", "future", "late", "message", "sent", "sink", "size")

    def __init__(
        self,
        message: pb.Request,
        expires: float,
        sink: Callable[[pb.Bytes], None] | None,
        late: Callable[[Reply], None],
    ) -> None:
        self.message: pb.Request | None = message
        self.size = message.ByteSize() + 16  # its own framing inside the message around it
        self.expires = expires
        self.sink = sink
        self.late = late
        self.sent = False
        self.future: Future[Reply] = Future()
        # A waiter that is cancelled must not cancel the call: its reply may hand over something that has to go back.
        self.future.set_running_or_notify_cancel()


def _nothing(reply: Reply) -> None:
    del reply


class SessionProtocol:
    """Requests in, messages out, replies back. Thread-safe; the time is handed in.

    Args:
        error_of: makes the exception of an error in a reply.
        notice: called with each reply that answers no request, by whoever hands it in.

    Attributes:
        most_requests, message_bytes: what may be unanswered at once, and in one message; raised after the hello.
        silent: a call got no answer in time, and nothing has come since. An echo is on its way to end it.
        late: answers that came after nobody waited any more.

    `received`, `expire` and `end` are called by one thread, the one that moves the bytes.
    """

    def __init__(self, error_of: Callable[[error_pb2.Error], HicacheError], notice: Callable[[Reply], None]) -> None:
        self._error_of = error_of
        self._notice = notice
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._queue: deque[int] = deque()
        self._expiring: list[tuple[float, int]] = []
        self._number = 0
        self._sent = 0
        self._ended: str | None = None
        self.most_requests = 1
        self.message_bytes = MESSAGE_BYTES
        self.silent = False
        self.late = 0

    @property
    def unanswered(self) -> int:
        """Calls that wait for their reply, those that were given up included."""
        with self._lock:
            return len(self._calls)

    def begin(
        self,
        message: pb.Request,
        *,
        expires: float = inf,
        sink: Callable[[pb.Bytes], None] | None = None,
        late: Callable[[Reply], None] = _nothing,
    ) -> Future[Reply]:
        """Take a request; its id is set here. It waits to be taken.

        Args:
            message: the request.
            expires: when to give it up.
            sink: gets the parts of a reply that comes in several.
            late: gets the reply if it comes after the call was given up.

        Returns:
            Ends with the reply, or raises what `error_of` makes of it; `Away` or `NoAnswer` without one.

        Raises:
            LimitExceeded: larger than a message may be.
        """
        call = _Call(message, expires, sink, late)
        if call.size > self.message_bytes:
            raise LimitExceeded(
                f"a request of {call.size:,} bytes: the service takes {self.message_bytes:,} bytes a message"
            )
        with self._lock:
            if self._ended is None:
                self._number += 1
                message.id = self._number
                self._calls[message.id] = call
                self._queue.append(message.id)
                if expires < inf:
                    self._watch(expires, message.id)
                return call.future
        call.future.set_exception(Away(self._ended))
        return call.future

    def _watch(self, expires: float, number: int) -> None:
        if len(self._expiring) > _SLACK + 2 * len(self._calls):  # most were answered long before their time
            self._expiring = [entry for entry in self._expiring if entry[1] in self._calls]
            heapq.heapify(self._expiring)
        heapq.heappush(self._expiring, (expires, number))

    def take(self) -> pb.OpenRequest | None:
        """The next message to send: all that waits, as far as the limits allow; None for nothing."""
        with self._lock:
            batch: list[pb.Request] = []
            size = 0
            while self._queue and self._sent < self.most_requests:
                call = self._calls.get(self._queue[0])
                if call is None or call.message is None:  # given up before it was sent
                    self._queue.popleft()
                    continue
                size += call.size
                if batch and size > self.message_bytes:
                    break
                self._queue.popleft()
                batch.append(call.message)
                call.message, call.sent = None, True
                self._sent += 1
        return pb.OpenRequest(requests=batch) if batch else None

    def received(self, message: pb.OpenResponse) -> None:
        """A message has come."""
        self.silent = False
        for reply in message.replies:
            if not reply.id:
                self._notice(reply)
                continue
            with self._lock:
                call = self._calls.get(reply.id)
                if call is not None and not reply.more:
                    del self._calls[reply.id]
                    self._sent -= call.sent
            if call is not None:
                self._answered(call, reply)

    def _answered(self, call: _Call, reply: Reply) -> None:
        if call.future.done():
            self.late += not reply.more
            if not reply.more:
                call.late(reply)
        elif reply.WhichOneof("result") == "error":
            call.future.set_exception(self._error_of(reply.error))
        elif call.sink is not None and reply.WhichOneof("result") == "bytes":
            call.sink(reply.bytes)
            if not reply.more:
                call.future.set_result(reply)
        elif not reply.more:
            call.future.set_result(reply)

    def expire(self, now: float) -> float:
        """Give up calls whose time is over. Returns when to look again."""
        given_up: list[_Call] = []
        with self._lock:
            while self._expiring and (self._expiring[0][0] <= now or self._expiring[0][1] not in self._calls):
                _, number = heapq.heappop(self._expiring)
                call = self._calls.get(number)
                if call is not None:
                    given_up.append(call)
                    if not call.sent:  # nobody has seen it, so nothing will come
                        del self._calls[number]
                        call.message = None
            following = self._expiring[0][0] if self._expiring else inf
        if not self.silent and any(call.sent for call in given_up):
            self.silent = True
            self.begin(pb.Request(echo=pb.Echo()))
        for call in given_up:
            if not call.future.done():
                call.future.set_exception(NoAnswer("the service has not answered in time"))
        return following

    def end(self, reason: str) -> None:
        """The session is over: everything that waits is answered by `Away`, and so is what comes. Idempotent."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
            calls = list(self._calls.values())
            self._calls.clear()
            self._queue.clear()
            self._expiring.clear()
        for call in calls:
            if not call.future.done():
                call.future.set_exception(Away(reason))
