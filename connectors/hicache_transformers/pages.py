"""Where pages are kept: in this process, with all tiers, or by a service beside it. One small interface over both."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import hicache
from hicache.core.identity import Namespace
from hicache_transformers.convert import Bytes, PageShape, Span
from hicache_transformers.layered import LayeredEmbeddedRequest, LayeredTier
from hicache_transformers.model import ModelShape
from hicache_transformers.sources import PageRequest, Separation, Tokens, allocated
from hicache_transformers.tiers import Computed, DeviceTier, PageSpan

__all__ = ["ConnectedPages", "EmbeddedPages"]


class EmbeddedPages:
    """A cache of this process. Owns it, and its device tier.

    Args:
        namespace: names the pages.
        shape: sizes of a page.
        tier: the device tier; closed here where the cache cannot be opened.
        options: for `hicache.open`.

    Raises:
        ConfigError, StorageError: as `hicache.open`.
    """

    def __init__(self, namespace: Namespace, shape: PageShape, tier: DeviceTier, *, options: dict[str, Any]) -> None:
        self._shape = shape
        self._tier = tier
        try:
            self.cache = hicache.open(namespace, device=tier.pool, **options)
        except BaseException:
            tier.close()
            raise

    @property
    def capacity(self) -> int:
        """Pages of the device tier: of one prompt no more can be reused."""
        return self._tier.pool.slots or 0

    def begin(self, tokens: Tokens, whose: Separation, *, deadline: float | None) -> PageRequest:
        """See `PageSource`."""
        request = self.cache.request(
            tokens, deadline=deadline, adapter=whose.adapter, tenant=whose.tenant, salt=whose.salt
        )
        if isinstance(self._tier, LayeredTier):
            return LayeredEmbeddedRequest(request, self._tier, self._shape)
        return _EmbeddedRequest(request, self._tier, self._shape)

    def span(self, *, batch: int, tokens: int) -> PageSpan:
        """See `PageSource`."""
        return self._tier.span(batch=batch, tokens=tokens)

    def flush(self) -> None:
        """Wait until lower tiers have what they should have."""
        self.cache.flush()

    def clear(self, whose: Separation) -> None:
        """See `PageSource`."""
        self.cache.clear(adapter=whose.adapter, tenant=whose.tenant, salt=whose.salt)

    def close(self) -> None:
        """Drain and close. Idempotent."""
        self.cache.close()
        self._tier.close()


class ConnectedPages:
    """The cache of a service in another process.

    Args:
        address: of the service.
        namespace: names the pages.
        shape: sizes of a page.
        model: what the model keeps.
        options: for `hicache.connect`.

    Raises:
        ConfigError, ServiceError: as `hicache.connect`.
    """

    def __init__(
        self, address: str, namespace: Namespace, shape: PageShape, model: ModelShape, *, options: dict[str, Any]
    ) -> None:
        self._shape = shape
        self._model = model
        self.cache = hicache.connect(address, namespace, **options)

    def begin(self, tokens: Tokens, whose: Separation, *, deadline: float | None) -> PageRequest:
        """See `PageSource`. The tenant is the service's business."""
        request = self.cache.request(tokens, deadline=deadline, adapter=whose.adapter, salt=whose.salt)
        return _ConnectedRequest(request, self._shape)

    def span(self, *, batch: int, tokens: int) -> PageSpan:
        """See `PageSource`."""
        return Span(self._shape, batch=batch, tokens=tokens, dtype=self._model.dtype, devices=self._model.devices)

    def flush(self) -> None:
        """Nothing is under way here."""

    def clear(self, whose: Separation) -> None:
        """See `PageSource`. The tenant is the service's business."""
        self.cache.clear(adapter=whose.adapter, salt=whose.salt)

    def close(self) -> None:
        """Say goodbye. Idempotent."""
        self.cache.close()


class _EmbeddedRequest:
    """A prompt whose pages are in main memory."""

    def __init__(self, request: hicache.Request, tier: DeviceTier, shape: PageShape) -> None:
        self._request = request
        self._tier = tier
        self._shape = shape
        self._slots: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def load(self, *, layered: bool = False) -> None:
        del layered
        self._slots = self._request.load()

    @property
    def usable(self) -> int:
        return len(self._slots)

    def pages(self) -> Any:
        return self._tier.pages(self._slots)

    def arrived(self) -> None:
        return

    def store(self, more: Tokens, computed: Computed) -> tuple[int, int]:
        request = self._request
        request.extend(more)
        wanted = request.tokens // self._shape.tokens - self.usable
        if wanted <= 0 or request.bypassed:
            return 0, 0
        slots = allocated(request, wanted)
        if len(slots):
            ready = self._tier.write(slots, computed, first=self.usable)
            request.commit(upto=(self.usable + len(slots)) * self._shape.tokens, ready=ready)
        return len(slots), wanted - len(slots)

    def close(self, *, aborted: bool = False) -> None:
        self._request.close(aborted=aborted)


class _ConnectedRequest:
    def __init__(self, request: hicache.ConnectedRequest, shape: PageShape) -> None:
        self._request = request
        self._shape = shape
        self._read: Bytes = np.empty((0, shape.page_bytes), np.uint8)
        self._usable = 0

    def load(self, *, layered: bool = False) -> None:
        del layered
        self._read = np.empty((len(self._request.load()), self._shape.page_bytes), np.uint8)
        # What counts is known behind the copy: the service may take pages back from one who is late.
        self._usable = self._request.read_into(self._read) if len(self._read) else 0

    @property
    def usable(self) -> int:
        return self._usable

    def arrived(self) -> None:
        return

    def pages(self) -> list[Bytes]:
        return [self._shape.of_canonical(page) for page in self._read[: self._usable]]

    def store(self, more: Tokens, computed: Computed) -> tuple[int, int]:
        request = self._request
        self._read = self._read[:0]
        request.extend(more)
        wanted = request.tokens // self._shape.tokens - self._usable
        if wanted <= 0 or request.bypassed or request.lost is not None:
            return 0, 0
        count = len(allocated(request, wanted))
        fresh = np.empty((count, self._shape.page_bytes), np.uint8)
        computed.fill(self._shape, [self._shape.of_canonical(page) for page in fresh], first=self._usable)
        written = request.write_from(fresh) if count else 0
        if written:
            request.commit(upto=(self._usable + written) * self._shape.tokens)
        return written, wanted - written

    def close(self, *, aborted: bool = False) -> None:
        self._request.close(aborted=aborted)
