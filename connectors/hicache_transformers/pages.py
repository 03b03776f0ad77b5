"""Where pages are kept: in this process, with all tiers, or by a service beside it. One small interface over both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

import hicache
from hicache.core.identity import Adapter, Namespace
from hicache.runtime.layered import LayeredLoad
from hicache_transformers.convert import Bytes, PageShape, Span
from hicache_transformers.model import ModelShape
from hicache_transformers.tiers import Computed, DeviceTier, PageSpan

__all__ = ["ConnectedPages", "EmbeddedPages", "PageRequest", "PageSource", "Separation"]

Tokens: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Separation:
    """What separates a call's pages from others' besides their tokens."""

    adapter: Adapter | None = None
    tenant: str | None = None
    salt: str | None = None


class PageRequest(Protocol):
    """One prompt. For one thread at a time."""

    @property
    def usable(self) -> int:
        """Leading pages that came from the cache; 0 before `load`."""
        ...

    def load(self, *, layered: bool = False) -> None:
        """Wait until its pages are here, at most until the deadline.

        With `layered`, and where the source can, copies to the GPU are not waited for: spans wait for each layer when
        it is put together.
        """
        ...

    def pages(self) -> Any:
        """These pages, for a span of the source: a sequence, to be read only; valid until `close`."""
        ...

    def store(self, more: Tokens, computed: Computed) -> tuple[int, int]:
        """Publish the pages that were computed: of the prompt, and of `more` behind it.

        Returns:
            How many were handed over, and for how many, at the end, there was no room.

        Raises:
            HicacheError: it could not be done.
        """
        ...

    def close(self, *, aborted: bool = False) -> None:
        """Let go of the pages. Idempotent."""
        ...


class PageSource(Protocol):
    """A cache. Thread-safe."""

    def begin(self, tokens: Tokens, whose: Separation, *, deadline: float | None) -> PageRequest:
        """Look a prompt up, and begin to fetch its pages. The deadline, in seconds, runs from now on."""
        ...

    def span(self, *, batch: int, tokens: int) -> PageSpan:
        """A span of zeros, for its requests' pages."""
        ...


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
        return _EmbeddedRequest(request, self._tier, self._shape)

    def span(self, *, batch: int, tokens: int) -> PageSpan:
        """See `PageSource`."""
        return self._tier.span(batch=batch, tokens=tokens)

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

    def close(self) -> None:
        """Say goodbye. Idempotent."""
        self.cache.close()


def _allocated(request: hicache.Request | hicache.ConnectedRequest, wanted: int) -> npt.NDArray[np.int64]:
    """Slots for so many pages, or for as many as there is room: the beginning is what others can use."""
    try:
        return request.allocate(wanted)
    except hicache.OutOfSlots as full:
        return request.allocate(min(wanted, full.free + full.evictable))


class _EmbeddedRequest:
    def __init__(self, request: hicache.Request, tier: DeviceTier, shape: PageShape) -> None:
        self._request = request
        self._tier = tier
        self._shape = shape
        self._slots: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._under_way: LayeredLoad | None = None

    def load(self, *, layered: bool = False) -> None:
        if layered and self._tier.layered:
            self._under_way = self._request.load_by_layer()
            self._slots = self._under_way.slots
        else:
            self._slots = self._request.load()

    @property
    def usable(self) -> int:
        return len(self._slots)

    def pages(self) -> Any:
        return self._tier.pages(self._slots, self._under_way)

    def store(self, more: Tokens, computed: Computed) -> tuple[int, int]:
        request = self._request
        if self._under_way is not None:  # what was withdrawn meanwhile is stored again: the model has it
            self._slots = self._under_way.finish()
        request.extend(more)
        wanted = request.tokens // self._shape.tokens - self.usable
        if wanted <= 0 or request.bypassed:
            return 0, 0
        slots = _allocated(request, wanted)
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

    def pages(self) -> list[Bytes]:
        return [self._shape.of_canonical(page) for page in self._read[: self._usable]]

    def store(self, more: Tokens, computed: Computed) -> tuple[int, int]:
        request = self._request
        self._read = self._read[:0]
        request.extend(more)
        wanted = request.tokens // self._shape.tokens - self._usable
        if wanted <= 0 or request.bypassed or request.lost is not None:
            return 0, 0
        count = len(_allocated(request, wanted))
        fresh = np.empty((count, self._shape.page_bytes), np.uint8)
        computed.fill(self._shape, [self._shape.of_canonical(page) for page in fresh], first=self._usable)
        written = request.write_from(fresh) if count else 0
        if written:
            request.commit(upto=(self._usable + written) * self._shape.tokens)
        return written, wanted - written

    def close(self, *, aborted: bool = False) -> None:
        self._request.close(aborted=aborted)
