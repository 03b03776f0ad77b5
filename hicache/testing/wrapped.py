"""Every wrapper there is, around a backend: what a suite runs through to see that none changes what a backend does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hicache.storage.base import StorageBackend
from hicache.storage.breaker import BreakerBackend, BreakerPolicy
from hicache.storage.registry import configured
from hicache.storage.retry import RetryingBackend, RetryPolicy
from hicache.storage.wrappers import GuardedBackend, MeteredBackend, WrapperBackend
from hicache.testing.faults import FaultyStorage, LatencyStorage
from hicache.testing.timed import TimedBackend

__all__ = ["WRAPPERS"]

_PATIENT: Final = BreakerPolicy(timeout=60.0)  # a slow machine is no trouble of the backend

WRAPPERS: Final[dict[str, Callable[[StorageBackend], StorageBackend]]] = {
    "passed on": WrapperBackend,
    "guarded": GuardedBackend,
    "metered": MeteredBackend,
    "tried again": lambda backend: RetryingBackend(backend, RetryPolicy()),
    "behind a breaker": lambda backend: BreakerBackend(backend, _PATIENT),
    "all of them": lambda backend: configured(backend, retry=RetryPolicy(), breaker=_PATIENT),
    "faulty without faults": FaultyStorage,
    "far away": lambda backend: LatencyStorage(backend, per_call=0.01, bytes_per_second=1e9, sleep=lambda _: None),
    "timed": TimedBackend,
}
"""By name: makes a wrapped backend, which then belongs to the wrapper."""
