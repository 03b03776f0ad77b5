"""Writing down what is only in volatile tiers, and taking a cache apart, to a deadline."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from hicache.core.transfers import TransferKind
from hicache.core.writeback import unwritten as unwritten_pages
from hicache.runtime.parts import Parts
from hicache.runtime.reducer import Ringer

LIMIT = 512
"""Pages started in one step: starting them holds the lock."""

GRACE = 0.5
"""Real seconds that threads get to end although the deadline has passed: those that are idle need almost none."""

_DOWN = (TransferKind.WRITE, TransferKind.HOST_WRITE, TransferKind.WRITE_BACK, TransferKind.PUT)
_AWAITED = (*_DOWN, TransferKind.TOUCH)  # a touch may find what is to be written again


@dataclass(frozen=True, slots=True)
class CloseReport:
    """How closing went.

    Attributes:
        complete: whether every page that a lower tier should have is there.
        abandoned_pages: pages of transfers that had not ended at the deadline; their results were not waited for.
        aborted_requests: requests that were still open, and were released.
        stuck_threads: threads that are still inside a storage or copy call; they end when it returns.
        unwritten_pages: pages that storage should have by the write policies, and is not known to have.
    """

    complete: bool
    abandoned_pages: int = 0
    aborted_requests: int = 0
    stuck_threads: int = 0
    unwritten_pages: int = 0


def drain(parts: Parts, *, end: float) -> bool:
    """Write all dirty pages down, root first, and wait for it.

    Args:
        parts: of the cache.
        end: when to give up.

    Returns:
        Whether nothing is left to write. False also when a whole step brought nothing down: then storage or HOST
        cannot take it, and trying again would only repeat that.

    Raises:
        CacheClosed: the cache was closed meanwhile.
    """
    reducer, core = parts.reducer, parts.core
    batch = _batch(parts)
    with reducer.lock:
        reducer.settle()
        if not _wait_for_writes(parts, end):
            return False
        passes = 0  # the core goes on where it stopped, so only a second zero covers all that was written meanwhile
        while passes < 2:
            before = _pages_down(parts)
            started = core.drain(batch)
            reducer.settle()
            passes = 0 if started else passes + 1
            if not _wait_for_writes(parts, end):
                return False
            if started and _pages_down(parts) == before:
                return False
        return True


def unwritten(parts: Parts) -> int:
    """Pages that storage should have and is not known to have. O(nodes)."""
    with parts.reducer.lock:
        return unwritten_pages(parts.core.registry, parts.core.trees)


def take_apart(parts: Parts, pump: Ringer | None, *, end: float) -> tuple[int, int]:
    """Stop the threads and free the pools, after `reducer.closed` was set.

    Returns:
        Pages of transfers that have not ended, and threads that have not.
    """
    reducer, pools = parts.reducer, parts.pools

    until = time.monotonic() + max(_left(parts, end), GRACE)

    def join(thread: threading.Thread) -> None:
        thread.join(max(0.0, until - time.monotonic()))

    stuck = parts.storage.close(join) if parts.storage is not None else 0
    if pools.copies is not None:
        pools.copies.close(_left(parts, end))
    with reducer.lock:
        reducer.settle()
        abandoned = sum(transfer.count for transfer in parts.executor.running.values())
    if pump is not None:
        stuck += not pump.stop(lambda thread: thread.join(GRACE))
    parts.publisher.close()
    if not abandoned:
        _close_pools(parts)
    if parts.port is not None:
        parts.port.close()
    return abandoned, stuck


def _close_pools(parts: Parts) -> None:
    """Only with no transfer left: whoever still moves bytes keeps the pools, and they are freed when he lets go."""
    pools = parts.pools
    if pools.host is not None and pools.owns_host:
        pools.host.close()
    if pools.device is not None and pools.owns_device:
        pools.device.close()


def _left(parts: Parts, end: float) -> float:
    return max(0.0, end - parts.clock.now())


def _batch(parts: Parts) -> int:
    """Pages under way at once, so few that no queue turns them away."""
    page_bytes = max(parts.pools.page_bytes, 1)
    bounds = (parts.options.copies(page_bytes), parts.options.write_bound)
    sizes = [min(bound.bytes // page_bytes, bound.requests) for bound in bounds]
    return max(1, min(LIMIT, *sizes))


def _pages_down(parts: Parts) -> int:
    pages = parts.core.log.pages
    return sum(pages[kind, True] for kind in _DOWN)


def _wait_for_writes(parts: Parts, end: float) -> bool:
    reducer = parts.reducer
    while any(transfer.kind in _AWAITED for transfer in reducer.transfers.values()):
        left = end - parts.clock.now()
        if left <= 0:
            return False
        reducer.wait(left)
    return True
