"""What keeps a client connected: one thread with an event loop of its own, and attempts until there is a service."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from hicache.errors import (
    HicacheError,
    InvalidInput,
    PermissionDenied,
    ProtocolMismatch,
    ServiceUnavailable,
    Unauthenticated,
)
from hicache.rpc.client.connection import Connection, Dialer
from hicache.rpc.client.options import ClientOptions

T = TypeVar("T")

_log = logging.getLogger("hicache.client")

REFUSALS: Final = (InvalidInput, PermissionDenied, ProtocolMismatch, Unauthenticated)
"""What trying again does not change, unless somebody changes the service or its settings."""

_RENEWALS: Final = 3
"""In the life of a lease: one may be late, and one lost."""

_STEADY: Final = 1.0
"""Seconds that a connection must have lived for the next attempts to begin anew; else a service that fails at once
would be asked fifty times a second."""


class Link:
    """Connects in the background, again and again. Thread-safe.

    Args:
        dialer: makes the connections.
        options: how to wait between attempts.
        lost: called on the loop's thread when a connection has ended, before the next attempt.
        renew: called there while a connection lives, often enough for its leases not to expire.

    Attributes:
        connection: the one that is open now, or None: the service is away.
        reason: why it is away, in words.
        refusal: the refusal behind the last failed attempt, or None.
        connections: how many there were. attempts: how often one was tried.
    """

    def __init__(
        self,
        dialer: Dialer,
        options: ClientOptions,
        lost: Callable[[Connection], None],
        renew: Callable[[Connection], None],
    ) -> None:
        self.connection: Connection | None = None
        self.reason = "no attempt to connect has ended yet"
        self.refusal: HicacheError | None = None
        self.connections = 0
        self.attempts = 0
        self._dialer = dialer
        self._options = options
        self._lost = lost
        self._renew = renew
        self._changed = threading.Condition()
        self._decided = 0  # attempts that have ended, or have brought a connection
        self._closed = False
        self._awaited = True  # whether somebody waits for the first attempt, and is told there that it is refused
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="hicache-client", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def wait_decided(self, timeout: float, *, connected: bool) -> None:
        """Wait until the first attempt has ended, or with `connected` until there is a connection or a refusal."""

        def enough() -> bool:
            done = self.connection is not None or self.refusal is not None
            return done or self._closed or (not connected and self._decided > 0)

        with self._changed:
            self._changed.wait_for(enough, timeout)
            self._awaited = False

    def wait_connected(self, timeout: float) -> None:
        """Wait until there is a connection."""
        with self._changed:
            self._changed.wait_for(lambda: self.connection is not None or self._closed, timeout)

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run something on the client's loop."""
        loop = self._loop
        if loop is None or loop.is_closed():
            work.close()
            raise ServiceUnavailable(f"the service is away: {self.reason}")
        return asyncio.run_coroutine_threadsafe(work, loop)

    def close(self, timeout: float) -> bool:
        """End the connection in order, and the thread. Idempotent. Whether it has ended in time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            loop, closing = self._loop, self._closing
        if loop is not None and closing is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(closing.set)
            except RuntimeError:
                _log.debug("the client's loop has ended by itself")
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # ---- the thread

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        closing = asyncio.Event()
        with self._changed:
            self._loop, self._closing = asyncio.get_running_loop(), closing
            if self._closed:
                return
        attempt = asyncio.create_task(self._keep(closing))
        closed = asyncio.create_task(closing.wait())
        await asyncio.wait((attempt, closed), return_when=asyncio.FIRST_COMPLETED)
        if self.connection is None:
            attempt.cancel()  # in the middle of an attempt, or of a wait
        await asyncio.wait((attempt,))
        closed.cancel()
        if not attempt.cancelled() and (error := attempt.exception()) is not None:
            _log.error("the client's connection is given up by a bug", exc_info=error)
            self._ended("a bug of the client")

    async def _keep(self, closing: asyncio.Event) -> None:
        failed = 0
        while not closing.is_set():
            self.attempts += 1
            began = time.monotonic()
            try:
                reason = await self._dialer.run(self._begun, closing)
            except HicacheError as error:
                self._failed(error)
                reason = str(error)
            except OSError as error:
                self._failed(error)
                reason = f"{self._dialer.address}: {error.strerror or error}"
            failed = 1 if time.monotonic() - began > _STEADY and self.connection is not None else failed + 1
            self._ended(reason)
            if not closing.is_set():
                await (self._options.pause or asyncio.sleep)(self._options.backoff.seconds(failed))

    def _begun(self, connection: Connection) -> None:
        if self.connections:
            _log.warning("connected to %s again", self._dialer.address)  # seen by whoever saw that it went away
        elif self.attempts > 1:
            level = logging.INFO if self.refusal is None else logging.WARNING
            _log.log(level, "connected to %s after %d attempts", self._dialer.address, self.attempts)
        with self._changed:
            self.connections += 1
            self.connection, self.refusal = connection, None
            self._decided += 1
            self._changed.notify_all()
        self._renew_later(connection)

    def _renew_later(self, connection: Connection) -> None:
        seconds = connection.welcome.limits.lease_seconds
        if seconds and self._loop is not None:
            self._loop.call_later(seconds / _RENEWALS, self._renewed, connection)

    def _renewed(self, connection: Connection) -> None:
        if self.connection is connection:
            self._renew(connection)
            self._renew_later(connection)

    def _failed(self, error: Exception) -> None:
        refusal = error if isinstance(error, REFUSALS) else None
        if refusal is not None:  # kept, so it must not keep what the attempt had open
            refusal.__traceback__ = refusal.__context__ = refusal.__cause__ = None
        if refusal is not None and not self._awaited and str(refusal) != str(self.refusal):
            _log.error("%s refuses this client, it goes on without the cache: %s", self._dialer.address, error)
        self.refusal = refusal

    def _ended(self, reason: str) -> None:
        with self._changed:
            connection, self.connection = self.connection, None
            self.reason = reason
            self._decided += 1
            self._changed.notify_all()
        if connection is not None:
            if not self._closed:
                _log.warning("going on without the cache: %s", reason)
            self._lost(connection)
