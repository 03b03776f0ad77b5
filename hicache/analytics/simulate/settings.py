"""What a simulation is told: tiers and policies as `hicache.open` takes them, and what things cost."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any, Final

from hicache.core.config import PROTECTED_SHARE, EdgePolicy
from hicache.core.eviction import policy_named
from hicache.core.symbols import MAX_PAGE_SIZE
from hicache.errors import ConfigError
from hicache.runtime.options import PREFETCH_MODES, Options, write_policies

ROUTING: Final = ("round_robin", "sticky", "prefix_aware")
MOST_INSTANCES: Final = 1024

PEAK_FLOPS: Final = 989.4e12
"""Of an H100 SXM, dense bfloat16 (NVIDIA, H100 Tensor Core GPU datasheet)."""
PARAMETERS: Final = 8.03e9
"""Of Llama-3.1-8B (its model card)."""
UTILISATION: Final = 0.4
"""Share of the peak that a prefill reaches. An assumption: report what your engine measures."""

PREFILL_RATE: Final = PEAK_FLOPS * UTILISATION / (2 * PARAMETERS)
"""Tokens a second; 2 operations a parameter and token (Kaplan and others 2020, arXiv:2001.08361)."""
TOKEN_BYTES: Final = 131_072
"""Of Llama-3.1-8B in bfloat16: `hicache plan llama-3.1-8b`."""
DEVICE_LINK: Final = 50e9
"""Bytes a second, each way: 80 % of the 63 GB/s of PCIe 5.0 x16, an assumption."""
STORAGE_READ: Final = 5e9
STORAGE_WRITE: Final = 2.5e9
"""Bytes a second of one NVMe drive on PCIe 4.0 x4, whose bus has 7.9 GB/s. Assumptions: see `hicache bench storage`."""
STORAGE_LATENCY: Final = 0.0005
"""Seconds until storage begins to answer: an assumption as well."""
SLOWEST_PREFILL: Final = 0.001
FASTEST_PREFILL: Final = 1e15
LONGEST_LATENCY: Final = 3600.0
DEAREST_HOUR: Final = 1e9
FASTEST: Final = 1e6
"""Of the trace's own speed; and 1 / that. With the others, so that no result has hundreds of digits."""
_USUAL: Final = Options()


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What things cost; see the defaults' own descriptions.

    Attributes:
        token_bytes: KV of one token.
        prefill_rate: tokens a second that one instance computes.
        device_link: bytes a second between device and host, each way, of each instance.
        storage_read, storage_write: bytes a second between host and storage, of each instance.
        storage_latency: seconds of each call.
        gpu_hour_price: of one instance, in any currency; None where nobody asked.
    """

    token_bytes: int = TOKEN_BYTES
    prefill_rate: float = PREFILL_RATE
    device_link: float = DEVICE_LINK
    storage_read: float = STORAGE_READ
    storage_write: float = STORAGE_WRITE
    storage_latency: float = STORAGE_LATENCY
    gpu_hour_price: float | None = None

    @property
    def instant(self) -> Costs:
        """The same where nothing is waited for: each request begins when all before is done, as in `hicache replay`."""
        return Costs(
            token_bytes=self.token_bytes,
            prefill_rate=self.prefill_rate,
            device_link=inf,
            storage_read=inf,
            storage_write=inf,
            storage_latency=0.0,
            gpu_hour_price=self.gpu_hour_price,
        )

    def __post_init__(self) -> None:
        for name in ("token_bytes", "device_link", "storage_read", "storage_write"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name):g}: must be 1 or more")
        _within("--prefill-rate", self.prefill_rate, SLOWEST_PREFILL, FASTEST_PREFILL)
        for name, most in (("storage_latency", LONGEST_LATENCY), ("gpu_hour_price", DEAREST_HOUR)):
            value = getattr(self, name)
            if value is not None:
                _within(f"--{name.replace('_', '-')}", value, 0, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """One point of a sweep.

    Attributes:
        device: pages of each instance; None is without limit.
        host: pages of each instance; 0 is no host tier.
        storage: pages of the storage that all instances share; 0 is none, None is without limit.
        page_size: tokens of a page; None: each id of the trace is one.
        eviction: which pages go first.
        protected_share: of a tier, what `slru` protects at most.
        write_policy: `write_through`, `write_through_selective` or `write_back`.
        admission: pages are written down from so many uses on, over both edges, instead of what `write_policy` says.
        prefetch: how long storage is waited for, as `hicache.open` takes it.
        decide: whether pages are brought up only where that takes less time than computing them.
        read_bound, write_bound: bytes that may be on their way from and to storage, of each instance, as
            `hicache.open` takes them. Beyond them pages are turned away, and so is what is behind them in their prompt.
        instances: how many caches; they share the storage.
        routing: which instance a request goes to.
        speed: factor to the trace's own times.
        instant: whether nothing takes time; see `Costs.instant`.

    Raises:
        ConfigError: what cannot be.
    """

    device: int | None = 10_000
    host: int = 0
    storage: int | None = 0
    page_size: int | None = None
    eviction: str = "lru"
    protected_share: float = PROTECTED_SHARE
    write_policy: str = "write_through"
    admission: int | None = None
    prefetch: str = "wait_complete"
    decide: bool = False
    read_bound: int = _USUAL.read_bound.bytes
    write_bound: int = _USUAL.write_bound.bytes
    instances: int = 1
    routing: str = "round_robin"
    speed: float = 1.0
    instant: bool = False
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        policy_named(self.eviction)
        write_policies(self.write_policy)
        _choice("--prefetch", self.prefetch, PREFETCH_MODES)
        _choice("--routing", self.routing, ROUTING)
        for name, least, most in (
            ("device", 1, 2**31),
            ("host", 0, 2**31),
            ("storage", 0, 2**40),
            ("page_size", 1, MAX_PAGE_SIZE),
            ("admission", 1, 2**31),
            ("read_bound", 1, 2**60),
            ("write_bound", 1, 2**60),
            ("instances", 1, MOST_INSTANCES),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be {least} to {most}")
        if not 0 <= self.protected_share <= 1:
            raise ConfigError(f"--protected-share {self.protected_share:g}: must be 0 to 1")
        if self.storage != 0 and not self.host:
            raise ConfigError("--storage needs a host tier, through which its pages go: give --host above 0")
        _within("--speed", self.speed, 1 / FASTEST, FASTEST)

    @property
    def effective_costs(self) -> Costs:
        """What things cost here."""
        return self.costs.instant if self.instant else self.costs

    def options(self) -> Options:
        """The runtime's options."""
        down, out = write_policies(self.write_policy)
        if self.admission is not None:
            down = out = EdgePolicy(self.admission, on_eviction=down.on_eviction)
        return Options(
            eviction=self.eviction,
            protected_share=self.protected_share,
            device_to_host=down,
            host_to_storage=out,
            prefetch=self.prefetch,
            read_bound=replace(_USUAL.read_bound, bytes=self.read_bound),
            write_bound=replace(_USUAL.write_bound, bytes=self.write_bound),
            prefill_tokens_per_second=self.costs.prefill_rate if self.decide else None,
            background=False,
        )

    def document(self) -> dict[str, Any]:
        """Ready for JSON."""
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "costs"}
        return plain | {"costs": {entry.name: getattr(self.costs, entry.name) for entry in fields(self.costs)}}


def _within(option: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{option} {value:g}: must be {least:g} to {most:g}")


def _choice(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{option} {value:.60}: use one of {', '.join(known)}")
