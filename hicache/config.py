"""Settings of a service: sections of named values, each with its kind, its default and a line that says what it is.

`hicache.sidecar.settings` reads them from a file, the environment and the command line. Backends' own options are
passed through to them as they are.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

from hicache.errors import ConfigError
from hicache.units import format_size, parse_size

__all__ = [
    "AccessLog",
    "Config",
    "Drain",
    "Events",
    "FileMode",
    "Host",
    "Leases",
    "Limits",
    "Listen",
    "Log",
    "Metrics",
    "Policies",
    "Quota",
    "Right",
    "Size",
    "Storage",
    "TenantRule",
    "Tenants",
    "Tls",
    "Tokens",
]


class Size(int):
    """Bytes, given as `4GiB` or as a plain number."""

    @classmethod
    def parse(cls, given: object) -> Size:
        """Read a size.

        Raises:
            ConfigError: it is none, or negative.
        """
        if isinstance(given, str):
            return cls(parse_size(given))
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise ConfigError("give bytes, such as 4GiB or 4294967296")
        return cls(parse_size(str(given)))

    def __str__(self) -> str:
        return format_size(self)


class FileMode(int):
    """Rights of a file, given in octal as `0600`."""

    @classmethod
    def parse(cls, given: object) -> FileMode:
        """Read a mode.

        Raises:
            ConfigError: it is none; a number without quotes is not taken, since in TOML it would be decimal.
        """
        if isinstance(given, FileMode):
            return given
        if not isinstance(given, str) or not 3 <= len(given) <= 4 or set(given) - set("01234567"):
            raise ConfigError('give three or four octal digits in quotes, such as "0600"')
        mode = cls(int(given, 8))
        if mode & ~0o777 or not mode & 0o600 == 0o600:
            raise ConfigError("the owner must read and write, and there are no bits above 0777")
        return mode

    def __str__(self) -> str:
        return f"{int(self):04o}"


Right = Literal["read", "write", "admin"]

_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_Positive = Annotated[float, Meta(gt=0, le=1e9)]
_Count = Annotated[int, Meta(ge=1)]
_Whole = Annotated[int, Meta(ge=0)]

READ_WRITE: Final[tuple[Right, ...]] = ("read", "write")


class _Section(Struct, frozen=True, forbid_unknown_fields=True):
    """Sections are frozen, so that a running service and what it shows cannot part."""


class Listen(_Section, frozen=True, kw_only=True):
    """Where the service listens."""

    addresses: Annotated[
        tuple[str, ...], Meta(description="addresses: unix:///path or host:port; the first is the service's own")
    ] = ("unix:///run/hicache/hicache.sock",)
    socket_mode: Annotated[FileMode, Meta(description="rights of Unix sockets, in octal")] = FileMode(0o600)
    insecure: Annotated[bool, Meta(description="allow TCP without TLS: anyone on the network may read and write")] = (
        False
    )


class Host(_Section, frozen=True, kw_only=True):
    """The shared memory that engines map."""

    bytes: Annotated[Size, Meta(description="host memory of all pools together; must be given")] = Size(0)
    pool_bytes: Annotated[
        Size, Meta(description="size of a model's pool whose client asks for none; 0: all that is left")
    ] = Size(0)
    numa_node: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="NUMA node that the memory is bound to; not set: any")
    ] = None
    huge_pages: Annotated[bool, Meta(description="use huge pages of 2 MiB, which must be reserved before")] = False
    populate: Annotated[bool, Meta(description="touch all memory in the background after the start")] = True


class Storage(_Section, frozen=True, kw_only=True):
    """The tier that outlives the service."""

    url: Annotated[str, Meta(description="store, such as file:///var/cache/hicache?capacity=100GiB; empty: none")] = ""
    options: Annotated[
        dict[str, str | int | float | bool], Meta(description="more parameters of the URL, as the backend knows them")
    ] = field(default_factory=dict)
    call_timeout: Annotated[_Positive, Meta(description="seconds after which a call into storage counts as hung")] = 5.0
    max_hung: Annotated[_Count, Meta(description="hung calls, for reads and for writes, with which no more begin")] = 64
    read_threads: Annotated[_Count, Meta(description="threads that read")] = 4
    write_threads: Annotated[_Count, Meta(description="threads that write")] = 2


class Quota(_Section, frozen=True, kw_only=True):
    """Hard limits of one tenant, in bytes; not set: none."""

    host: Size | None = None
    storage: Size | None = None


class TenantRule(_Section, frozen=True, kw_only=True):
    """Who local callers are, and what they may do."""

    tenant: str
    rights: tuple[Right, ...] = READ_WRITE


class Tenants(_Section, frozen=True, kw_only=True):
    """Tenants of local callers. Without any, all callers of Unix sockets share everything and may do everything."""

    uids: Annotated[
        dict[str, TenantRule], Meta(description='user id -> tenant; "*" is every other one. Unlisted ones are refused')
    ] = field(default_factory=dict)
    sockets: Annotated[
        dict[str, TenantRule], Meta(description="path of a Unix socket -> tenant of all its callers")
    ] = field(default_factory=dict)
    quotas: Annotated[dict[str, Quota], Meta(description="tenant -> hard limits in bytes, by tier")] = field(
        default_factory=dict
    )


class Tokens(_Section, frozen=True, kw_only=True):
    """Tokens of remote callers."""

    file: Annotated[str, Meta(description="file of tokens, which only its owner may read; empty: none")] = ""


class Tls(_Section, frozen=True, kw_only=True):
    """Certificates for TCP."""

    certificate: Annotated[str, Meta(description="PEM file of the service's certificate and its chain")] = ""
    key: Annotated[str, Meta(description="PEM file of its private key")] = ""
    client_ca: Annotated[str, Meta(description="PEM file of authorities; given, clients must show a certificate")] = ""


class Limits(_Section, frozen=True, kw_only=True):
    """Bounds; what is above one is refused with the number."""

    sessions: Annotated[_Count, Meta(description="sessions at once")] = 1024
    connections: Annotated[_Count, Meta(description="lifelines at once")] = 2048
    message_bytes: Annotated[Size, Meta(description="bytes of one message")] = Size(16 * 2**20)
    chunk_bytes: Annotated[Size, Meta(description="bytes of a page's piece, for remote clients")] = Size(2**20)
    pages: Annotated[_Count, Meta(description="pages of one prompt")] = 131_072
    leases: Annotated[_Count, Meta(description="leases of one session")] = 4096
    requests: Annotated[_Count, Meta(description="unanswered requests of one session")] = 1024
    pinned_bytes: Annotated[Size, Meta(description="bytes of HOST that pins of one tenant may hold")] = Size(2**30)


class Leases(_Section, frozen=True, kw_only=True):
    """How long clients may hold pages."""

    seconds: Annotated[_Positive, Meta(description="seconds after which an unused lease expires")] = 600.0
    quarantined_slots: Annotated[
        _Count, Meta(description="slots that expired leases of one session may keep; then it gets no new ones")
    ] = 65_536
    grace: Annotated[
        _Seconds, Meta(description="seconds that a client counts as alive after its lifeline, where no pidfd tells")
    ] = 2.0


class Policies(_Section, frozen=True, kw_only=True):
    """What is written down, brought up and evicted."""

    write: Annotated[
        Literal["write_through", "write_through_selective", "write_back"],
        Meta(description="when pages go to storage: at once, from their second use, or when host memory needs room"),
    ] = "write_through"
    eviction: Annotated[
        Literal["lru", "lfu", "slru", "priority"], Meta(description="which pages leave host memory first")
    ] = "lru"
    protected_share: Annotated[
        Annotated[float, Meta(ge=0, le=1)], Meta(description="share of host memory that slru protects at most")
    ] = 0.2
    prefetch: Annotated[
        Literal["best_effort", "timeout", "wait_complete"],
        Meta(description="how long a load waits for storage: not at all, as below, or as its client allows"),
    ] = "timeout"
    prefetch_base: Annotated[_Seconds, Meta(description="seconds that any load may wait")] = 0.1
    prefetch_per_1024_tokens: Annotated[_Seconds, Meta(description="seconds more for each 1,024 tokens")] = 0.1
    prefetch_cap: Annotated[_Seconds, Meta(description="seconds at most")] = 5.0
    prefetch_threshold: Annotated[_Whole, Meta(description="tokens; less than that is left in storage")] = 0
    prefill_tokens_per_second: Annotated[
        _Positive | None, Meta(description="engines' speed until they report it; not set: load whatever there is")
    ] = None
    reserve: Annotated[
        Annotated[float, Meta(ge=0, le=1)], Meta(description="share of host memory kept clean, with write_back")
    ] = 1 / 16


class Metrics(_Section, frozen=True, kw_only=True):
    """The HTTP server of /metrics, /healthz and /readyz."""

    address: Annotated[str, Meta(description="host:port; empty: none")] = ""


class Events(_Section, frozen=True, kw_only=True):
    """KV events for routers, over ZMQ."""

    publish: Annotated[
        str, Meta(description="endpoint of the PUB socket, such as tcp://127.0.0.1:5557; empty: none")
    ] = ""
    replay: Annotated[str, Meta(description="endpoint of the replay socket; empty: none")] = ""
    topic: Annotated[str, Meta(description="topic of the messages")] = ""
    encoding: Annotated[Literal["map", "array"], Meta(description="form of events; array is for old consumers")] = "map"
    hashes: Annotated[
        Literal["int64", "bytes"], Meta(description="form of page hashes: their first 8 bytes as SGLang has it, or all")
    ] = "int64"
    salts: Annotated[
        bool, Meta(description="tell salts and tenants to consumers; routers that separate by them need them")
    ] = False
    model: Annotated[str, Meta(description="only of this model; empty: of all")] = ""
    device_medium: Annotated[str, Meta(description="what DEVICE is called; empty: it is not told of")] = "GPU"
    host_medium: Annotated[str, Meta(description="what HOST is called; empty: it is not told of")] = "CPU"
    storage_medium: Annotated[str, Meta(description="what STORAGE is called; empty: it is not told of")] = "DISK"
    dp_rank: Annotated[int, Meta(ge=0, description="rank among data-parallel replicas that messages carry")] = 0
    batches: Annotated[_Count, Meta(description="batches kept for replay")] = 10_000
    high_water: Annotated[_Count, Meta(description="batches queued for a slow consumer before it loses some")] = 10_000


class AccessLog(_Section, frozen=True, kw_only=True):
    """What requests asked for and got, by page hashes and without any token, for `hicache analyze`."""

    folder: Annotated[str, Meta(description="folder of the access log, which is made; empty: none is written")] = ""
    file_bytes: Annotated[Size, Meta(description="size at which a file ends and the next one begins")] = Size(
        64 * 2**20
    )
    total_bytes: Annotated[
        Size, Meta(description="bytes of all access logs in the folder; the oldest files are removed above it")
    ] = Size(2**30)
    sample: Annotated[Annotated[float, Meta(gt=0, le=1)], Meta(description="share of the requests that is written")] = (
        1.0
    )
    sample_by: Annotated[
        Literal["prefix", "request"],
        Meta(description="prefix: all requests with the same beginning or none; request: each by itself"),
    ] = "prefix"
    sample_tokens: Annotated[
        _Whole, Meta(description="tokens of that beginning, more than all prompts share; 0: one page")
    ] = 0
    tenants: Annotated[
        Literal["digest", "name", "omit"], Meta(description="how tenants are written; omit: they are not")
    ] = "digest"
    key_file: Annotated[
        str,
        Meta(description="file of a secret, so that nobody without it can tell by a hash what was asked; empty: none"),
    ] = ""


class Log(_Section, frozen=True, kw_only=True):
    """What is logged, on stderr."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least level")] = "info"
    format: Annotated[Literal["text", "json"], Meta(description="lines for people, or a JSON document a line")] = "text"


class Drain(_Section, frozen=True, kw_only=True):
    """The end of the service, after SIGTERM."""

    seconds: Annotated[
        _Seconds, Meta(description="seconds for clients to finish and for storage to take what waits")
    ] = 10.0


class Config(_Section, frozen=True, kw_only=True):
    """All settings of a service."""

    listen: Listen = Listen()
    host: Host = Host()
    storage: Storage = field(default_factory=Storage)
    tenants: Tenants = field(default_factory=Tenants)
    tokens: Tokens = Tokens()
    tls: Tls = Tls()
    limits: Limits = Limits()
    leases: Leases = Leases()
    policies: Policies = Policies()
    metrics: Metrics = Metrics()
    events: Events = Events()
    access_log: AccessLog = AccessLog()
    log: Log = Log()
    drain: Drain = Drain()
