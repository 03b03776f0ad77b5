"""Small embedded caches for tests: opened plainly, filled, emptied, and looked at when they are at rest."""

from __future__ import annotations

from typing import Any, Final

from hicache.runtime.cache import EmbeddedCache
from hicache.runtime.closing import CloseReport
from hicache.runtime.opening import open_cache
from hicache.runtime.statistics import CacheStatistics
from hicache.storage.base import StorageBackend
from hicache.testing.engine import FakeEngine, small_namespace
from hicache.testing.waits import eventually

__all__ = ["PLAIN", "at_rest", "empty", "leave_in", "open_small", "settled"]

PLAIN: Final[dict[str, Any]] = {"retry": None, "breaker": None, "canary": False}
"""Options without what repeats, refuses or adds calls, for tests that say which call goes wrong."""


def open_small(storage: StorageBackend | str | None, **options: Any) -> EmbeddedCache:
    """A cache of 64 small pages in each owned tier, which waits for storage; `options` change that."""
    defaults: dict[str, Any] = {"device": 64, "host": 64, "prefetch": "wait_complete", **PLAIN}
    return open_cache(small_namespace(), storage=storage, **(defaults | options))


def leave_in(storage: StorageBackend | str, *prompts: list[int], **options: Any) -> None:
    """Another life of the process, which leaves these prompts in storage."""
    with open_small(storage, **options) as cache:
        engine = FakeEngine(cache)
        for tokens in prompts:
            engine.run(tokens, logits=False)
        assert cache.flush()
    assert cache.close() == CloseReport(complete=True)


def empty(cache: EmbeddedCache) -> None:
    """Evict everything from both owned tiers."""
    with cache.parts.reducer.lock:
        for tier in (0, 1):
            cache.parts.core.evict(tier, 10_000)
        cache.parts.reducer.settle()


def at_rest(cache: EmbeddedCache) -> CacheStatistics:
    """Wait until no transfer is under way, and see that every pin and every slot has come back."""
    eventually(lambda: cache.statistics().core.transfers == 0, "the end of all transfers")
    cache.check()
    statistics = cache.statistics()
    assert statistics.internal_errors == 0
    for tier in (statistics.core.device, statistics.core.host):
        assert tier.free + tier.resident == tier.capacity
        assert tier.pinned == 0
    return statistics


def settled(cache: EmbeddedCache) -> CacheStatistics:
    """Write down what may be written, then `at_rest`."""
    cache.flush()
    return at_rest(cache)
