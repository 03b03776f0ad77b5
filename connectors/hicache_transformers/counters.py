"""What the connector counts."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Counters", "Statistics"]

_log = logging.getLogger("hicache.transformers")


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot; counts are since the cache was made. What tiers did stands in `PrefixCache.cache.statistics()`.

    Attributes:
        calls: calls of `generate` and `prefix`.
        prompts: prompts in those calls that were looked up.
        prompt_tokens: their tokens, without padding.
        reused_tokens: of these, tokens whose keys and values came from the cache.
        stored_pages: pages handed to the cache.
        dropped_pages: pages that were computed and found no room in it.
        bypassed: calls that went past the cache, by reason.
        failures: what went wrong in the cache, by reason; the calls went on without it.
    """

    calls: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    stored_pages: int = 0
    dropped_pages: int = 0
    bypassed: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.prompt_tokens - self.reused_tokens


class Counters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bypassed: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    def add(self, **counts: int) -> None:
        """Count, by the names in `Statistics`."""
        with self._lock:
            self._counts.update(counts)

    def bypass(self, reason: str, why: str) -> None:
        """A call goes past the cache; said in the log the first time."""
        with self._lock:
            self._bypassed[reason] += 1
            first = self._bypassed[reason] == 1
        if first:
            _log.warning("hicache: generating without the cache: %s", why)

    def failed(self, what: str, error: BaseException) -> None:
        """The cache failed, and the call goes on without; said in the log the first time of each kind."""
        reason = f"{what}: {type(error).__name__}"
        with self._lock:
            self._failures[reason] += 1
            first = self._failures[reason] == 1
        if first:
            _log.warning("hicache: %s failed, generating goes on: %s", what, error)

    def snapshot(self) -> Statistics:
        """All counts as a record."""
        with self._lock:
            return Statistics(**self._counts, bypassed=dict(self._bypassed), failures=dict(self._failures))
