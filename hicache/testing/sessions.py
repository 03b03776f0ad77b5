"""A service without its transport, for tests: sessions that stream true bytes, and lifelines without processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from hicache.config import Config, Host, Quota, Size
from hicache.core.identity import Namespace
from hicache.core.layout import KVGeometry
from hicache.core.symbols import symbols
from hicache.rpc.service import Attached, Attachment, Caller, Leased, Piece, RequestScope
from hicache.runtime.accesslog.writer import AccessLogWriter
from hicache.sidecar.estate import Estate
from hicache.sidecar.heritage import take_over
from hicache.sidecar.processes import Peer
from hicache.sidecar.quotas import Quotas
from hicache.sidecar.service import SidecarService
from hicache.sidecar.session import SidecarSession
from hicache.storage.registry import open_storage

__all__ = [
    "NAMESPACE",
    "PAGE",
    "PLAIN",
    "Client",
    "FakeLifeline",
    "FakeLifelines",
    "Left",
    "hashes",
    "page_bytes",
    "prompt",
    "running",
]

PAGE: Final = 16
PLAIN: Final = RequestScope()
_GEOMETRY = KVGeometry.mha(4, kv_heads=4, head_dim=64, dtype="bfloat16", head_group=1)
NAMESPACE: Final = Namespace("org/model", revision="1", geometry=_GEOMETRY, page_size=PAGE, hash="sha256")


class FakeLifeline:
    """A client's process, without the process."""

    peer = Peer(0, 0, 0)
    pidfd: int | None = None

    def __init__(self) -> None:
        self.gone = False
        self.grants: dict[int, tuple[int, int]] = {}
        self._calls: list[Callable[[], None]] = []

    def when_ended(self, call: Callable[[], None]) -> None:
        """See `Lifeline`."""
        self._calls.insert(0, call)

    def when_gone(self, call: Callable[[], None]) -> None:
        """See `Lifeline`."""
        self._calls.append(call)

    def die(self) -> None:
        """Its connection ends, and its process is gone."""
        self.gone = True
        for call in self._calls:
            call()


class FakeLifelines:
    """Lifelines by key."""

    def __init__(self) -> None:
        self.lines: dict[bytes, FakeLifeline] = {}

    def find(self, key: bytes) -> FakeLifeline | None:
        """The lifeline of a key."""
        return self.lines.get(key)

    def connect(self) -> tuple[bytes, FakeLifeline]:
        """A new one, and its key."""
        key = len(self.lines).to_bytes(16, "little")
        self.lines[key] = FakeLifeline()
        return key, self.lines[key]


class Left:
    """What a service leaves at its end.

    Attributes:
        estate: the estate, after the end of `running(leave=...)`.
    """

    estate: Estate


@asynccontextmanager
async def running(
    *,
    storage: str | None = None,
    size: int = 16 << 20,
    quotas: dict[str, Quota] | None = None,
    inherits: Estate | None = None,
    leave: Left | None = None,
    orderly: bool = True,
    log: AccessLogWriter | None = None,
    **sections: Any,
) -> AsyncIterator[tuple[SidecarService, FakeLifelines]]:
    """A service that takes requests.

    Args:
        storage: URL of its store.
        size: bytes of host memory.
        quotas: of tenants.
        inherits: what it takes over.
        leave: gets its estate.
        orderly: whether clients that are left at its end say goodbye and are gone.
        log: its access log, which stays the caller's to close.
        sections: more of its configuration.
    """
    config = Config(**({"host": Host(bytes=Size(size), populate=False)} | sections))
    backend = None if storage is None else open_storage(storage)
    lifelines = FakeLifelines()
    service = SidecarService(
        config,
        quotas=Quotas(quotas),
        storage=backend,
        storage_name=storage or "",
        lifelines=cast("Any", lifelines),
        log=log,
    )
    if inherits is not None:
        await take_over(service.pools, inherits, storage=storage or "")
    service.ready = True
    try:
        yield service, lifelines
    finally:
        if orderly:
            for session in service.sessions:
                session.end(orderly=True)
            for lifeline in lifelines.lines.values():
                lifeline.die()
        left = await service.drain(5.0 if orderly else 0.0)
        ending = await service.close(5.0, leave=leave is not None)
        if backend is not None:
            backend.close()
        if leave is not None:
            assert ending.estate is not None
            leave.estate = ending.estate
        assert ending.dropped_pages == 0
        assert not (orderly and left)


def hashes(tokens: NDArray[np.uint32], scope: RequestScope = PLAIN, namespace: Namespace = NAMESPACE) -> bytes:
    """Page hashes of a prompt, glued together."""
    hasher = namespace.derive(adapter=scope.adapter, salt=scope.salt).hasher()
    return hasher.extend(None, symbols(tokens, PAGE), len(tokens) // PAGE)


def prompt(pages: int, seed: int = 0) -> NDArray[np.uint32]:
    """Tokens of so many pages, others for each seed."""
    return np.random.default_rng(seed).integers(0, 2**32, pages * PAGE, dtype=np.uint32)


def page_bytes(page_hash: bytes, size: int) -> bytes:
    """What stands in a page follows from its hash, so that any mix-up shows."""
    seed = int.from_bytes(page_hash[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


class Client:
    """A streaming client that writes true bytes."""

    def __init__(self, session: SidecarSession, attached: Attached) -> None:
        self.session = session
        self.attached = attached
        self.now = asyncio.get_running_loop().time

    @classmethod
    async def attach(cls, service: SidecarService, caller: Caller = Caller(), **fields: Any) -> Client:  # noqa: B008  frozen
        """A new session that is attached; `fields` are those of `Attachment`."""
        session = await service.open_session(caller, "test")
        asked: dict[str, Any] = {"namespace": NAMESPACE, "streamed": True} | fields
        return cls(session, await session.attach(Attachment(1, **asked)))

    async def lease(self, tokens: NDArray[np.uint32], scope: RequestScope = PLAIN, limit: int | None = None) -> Leased:
        """Lease a prompt."""
        names = hashes(tokens, scope)
        pages = len(names) // 32
        return await self.session.lease(
            1,
            scope,
            names,
            tokens=len(tokens),
            limit=pages if limit is None else limit,
            priority=0,
            until=self.now() + 5.0,
        )

    async def store(self, tokens: NDArray[np.uint32], scope: RequestScope = PLAIN) -> int:
        """Commit what is not there yet; returns the pages found."""
        lease = await self.lease(tokens, scope)
        found = len((await self.session.load(lease.lease, until=self.now() + 5.0)).slots) // 4
        names = hashes(tokens, scope)
        pages = len(names) // 32
        await self.session.reserve(lease.lease, pages - found, until=None)
        for page in range(found, pages):
            data = page_bytes(names[page * 32 :][:32], self.attached.rank_page_bytes)
            await self.session.put_bytes(lease.lease, Piece(page, 0, data))
        told = tokens[found * PAGE :].tobytes()
        assert self.session.commit(lease.lease, pages, tokens=told, first_page=found, extras=b"") == pages
        self.session.release(lease.lease, aborted=False)
        return found

    async def check(self, tokens: NDArray[np.uint32], scope: RequestScope = PLAIN) -> int:
        """Load and compare every byte; returns the pages found."""
        lease = await self.lease(tokens, scope)
        found = len((await self.session.load(lease.lease, until=self.now() + 5.0)).slots) // 4
        names = hashes(tokens, scope)
        got: dict[int, bytearray] = {page: bytearray() for page in range(found)}
        async for piece in self.session.get_bytes(lease.lease, 0, found):
            assert piece.offset == len(got[piece.page])
            got[piece.page] += piece.data
        for page, data in got.items():
            assert data == page_bytes(names[page * 32 :][:32], self.attached.rank_page_bytes)
        self.session.release(lease.lease, aborted=False)
        return found
