"""How one service gives its estate to the next while it ends: a Unix socket beside the service's own.

    heir    connects, and waits
    old     ends, and when it has let go of everything else it sends the estate: packets of descriptors, the document's
            first, each with how many follow; or one with words: why not
    heir    takes the socket's path, the ports, the storage and the pages, and before it serves anyone says `TAKEN`
    old     closes its descriptors, and is no more

Until that word both have the memory, and nobody serves. Where the connection ends without it, the heir was killed or
could not start: then the old one begins anew, with its own estate. So there is never none of them for long, and never
two, as who serves has a lock on the path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Final

from hicache.errors import ConfigError
from hicache.sidecar.estate import Estate
from hicache.sidecar.processes import peer_of
from hicache.sidecar.sockets import bind

__all__ = ["SUFFIX", "TAKEN", "Inheritance", "TakeoverServer", "inherit_at"]

_log = logging.getLogger("hicache.sidecar")

SUFFIX: Final = ".takeover"
TAKEN: Final = b"taken"
_REFUSED: Final = b"refused: "
_LONGEST: Final = 512  # bytes of a packet
_COUNT: Final = struct.Struct("<I")
_MOST: Final = 128  # descriptors of one packet; Linux takes 253
_MOST_ALL: Final = 65_536


class TakeoverServer:
    """Lets the next service ask. On the loop's thread, but for `give`.

    Args:
        asked: called once, when it has.

    Attributes:
        withdrawn: set when who asked has gone away again.
    """

    def __init__(self, asked: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked = asked
        self._listener: socket.socket | None = None
        self._heir: socket.socket | None = None
        self.withdrawn = asyncio.Event()

    @property
    def asked(self) -> bool:
        """Whether a service wants to take over, or wanted to."""
        return self._heir is not None

    def listen(self, path: str) -> None:
        """Wait for it at the service's path, which is claimed.

        Raises:
            ConfigError: the socket cannot be bound.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + SUFFIX)
        self._path = path + SUFFIX
        self._listener = bind(self._path, socket.SOCK_SEQPACKET, mode=0o600)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        uid = peer_of(connection).uid
        if uid not in (0, os.geteuid()):
            _refuse(connection, f"user {uid} may not take over a service of user {os.geteuid()}")
        elif self._heir is not None:
            _refuse(connection, "another one is taking it over")
        else:
            connection.setblocking(False)
            self._heir = connection
            self._loop.add_reader(connection.fileno(), self._left)
            self._asked()

    def _left(self) -> None:
        assert self._heir is not None
        self._loop.remove_reader(self._heir.fileno())
        self.withdrawn.set()  # it has nothing to say yet, so this is its end

    def close(self) -> None:
        """Listen no more; who has asked still waits. Idempotent."""
        if self._heir is not None:
            self._loop.remove_reader(self._heir.fileno())
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def give(self, estate: Estate, *, seconds: float) -> bool:
        """Give an estate to who has asked, behind `close`; whether it was taken. Blocks.

        Args:
            estate: its descriptors stay the caller's, which must not use the memory if it was taken.
            seconds: for the next service to start.
        """
        assert self._heir is not None
        with self._heir as heir:
            heir.settimeout(seconds)
            try:
                _send(heir, estate)
                return heir.recv(len(TAKEN)) == TAKEN
            except OSError as error:
                _log.error("the next service does not answer: %s", error)
                return False


def _refuse(connection: socket.socket, reason: str) -> None:
    _log.warning("a takeover is refused: %s", reason)
    with connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(_REFUSED + reason.encode())


def _send(heir: socket.socket, estate: Estate) -> None:
    document = estate.document()
    try:
        left = [document, *estate.descriptors]
        while left:
            packet, left = left[:_MOST], left[_MOST:]
            socket.send_fds(heir, [_COUNT.pack(len(left))], packet, socket.MSG_NOSIGNAL)
    finally:
        os.close(document)


class Inheritance:
    """What the service before leaves, and the connection to it.

    Attributes:
        estate: what it has left; None where there is nothing.
    """

    def __init__(self, estate: Estate | None = None, connection: socket.socket | None = None) -> None:
        self.estate = estate
        self._connection = connection

    def taken(self) -> None:
        """The estate is this service's now, and nobody else may serve it."""
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it gave up waiting: then it could not serve either
                self._connection.send(TAKEN, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Let go of what was not taken, and of the connection. Idempotent."""
        if self.estate is not None:
            self.estate.close()
        if self._connection is not None:
            self._connection.close()


def inherit_at(path: str, *, seconds: float) -> Inheritance:
    """Ask the service at a path to end, and for what it leaves. Blocks until it has ended.

    Args:
        path: of its socket.
        seconds: how long to wait.

    Returns:
        What it leaves, to be closed; nothing where no service runs there, or it has left nothing.

    Raises:
        ConfigError: it refuses, or does not end in time.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(seconds)
        connection.connect(path + SUFFIX)
        return Inheritance(_receive(connection), connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            return Inheritance()
        if isinstance(error, TimeoutError):
            raise ConfigError(
                f"the service at {path!r:.200} did not end within {seconds:g} seconds: stop it, or wait longer "
                "(drain.seconds of both)"
            ) from None
        if isinstance(error, _RefusedError | OSError):
            reason = error if isinstance(error, _RefusedError) else error.strerror or error
            raise ConfigError(f"the service at {path!r:.200} cannot be taken over: {reason}") from None
        raise


class _RefusedError(Exception):
    """The service says no."""


def _receive(connection: socket.socket) -> Estate | None:
    descriptors: list[int] = []
    try:
        more = 1
        while more:
            packet, found, _, _ = socket.recv_fds(connection, _LONGEST, _MOST)
            for fd in found:
                os.set_inheritable(fd, False)
            descriptors += found
            if packet.startswith(_REFUSED):
                raise _RefusedError(packet[len(_REFUSED) :].decode(errors="replace"))
            if len(packet) != _COUNT.size or not found or len(descriptors) > _MOST_ALL:
                raise ConnectionError
            (more,) = _COUNT.unpack(packet)
        estate = Estate.read(descriptors[0], descriptors[1:])
    except (ConfigError, ConnectionError) as error:
        _close(descriptors)
        reason = str(error) or "the service before has ended without leaving anything"
        _log.warning("nothing is taken over: %s", reason)
        return None
    except BaseException:
        _close(descriptors)
        raise
    os.close(descriptors[0])
    return estate


def _close(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)
