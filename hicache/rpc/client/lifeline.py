"""The client's end of a lifeline: it says who calls, gives the descriptors of shared memory, and tells of the end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from array import array
from collections.abc import Iterable
from typing import Final

from hicache.errors import HicacheError, NotFound, PermissionDenied, ServiceUnavailable
from hicache.rpc.convert.lifeline import LIFELINE_PACKET, decode_greeting, decode_reply, encode_request

__all__ = ["Lifeline"]

_OVER: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
_MOST_DESCRIPTORS: Final = 4  # one is right; room shows when there are more


class Lifeline:
    """A connection to the lifeline's socket. Thread-safe.

    Who copies out of shared memory asks `ended` behind the copy, after the generation words: while the lifeline
    lasts, the words are those of the service that owns the memory now.

    Args:
        path: of the socket: the service's, with ".lifeline" behind it.
        timeout: seconds for connecting, and for each descriptor.

    Attributes:
        key: names this connection in the session's hello.
        boot: names the service's life.

    Raises:
        ServiceUnavailable: nobody listens there, or answers in time.
        PermissionDenied: this user may not connect.
        InvalidInput: what answers there is no service of this kind.
        ProtocolMismatch: it speaks another version.
    """

    def __init__(self, path: str, *, timeout: float = 5.0) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._connection.settimeout(timeout)
            self._connect()
            packet, fds = self._receive()
            _close_all(fds)  # a greeting has none
            greeting = decode_greeting(packet)
        except BaseException:
            self._connection.close()
            raise
        self.key = greeting.key
        self.boot = greeting.boot

    @property
    def ended(self) -> bool:
        """Whether the service has ended the connection, or is no more. Asks the kernel; costs about a microsecond."""
        poll = select.poll()
        try:
            poll.register(self._connection, select.POLLRDHUP)
            return any(events & _OVER for _, events in poll.poll(0))
        except ValueError:  # closed
            return True

    def fileno(self) -> int:
        """The descriptor: readable at the end of the connection, and in `fetch`; -1 when closed."""
        return self._connection.fileno()

    def fetch(self, memory: int) -> tuple[int, int]:
        """The descriptor of a memory that the session has attached, and its bytes. The caller owns the descriptor.

        Raises:
            NotFound: the service gives none; the text says why.
            ServiceUnavailable: it has ended, or does not answer in time; the connection is then closed.
        """
        with self._lock:
            try:
                self._connection.sendmsg([encode_request(memory)], [], socket.MSG_NOSIGNAL)
                packet, fds = self._receive()
            except OSError as error:
                self.close()
                raise ServiceUnavailable(f"the service at {self._path} has ended: {error}") from error
            except ServiceUnavailable:
                self.close()  # what comes late would be taken for the next answer
                raise
        try:
            reply = decode_reply(packet)
            if reply.error:
                raise NotFound(f"the service gives no memory {memory}: {reply.error}")
            if reply.id != memory or len(fds) != 1:
                raise ServiceUnavailable(f"the service at {self._path} has answered with another memory than {memory}")
        except HicacheError:
            _close_all(fds)
            raise
        return fds[0], reply.size

    def finish(self) -> None:
        """Tell that this process does not touch the memory any more, though it may live on, and close. Idempotent."""
        with contextlib.suppress(OSError):  # where it has ended, nobody is there to be told
            self._connection.sendmsg([encode_request(finished=True)], [], socket.MSG_NOSIGNAL)
        self.close()

    def close(self) -> None:
        """End the connection. Idempotent."""
        if os.getpid() == self._pid:
            # Also where a forked child still has the socket: the service must not wait for that.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def forked(self) -> None:
        """To be called in a forked child: lets go of its copy, so that the end of the parent is seen. No lock."""
        self._connection.close()

    def _connect(self) -> None:
        try:
            self._connection.connect(self._path)
        except PermissionError as error:
            raise PermissionDenied(
                f"this user may not connect to {self._path}: the socket's rights forbid it"
            ) from error
        except OSError as error:
            raise ServiceUnavailable(f"no service answers at {self._path}: {error.strerror or error}") from error

    def _receive(self) -> tuple[bytes, list[int]]:
        room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array("i").itemsize)
        try:
            # Not `socket.recv_fds`: Python 3.11's passes no flags on, so a child in between would inherit them.
            packet, ancillary, _, _ = self._connection.recvmsg(LIFELINE_PACKET, room, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError as error:
            raise ServiceUnavailable(
                f"the service at {self._path} does not answer: it may hang, or be stopped"
            ) from error
        except OSError as error:
            raise ServiceUnavailable(f"the service at {self._path} has ended: {error}") from error
        fds = array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if not packet:
            _close_all(fds)
            raise ServiceUnavailable(f"the service at {self._path} has hung up: it ends, or has too many clients")
        return packet, fds.tolist()


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
