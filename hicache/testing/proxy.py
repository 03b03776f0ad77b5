"""A TCP proxy that spoils connections on command, to stand between a client and a real server."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

__all__ = ["Fault", "Proxy"]

_READ: Final = 64 * 1024
_PATIENCE: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to bytes on their way. All counts are per connection, from its start or from when the fault was set.

    Attributes:
        delay: seconds that each piece of a reply waits, or until another fault is set.
        delay_request: the same of requests, of which no more is taken meanwhile than kernels hold.
        cut_request: bytes of requests that pass; then the connection is cut, before the rest is forwarded.
        cut_reply: bytes of replies that pass; then the connection is cut. 0 = the server acts, and its reply is lost.
        hold_requests, hold_replies: nothing passes in this direction, and nothing is closed.
        flip: index of a byte of the replies one bit of which is turned over.
        times: how many connections it happens to, counted when it strikes; None = all.
    """

    delay: float = 0.0
    delay_request: float = 0.0
    cut_request: int | None = None
    cut_reply: int | None = None
    hold_requests: bool = False
    hold_replies: bool = False
    flip: int | None = None
    times: int | None = None


class Proxy:
    """Listens on a free loopback port and forwards to a server. A context manager; leaving it closes everything.

    Args:
        target: address of the server.

    Attributes:
        port: where it listens.
        connections: how many were accepted.
        struck: how often a fault cut, held or changed something.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._fault = Fault()
        self._left: int | None = None
        self._round = 0
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self.connections = 0
        self.struck = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: Final = int(self._listener.getsockname()[1])

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return ("127.0.0.1", self.port)

    def set(self, fault: Fault | None = None) -> None:
        """From now on this happens, also to connections that are open; None = nothing any more."""
        with self._changed:
            self._fault = fault or Fault()
            self._left = self._fault.times
            self._round += 1
            self._changed.notify_all()

    def cut_all(self) -> None:
        """Close all connections that are open."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            _shut(connection)

    def __enter__(self) -> Self:
        """Listen."""
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close everything."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        _shut(self._listener)
        self._listener.close()
        self.cut_all()
        for thread in list(self._threads):
            thread.join(_PATIENCE)

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, _PATIENCE)
            except OSError:
                client.close()  # as if nobody listened
                continue
            for connection in (client, server):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.settimeout(None)
            with self._lock:
                self.connections += 1
                self._open |= {client, server}
            link = _Link(client, server)
            self._start(self._forward, link, client, server, True)
            self._start(self._forward, link, server, client, False)

    def _forward(self, link: _Link, source: socket.socket, target: socket.socket, requests: bool) -> None:
        passed, round_ = 0, -1
        with contextlib.suppress(OSError):
            while data := source.recv(_READ):
                fault, now = self._current()
                if now != round_:
                    passed, round_ = 0, now
                data = self._spoil(fault, data, passed, requests=requests)
                passed += len(data)
                if data:
                    target.sendall(data)
                limit = fault.cut_request if requests else fault.cut_reply
                if limit is not None and passed >= limit and self._strikes(now):
                    break
        link.end()
        with self._lock:
            self._open -= {source, target}
        if link.both_ended():
            source.close()
            target.close()

    def _spoil(self, fault: Fault, data: bytes, passed: int, *, requests: bool) -> bytes:
        """What passes of a piece, after what has to be waited for."""
        if fault.hold_requests if requests else fault.hold_replies:
            self._hold()
        if delay := fault.delay_request if requests else fault.delay:
            self._delay(delay)
        if requests:
            return data if fault.cut_request is None or not self._may_strike() else data[: fault.cut_request - passed]
        if fault.flip is not None and passed <= fault.flip < passed + len(data) and self._strikes():
            spoilt = bytearray(data)
            spoilt[fault.flip - passed] ^= 0x10
            data = bytes(spoilt)
        return data if fault.cut_reply is None or not self._may_strike() else data[: fault.cut_reply - passed]

    def _delay(self, seconds: float) -> None:
        """Wait so long, or until the fault is another one."""
        with self._changed:
            delayed = self._round
            self._changed.wait_for(lambda: self._round != delayed or self._closed.is_set(), seconds)

    def _hold(self) -> None:
        """Wait until the fault is another one."""
        with self._changed:
            held = self._round
            self.struck += 1
            self._changed.wait_for(lambda: self._round != held or self._closed.is_set())

    def _current(self) -> tuple[Fault, int]:
        with self._lock:
            return self._fault, self._round

    def _may_strike(self) -> bool:
        with self._lock:
            return self._left is None or self._left > 0

    def _strikes(self, round_: int | None = None) -> bool:
        with self._lock:
            if self._left == 0 or (round_ is not None and round_ != self._round):
                return False
            if self._left is not None:
                self._left -= 1
            self.struck += 1
            return True


class _Link:
    """Two sockets that end together."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._both = (client, server)
        self._lock = threading.Lock()
        self._ended = 0

    def end(self) -> None:
        with self._lock:
            self._ended += 1
        for connection in self._both:
            _shut(connection)

    def both_ended(self) -> bool:
        with self._lock:
            return self._ended == 2


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
