"""An engine for tests: it "computes" pages whose bytes depend on all tokens before, and checks all it is given."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from hicache.core.identity import Namespace
from hicache.core.layout import KVGeometry
from hicache.core.reasons import RequestCounts
from hicache.core.residency import Slots
from hicache.memory.device import TensorDevicePool
from hicache.memory.writer import READY, WriterEvent
from hicache.runtime.cache import EmbeddedCache
from hicache.runtime.request import Request

SMALL = KVGeometry.mha(layers=2, kv_heads=2, head_dim=4, dtype="float16", head_group=1, layer_partition=1)
"""A geometry of few bytes whose pages are four objects in storage."""


def small_namespace(**fields: Any) -> Namespace:
    """A namespace of tiny pages, four tokens each unless told otherwise."""
    defaults: dict[str, Any] = {"model": "tiny", "geometry": SMALL, "page_size": 4}
    return Namespace(**(defaults | fields))


def small_pool(namespace: Namespace, slots: int) -> TensorDevicePool:
    """A device pool in main memory for such a namespace."""
    return TensorDevicePool.allocate(namespace.geometry, page_size=namespace.page_size, slots=slots)


def prompt(seed: int, tokens: int) -> list[int]:
    """Tokens that share nothing with those of another seed."""
    return [(seed * 1_000_003 + i * 7919) % 2**32 for i in range(tokens)]


class WrongPageError(AssertionError):
    """The cache gave bytes that belong to other tokens."""


class FakeEngine:
    """Runs requests against an embedded cache with bytes.

    Args:
        cache: where pages come from and go to.
        variant: part of every page's content, as the weights of a model would be.
        patience: seconds for which it waits for slots, as copies that run may hold many of a small pool.

    Attributes:
        verified: pages that came from the cache and were compared.
        computed: pages that were written.
    """

    def __init__(self, cache: EmbeddedCache, *, variant: str = "", patience: float | None = 30.0) -> None:
        self.cache = cache
        self.variant = variant
        self.patience = patience
        self.verified = 0
        self.computed = 0

    def content(self, tokens: Sequence[int], page: int) -> bytes:
        """The bytes of a page: a function of all tokens up to its end."""
        past = repr((self.variant, list(map(int, tokens[: (page + 1) * self.cache.page_size])))).encode()
        return hashlib.shake_128(past).digest(self.cache.device.page_bytes)

    def check(self, tokens: Sequence[int], slots: Slots) -> None:
        """Compare device slots with what the prompt's first pages must hold.

        Raises:
            WrongPageError: a page differs.
        """
        for page, slot in enumerate(slots.tolist()):
            if self.cache.device.read_page(slot).tobytes() != self.content(tokens, page):
                raise WrongPageError(f"page {page} of a prompt of {len(tokens)} tokens holds other bytes")
            self.verified += 1

    def compute(self, tokens: Sequence[int], slots: Slots, *, first: int) -> None:
        """Write the pages from index `first` on into private slots, a partial last one as if it were whole."""
        for page, slot in enumerate(slots.tolist(), first):
            self.cache.device.write_page(slot, self.content(tokens, page))
            self.computed += 1

    def prefill(self, request: Request, tokens: Sequence[int], *, ready: WriterEvent = READY) -> int:
        """Load, check, compute and commit one open request. Returns the pages that came from the cache."""
        loaded = request.load()
        self.check(tokens, loaded)
        self.compute(tokens, request.allocate(deadline=self.patience), first=len(loaded))
        request.commit(ready=ready)
        return len(loaded)

    def run(self, tokens: Sequence[int], **options: Any) -> RequestCounts:
        """One whole request, with the options of `EmbeddedCache.request`. Returns what it was counted as."""
        with self.cache.request(tokens, **options) as request:
            self.prefill(request, tokens)
        return request.counts
