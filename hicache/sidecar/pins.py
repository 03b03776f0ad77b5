"""Named pins: prefixes that an administrator keeps in HOST.

A pin is a request of the pool that stays open. A hard one holds its slots whatever comes; soft ones are given up, the
oldest first, when a request of the same pool needs slots.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache.errors import InvalidInput, LimitExceeded, NotFound, OutOfSlots
from hicache.rpc.service import Pinned
from hicache.units import format_size

if TYPE_CHECKING:
    from hicache.core.residency import Slots
    from hicache.runtime.hosting import HostedRequest
    from hicache.sidecar.pool import Pool


@dataclass(frozen=True, slots=True)
class PinStatistics:
    """A snapshot.

    Attributes:
        pins, slots: held now.
        given_up: soft pins that made room for requests.
        expired: pins whose time ended, or whose namespace was cleared.
    """

    pins: int
    slots: int
    given_up: int
    expired: int


@dataclass(slots=True)
class _Pin:
    name: str
    tenant: str | None
    pool: Pool
    request: HostedRequest
    hard: bool
    until: float | None

    @property
    def bytes(self) -> int:
        return len(self.request.usable) * self.pool.page_bytes


class Pins:
    """All pins of one service. On the loop's thread only.

    Args:
        now: the loop's clock.
        most_bytes: bytes that one tenant may pin; None is without limit.
    """

    def __init__(self, now: Callable[[], float], *, most_bytes: int | None) -> None:
        self._now = now
        self._most = most_bytes
        self._pins: dict[tuple[str | None, str], _Pin] = {}  # in the order made
        self._given_up = self._expired = 0

    def hold(
        self, pool: Pool, tenant: str | None, request: HostedRequest, *, hard: bool, ttl_seconds: float, name: str
    ) -> Pinned:
        """Keep a request's usable pages. The request is this object's from now on, also when it raises.

        Raises:
            InvalidInput: the tenant has a pin of that name, or a time that is negative.
            LimitExceeded: more bytes than the tenant may pin.
        """
        name = name or secrets.token_hex(4)
        try:
            if (tenant, name) in self._pins:
                raise InvalidInput(f"pin {name!r:.60} exists already: unpin it first, or choose another name")
            if not 0 <= ttl_seconds < 1e9:
                raise InvalidInput(f"pin: a time of {ttl_seconds} seconds: give 0 for ever, or up to 1e9")
            pin = _Pin(name, tenant, pool, request, hard, self._now() + ttl_seconds if ttl_seconds else None)
            held = sum(other.bytes for other in self._pins.values() if other.tenant == tenant)
            if self._most is not None and held + pin.bytes > self._most:
                raise LimitExceeded(
                    f"pin: {format_size(held + pin.bytes)} would be pinned, the limit is {format_size(self._most)}: "
                    "unpin something, or raise limits.pinned_bytes"
                )
        except BaseException:
            request.close(aborted=True)
            raise
        self._pins[tenant, name] = pin
        return self._record(pin)

    def release(self, tenant: str | None, name: str) -> int:
        """End one pin of a tenant, or with an empty name all of them.

        Raises:
            NotFound: the tenant has no pin of that name.
        """
        found = [pin for pin in self._pins.values() if pin.tenant == tenant and name in ("", pin.name)]
        if name and not found:
            raise NotFound(f"no pin is called {name!r:.60}: `pins` lists them")
        for pin in found:
            self._drop(pin)
        return len(found)

    def reserve(self, pool: Pool, request: HostedRequest, pages: int) -> Slots:
        """Slots for a request, for which soft pins of the pool are given up if they must.

        Raises:
            OutOfSlots: not even so.
        """
        while True:
            try:
                return request.reserve(pages)
            except OutOfSlots:
                soft = next((pin for pin in self._pins.values() if pin.pool is pool and not pin.hard), None)
                if soft is None:
                    raise
                self._drop(soft)
                self._given_up += 1

    def expire(self) -> None:
        """End pins whose time is over, and those of namespaces that were cleared: nobody can find their pages."""
        now = self._now()
        for pin in list(self._pins.values()):
            if not pin.request.lease.tree.live or (pin.until is not None and pin.until <= now):
                self._drop(pin)
                self._expired += 1

    def leave(self, pool: Pool) -> None:
        """The pool is being closed."""
        for pin in list(self._pins.values()):
            if pin.pool is pool:
                self._drop(pin)

    def holds(self, pool: Pool) -> bool:
        """Whether any pin is in the pool."""
        return any(pin.pool is pool for pin in self._pins.values())

    def records(self, tenant: str | None, *, all_tenants: bool) -> tuple[Pinned, ...]:
        """Pins of a tenant, or of all."""
        return tuple(self._record(pin) for pin in self._pins.values() if all_tenants or pin.tenant == tenant)

    def statistics(self) -> PinStatistics:
        """A snapshot."""
        slots = sum(len(pin.request.usable) for pin in self._pins.values())
        return PinStatistics(len(self._pins), slots, self._given_up, self._expired)

    def _drop(self, pin: _Pin) -> None:
        del self._pins[pin.tenant, pin.name]
        pin.request.close(aborted=False)

    def _record(self, pin: _Pin) -> Pinned:
        return Pinned(
            pin.name,
            pages=len(pin.request.usable),
            bytes=pin.bytes,
            of_pages=pin.request.pages,
            hard=pin.hard,
            tenant=pin.tenant,
            namespace_digest=pin.pool.namespace.digest,
            seconds_left=0.0 if pin.until is None else max(0.0, pin.until - self._now()),
        )
