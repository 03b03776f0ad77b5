"""From settings to a running service, and back: what starts in which order, and ends in the reverse one."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from hicache.config import Config, Quota
from hicache.core.identity import normal_model_name
from hicache.errors import ConfigError, ServiceError
from hicache.memory.limits import check_memory
from hicache.records import Tier
from hicache.rpc.address import Address
from hicache.rpc.server import Listener, RpcServer, ServerTls
from hicache.rpc.service import Caller
from hicache.runtime.accesslog.writer import AccessLogWriter
from hicache.sidecar import notify
from hicache.sidecar.certificates import read_certificates
from hicache.sidecar.checks import addresses, storage_url
from hicache.sidecar.document import document
from hicache.sidecar.estate import Estate
from hicache.sidecar.heritage import take_over
from hicache.sidecar.http import HttpServer, Page, json_page
from hicache.sidecar.kv_events import KvPublisher
from hicache.sidecar.lifeline import LifelineServer
from hicache.sidecar.metrics import Histogram, Metrics, histograms
from hicache.sidecar.quotas import Quotas, agreed_quotas
from hicache.sidecar.service import SidecarService
from hicache.sidecar.sockets import Claim, claim
from hicache.sidecar.takeover import Inheritance, TakeoverServer, inherit_at
from hicache.sidecar.tenants import Authenticator, TokenFile
from hicache.sidecar.usage import stored_by_tenant
from hicache.sidecar.wiring import access_log_of
from hicache.storage.registry import open_storage
from hicache.storage.url import redacted
from hicache.storage.wrappers import MeteredBackend
from hicache.units import format_size

_log = logging.getLogger("hicache.sidecar")

_LINGER = 0.5
"""Seconds for which calls go on after everything was drained, so that last answers leave."""

_LET_GO = 1.0
"""Seconds for clients to finish the copies that they are in the middle of."""

_PATIENCE = 30.0
"""Seconds for a service to end behind its drain: it hashes all of its memory."""

_DYING = 5.0
"""Seconds for a service that was killed to be gone: the kernel ends its connections before its locks."""

_TRY_AGAIN = 0.02

STORE_NAME = "hicache"
"""Of the descriptors that systemd keeps."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a service ended.

    Attributes:
        dropped: what did not end in order, by name; empty when nothing was lost.
        kept: what was to be another service's, which has not taken it; its descriptors are the caller's to close.
    """

    dropped: dict[str, int]
    kept: Estate | None = None


class App:
    """One service: made of settings, started, and stopped once. On the loop's thread.

    Args:
        config: checked settings.
        inherits: what it takes over, whoever has left it; None: nothing, or what is found.

    Attributes:
        service: once it is started.
        addresses: on which it listens then, with the ports that were chosen for port 0.
        http: the address of /metrics, /healthz and /readyz; None without one.
    """

    def __init__(self, config: Config, inherits: Estate | None = None) -> None:
        self._config = config
        self._inherits = inherits
        self._listening = addresses(config)
        self._stop = asyncio.Event()
        self._told = False  # to end, whoever takes over
        self._undo = AsyncExitStack()
        self._tokens = TokenFile(config.tokens.file) if config.tokens.file else None
        self._tls: ServerTls | None = None
        self._rpc: RpcServer | None = None
        self._storage: MeteredBackend | None = None
        self._takeover: TakeoverServer | None = None
        self._publisher: KvPublisher | None = None
        self.service: SidecarService
        self.addresses: tuple[Address, ...] = ()
        self.http: Address | None = None

    async def start(self, *, takeover: bool = False) -> None:
        """Begin everything, or nothing.

        Args:
            takeover: as in `serve`.

        Raises:
            ConfigError: memory, sockets, ports, certificates or tokens that cannot be had.
            StorageError: storage cannot be opened.
        """
        try:
            await self._start(takeover)
        except BaseException:
            await self._undo.aclose()
            raise

    async def _start(self, takeover: bool) -> None:
        config, undo = self._config, self._undo
        if not config.host.bytes:
            raise ConfigError("host.bytes is not set: say how much memory engines may share, such as --host 8GiB")
        check_memory(int(config.host.bytes), "the host memory of this service")
        if (certificates := read_certificates(config.tls)) is not None:
            self._tls = ServerTls(certificates.certificate, certificates.key, certificates.client_ca)
        quotas = Quotas(self._limits())
        inheritance = await self._inheritance(takeover)
        for address in self._listening:
            if address.is_unix:
                undo.callback((await _claimed(address.path, seconds=_DYING if takeover else 0.0)).release)
        storage = self._storage = await self._open_storage()
        lifelines = LifelineServer(limit=config.limits.connections, grace=config.leases.grace)
        name = redacted(storage_url(config) or "")
        self.service = service = SidecarService(
            config, quotas=quotas, storage=storage, storage_name=name, lifelines=lifelines, log=self._open_log()
        )
        lifelines.boot = service.boot
        undo.push_async_callback(lifelines.close)
        for address in self._listening:
            if address.is_unix:
                await lifelines.listen(address.lifeline, mode=config.listen.socket_mode)
                if self._takeover is None:
                    self._takeover = TakeoverServer(self._stop.set)
                    self._takeover.listen(address.path)
                    undo.callback(self._takeover.close)
        authenticate = Authenticator(config, self._tokens, uid_of=lifelines.uid_of)
        listeners = [self._listener(address) for address in self._listening]
        self._rpc = RpcServer(service, listeners, authenticate=authenticate)
        service.verbs = self._rpc.statistics
        undo.push_async_callback(self._rpc.stop, 0.0)
        await self._rpc.start()
        self.addresses = self._rpc.addresses
        self._start_events()
        self._counting = asyncio.create_task(self._count_stored(quotas))
        undo.push_async_callback(_cancelled, self._counting)
        await self._start_http()
        if inheritance.estate is not None:
            pages = await take_over(service.pools, inheritance.estate, storage=name)
            _log.info("%d pages taken over from a service of version %s", pages, inheritance.estate.server)
        inheritance.taken()
        service.ready = True
        _log.info(
            "ready on %s with %s of host memory and %s",
            ", ".join(map(str, self.addresses)),
            format_size(int(config.host.bytes)),
            "storage" if storage is not None else "no storage",
        )
        notify.notify("READY=1", f"STATUS=serving on {self.addresses[0]}")

    async def _count_stored(self, quotas: Quotas) -> None:
        """In the background: listing a large store takes a while."""
        limited = [tenant for tenant, quota in self._limits().items() if quota.storage is not None]
        if self._storage is not None and limited:
            for tenant, size in (await asyncio.to_thread(stored_by_tenant, self._storage, limited)).items():
                quotas.adopt(tenant, Tier.STORAGE, size)

    async def _inheritance(self, takeover: bool) -> Inheritance:
        sockets = [address.path for address in self._listening if address.is_unix]
        if takeover and not sockets:
            raise ConfigError("--takeover goes over a Unix socket, and there is none among listen.addresses")
        found = Inheritance(self._inherits or await asyncio.to_thread(_inherited))
        if found.estate is None and takeover:
            patience = 2 * self._config.drain.seconds + _PATIENCE
            found = await asyncio.to_thread(inherit_at, sockets[0], seconds=patience)
            if found.estate is None:
                _log.info("nothing to take over at %s: this service begins with empty memory", sockets[0])
        self._undo.callback(found.close)
        if takeover and found.estate is not None and found.estate.bytes > int(self._config.host.bytes):
            # Refused, the one before goes on with all of it; taken in part, the rest would be lost.
            raise ConfigError(
                f"the service at {sockets[0]!r:.200} has {format_size(found.estate.bytes)} of host memory in use, and "
                f"this one may have {self._config.host.bytes}: give --host as much"
            )
        return found

    async def _open_storage(self) -> MeteredBackend | None:
        url = storage_url(self._config)
        if url is None:
            return None
        # In a thread: a store may take its time to be connected to.
        storage = await asyncio.to_thread(open_storage, url)
        self._undo.push_async_callback(asyncio.to_thread, storage.close)
        return storage

    def _open_log(self) -> AccessLogWriter | None:
        settings = access_log_of(self._config)
        if settings is None:
            return None
        log = AccessLogWriter(settings)
        self._undo.push_async_callback(asyncio.to_thread, log.close)
        _log.info("access log in %s", settings.folder)
        return log

    def _listener(self, address: Address) -> Listener:
        tls = None if address.is_unix else self._tls
        return Listener(address, tls, socket_mode=int(self._config.listen.socket_mode))

    async def _start_http(self) -> None:
        if not self._config.metrics.address:
            return
        everyone = Caller()
        metrics = Metrics(lambda: document(self.service, everyone), self._latencies)
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
            media = (events.device_medium, events.host_medium, events.storage_medium)
            self._publisher = self.service.publisher = publisher = KvPublisher(
                self.service.events,
                publish=events.publish,
                replay=events.replay or None,
                topic=events.topic,
                encoding=events.encoding,
                hashes=events.hashes,
                media={tier: medium for tier, medium in zip(Tier, media, strict=True) if medium},
                salts=events.salts,
                model=normal_model_name(events.model) if events.model else None,
                dp_rank=events.dp_rank,
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
        try:
            return Page(await self._publisher.snapshot(), "application/json")
        except ServiceError as error:
            return Page(f"{error}\n".encode(), status=503)

    # ---- signals

    def stop(self) -> None:
        """Begin to end: SIGTERM."""
        self._told = True
        self._stop.set()

    def reload(self) -> None:
        """Read again what can be read again: certificates, tokens and quotas. SIGHUP."""
        notify.reloading()
        if self._tls is not None:
            self._reload_certificates(self._tls)
        if self._tokens is not None:
            gone = self._tokens.reload()
            if gone:
                self.service.withdraw(gone)
            try:
                self.service.quotas.replace(self._limits())
            except ConfigError as error:
                _log.error("quotas are kept as they were: %s", error)
        notify.notify("READY=1")

    def _reload_certificates(self, tls: ServerTls) -> None:
        try:
            certificates = read_certificates(self._config.tls)
            assert certificates is not None  # they are configured
            tls.replace(certificates.certificate, certificates.key, certificates.client_ca)
        except ConfigError as error:
            _log.error("certificates are kept as they were: %s", error)
        else:
            for text in certificates.warnings:
                _log.warning("%s", text)

    def _limits(self) -> dict[str, Quota]:
        tokens = {} if self._tokens is None else self._tokens.table.quotas
        return agreed_quotas(self._config, tokens)

    async def wait(self) -> None:
        """Until `stop`."""
        await self._stop.wait()

    async def close(self) -> Ended:
        """Drain to the configured deadline, then end everything, in the reverse order of the start.

        What lies in memory is left to the next service, if one has asked for it or systemd keeps descriptors.
        """
        notify.notify("STOPPING=1", "STATUS=draining")
        seconds = self._config.drain.seconds
        end = asyncio.get_running_loop().time() + seconds
        assert self._rpc is not None
        self._rpc.set_ready(False)
        leases = await self._drain(seconds)
        await self._rpc.stop(_LINGER)
        await self._let_go()
        heir = self._takeover if self._takeover is not None and self._takeover.asked else None
        left = max(_LINGER, end - asyncio.get_running_loop().time())
        ending = await self.service.close(left, leave=heir is not None or notify.keeps_descriptors())
        await self._undo.aclose()
        dropped = {"leases": leases, "pages": ending.dropped_pages}
        kept = None if ending.estate is None else await asyncio.to_thread(_leave, ending.estate, heir)
        if kept is not None and self._told:
            kept.close()
            kept = None
        return Ended({what: count for what, count in dropped.items() if count}, kept)

    async def _drain(self, seconds: float) -> int:
        """Let clients finish; returns the leases that are left. No longer than somebody waits to take over."""
        if self._takeover is None:
            return await self.service.drain(seconds)
        draining = asyncio.create_task(self.service.drain(seconds))
        withdrawn = asyncio.create_task(self._takeover.withdrawn.wait())
        await asyncio.wait((draining, withdrawn), return_when=asyncio.FIRST_COMPLETED)
        await _cancelled(withdrawn)
        await _cancelled(draining)
        return len(self.service.leases)

    async def _let_go(self) -> None:
        """Give clients a moment to say that they touch nothing any more: what they may touch is left to nobody."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _LET_GO
        while len(self.service.leases) and loop.time() < end:
            await self.service.changed(end)


async def _claimed(path: str, *, seconds: float) -> Claim:
    """Claim a path, which another process may have for so long."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while True:
        try:
            return claim(path)
        except ConfigError:
            if loop.time() >= end:
                raise
        await asyncio.sleep(_TRY_AGAIN)


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _leave(estate: Estate, heir: TakeoverServer | None) -> Estate | None:
    """Give it away; returns it if the service that has asked for it does not take it."""
    if heir is not None and not heir.give(estate, seconds=_PATIENCE):
        return estate
    try:
        if heir is None:
            document = estate.document()
            try:
                notify.store(STORE_NAME, [document, *estate.descriptors])
            finally:
                os.close(document)
        return None
    finally:
        estate.close()


def _inherited() -> Estate | None:
    """What an earlier service has left with systemd, if anything."""
    kept = [fd for name, fd in notify.stored() if name == STORE_NAME]
    if kept:
        notify.unstore(STORE_NAME)
        try:
            return Estate.read(kept[0], kept[1:])
        except ConfigError as error:
            _log.warning("%s", error)
            for fd in kept[1:]:
                os.close(fd)
            return None
        finally:
            os.close(kept[0])
    return None


async def serve(config: Config, *, takeover: bool = False, started: Callable[[App], None] | None = None) -> Ended:
    """Run a service until SIGTERM or SIGINT.

    Args:
        config: checked settings.
        takeover: let the service that runs at the first Unix socket end, and take its memory over.
        started: called when it takes requests; again where the next service did not take over, and this one goes on.

    Raises:
        ConfigError, StorageError: it cannot start; nothing of it is left.
    """
    loop = asyncio.get_running_loop()
    kept: Estate | None = None
    while True:
        app = App(config, kept)
        await app.start(takeover=takeover and kept is None)
        for number, call in ((signal.SIGTERM, app.stop), (signal.SIGINT, app.stop), (signal.SIGHUP, app.reload)):
            loop.add_signal_handler(number, call)
        if started is not None:
            started(app)
        await app.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)  # a second one ends the process at once
        ended = await app.close()
        if ended.kept is None:
            return ended
        _log.warning("the service that was to take over has not: this one goes on")
        kept = ended.kept
