"""A service on a thread of its own, for tests of clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hicache.rpc.address import Address
from hicache.rpc.server import Listener, RpcServer
from hicache.rpc.service import Caller, Peer, Service

__all__ = ["Served"]

T = TypeVar("T")
_PATIENCE = 30.0  # real seconds for whatever is asked of the service's thread


def _anybody(peer: Peer) -> Caller:
    return Caller(lifeline_key=peer.lifeline_key)


class Served:
    """Runs a service in an event loop of its own thread, from `start` to `stop`; a context manager.

    Args:
        make: makes the service, on the loop; called at every start.
        authenticate: as of `RpcServer`; by default anybody may do everything.
        address: where to listen; a free port of the loopback interface by default, the same one after a restart.

    Attributes:
        address: as clients write it.
        service: what `make` made last.
    """

    def __init__(
        self,
        make: Callable[[], Service],
        *,
        authenticate: Callable[[Peer], Caller] = _anybody,
        address: str = "127.0.0.1:0",
    ) -> None:
        self._make = make
        self._authenticate = authenticate
        self.address = address
        self.service: Any = None
        self._server: RpcServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to serve."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="served", daemon=True)
        self._thread.start()
        self.run(self._begin())

    def stop(self, grace: float = 0.0) -> None:
        """End all sessions, and the thread. Idempotent."""
        if self._loop is None or self._thread is None:
            return
        if self._server is not None:
            self.run(self._end(self._server, grace))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE)
        self._loop.close()
        self._loop = self._thread = self._server = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the service's loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE)

    def do(self, what: Callable[[], T]) -> T:
        """Call something on the service's loop."""

        async def call() -> T:
            return what()

        return self.run(call())

    async def _begin(self) -> None:
        self.service = self._make()
        listener = Listener(Address.parse(self.address, listening=True))
        self._server = RpcServer(self.service, [listener], authenticate=self._authenticate)
        await self._server.start()
        self.address = str(self._server.addresses[0])

    async def _end(self, server: RpcServer, grace: float) -> None:
        await server.stop(grace)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_PATIENCE)

    def __enter__(self) -> Served:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
