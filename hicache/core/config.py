"""Settings of the core, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from hicache.errors import ConfigError
from hicache.units import whole_number


@dataclass(frozen=True, slots=True)
class EdgePolicy:
    """When pages are written down over one edge (DEVICE to HOST, or HOST to STORAGE).

    Attributes:
        hits: from the k-th use on; 1 means at commit, None means never because of use.
        on_eviction: keep a clean reserve by writing the coldest dirty pages before their slots are needed.
    """

    hits: int | None = 1
    on_eviction: bool = False

    def __post_init__(self) -> None:
        hits = whole_number(self.hits)
        if self.hits is not None and (hits is None or hits < 1):
            raise ConfigError(f"write policy: hits={self.hits!r:.40} is not 1 or more; None turns it off")
        object.__setattr__(self, "hits", hits)
        if not isinstance(self.on_eviction, bool):
            raise ConfigError(f"write policy: on_eviction={self.on_eviction!r:.40} is not True or False")


WRITE_POLICIES: Final = {
    "write_through": EdgePolicy(1),
    "write_through_selective": EdgePolicy(2),
    "write_back": EdgePolicy(None, on_eviction=True),
}


PROTECTED_SHARE: Final = 0.2
"""Of a tier. With most of it protected, as where pages are single and small, prompts that are used again soon are gone
before: a share of 0.8 hits 0.13 of the public conversation trace in 10,000 pages, LRU 0.21 and a share of 0.2 0.22."""


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """What the core needs to know.

    Attributes:
        device_pages: slots of the DEVICE tier; None lets it grow without bound (simulation); 0 is no DEVICE tier, as
            where the engine owns it: then HOST is the top tier, in which requests have their slots.
        host_pages: slots of the HOST tier; 0 is no HOST tier.
        storage: whether there is a STORAGE tier; it stages through HOST.
        eviction: name of a policy in `hicache.core.eviction.POLICIES`.
        protected_share: share of a tier's pages that `slru` protects at most.
        device_to_host, host_to_storage: write policies of the two edges.
        fetch_pages: a STORAGE to HOST transfer has at most so many pages, so that a deadline keeps what came.
        write_pages: pages that may be on their way from HOST to STORAGE at once, but for what `drain` writes; those
            beyond are written when they are used again. None: no bound. It is what storage's queue can take: planning
            what is turned away takes as long as planning what is written.
        reserve: share of a tier's pages that `on_eviction` keeps free or clean.
        stub_pages: pages known only to be in storage that the trees remember; each costs its tokens.
        ghost_pages: hashes of pages gone that are remembered for miss reasons.
        touch_seconds: a path's pages are touched in storage at most once in so long; None means never.
        span_bytes: bound of a node's symbols in bytes.
        events: whether to produce residency events.
    """

    device_pages: int | None
    host_pages: int = 0
    storage: bool = False
    eviction: str = "lru"
    protected_share: float = PROTECTED_SHARE
    device_to_host: EdgePolicy = field(default_factory=EdgePolicy)
    host_to_storage: EdgePolicy = field(default_factory=EdgePolicy)
    fetch_pages: int = 32
    write_pages: int | None = None
    reserve: float = 1 / 16
    stub_pages: int = 262_144
    ghost_pages: int = 65_536
    touch_seconds: float | None = None
    span_bytes: int = 65_536
    events: bool = False

    def __post_init__(self) -> None:
        if self.device_pages is not None and self.device_pages < 0:
            raise ConfigError(f"device_pages={self.device_pages} is negative; 0 leaves the device tier out")
        if self.host_pages < 0:
            raise ConfigError(f"host_pages={self.host_pages} is negative; 0 leaves the host tier out")
        if not self.host_pages and self.device_pages == 0:
            raise ConfigError("device_pages=0 and host_pages=0: at least one tier needs pages")
        if self.storage and not self.host_pages:
            raise ConfigError("storage stages through the host tier, which has 0 pages: give host pages, or no storage")
        for name in ("fetch_pages", "span_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not 1 or more")
        if self.write_pages is not None and self.write_pages < 1:
            raise ConfigError(f"write_pages={self.write_pages} is not 1 or more; None is no bound")
        for name in ("stub_pages", "ghost_pages"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative")
        if self.touch_seconds is not None and self.touch_seconds <= 0:
            raise ConfigError(f"touch_seconds={self.touch_seconds} is not above 0; None turns touching off")
        _check_share("reserve", self.reserve)
        _check_share("protected_share", self.protected_share)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={value} is not a share between 0 and 1")
