"""Everything that a service counts as one document, as far as a caller may see it."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING, Any

from hicache.rpc.service import Caller

if TYPE_CHECKING:
    from hicache.sidecar.service import SidecarService

__all__ = ["document", "sees_all"]


def sees_all(caller: Caller) -> bool:
    """Whether a caller may see every tenant's."""
    return caller.admin and caller.tenant is None


def document(service: SidecarService, caller: Caller) -> dict[str, Any]:
    """The statistics, of JSON's types. A tenant sees its own pools and quotas, and nothing that others add to."""
    all_of_it = sees_all(caller)
    quotas = [
        {"tenant": tenant, "tier": tier, "bytes": used, "quota": limit}
        for tenant, tier, used, limit in service.quotas.rows()
        if all_of_it or tenant == caller.tenant
    ]
    pools = [pool.describe() for pool in service.visible(caller)]
    own: dict[str, Any] = {"quotas": quotas}
    if all_of_it:
        own |= asdict(service.statistics())
        publisher = service.publisher
        own |= {
            "events": asdict(service.events.statistics()),
            "access_log": None if service.access_log is None else asdict(service.access_log.statistics()),
            "kv_events": None if publisher is None else asdict(publisher.statistics()),
            "verbs": [asdict(verb) for verb in service.verbs()],
        }
    else:
        statistics = service.statistics()
        own |= {"uptime_seconds": statistics.uptime_seconds, "degraded": statistics.degraded}
        for pool in pools:
            pool["statistics"]["storage"] = None  # the store is all tenants' together
    found: dict[str, Any] = _plain({"service": own, "pools": pools})
    return found


def _plain(value: Any) -> Any:
    """Records as JSON: keys are text, bytes are hex."""
    if isinstance(value, dict):
        return {getattr(key, "name", str(key)).lower(): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value.name.lower() if isinstance(value, Enum) else value
