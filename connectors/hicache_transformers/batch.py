"""What the calls of a cache share, and what one of them asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hicache_transformers.convert import PageShape
from hicache_transformers.counters import Counters
from hicache_transformers.model import ModelShape
from hicache_transformers.rows import Row
from hicache_transformers.sources import PageRequest, PageSource

__all__ = ["Batch", "Engine"]


@dataclass(frozen=True, slots=True)
class Engine:
    """What all calls share.

    Attributes:
        model: the transformers model.
        shape: what its own cache holds.
        pages: sizes of a page of it.
        source: where pages are kept.
        counters: told of everything.
    """

    model: Any
    shape: ModelShape
    pages: PageShape
    source: PageSource
    counters: Counters


@dataclass(slots=True)
class Batch:
    """The prompts of one call, one request to the cache each.

    Attributes:
        engine: of the call.
        rows: the prompts.
        requests: of each.
        repeats: rows of the model's cache for each prompt.
        ended: whether its pages may be others' by now.
        reused: tokens of the prompts that are counted as reused.
    """

    engine: Engine
    rows: Sequence[Row]
    requests: Sequence[PageRequest]
    repeats: int
    ended: bool = False
    reused: int = 0

    def arrived(self) -> None:
        """The model has all that came from the cache. Raises what `PageRequest.arrived` does."""
        for request in self.requests:
            request.arrived()

    @property
    def columns(self) -> int:
        """Columns of the prompts, padding included."""
        return self.rows[0].padding + len(self.rows[0].tokens)

    def close(self, *, aborted: bool) -> None:
        """End the requests. Never raises."""
        self.ended = True
        for request in self.requests:
            try:
                request.close(aborted=aborted)
            except Exception as error:
                self.engine.counters.failed("ending a request", error)
