"""One connection for the time of one call: requests out, replies in, payloads straight into the caller's buffer.

redis-py makes the connection (host, TLS, password, database) and sends on it. Replies are read here, from its socket,
since redis-py would read each value into several buffers of its own before giving it as bytes. RESP2 only.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from .trouble import Trouble

__all__ = ["Channel", "Deadline", "is_connected", "socket_of"]

MAX_LINE: Final = 64 * 1024
_SCRATCH: Final = 16 * 1024
_SMALLEST_WAIT: Final = 0.001


class Deadline:
    """The end of one call.

    Args:
        now: a monotonic clock in seconds.
        seconds: how long the call may take.
    """

    __slots__ = ("_end", "_now")

    def __init__(self, now: Callable[[], float], seconds: float) -> None:
        self._now = now
        self._end = now() + seconds

    def remaining(self) -> float:
        """Seconds left, not below zero."""
        return max(0.0, self._end - self._now())

    def check(self) -> float:
        """Seconds left.

        Raises:
            Trouble: none are.
        """
        left = self._end - self._now()
        if left <= 0:
            raise Trouble("timeout")
        return left


def socket_of(connection: Any) -> socket.socket:
    """The socket of a connected connection: here alone is it known how redis-py keeps it.

    Raises:
        Trouble: it is not connected.
    """
    found = getattr(connection, "_sock", None)
    if found is None:
        raise Trouble("connection")
    return found  # type: ignore[no-any-return]


def is_connected(connection: Any) -> bool:
    """Whether a connection has a socket; the other side may have closed it."""
    return getattr(connection, "_sock", None) is not None


class Channel:
    """Reads replies of one connected connection. For one thread and one call.

    Reads are asked for in sizes that end where the payload begins (`hint`), so that nearly nothing of a payload comes
    by way of the scratch buffer.

    Args:
        connection: of redis-py, connected, with nothing unread.
        timeout: most seconds between two pieces.
        deadline: of the call.

    Attributes:
        hint: bytes that the next read asks for at least.
        suspect: something came that was not asked for here; the connection must not be used again.
    """

    def __init__(self, connection: Any, *, timeout: float, deadline: Deadline) -> None:
        self._connection = connection
        self._socket = socket_of(connection)
        self._in_pieces = isinstance(self._socket, ssl.SSLSocket)
        self._timeout = timeout
        self._deadline = deadline
        self._armed = 0.0
        self._scratch = bytearray(_SCRATCH)
        self._view = memoryview(self._scratch)
        self._start = 0
        self._end = 0
        self.hint = 512
        self.suspect = False

    @property
    def clean(self) -> bool:
        """Whether all that came was asked for and used."""
        return self._start == self._end and not self.suspect

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send the parts in order, without copying them together."""
        for part in parts:
            if self._in_pieces:
                self._send_pieces(memoryview(part))
            else:
                self._arm()  # the whole of a plain socket's `sendall` is bounded by its time-out
                self._connection.send_packed_command((part,), check_health=False)

    def line(self) -> bytes:
        """The next line, without its end."""
        while True:
            at = self._scratch.find(b"\r\n", self._start, self._end)
            if at >= 0:
                line = bytes(self._view[self._start : at])
                self._start = at + 2
                return line
            if self._end - self._start > MAX_LINE:
                raise Trouble("protocol")
            self._more(1)

    def reply(self, kind: bytes) -> int | bytes | None:
        """The start of the next reply, which is of the kind that the request asks for, or an error.

        Args:
            kind: `$` for a value, `:` for a number, `+` for a status.

        Returns:
            The number; for a value its length or None; for a status and for an error the line with its sign.

        Raises:
            Trouble: another kind, so the connection answers something else than was asked.
        """
        line = self.line()
        sign, rest = line[:1], line[1:]
        if sign == b"-" or (sign == kind and kind == b"+"):
            return line
        if sign != kind:
            raise Trouble("protocol")
        number = _number(rest)
        if kind == b"$" and number < 0:
            return None
        return number

    def need(self, count: int) -> memoryview:
        """The next `count` bytes, not yet taken; valid until the next call."""
        while self._end - self._start < count:
            self._more(count - (self._end - self._start))
        return self._view[self._start : self._start + count]

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        found = bytes(self.need(count))
        self._start += count
        return found

    def fill(self, buffer: memoryview) -> None:
        """Put the next bytes into a buffer, all of it."""
        there = min(self._end - self._start, buffer.nbytes)
        if there:
            np.copyto(np.asarray(buffer[:there]), np.asarray(self._view[self._start : self._start + there]))
            self._start += there
        while there < buffer.nbytes:
            there += self._receive(buffer[there:])

    def skip(self, count: int) -> None:
        """Drop the next bytes."""
        there = min(self._end - self._start, count)
        self._start += there
        count -= there
        while count:
            self._start = self._end = 0
            count -= self._receive(self._view[: min(count, len(self._scratch))])

    def end_value(self) -> None:
        """Take the end of a value."""
        if self.take(2) != b"\r\n":
            raise Trouble("protocol")

    def restore(self) -> None:
        """Give the socket back as redis-py had it."""
        self._socket.settimeout(self._connection.socket_timeout)

    def _more(self, least: int) -> None:
        want = max(least, self.hint)
        if self._start == self._end:
            self._start = self._end = 0
        if self._end + want > len(self._scratch):
            self._make_room(want)
        self._end += self._receive(self._view[self._end : self._end + want])

    def _make_room(self, want: int) -> None:
        rest = bytes(self._view[self._start : self._end])
        size = max(len(self._scratch), len(rest) + want)
        self._scratch = bytearray(size)
        self._view = memoryview(self._scratch)
        self._scratch[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def _receive(self, into: memoryview) -> int:
        self._arm()
        count = self._socket.recv_into(into)
        if count == 0:
            raise Trouble("connection")
        return count

    def _send_pieces(self, part: memoryview) -> None:
        """As `sendall` of TLS, which begins its time-out anew with each piece that is taken."""
        view = part.cast("B")
        while view.nbytes:
            self._arm()
            view = view[self._socket.send(view) :]

    def _arm(self) -> None:
        """The socket's time-out is what is left of the deadline, where that is less; set only when it changes."""
        left = min(self._timeout, self._deadline.check())
        if left != self._armed:
            self._socket.settimeout(max(left, _SMALLEST_WAIT))
            self._armed = left


def _number(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 19:
        raise Trouble("protocol")
    return int(text)
