"""Why a cache is not all that it should be, in words."""

from __future__ import annotations

from collections.abc import Iterator

from hicache.runtime.canary import MANY_PAGES, MANY_REQUESTS
from hicache.runtime.parts import Parts
from hicache.runtime.queues import QueueStatistics
from hicache.storage.base import BreakerState, StorageStatistics
from hicache.storage.wrappers import MeteredBackend


def degraded(
    parts: Parts,
    queues: tuple[QueueStatistics, ...],
    *,
    storage: StorageStatistics | None,
    stored: int,
    expected: int,
    came: int,
) -> tuple[str, ...]:
    """Reasons, the worst first; empty when all is well. What they do not name goes on.

    Args:
        parts: of the cache.
        queues: of reads and of writes.
        storage: the backend's counts.
        stored: pages that storage has acknowledged.
        expected: requests that found pages in storage.
        came: pages that came from there.
    """
    copies = parts.pools.copies
    lost = (f"device: {copies.lost}",) if copies is not None and copies.lost else ()
    if parts.storage is None:
        return lost
    if not parts.storage.attached:
        return (*lost, "storage: detached") if parts.storage.attachment else lost
    reasons = [*_trouble(queues, storage)]
    if parts.canary is not None and parts.canary.failed:
        reasons.append(f"canary {parts.canary.state}")
    if stored >= MANY_PAGES and expected >= MANY_REQUESTS and not came:
        reasons.append(f"{stored} pages stored, and none came back for {expected} requests that it had some of")
    backend = None if parts.port is None else parts.port.backend
    scheme = backend.scheme if isinstance(backend, MeteredBackend) else ""
    which = f"storage {scheme}" if scheme else "storage"
    return (*lost, *(f"{which}: {reason}" for reason in reasons))


def _trouble(queues: tuple[QueueStatistics, ...], storage: StorageStatistics | None) -> Iterator[str]:
    for name, queue in zip(("reads", "writes"), queues, strict=True):
        if queue.stopped:
            yield f"{name} stopped, {queue.hung} hung"
        elif queue.hung:
            yield f"{queue.hung} {name} hung"
    for breaker in storage.breakers if storage is not None else ():
        if breaker.state is not BreakerState.CLOSED:
            yield f"{breaker.name} breaker {breaker.state.value}: {breaker.reason}"
