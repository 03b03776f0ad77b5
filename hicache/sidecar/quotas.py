"""Hard limits of tenants, in bytes, by tier. Pure."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping

from hicache.config import Config, Quota
from hicache.errors import ConfigError, LimitExceeded
from hicache.records import Tier
from hicache.units import format_size

__all__ = ["Quotas", "agreed_quotas"]


class Quotas:
    """What each tenant holds in each tier, and how much it may. Used by one thread, but for `account`.

    Who charges also refunds, exactly once, when the bytes are given back. A tenant without a quota is counted too, so
    that one that comes later, at a reload, begins with the truth.

    Args:
        limits: by tenant.

    Attributes:
        lock: around charges of storage, which come from any thread.
    """

    def __init__(self, limits: Mapping[str, Quota] | None = None) -> None:
        self._limits = dict(limits or {})
        self.lock = threading.Lock()
        self._used: Counter[tuple[str | None, Tier]] = Counter()

    def charge(self, tenant: str | None, tier: Tier, size: int) -> None:
        """Take bytes for a tenant, all or none.

        Raises:
            LimitExceeded: they do not fit; the text has the numbers, and nothing was taken.
        """
        used, limit = self.used(tenant, tier), self.limit(tenant, tier)
        if size < 0:
            raise ValueError(f"{size} bytes cannot be charged")
        if limit is not None and used + size > limit:
            raise LimitExceeded(
                f"tenant {tenant!r:.80} may hold {format_size(limit)} in {tier.name} and holds {format_size(used)}: "
                f"{format_size(size)} more do not fit; free some, or ask whoever runs the service for a larger quota"
            )
        self._used[tenant, tier] += size

    def adopt(self, tenant: str | None, tier: Tier, size: int) -> None:
        """Count bytes that are there already, whatever the limit says."""
        with self.lock:
            self._used[tenant, tier] += size

    def account(self, tenant: str | None) -> StorageAccount:
        """Where a tenant's bytes in storage are charged."""
        return StorageAccount(self, tenant)

    def refund(self, tenant: str | None, tier: Tier, size: int) -> None:
        """Give bytes back that were charged."""
        held = self._used[tenant, tier]
        if not 0 <= size <= held:
            raise ValueError(f"{size} bytes cannot be refunded, {held} are charged")
        if size == held:
            del self._used[tenant, tier]
        else:
            self._used[tenant, tier] = held - size

    def used(self, tenant: str | None, tier: Tier) -> int:
        """Bytes charged now."""
        return self._used.get((tenant, tier), 0)

    def left(self, tenant: str | None, tier: Tier) -> int | None:
        """Bytes that may still be charged; 0 where a limit was lowered below what is held; None without limit."""
        limit = self.limit(tenant, tier)
        return None if limit is None else max(0, limit - self.used(tenant, tier))

    def limit(self, tenant: str | None, tier: Tier) -> int | None:
        """Bytes that a tenant may hold; None without limit."""
        quota = self._limits.get(tenant) if tenant is not None else None
        if quota is None or tier is Tier.DEVICE:  # that one is the engine's own
            return None
        return quota.host if tier is Tier.HOST else quota.storage

    def replace(self, limits: Mapping[str, Quota]) -> None:
        """Other limits from now on. What is held beyond one stays until it is given back, and nothing is added."""
        self._limits = dict(limits)

    def rows(self) -> Iterator[tuple[str | None, Tier, int, int | None]]:
        """Tenant, tier, bytes held and limit, of all that hold something or have a limit."""
        limited = {(tenant, tier) for tenant in self._limits for tier in (Tier.HOST, Tier.STORAGE)}
        for tenant, tier in sorted(limited | set(self._used), key=lambda row: (row[0] or "", row[1].value)):
            used, limit = self.used(tenant, tier), self.limit(tenant, tier)
            if used or limit is not None:
                yield tenant, tier, used, limit


class StorageAccount:
    """A tenant's bytes in STORAGE, for `hicache.runtime.quota`. Thread-safe."""

    def __init__(self, quotas: Quotas, tenant: str | None) -> None:
        self._quotas = quotas
        self._tenant = tenant

    def charge(self, size: int) -> bool:
        """See `Account`."""
        with self._quotas.lock:
            try:
                self._quotas.charge(self._tenant, Tier.STORAGE, size)
            except LimitExceeded:
                return False
            return True

    def refund(self, size: int) -> None:
        """See `Account`."""
        with self._quotas.lock:
            self._quotas.refund(self._tenant, Tier.STORAGE, size)


def agreed_quotas(config: Config, tokens: Mapping[str, Quota]) -> dict[str, Quota]:
    """Limits of the configuration and of the token file together.

    Raises:
        ConfigError: they differ about a tenant.
    """
    for tenant, quota in tokens.items():
        if config.tenants.quotas.get(tenant, quota) != quota:
            raise ConfigError(
                f"tenants.quotas and the token file differ about tenant {tenant!r:.80}: give its quota in one of them"
            )
    return {**tokens, **config.tenants.quotas}
