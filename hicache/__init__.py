"""A hierarchical KV cache for LLM inference: device memory, host memory and storage, without wrong hits.

    geometry = hicache.KVGeometry.mha(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
    namespace = hicache.Namespace(model="org/model", revision="8c22764", geometry=geometry, page_size=64)
    with hicache.open(namespace, device="8GiB", host="4GiB", storage="file:///var/cache/hicache") as cache:
        with cache.request(tokens) as request:
            usable = request.load()
            fresh = request.allocate()
            ...  # compute what is missing into cache.device
            request.commit(ready=hicache.READY)

Names are loaded when they are first used, so that importing this package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache.clock import Clock, MonotonicClock
    from hicache.core.config import EdgePolicy
    from hicache.core.eviction import register_policy
    from hicache.core.identity import Adapter, Namespace
    from hicache.core.layout import KVGeometry
    from hicache.core.reasons import RequestCounts
    from hicache.errors import (
        BackendUnavailableError,
        CacheClosed,
        ConfigError,
        DeadlineExceeded,
        GeometryError,
        HashMismatch,
        HicacheError,
        HicacheInternalError,
        InvalidInput,
        LeaseExpired,
        LimitExceeded,
        NamespaceError,
        NotFound,
        OutOfSlots,
        PermissionDenied,
        ProtocolMismatch,
        ResidencyError,
        ServiceError,
        ServiceUnavailable,
        StorageError,
        StorageUnavailable,
        TraceError,
        Unauthenticated,
    )
    from hicache.events import Cleared, Event, Removed, Stored
    from hicache.memory.base import DevicePool, HostPool
    from hicache.memory.device import TensorDevicePool
    from hicache.memory.layout import LAYOUTS
    from hicache.memory.writer import READY, ThreadEvent, WriterEvent
    from hicache.records import Match, MissReason, PageResult, Tier
    from hicache.rpc.client.aio import AsyncConnectedCache, AsyncConnectedRequest, connect_async
    from hicache.rpc.client.cache import ConnectedCache, connect
    from hicache.rpc.client.group import JoinedRequest, Ticket
    from hicache.rpc.client.options import Backoff, ClientOptions
    from hicache.rpc.client.request import ConnectedRequest
    from hicache.rpc.client.statistics import ClientStatistics
    from hicache.runtime.accesslog.settings import AccessLog
    from hicache.runtime.accesslog.writer import AccessLogStatistics
    from hicache.runtime.attaching import DetachReport
    from hicache.runtime.cache import EmbeddedCache
    from hicache.runtime.closing import CloseReport
    from hicache.runtime.events import Gap, Subscription
    from hicache.runtime.flight import FlightRecorder
    from hicache.runtime.opening import open_cache as open  # noqa: A004
    from hicache.runtime.options import Options, PrefetchTimeout
    from hicache.runtime.planner import LoadDecision, PlanningStatistics
    from hicache.runtime.queues import Bound
    from hicache.runtime.request import Request
    from hicache.runtime.statistics import CacheStatistics, Totals
    from hicache.storage.base import StorageBackend
    from hicache.storage.breaker import BreakerPolicy
    from hicache.storage.retry import RetryPolicy

__all__ = [
    "LAYOUTS",
    "READY",
    "AccessLog",
    "AccessLogStatistics",
    "Adapter",
    "AsyncConnectedCache",
    "AsyncConnectedRequest",
    "BackendUnavailableError",
    "Backoff",
    "Bound",
    "BreakerPolicy",
    "CacheClosed",
    "CacheStatistics",
    "Cleared",
    "ClientOptions",
    "ClientStatistics",
    "Clock",
    "CloseReport",
    "ConfigError",
    "ConnectedCache",
    "ConnectedRequest",
    "DeadlineExceeded",
    "DetachReport",
    "DevicePool",
    "EdgePolicy",
    "EmbeddedCache",
    "Event",
    "FlightRecorder",
    "Gap",
    "GeometryError",
    "HashMismatch",
    "HicacheError",
    "HicacheInternalError",
    "HostPool",
    "InvalidInput",
    "JoinedRequest",
    "KVGeometry",
    "LeaseExpired",
    "LimitExceeded",
    "LoadDecision",
    "Match",
    "MissReason",
    "MonotonicClock",
    "Namespace",
    "NamespaceError",
    "NotFound",
    "Options",
    "OutOfSlots",
    "PageResult",
    "PermissionDenied",
    "PlanningStatistics",
    "PrefetchTimeout",
    "ProtocolMismatch",
    "Removed",
    "Request",
    "RequestCounts",
    "ResidencyError",
    "RetryPolicy",
    "ServiceError",
    "ServiceUnavailable",
    "StorageBackend",
    "StorageError",
    "StorageUnavailable",
    "Stored",
    "Subscription",
    "TensorDevicePool",
    "ThreadEvent",
    "Ticket",
    "Tier",
    "Totals",
    "TraceError",
    "Unauthenticated",
    "WriterEvent",
    "connect",
    "connect_async",
    "open",
    "register_policy",
]

_HOMES = {
    "hicache.clock": ("Clock", "MonotonicClock"),
    "hicache.core.config": ("EdgePolicy",),
    "hicache.core.eviction": ("register_policy",),
    "hicache.core.identity": ("Adapter", "Namespace"),
    "hicache.core.layout": ("KVGeometry",),
    "hicache.core.reasons": ("RequestCounts",),
    "hicache.errors": (
        "BackendUnavailableError",
        "CacheClosed",
        "ConfigError",
        "DeadlineExceeded",
        "GeometryError",
        "HashMismatch",
        "HicacheError",
        "HicacheInternalError",
        "InvalidInput",
        "LeaseExpired",
        "LimitExceeded",
        "NamespaceError",
        "NotFound",
        "OutOfSlots",
        "PermissionDenied",
        "ProtocolMismatch",
        "ResidencyError",
        "ServiceError",
        "ServiceUnavailable",
        "StorageError",
        "StorageUnavailable",
        "TraceError",
        "Unauthenticated",
    ),
    "hicache.events": ("Cleared", "Event", "Removed", "Stored"),
    "hicache.memory.base": ("DevicePool", "HostPool"),
    "hicache.memory.device": ("TensorDevicePool",),
    "hicache.memory.layout": ("LAYOUTS",),
    "hicache.memory.writer": ("READY", "ThreadEvent", "WriterEvent"),
    "hicache.records": ("Match", "MissReason", "PageResult", "Tier"),
    "hicache.rpc.client.aio": ("AsyncConnectedCache", "AsyncConnectedRequest", "connect_async"),
    "hicache.rpc.client.cache": ("ConnectedCache", "connect"),
    "hicache.rpc.client.group": ("JoinedRequest", "Ticket"),
    "hicache.rpc.client.options": ("Backoff", "ClientOptions"),
    "hicache.rpc.client.request": ("ConnectedRequest",),
    "hicache.rpc.client.statistics": ("ClientStatistics",),
    "hicache.runtime.accesslog.settings": ("AccessLog",),
    "hicache.runtime.accesslog.writer": ("AccessLogStatistics",),
    "hicache.runtime.attaching": ("DetachReport",),
    "hicache.runtime.cache": ("EmbeddedCache",),
    "hicache.runtime.closing": ("CloseReport",),
    "hicache.runtime.events": ("Gap", "Subscription"),
    "hicache.runtime.flight": ("FlightRecorder",),
    "hicache.runtime.opening": ("open",),
    "hicache.runtime.options": ("Options", "PrefetchTimeout"),
    "hicache.runtime.planner": ("LoadDecision", "PlanningStatistics"),
    "hicache.runtime.queues": ("Bound",),
    "hicache.runtime.request": ("Request",),
    "hicache.runtime.statistics": ("CacheStatistics", "Totals"),
    "hicache.storage.base": ("StorageBackend",),
    "hicache.storage.breaker": ("BreakerPolicy",),
    "hicache.storage.retry": ("RetryPolicy",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'hicache' has no attribute {name!r}")
    found = getattr(import_module(module), "open_cache" if name == "open" else name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
