"""How one service gives its estate to the next while it ends: a Unix socket beside the service's own.

The next service connects and waits. The one that runs begins to end, and when it has let go of everything else it sends
the estate: packets of descriptors, the document's first, each with how many follow. The end of the connection without
them means that there is nothing.
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

__all__ = ["SUFFIX", "TakeoverServer", "send", "wait_for_estate"]

_log = logging.getLogger("hicache.sidecar")

SUFFIX: Final = ".takeover"
_COUNT: Final = struct.Struct("<I")
_MOST: Final = 128  # descriptors of one packet; Linux takes 253
_MOST_ALL: Final = 65_536


class TakeoverServer:
    """Lets the next service ask. On the loop's thread.

    Args:
        asked: called once, when it has.

    Attributes:
        heir: the connection of who asked, or None.
    """

    def __init__(self, asked: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked = asked
        self._listener: socket.socket | None = None
        self.heir: socket.socket | None = None

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
        if self.heir is not None or uid not in (0, os.geteuid()):
            _log.warning("uid %d may not take this service over, or another one does", uid)
            connection.close()
            return
        self.heir = connection
        self._asked()

    def close(self) -> None:
        """Listen no more; the heir's connection stays. Idempotent."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def send(heir: socket.socket, estate: Estate) -> bool:
    """Give an estate away; whether it was taken. The descriptors stay the caller's."""
    document = estate.document()
    try:
        heir.setblocking(True)
        heir.settimeout(10.0)
        left = [document, *estate.descriptors]
        while left:
            packet, left = left[:_MOST], left[_MOST:]
            socket.send_fds(heir, [_COUNT.pack(len(left))], packet, socket.MSG_NOSIGNAL)
    except OSError as error:
        _log.error("the next service did not take over: %s", error)
        return False
    finally:
        os.close(document)
    return True


def wait_for_estate(path: str, *, seconds: float) -> Estate | None:
    """Ask the service at a path to end, and take over what it leaves. Blocks until it has ended.

    Args:
        path: of its socket.
        seconds: how long to wait.

    Returns:
        The estate; None where no service runs there, or it has left nothing.

    Raises:
        ConfigError: it does not end in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(seconds)
        try:
            connection.connect(path + SUFFIX)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise ConfigError(f"the service at {path!r:.200} cannot be taken over: {error.strerror or error}") from None
        descriptors: list[int] = []
        try:
            more = 1
            while more:
                packet, found, _, _ = socket.recv_fds(connection, _COUNT.size, _MOST)
                descriptors += found
                if len(packet) != _COUNT.size or not found or len(descriptors) > _MOST_ALL:
                    raise ConnectionError
                (more,) = _COUNT.unpack(packet)
            for fd in descriptors:
                os.set_inheritable(fd, False)
            estate = Estate.read(descriptors[0], descriptors[1:])
        except TimeoutError:
            _close(descriptors)
            raise ConfigError(
                f"the service at {path!r:.200} did not end within {seconds:g} seconds: stop it, or wait longer "
                "(drain.seconds of both)"
            ) from None
        except (ConfigError, ConnectionError) as error:
            _close(descriptors)
            reason = str(error) or "the service before ended without leaving anything"
            _log.warning("nothing is taken over: %s", reason)
            return None
        os.close(descriptors[0])
        return estate


def _close(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)
