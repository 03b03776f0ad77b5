"""Lifelines: one small connection a client, which carries descriptors and whose end is the client's end.

Two things are told apart. A lifeline has *ended* when its connection has, or its process; no session goes on without.
Its process is *gone* when it can touch shared memory no more: it never had any, it has said that it is finished, or
the kernel says that the process is no more. A stopped or hung process is neither.

Clients are not trusted to behave: whatever they send, or do not read, costs a bounded amount and at most their own
connection.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Final

from hicache.errors import InvalidInput
from hicache.rpc.convert.lifeline import LIFELINE_PACKET, decode_request, encode_greeting, encode_reply
from hicache.sidecar.processes import Peer, ProcessWatch, peer_of, peer_pidfd
from hicache.sidecar.sockets import bind

__all__ = ["Lifeline", "LifelineServer"]

_log = logging.getLogger("hicache.sidecar")

_PACKETS_A_TURN: Final = 16
_ACCEPTS_A_TURN: Final = 16
_PAUSE: Final = 1.0
"""Seconds without new connections where there is no descriptor for one; so does asyncio."""


class Lifeline:
    """One client's lifeline. Everything on the loop's thread.

    Attributes:
        key: names it in the session's `Hello`.
        peer: the process at its other end, as the kernel knows it.
        grants: descriptors that the client may have, by id: (descriptor, bytes). They stay their owners'.
        watched: whether the kernel tells when the process is gone; else a while after the end must do.
        ended: whether the connection or the process has ended.
        gone: whether the process can touch shared memory no more.
    """

    def __init__(self, connection: socket.socket, *, loop: asyncio.AbstractEventLoop, grace: float) -> None:
        self.key = secrets.token_bytes(16)
        self.peer: Peer = peer_of(connection)
        self.grants: dict[int, tuple[int, int]] = {}
        self.ended = False
        self.gone = False
        self._loop = loop
        self._grace = grace
        self._connection = connection
        self._maps = False
        self._when_ended: list[Callable[[], None]] = []
        self._when_gone: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        pidfd = peer_pidfd(connection, self.peer)
        self.watched = pidfd is not None
        self._watch = None if pidfd is None else ProcessWatch(loop, pidfd, self._process_gone)
        loop.add_reader(connection.fileno(), self._readable)

    @property
    def pidfd(self) -> int | None:
        """A descriptor of its process, which stays the lifeline's; None where there is none, or it is gone."""
        return None if self._watch is None else self._watch.pidfd

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call this once it has ended; at once if it has."""
        _call_when(self.ended, self._when_ended, call)

    def when_gone(self, call: Callable[[], None]) -> None:
        """Call this once its process is gone; at once if it is."""
        _call_when(self.gone, self._when_gone, call)

    def hang_up(self) -> None:
        """End the connection, as if the client had. Idempotent."""
        if self.ended:
            return
        self.ended = True
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
        self.grants.clear()
        _call_all(self._when_ended)
        if not self._maps:
            self._process_gone()
        elif self._watch is None:
            self._timer = self._loop.call_later(self._grace, self._process_gone)

    def close(self) -> None:
        """Hang up, and wait for nothing more: nobody is told that the process is gone. Idempotent."""
        self._when_gone.clear()
        self.hang_up()
        self._forget()

    def greet(self, boot: bytes) -> None:
        """Send the first packet."""
        self._send(encode_greeting(self.key, boot))

    # ---- packets

    def _readable(self) -> None:
        for _ in range(_PACKETS_A_TURN):  # others have their turn too
            if self.ended:
                return
            try:
                # No room for descriptors: the kernel closes those that a client sends.
                packet, _, flags, _ = self._connection.recvmsg(LIFELINE_PACKET)
            except BlockingIOError:
                return
            except ConnectionResetError:  # it left something unread; what it sent may still follow
                continue
            except OSError:
                packet, flags = b"", 0
            if not packet:
                self.hang_up()
            elif flags & socket.MSG_TRUNC:
                self._refuse(f"a packet of the lifeline has at most {LIFELINE_PACKET} bytes")
            else:
                self._answer(packet)

    def _answer(self, packet: bytes) -> None:
        try:
            request = decode_request(packet)
        except InvalidInput as error:
            self._refuse(str(error))
            return
        if request.finished:
            self._maps = False
            self.hang_up()
            return
        granted = self.grants.get(request.id)
        if granted is None:
            self._send(encode_reply(request.id, error=f"no memory {request.id} was given to this client: attach first"))
            return
        fd, size = granted
        self._maps = True
        self._send(encode_reply(request.id, size=size), fd)

    def _refuse(self, text: str) -> None:
        _log.debug("lifeline of process %d: %s", self.peer.pid, text)
        self._send(encode_reply(0, error=text))
        self.hang_up()

    def _send(self, packet: bytes, *fds: int) -> None:
        try:
            # Not `socket.send_fds`: Python 3.11's passes no flags on.
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            self._connection.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
        except OSError as error:  # it asks without reading, or is away
            _log.debug("lifeline of process %d: %s", self.peer.pid, error)
            self.hang_up()

    # ---- ends

    def _process_gone(self) -> None:
        self.hang_up()
        if not self.gone:
            self.gone = True
            self._forget()
            _call_all(self._when_gone)

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class LifelineServer:
    """Takes lifelines on one or more sockets. Everything on the loop's thread.

    Args:
        limit: lifelines at once, with those whose connection has ended and whose process may still touch memory.
        per_process: as many of one process.
        grace: seconds behind the end of a connection until its process counts as gone, where the kernel does not tell.
        unused: seconds in which a session must name a new lifeline, else it is closed.

    Attributes:
        boot: names this life of the service to clients, 16 bytes; set before `listen`.
    """

    def __init__(self, *, limit: int = 2048, per_process: int = 64, grace: float = 2.0, unused: float = 30.0) -> None:
        self.boot = bytes(16)
        self._limit = limit
        self._per_process = per_process
        self._grace = grace
        self._unused = unused
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._lifelines: dict[bytes, Lifeline] = {}
        self._processes: Counter[int] = Counter()
        self._timers: dict[bytes, asyncio.TimerHandle] = {}
        self._closed = False

    @property
    def count(self) -> int:
        """Lifelines now, with those whose connection has ended and whose process may still touch memory."""
        return len(self._lifelines)

    async def listen(self, path: str, *, mode: int = 0o600) -> None:
        """Take lifelines at a path that was claimed.

        Args:
            path: of the socket.
            mode: rights of its file; who may write it may connect.

        Raises:
            ConfigError: it cannot be bound.
        """
        listener = bind(path, socket.SOCK_SEQPACKET, mode=mode)
        self._listeners.append(listener)
        self._loop.add_reader(listener.fileno(), self._accept, listener)

    def find(self, key: bytes) -> Lifeline | None:
        """The lifeline of a key, for the session that names it; None where there is none, or it has ended."""
        lifeline = self._lifelines.get(key)
        if lifeline is None or lifeline.ended:
            return None
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        return lifeline

    def uid_of(self, key: bytes) -> int | None:
        """The user of the process behind a key; as `find` otherwise."""
        lifeline = self.find(key)
        return None if lifeline is None else lifeline.peer.uid

    async def close(self) -> None:
        """Hang up everywhere and listen no more; who waits for a process to be gone is not told. Idempotent.

        The sockets' files stay, for whoever claimed the path to remove.
        """
        self._closed = True
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        for lifeline in list(self._lifelines.values()):
            lifeline.close()
            self._drop(lifeline)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("no lifelines for %g s: %s", _PAUSE, error)
                self._loop.remove_reader(listener.fileno())
                self._loop.call_later(_PAUSE, self._resume, listener)
                return
            self._take(connection)

    def _resume(self, listener: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            peer = peer_of(connection)
            if len(self._lifelines) >= self._limit or (peer.pid and self._processes[peer.pid] >= self._per_process):
                _log.warning("process %d of uid %d gets no lifeline: there are too many", peer.pid, peer.uid)
                connection.close()
                return
            lifeline = Lifeline(connection, loop=self._loop, grace=self._grace)
        except OSError as error:
            _log.debug("a lifeline ended as it began: %s", error)
            connection.close()
            return
        self._lifelines[lifeline.key] = lifeline
        self._processes[peer.pid] += 1
        self._timers[lifeline.key] = self._loop.call_later(self._unused, lifeline.hang_up)
        lifeline.when_ended(lambda: self._stop_timer(lifeline.key))
        lifeline.when_gone(lambda: self._drop(lifeline))
        lifeline.greet(self.boot)

    def _stop_timer(self, key: bytes) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _drop(self, lifeline: Lifeline) -> None:
        self._stop_timer(lifeline.key)
        if self._lifelines.pop(lifeline.key, None) is not None:
            self._processes[lifeline.peer.pid] -= 1
            if not self._processes[lifeline.peer.pid]:
                del self._processes[lifeline.peer.pid]


def _call_when(happened: bool, waiting: list[Callable[[], None]], call: Callable[[], None]) -> None:
    if happened:
        call()
    else:
        waiting.append(call)


def _call_all(waiting: list[Callable[[], None]]) -> None:
    calls, waiting[:] = list(waiting), []
    for call in calls:
        try:
            call()
        except Exception:
            _log.exception("what followed the end of a lifeline failed")
