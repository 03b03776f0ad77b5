"""Replies on their way to one client: in order, joined into one message while the client's stream is busy."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

JOINED_BYTES: Final = 2**20
"""Replies are joined up to this size: well under the 4 MiB that a foreign client's gRPC takes by default."""

HIGH_BYTES: Final = 4 * 2**20
"""Above this nothing more is read from a client that does not read its replies."""


class Outbox:
    """A bounded queue of serialised messages. Used on the loop's thread.

    Messages of protobuf that stand one behind the other are one message with the lists of all, so joining costs a copy.

    Args:
        write: sends one message, and returns when there is room for the next.
    """

    def __init__(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._write = write
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, message: bytes) -> None:
        """Send this after all others. Never waits; who sends much waits for `room` first."""
        self._waiting.append(message)
        self._bytes += len(message)
        self._filled.set()
        self._idle.clear()
        if self._bytes > HIGH_BYTES:
            self._room.clear()

    async def room(self) -> None:
        """Wait until the client has read so much that more may be produced."""
        if self._bytes > HIGH_BYTES:
            await self._room.wait()

    async def drained(self) -> None:
        """Wait until everything is sent."""
        await self._idle.wait()

    async def run(self) -> None:
        """Send what is put, until cancelled or until a write fails."""
        while True:
            await self._filled.wait()
            message = self._take()
            await self._write(message)
            self._bytes -= len(message)
            if self._bytes <= HIGH_BYTES:
                self._room.set()
            if not self._waiting:
                self._filled.clear()
                self._idle.set()

    def _take(self) -> bytes:
        first = self._waiting.popleft()
        if not self._waiting or len(first) + len(self._waiting[0]) > JOINED_BYTES:
            return first
        joined, size = [first], len(first)
        while self._waiting and size + len(self._waiting[0]) <= JOINED_BYTES:
            message = self._waiting.popleft()
            joined.append(message)
            size += len(message)
        return b"".join(joined)
