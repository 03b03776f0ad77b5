"""From settings to a running service, and back: what starts in which order, and ends in the reverse one."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

from hicache.config import Config, Quota
from hicache.errors import ConfigError
from hicache.memory.limits import check_memory
from hicache.rpc.address import Address
from hicache.rpc.server import Listener, RpcServer
from hicache.rpc.service import Caller
from hicache.sidecar import notify
from hicache.sidecar.certificates import Certificates, read_certificates
from hicache.sidecar.checks import addresses, storage_url
from hicache.sidecar.http import HttpServer, Page, json_page
from hicache.sidecar.kv_events import KvPublisher
from hicache.sidecar.lifeline import LifelineServer
from hicache.sidecar.metrics import Histogram, Metrics, histograms
from hicache.sidecar.quotas import Quotas, agreed_quotas
from hicache.sidecar.service import SidecarService
from hicache.sidecar.sockets import claim
from hicache.sidecar.tenants import Authenticator, TokenFile
from hicache.storage.registry import open_storage
from hicache.storage.wrappers import MeteredBackend
from hicache.units import format_size

_log = logging.getLogger("hicache.sidecar")

_LINGER = 0.5
"""Seconds for which calls go on after everything was drained, so that last answers leave."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a service ended.

    Attributes:
        dropped: what did not end in order, by name; empty when nothing was lost.
    """

    dropped: dict[str, int]


class App:
    """One service: made of settings, started, and stopped once. On the loop's thread.

    Args:
        config: checked settings.

    Attributes:
        service: once it is started.
        addresses: on which it listens then, with the ports that were chosen for port 0.
        http: the address of /metrics, /healthz and /readyz; None without one.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._listening = addresses(config)
        self._stop = asyncio.Event()
        self._undo = AsyncExitStack()
        self._tokens = TokenFile(config.tokens.file) if config.tokens.file else None
        self._rpc: RpcServer | None = None
        self._storage: MeteredBackend | None = None
        self._publisher: KvPublisher | None = None
        self.service: SidecarService
        self.addresses: tuple[Address, ...] = ()
        self.http: Address | None = None

    async def start(self) -> None:
        """Begin everything, or nothing.

        Raises:
            ConfigError: memory, sockets, ports, certificates or tokens that cannot be had.
            StorageError: storage cannot be opened.
        """
        try:
            await self._start()
        except BaseException:
            await self._undo.aclose()
            raise

    async def _start(self) -> None:
        config, undo = self._config, self._undo
        if not config.host.bytes:
            raise ConfigError("host.bytes is not set: say how much memory engines may share, such as --host 8GiB")
        check_memory(int(config.host.bytes), "the host memory of this service")
        certificates = read_certificates(config.tls)
        quotas = Quotas(self._limits())
        for address in self._listening:
            if address.is_unix:
                undo.callback(claim(address.path).release)
        storage = self._storage = await self._open_storage()
        lifelines = LifelineServer(limit=config.limits.connections, grace=config.leases.grace)
        self.service = service = SidecarService(config, quotas=quotas, storage=storage, lifelines=lifelines)
        lifelines.boot = service.boot
        undo.push_async_callback(lifelines.close)
        for address in self._listening:
            if address.is_unix:
                await lifelines.listen(address.lifeline, mode=config.listen.socket_mode)
        authenticate = Authenticator(config, self._tokens, uid_of=lifelines.uid_of)
        listeners = [self._listener(address, certificates) for address in self._listening]
        self._rpc = RpcServer(service, listeners, authenticate=authenticate)
        undo.push_async_callback(self._rpc.stop, 0.0)
        await self._rpc.start()
        self.addresses = self._rpc.addresses
        self._start_events()
        await self._start_http()
        service.ready = True
        _log.info(
            "ready on %s with %s of host memory and %s",
            ", ".join(map(str, self.addresses)),
            format_size(int(config.host.bytes)),
            "storage" if storage is not None else "no storage",
        )
        notify.notify("READY=1", f"STATUS=serving on {self.addresses[0]}")

    async def _open_storage(self) -> MeteredBackend | None:
        url = storage_url(self._config)
        if url is None:
            return None
        # In a thread: a store may take its time to be connected to.
        storage = await asyncio.to_thread(open_storage, url)
        self._undo.push_async_callback(asyncio.to_thread, storage.close)
        return storage

    def _listener(self, address: Address, certificates: Certificates | None) -> Listener:
        mode = int(self._config.listen.socket_mode)
        if address.is_unix or certificates is None:
            return Listener(address, socket_mode=mode)
        return Listener(address, certificates.certificate, certificates.key, certificates.client_ca)

    async def _start_http(self) -> None:
        if not self._config.metrics.address:
            return
        everyone = Caller()
        metrics = Metrics(lambda: self.service.document(everyone), self._latencies)
        pages: dict[str, Callable[[], Page | Awaitable[Page]]] = {
            "/metrics": metrics.page,
            "/healthz": self._health,
            "/readyz": self._ready,
        }
        if self._publisher is not None:
            pages["/kv_events/snapshot"] = self._kv_snapshot
        server = HttpServer(pages)
        self._undo.push_async_callback(server.close)
        self.http = await server.start(Address.parse(self._config.metrics.address, listening=True))
        _log.info("metrics on %s", self.http)

    def _start_events(self) -> None:
        events = self._config.events
        if events.publish:
            self._publisher = publisher = KvPublisher(
                self.service.events,
                publish=events.publish,
                replay=events.replay or None,
                topic=events.topic,
                encoding=events.encoding,
                hashes=events.hashes,
                salts=events.salts,
                batches=events.batches,
                high_water=events.high_water,
            )
            self._undo.callback(publisher.close)

    # ---- pages

    def _latencies(self) -> Iterator[Histogram]:
        assert self._rpc is not None
        return histograms(self._rpc.statistics(), None if self._storage is None else self._storage.verbs())

    def _health(self) -> Page:
        ping = self.service.ping(Caller())
        status = "degraded" if ping.degraded else "ok"
        return json_page({"status": status, "ready": ping.ready, "degraded": list(ping.degraded)})

    def _ready(self) -> Page:
        ready = self.service.ping(Caller()).ready
        return json_page({"ready": ready}, status=200 if ready else 503)

    async def _kv_snapshot(self) -> Page:
        assert self._publisher is not None
        return Page(await self._publisher.snapshot(), "application/json")

    # ---- signals

    def stop(self) -> None:
        """Begin to end: SIGTERM."""
        self._stop.set()

    def reload(self) -> None:
        """Read again what can be read again: tokens and quotas. SIGHUP."""
        notify.reloading()
        if self._tokens is not None:
            gone = self._tokens.reload()
            if gone:
                self.service.withdraw(gone)
            try:
                self.service.quotas.replace(self._limits())
            except ConfigError as error:
                _log.error("quotas are kept as they were: %s", error)
        notify.notify("READY=1")

    def _limits(self) -> dict[str, Quota]:
        tokens = {} if self._tokens is None else self._tokens.table.quotas
        return agreed_quotas(self._config, tokens)

    async def wait(self) -> None:
        """Until `stop`."""
        await self._stop.wait()

    async def close(self) -> Ended:
        """Drain to the configured deadline, then end everything, in the reverse order of the start."""
        notify.notify("STOPPING=1", "STATUS=draining")
        if self._rpc is not None:
            self._rpc.set_ready(False)
        dropped = await self.service.drain(self._config.drain.seconds)
        if self._rpc is not None:
            await self._rpc.stop(_LINGER)
        await self._undo.aclose()
        return Ended(dropped)


async def serve(config: Config, *, started: Callable[[App], None] | None = None) -> Ended:
    """Run a service until SIGTERM or SIGINT.

    Args:
        config: checked settings.
        started: called when it takes requests.

    Raises:
        ConfigError, StorageError: it cannot start; nothing of it is left.
    """
    app = App(config)
    loop = asyncio.get_running_loop()
    await app.start()
    for number, call in ((signal.SIGTERM, app.stop), (signal.SIGINT, app.stop), (signal.SIGHUP, app.reload)):
        loop.add_signal_handler(number, call)
    if started is not None:
        started(app)
    await app.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)  # a second one ends the process at once
    return await app.close()
