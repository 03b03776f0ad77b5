"""Who is at the other end of a Unix socket, and when that process is gone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

__all__ = ["Peer", "ProcessWatch", "peer_of", "peer_pidfd"]

_SO_PEERPIDFD: Final = 77  # Linux 6.5; Python has no name for it yet
_FULL: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_CREDENTIALS: Final = struct.Struct("3i")


class Peer(NamedTuple):
    """The process that made a connection, as the kernel noted it then.

    `pid` is 0 where this process cannot see it, as from another container.
    """

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """Who made a connection of a Unix socket."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(found))


def peer_pidfd(connection: socket.socket, peer: Peer) -> int | None:
    """A descriptor of the process that made a connection, which becomes readable when it is gone; None for none.

    The caller owns it. Since Linux 6.5 the kernel gives the very process. Before, it is looked up by its number: were
    that another's already, its first owner would have ended, and the connection with it, or its uid would be another.

    Raises:
        OSError: this process or the machine has no descriptor left.
    """
    try:
        found = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, struct.calcsize("i"))
    except OSError as error:
        if error.errno in _FULL:
            raise
        return _pidfd_by_number(connection, peer)
    return int(struct.unpack("i", found)[0])


def _pidfd_by_number(connection: socket.socket, peer: Peer) -> int | None:
    if not peer.pid:
        return None
    try:
        fd = os.pidfd_open(peer.pid)
    except OSError as error:
        if error.errno in _FULL:
            raise
        return None
    with contextlib.suppress(OSError):
        if os.stat(f"/proc/{peer.pid}").st_uid == peer.uid and not _over(connection):
            return fd
    os.close(fd)
    return None


def _over(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError as error:
        return error.errno != errno.EAGAIN


class ProcessWatch:
    """Calls once when a process is gone: its memory is unmapped, and nothing of it runs. For the loop's thread.

    Args:
        loop: calls.
        pidfd: of the process; becomes the watch's.
        call: called at most once, never after `close`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pidfd: int, call: Callable[[], None]) -> None:
        self._loop = loop
        self._pidfd = pidfd
        self._call = call
        loop.add_reader(pidfd, self._gone)

    @property
    def pidfd(self) -> int:
        """The descriptor, which stays the watch's; -1 when it looks no more."""
        return self._pidfd

    def _gone(self) -> None:
        self.close()
        self._call()

    def close(self) -> None:
        """Look no more. Idempotent."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
