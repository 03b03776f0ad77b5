"""Settings of a cache, checked once, before anything is allocated or started."""

from __future__ import annotations

import numbers
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hicache.core.config import PROTECTED_SHARE, WRITE_POLICIES, EdgePolicy
from hicache.core.eviction import POLICIES
from hicache.errors import ConfigError
from hicache.runtime.accesslog.settings import AccessLog
from hicache.runtime.arguments import deadline_of, flag, number_of_seconds, whole
from hicache.runtime.flight import FlightRecorder
from hicache.runtime.planner import check_rate
from hicache.runtime.queues import Bound
from hicache.storage.breaker import BreakerPolicy
from hicache.storage.retry import RetryPolicy
from hicache.units import format_size, parse_size

PREFETCH_MODES: Final = ("best_effort", "timeout", "wait_complete")

# Copies and reads take no memory of their own, their slots do; writes waiting hold host pages that others may want.
_LARGE: Final = Bound(bytes=2**30, requests=4096)
_SMALL: Final = Bound(bytes=2**28, requests=1024)
_COPIED_PAGES: Final = 256

_TOUCH_SECONDS: Final = 60.0
_NEVER: Final = 1e9  # seconds: calls that hang are the threads' affair; a breaker would stop others because of them

WritePolicy = str | EdgePolicy
"""A name of `WRITE_POLICIES`, or the policy of one edge spelled out."""


@dataclass(frozen=True, slots=True)
class PrefetchTimeout:
    """How long `load` waits for pages from storage in the mode `timeout`.

    Attributes:
        base: seconds for any prefetch.
        per_1024_tokens: seconds more for each 1,024 tokens that come from storage.
        cap: seconds at most.
    """

    base: float = 0.1
    per_1024_tokens: float = 0.1
    cap: float = 5.0

    def __post_init__(self) -> None:
        for name in ("base", "per_1024_tokens", "cap"):
            object.__setattr__(self, name, number_of_seconds(f"prefetch_timeout.{name}", getattr(self, name)))

    def seconds(self, tokens: int) -> float:
        """The time for so many tokens."""
        return min(self.cap, self.base + self.per_1024_tokens * tokens / 1024)


@dataclass(frozen=True, slots=True)
class Options:
    """How the runtime behaves. All of it has defaults; names are those of `hicache.open`.

    Attributes:
        eviction: `lru`, `lfu`, `slru`, `priority`, or a name given to `hicache.register_policy`. A priority never wears
            off: pages once used at a high one go after all pages of lower ones.
        protected_share: share of a tier's pages that `slru` protects at most, as they were used more than once.
        device_to_host, host_to_storage: write policies of the two edges.
        prefetch: `best_effort` takes what is in host memory when `load` is called; `timeout` waits for storage as
            `prefetch_timeout` says; `wait_complete` waits as long as the request's own deadline allows.
        prefetch_timeout: for the mode `timeout`.
        prefetch_threshold: tokens; what storage has beyond the other tiers is left there if it is less.
        prefill_tokens_per_second: the engine's own speed. With it, pages are brought up only where that takes less time
            than computing them (see `hicache.runtime.planner`); None brings up whatever there is.
        extras: whether prompts may carry non-text input; it costs 16 bytes a page.
        events: whether residency changes are produced.
        longest_wait: seconds after which any wait without a deadline of its own gives up.
        absent_seconds: how long a page that storage did not have is not asked for again.
        touch_seconds: storage is told at most once in so long that pages hot above are in use; "auto" is a quarter of
            the backend's time to live, but 60 at least; None never tells.
        generation_seconds: a clear by another process is seen within so long, plus what the backend itself needs
            (see `hicache.runtime.scopes`); None never looks again.
        call_timeout: seconds after which a call into storage counts as hung, and its thread is replaced.
        max_hung: threads so replaced, for reads and for writes; with so many hung calls no more are begun.
        probe_seconds: how often storage that hangs is tried again then.
        retry: how transfers that failed for a passing reason are repeated; None: never. Not for a backend that was
            given wrapped already.
        breaker: when storage that fails is left alone, and for how long; None: never. Likewise.
        attachable: whether a storage may be attached later where none is given at opening.
        canary: whether opening stores, finds and loads one small object, in the background, to see that storage works.
        copy_threads, read_threads, write_threads: threads for copies, storage reads and storage writes.
        copy_bound, read_bound, write_bound: what may be under way in the three queues. Copies to host memory beyond
            theirs are not made, which statistics count as `copy_queue_full`; None is 1 GiB, and at least 256 pages.
        fetch_bytes: about the bytes of one transfer from storage; a deadline keeps whole transfers that came.
        reserve: share of a tier's pages kept free or clean where a policy writes on eviction.
        stub_pages: pages known only to be in storage that are remembered.
        ghost_pages: hashes of pages gone that are remembered, for miss reasons.
        flight_recorder: how what the core is asked is recorded; None does not record.
        access_log: where what each request asked for and got is written, page hashes only; None writes nothing.
        background: whether threads do the storage work, and apply what has ended while no caller comes by. False is
            for tests that decide what happens when: then only `EmbeddedCache.parts` does any of it, when it is told.
    """

    eviction: str = "lru"
    protected_share: float = PROTECTED_SHARE
    device_to_host: EdgePolicy = field(default_factory=EdgePolicy)
    host_to_storage: EdgePolicy = field(default_factory=EdgePolicy)
    prefetch: str = "timeout"
    prefetch_timeout: PrefetchTimeout = field(default_factory=PrefetchTimeout)
    prefetch_threshold: int = 0
    prefill_tokens_per_second: float | None = None
    extras: bool = False
    events: bool = False
    longest_wait: float = 60.0
    absent_seconds: float = 1.0
    touch_seconds: float | str | None = "auto"
    generation_seconds: float | None = 1.0
    call_timeout: float = 5.0
    max_hung: int = 64
    probe_seconds: float = 5.0
    retry: RetryPolicy | None = field(default_factory=RetryPolicy)
    breaker: BreakerPolicy | None = field(default_factory=lambda: BreakerPolicy(timeout=_NEVER))
    attachable: bool = False
    canary: bool = True
    copy_threads: int = 2
    read_threads: int = 4
    write_threads: int = 2
    copy_bound: Bound | None = None
    read_bound: Bound = _LARGE
    write_bound: Bound = _SMALL
    fetch_bytes: int = 2**23
    reserve: float = 1 / 16
    stub_pages: int = 262_144
    ghost_pages: int = 65_536
    flight_recorder: FlightRecorder | None = None
    access_log: AccessLog | None = None
    background: bool = True

    def __post_init__(self) -> None:
        _check_choice("prefetch", self.prefetch, PREFETCH_MODES)
        _check_choice("eviction", self.eviction, POLICIES)
        for name in ("device_to_host", "host_to_storage"):
            self._set(name, _edge(getattr(self, name)))
        for name in ("copy_threads", "read_threads", "write_threads", "fetch_bytes", "max_hung"):
            self._set(name, whole(name, getattr(self, name), least=1))
        for name in ("prefetch_threshold", "stub_pages", "ghost_pages"):
            self._set(name, whole(name, getattr(self, name), least=0))
        for name in ("extras", "events", "attachable", "canary", "background"):
            flag(name, getattr(self, name))
        for name in ("reserve", "protected_share"):
            _check_share(name, getattr(self, name))
        self._check_times()
        self._check_kinds()

    def _check_times(self) -> None:
        if self.prefill_tokens_per_second is not None:
            check_rate("prefill_tokens_per_second", self.prefill_tokens_per_second)
        for name in ("longest_wait", "absent_seconds"):
            self._set(name, number_of_seconds(name, getattr(self, name)))
        for name in ("call_timeout", "probe_seconds"):
            self._set(name, _above_zero(name, getattr(self, name)))
        if self.generation_seconds is not None:
            self._set("generation_seconds", _above_zero("generation_seconds", self.generation_seconds))
        if self.touch_seconds is not None and self.touch_seconds != "auto":
            self._set("touch_seconds", _above_zero("touch_seconds", self.touch_seconds))

    def _check_kinds(self) -> None:
        for name in ("copy_bound", "read_bound", "write_bound"):
            bound = getattr(self, name)
            if bound is None and name == "copy_bound":
                continue
            if not isinstance(bound, Bound):
                raise ConfigError(f"{name}={bound!r:.60} is no hicache.Bound: give hicache.Bound(bytes, requests)")
            whole(f"{name}.bytes", bound.bytes, least=1)
            whole(f"{name}.requests", bound.requests, least=1)
        for name, kind in (("retry", RetryPolicy), ("breaker", BreakerPolicy), ("prefetch_timeout", PrefetchTimeout)):
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or kind is PrefetchTimeout):
                raise ConfigError(f"{name}={value!r:.60} is no {kind.__name__}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def touches(self, ttl: float | None) -> float | None:
        """Seconds between two touches of a path, for a backend whose objects live `ttl` seconds after their last use.

        None: never.
        """
        if not isinstance(self.touch_seconds, str):
            return self.touch_seconds
        return _TOUCH_SECONDS if ttl is None else max(_TOUCH_SECONDS, ttl / 4)

    def fetch_pages(self, page_bytes: int) -> int:
        """Pages of one transfer from storage."""
        return max(1, min(32, self.fetch_bytes // max(page_bytes, 1)))

    def copies(self, page_bytes: int) -> Bound:
        """What may be on its way to host memory: by default as many bytes as that takes in a moment.

        But some long prompts at least: one of 512-token pages has gigabytes, and copies take no memory of their own.
        """
        if self.copy_bound is not None:
            return self.copy_bound
        return Bound(bytes=max(_LARGE.bytes, _COPIED_PAGES * page_bytes), requests=_LARGE.requests)

    def write_pages(self, page_bytes: int) -> int:
        """Pages that may be on their way to storage: what its queue takes, and a transfer more, so that it is full."""
        return self.write_bound.bytes // max(page_bytes, 1) + self.fetch_pages(page_bytes)


def write_policies(given: WritePolicy | Sequence[WritePolicy]) -> tuple[EdgePolicy, EdgePolicy]:
    """The policies of both edges, DEVICE to HOST first: one name or policy for both, or a pair.

    Raises:
        ConfigError: an unknown name, or neither one nor two.
    """
    if isinstance(given, (str, EdgePolicy)) or not isinstance(given, Sequence):
        return _edge(given), _edge(given)
    if len(given) != 2:
        raise ConfigError(f"write_policy has {len(given)} parts: give one, or a pair (device_to_host, host_to_storage)")
    return _edge(given[0]), _edge(given[1])


def prefetch_timeout(given: PrefetchTimeout | float) -> PrefetchTimeout:
    """A number is the same time for every prefetch.

    Raises:
        ConfigError: negative or not finite.
    """
    if isinstance(given, PrefetchTimeout):
        return given
    return PrefetchTimeout(base=given, per_1024_tokens=0.0, cap=given)


def pool_pages(given: Any, *, page_bytes: int, tier: str) -> int:
    """Pages of a pool from a number of pages, or from bytes with a unit such as "4GiB".

    Raises:
        ConfigError: negative, not a size, or too small for a single page.
    """
    if isinstance(given, str):
        try:
            size = parse_size(given)
        except ConfigError as error:
            raise ConfigError(f"{tier}: {error}, or give a number of pages") from None
        quoted = f" (a number in quotes is bytes: give {size} for pages)" if given.strip().isdecimal() else ""
        if page_bytes == 0:
            raise ConfigError(
                f"{tier}={given!r}: pages hold no bytes here, so a size says nothing: give a number of pages{quoted}"
            )
        if size < page_bytes:
            raise ConfigError(
                f"{tier}={given!r} is less than one page of {format_size(page_bytes)}: make it larger{quoted}"
            )
        return size // page_bytes
    return whole(tier, given, least=0)


def check_deadline(seconds: Any) -> float | None:
    """A deadline is None or a number of seconds from now, not negative.

    Raises:
        ConfigError: anything else.
    """
    return deadline_of(seconds)


def _edge(given: object) -> EdgePolicy:
    if isinstance(given, EdgePolicy):
        return given
    _check_choice("write_policy", given, WRITE_POLICIES, more=", an EdgePolicy, or a pair of these")
    return WRITE_POLICIES[str(given)]


def _check_choice(name: str, value: object, known: Collection[str], *, more: str = "") -> None:
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{name}={value!r:.60} is not one of {', '.join(sorted(known))}{more}")


def _check_share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= 1:
        raise ConfigError(f"{name}={value!r:.60} is not a share between 0 and 1")


def _above_zero(name: str, value: object) -> float:
    seconds = number_of_seconds(name, value)
    if not seconds:
        raise ConfigError(f"{name}=0 does not work: give seconds above 0")
    return seconds
