"""What a service does for its clients, in plain Python: the server calls it, the sidecar implements it.

The records are what travels, decoded and checked for form; what they mean is checked by whoever implements `Session`.
Nothing here knows of protobuf or gRPC. Page hashes, slots, words and tokens are glued bytes, as in the protocol:
32 bytes a hash, u32 little endian a slot and a token, u64 little endian a word.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hicache.core.arenas import Run
from hicache.core.identity import Adapter, Namespace
from hicache.events import Event
from hicache.records import MissReason

PROTOCOL = 1
"""The version of the protocol that this package speaks."""

BY_HASH = "commit_by_hash"
"""Capability: commits may name pages by their hashes, without tokens."""


@dataclass(frozen=True, slots=True)
class RequestScope:
    """What separates a request's pages from others of its model, but for the tenant.

    Attributes:
        adapter: changes the weights, or None.
        salt: a separation of its own, or None.
    """

    adapter: Adapter | None = None
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """What the transport knows of a client, for who decides what it may do.

    Attributes:
        listener: address on which it came in, as it was given to `serve`.
        address: its own, such as "ipv4:10.0.0.7:41200" or "unix:"; for logs.
        token: what stood behind "Bearer " in the metadata `authorization`; None without.
        certificate: common name of the client's certificate, where the listener asks for one; None without.
        lifeline_key: key of its lifeline, from `Hello`, or for unary calls from the metadata `hicache-lifeline-bin`;
            empty without one. The lifeline knows the process and its uid.
    """

    listener: str
    address: str = ""
    token: str | None = field(default=None, repr=False)
    certificate: str | None = None
    lifeline_key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, as far as the transport and the configuration know it. Nothing of it is the client's own claim.

    Attributes:
        tenant: whose pages it sees; None where tenants are not told apart.
        read, write, admin: what it may do.
        name: for logs; the name of its token, or its uid.
        lifeline_key: key of its lifeline, empty without one.
    """

    tenant: str | None = None
    read: bool = True
    write: bool = True
    admin: bool = True
    name: str = ""
    lifeline_key: bytes = b""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one session; see `Limits` in session.proto for each."""

    message_bytes: int = 16 * 2**20
    pages: int = 131_072
    leases: int = 4096
    requests: int = 1024
    quarantined_slots: int = 65_536
    lease_seconds: float = 600.0
    chunk_bytes: int = 2**20


@dataclass(frozen=True, slots=True)
class Welcome:
    """The service's answer to a session's beginning.

    Attributes:
        server: version of the service.
        boot: names this life of the service, 16 bytes.
        session: number of the session.
        limits: its bounds.
        tenant: whose pages it sees.
        capabilities: what it can do that earlier releases of the protocol's version could not.
    """

    server: str
    boot: bytes
    session: int
    limits: Limits
    tenant: str | None = None
    capabilities: tuple[str, ...] = (BY_HASH,)


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a session asks for when it attaches to a model.

    Attributes:
        number: chosen by the client; unique in its session, above 0.
        namespace: the model as served.
        group: name of the ranks that serve one instance of it; empty: a group of its own.
        tp_rank, tp_size: this rank's place among those that share the heads.
        pp_first_layers: first layer of each pipeline stage; empty: one stage.
        pp_rank: this rank's stage.
        pool_bytes: size of the pool, if this makes it; 0: as configured.
        streamed: the client maps nothing.
        worker: whether it reads and writes pages, or only schedules.
    """

    number: int
    namespace: Namespace
    group: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_first_layers: tuple[int, ...] = ()
    pp_rank: int = 0
    pool_bytes: int = 0
    streamed: bool = False
    worker: bool = True


@dataclass(frozen=True, slots=True)
class ArenaView:
    """One shared memory as one rank sees it.

    Attributes:
        id: under which the lifeline gives its file descriptor.
        stride: bytes from slot to slot.
        size: bytes in all.
        runs: where the rank's bytes lie in a slot.
        writes: whether this rank writes it.
    """

    id: int
    stride: int
    size: int
    runs: tuple[Run, ...]
    writes: bool


@dataclass(frozen=True, slots=True)
class Attached:
    """The service's answer to `Attachment`; see `Attached` in session.proto."""

    slots: int
    page_bytes: int
    rank_page_bytes: int
    namespace_digest: bytes
    arenas: tuple[ArenaView, ...] = ()
    words_id: int = 0
    warnings: tuple[str, ...] = ()
    newest_lease: int = 0


@dataclass(frozen=True, slots=True)
class Matched:
    """Usable leading pages by tier, and the generation they belong to."""

    device: int = 0
    host: int = 0
    storage: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Leased:
    """A lease; `lease` is 0 never. See `Leased` in session.proto."""

    lease: int
    host: int = 0
    storage: int = 0
    slots: bytes = b""
    words: bytes = b""
    bypassed: bool = False
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """Slots of the usable leading pages, their words, and what storage was found to have."""

    slots: bytes = b""
    words: bytes = b""
    storage: int = 0


@dataclass(frozen=True, slots=True)
class Reserved:
    """Private slots, their words, and the page index of the first."""

    slots: bytes = b""
    words: bytes = b""
    first_page: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """What a lease was counted as, in pages: `asked == host + storage + sum(missed.values())`."""

    asked: int = 0
    host: int = 0
    storage: int = 0
    missed: Mapping[MissReason, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one page's canonical bytes."""

    page: int
    offset: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Revoked:
    """A notice: these leases have ended, and this client may be touching their slots (see session.proto)."""

    leases: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Draining:
    """A notice: the service ends in so many seconds."""

    seconds: float


Notice = Revoked | Draining


Authenticate = Callable[[Peer], Caller]
"""Says who calls. On the loop's thread, never waits; raises `Unauthenticated` or `PermissionDenied`."""


class Session(Protocol):
    """One client's session. All methods are called on the event loop's thread; those that are not `async` never wait.

    They raise the errors of `hicache.errors`; the server makes replies of them, so that one bad request ends nothing
    else. A time is a moment of the loop's clock (`loop.time()`).
    """

    welcome: Welcome

    async def attach(self, attachment: Attachment) -> Attached:
        """Join a model's pool and group. May allocate memory, in a thread."""
        ...

    def match(self, attachment: int, scope: RequestScope, page_hashes: bytes) -> Matched:
        """How far a prompt is usable. Changes nothing."""
        ...

    async def lease(
        self,
        attachment: int,
        scope: RequestScope,
        page_hashes: bytes,
        *,
        tokens: int,
        limit: int,
        priority: int,
        until: float,
    ) -> Leased:
        """Match and pin, and begin to bring up the rest. Waits only for a namespace's first use, until `until`."""
        ...

    async def load(self, lease: int, *, until: float) -> Loaded:
        """Wait for what is on its way, at most until `until`, then withdraw what is not there."""
        ...

    async def prefetch(
        self, attachment: int, scope: RequestScope, page_hashes: bytes, *, until: float
    ) -> tuple[int, int]:
        """Bring pages up without a lease. Returns the pages in HOST, and those that storage is believed to have."""
        ...

    async def reserve(self, lease: int, pages: int, *, until: float | None) -> Reserved:
        """Private slots, all or nothing; waits for them until `until`, None: not at all."""
        ...

    def extend(self, lease: int, page_hashes: bytes, tokens: int) -> None:
        """The prompt grew."""
        ...

    def commit(
        self, lease: int, upto: int, *, tokens: bytes, first_page: int, extras: bytes, by_hash: bool = False
    ) -> int:
        """This rank's part of the pages up to an index is written. Returns the index up to which all parts are."""
        ...

    def release(self, lease: int, *, aborted: bool) -> Counts:
        """Give back all that a lease holds."""
        ...

    async def put_bytes(self, lease: int, piece: Piece) -> None:
        """Write part of a page into a reserved slot."""
        ...

    def get_bytes(self, lease: int, first: int, end: int) -> AsyncIterator[Piece]:
        """Pages of a lease in pieces of at most `chunk_bytes`."""
        ...

    def report_device(
        self,
        attachment: int,
        scope: RequestScope,
        *,
        stored: bytes,
        parent_hash: bytes,
        first_page: int,
        removed: bytes,
        cleared: bool,
    ) -> None:
        """The engine's own memory holds other pages now."""
        ...

    def report_prefill(self, attachment: int, tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens in so many seconds."""
        ...

    def acknowledge(self, leases: Sequence[int]) -> None:
        """The client does not touch these revoked leases' slots any more."""
        ...

    def renew(self, leases: Sequence[int]) -> None:
        """These leases are in use, though nothing else is asked of them; those that are not known are left out."""
        ...

    async def next_notice(self) -> Notice:
        """The next thing that the client must be told; waits until there is one."""
        ...

    def end(self, *, orderly: bool) -> None:
        """The stream has ended; `orderly` after a goodbye. Idempotent. The session is not used afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """Prompts of one model that an administrator names.

    Attributes:
        namespace_digest: of the base namespace, 16 bytes; or empty.
        model: its name, where `namespace_digest` is empty.
        scope: adapter and salt.
        tenant: for callers that may administer all tenants; None: the caller's own.
    """

    namespace_digest: bytes = b""
    model: str = ""
    scope: RequestScope = RequestScope()
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Ping:
    """See `PingResponse` in admin.proto."""

    server: str
    boot: bytes
    uptime_seconds: float
    ready: bool
    degraded: tuple[str, ...]
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pin, as it is now. See `PinResponse` and `HeldPin` in admin.proto."""

    name: str
    pages: int
    bytes: int
    of_pages: int
    hard: bool = True
    tenant: str | None = None
    namespace_digest: builtins.bytes = b""
    seconds_left: float = 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was looked at, whether it is as it should be, and what to do."""

    check: str
    good: bool
    text: str


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Numbered residency events; see `WatchEventsResponse` in admin.proto."""

    sequence: int
    timestamp_ms: int
    events: tuple[Event, ...] = ()
    lost: int = 0
    snapshot: bool = False
    snapshot_end: bool = False


class Service(Protocol):
    """A running service. As `Session`: on the loop's thread, errors of `hicache.errors`."""

    limits: Limits

    async def open_session(self, caller: Caller, client: str) -> Session:
        """A session for a client that has said hello."""
        ...

    def ping(self, caller: Caller) -> Ping:
        """Whether it answers."""
        ...

    def statistics_json(self, caller: Caller) -> str:
        """Everything it counts, as a JSON document."""
        ...

    async def clear(self, caller: Caller, target: Target | None) -> tuple[int, tuple[str, ...]]:
        """Forget pages. Returns the namespaces cleared, and those of them that storage did not confirm."""
        ...

    async def pin(
        self, caller: Caller, target: Target, tokens: bytes, *, hard: bool, ttl_seconds: float, name: str
    ) -> Pinned:
        """Keep a prefix in HOST."""
        ...

    def unpin(self, caller: Caller, name: str) -> int:
        """End a pin, or with an empty name all of the caller's tenant. Returns how many ended."""
        ...

    def pins_of(self, caller: Caller) -> tuple[Pinned, ...]:
        """Pins that the caller may see."""
        ...

    def warm(
        self, caller: Caller, target: Target, prompts: Sequence[bytes], *, deadline_seconds: float
    ) -> AsyncIterator[tuple[int, int, int]]:
        """Bring prompts into HOST. Yields (prompts done, pages in HOST, pages missed) as it goes."""
        ...

    async def diagnose(self, caller: Caller) -> tuple[Finding, ...]:
        """Send a page through every tier and back, look at limits and rights."""
        ...

    async def explain(self, caller: Caller, target: Target, tokens: bytes, *, storage_seconds: float) -> str:
        """Why a prompt misses, as a JSON document: `{"explanations": [...]}`. Moves, pins and counts nothing."""
        ...

    def watch_events(self, caller: Caller, from_sequence: int) -> AsyncIterator[EventBatch]:
        """Residency events from a number on; 0: a snapshot first."""
        ...
