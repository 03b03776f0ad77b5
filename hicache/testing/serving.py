"""A service on a thread of its own, for tests of clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Self, TypeVar

from hicache.config import Config
from hicache.rpc.address import Address
from hicache.rpc.server import Listener, RpcServer
from hicache.rpc.service import Caller, Peer, Service

if TYPE_CHECKING:
    from hicache.sidecar.app import App

__all__ = ["Served", "ServedApp"]

T = TypeVar("T")
_PATIENCE = 30.0  # real seconds for whatever is asked of the service's thread


def _anybody(peer: Peer) -> Caller:
    return Caller(lifeline_key=peer.lifeline_key)


class _OnThread:
    """An event loop on a thread of its own, from `start` to `stop`; a context manager."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def _begin(self) -> None:
        raise NotImplementedError

    async def _end(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Begin to serve."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="served", daemon=True)
        self._thread.start()
        try:
            self.run(self._begin())
        except BaseException:
            self._stop_loop()
            raise

    def stop(self) -> None:
        """End all sessions, and the thread. Idempotent."""
        if self._loop is not None:
            self.run(self._finish())
            self._stop_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the service's loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE)

    def do(self, what: Callable[[], T]) -> T:
        """Call something on the service's loop."""

        async def call() -> T:
            return what()

        return self.run(call())

    async def _finish(self) -> None:
        await self._end()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_PATIENCE)
        await asyncio.get_running_loop().shutdown_default_executor()

    def _stop_loop(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE)
        self._loop.close()
        self._loop = self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class Served(_OnThread):
    """Runs a service behind a server, from `start` to `stop`.

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
        super().__init__()
        self._make = make
        self._authenticate = authenticate
        self.address = address
        self.service: Any = None
        self._server: RpcServer

    async def _begin(self) -> None:
        self.service = self._make()
        listener = Listener(Address.parse(self.address, listening=True))
        self._server = RpcServer(self.service, [listener], authenticate=self._authenticate)
        await self._server.start()
        self.address = str(self._server.addresses[0])

    async def _end(self) -> None:
        await self._server.stop(0.0)


class ServedApp(_OnThread):
    """Runs a whole service, as `hicache serve` does, but in this process.

    Args:
        config: its settings.

    Attributes:
        app: what runs. address: the first on which it listens.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config
        self.app: App
        self.address = ""

    async def _begin(self) -> None:
        from hicache.sidecar.app import App

        self.app = App(self._config)
        await self.app.start()
        self.address = str(self.app.addresses[0])

    async def _end(self) -> None:
        await self.app.close()
