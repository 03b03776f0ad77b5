"""Pages of a service for a model on a GPU: straight between the GPU's memory and the service's, which is pinned.

    a hit     the service's memory -> slots of a window on the GPU, layer by layer, on a stream of its own; torch puts
              each layer together when the model reads it, on the model's stream, which waits for that layer
    a store   torch puts each layer into slots when the model has it; copies down follow behind its event, on a stream
              of their own; a thread publishes the pages when the last layer's has ended

What a window has no room for, and what comes over the network, goes through a part of it in pieces, for which the
calling thread waits. What is here was tried with a fake of CUDA: no GPU was at hand.
"""

from __future__ import annotations

from typing import Any, Final

import hicache
from hicache.core.identity import Namespace
from hicache_transformers.counters import Counters
from hicache_transformers.gpurequest import GpuRequest
from hicache_transformers.keeper import Keeper
from hicache_transformers.sources import Separation, Tokens
from hicache_transformers.tiers import PageSpan
from hicache_transformers.window import GpuWindow

__all__ = ["ConnectedGpuPages"]

_CLOSE_SECONDS: Final = 5.0


class ConnectedGpuPages:
    """See `PageSource`. Owns the window.

    Args:
        address: of the service.
        namespace: names the pages.
        window: on the model's GPU.
        counters: told of what was stored, which is known later.
        options: for `hicache.connect`.

    Attributes:
        cache: the client.

    Raises:
        ConfigError, ServiceError: as `hicache.connect`.
    """

    def __init__(
        self, address: str, namespace: Namespace, window: GpuWindow, *, counters: Counters, options: dict[str, Any]
    ) -> None:
        self.window = window
        self.counters = counters
        self.keeper = Keeper()
        try:
            self.cache = hicache.connect(address, namespace, **options)
            try:
                if (memory := self.cache.host.memory) is not None:
                    window.blocks.attach(memory)  # pins it now, and not within a call
            except BaseException:
                self.cache.close()
                raise
        except BaseException:
            window.close()
            raise

    @property
    def capacity(self) -> int:
        """Pages of one prompt whose copies the model does not wait for as a whole."""
        return self.window.pages

    def begin(self, tokens: Tokens, whose: Separation, *, deadline: float | None) -> GpuRequest:
        """See `PageSource`. The tenant is the service's business."""
        return GpuRequest(self.cache.request(tokens, deadline=deadline, adapter=whose.adapter, salt=whose.salt), self)

    def span(self, *, batch: int, tokens: int) -> PageSpan:
        """See `PageSource`."""
        return self.window.span(batch=batch, tokens=tokens)

    def flush(self) -> None:
        """Wait until the service has what was stored."""
        self.keeper.flush()

    def clear(self, whose: Separation) -> None:
        """See `PageSource`. What is under way is not there afterwards either: the service knows that it is older."""
        self.cache.clear(adapter=whose.adapter, salt=whose.salt)

    def close(self) -> None:
        """Let stores end, for some seconds, and say goodbye. Idempotent."""
        self.keeper.close(_CLOSE_SECONDS)
        self.window.close()
        self.cache.close()
