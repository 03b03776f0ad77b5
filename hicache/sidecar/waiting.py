"""Waiting on the event loop for something to change."""

from __future__ import annotations

import asyncio
import threading


class Changes:
    """Wakes all who wait. `notify` may be called from any thread; the rest on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Something may have changed."""
        if not self._waiters:
            return
        if threading.get_ident() == self._thread:
            self._wake()
        else:
            self._loop.call_soon_threadsafe(self._wake)

    async def wait(self, until: float) -> None:
        """Wait for the next change, at most until a moment of the loop's clock. The caller looks again in a loop."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        timer = self._loop.call_at(until, _set, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            _set(waiter)


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
