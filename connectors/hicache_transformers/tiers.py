"""Where calls read pages from and write them to: main memory, or the memory of the GPU that the model is on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

import hicache
from hicache.core.identity import Namespace
from hicache.errors import ConfigError
from hicache.runtime.options import pool_pages
from hicache_transformers.convert import Bytes, PageShape, Span
from hicache_transformers.model import ModelShape

__all__ = ["Computed", "DeviceTier", "LayeredSpan", "MainMemory", "PageSpan", "open_tier", "open_window"]

if TYPE_CHECKING:
    from hicache.cuda.driver import CudaDriver
    from hicache_transformers.window import GpuWindow


class PageSpan(Protocol):
    """Keys and values of some tokens of a batch, put together for the model; see `Span`. For one thread.

    Attributes:
        tokens: columns.
    """

    tokens: int

    def put_pages(self, row: int, pages: Any, *, start: int) -> None:
        """Pages of its tier into a row, the first token of the first page into column `start`."""
        ...

    def put_layers(self, layers: Sequence[tuple[Any, Any]], *, row: int, source: int, first: int, start: int) -> None:
        """Keys and values of a model's cache into a row, from column `start` on."""
        ...

    def layers(self, devices: Sequence[torch.device]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values layer by layer, `(batch, kv_heads, tokens, head_dim)`, each on the layer's device."""
        ...


@runtime_checkable
class LayeredSpan(PageSpan, Protocol):
    """A span whose layers can be put together one by one, each when the model wants it."""

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer."""
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """What a model has of one prompt.

    Attributes:
        layers: keys and values of each layer, `(batch, kv_heads, tokens, head_dim)`.
        row: of the prompt in them.
        padding: columns before its first token.
    """

    layers: Sequence[tuple[Any, Any]]
    row: int
    padding: int

    def fill(self, shape: PageShape, pages: Sequence[Bytes], *, first: int) -> None:
        """Copy the prompt's pages from page `first` on into main memory; waits for it."""
        tokens = len(pages) * shape.tokens
        span = Span(shape, batch=1, tokens=tokens, dtype=self.layers[0][0].dtype)
        begin = self.padding + first * shape.tokens
        span.put_layers(self.layers, row=0, source=self.row, first=begin, start=0)
        span.fill_pages(0, pages, start=0)


class DeviceTier(Protocol):
    """Memory of the device tier. Thread-safe.

    Attributes:
        pool: of the cache.
    """

    @property
    def pool(self) -> hicache.DevicePool:
        """See the class."""
        ...

    def pages(self, slots: npt.NDArray[np.int64]) -> Any:
        """Slots as its spans take them, with a length."""
        ...

    def span(self, *, batch: int, tokens: int) -> PageSpan:
        """A span of zeros."""
        ...

    def write(self, slots: npt.NDArray[np.int64], computed: Computed, *, first: int) -> hicache.WriterEvent:
        """Write a prompt's pages, from page `first` on, into private slots.

        Returns:
            The event behind which they are written.
        """
        ...

    def close(self) -> None:
        """Give the memory back, behind the cache. Idempotent."""
        ...


class MainMemory:
    """A device tier in main memory, for models anywhere; see `DeviceTier`. Writing waits until it is done.

    Args:
        namespace: of the pages.
        shape: sizes of a page.
        model: what the model keeps.
        size: pages, or bytes with a unit.

    Attributes:
        pool: over its memory.
    """

    def __init__(self, namespace: Namespace, shape: PageShape, model: ModelShape, *, size: str | int) -> None:
        self._shape = shape
        self._model = model
        self._memory = shape.slots(max(1, pool_pages(size, page_bytes=shape.page_bytes, tier="device")))
        # Bytes stand for any dtype there, so their last axis counts bytes.
        self.pool = hicache.TensorDevicePool.attach(
            self._memory, namespace.geometry, page_size=namespace.page_size, layout="page_first"
        )

    def pages(self, slots: npt.NDArray[np.int64]) -> Sequence[Bytes]:
        """See `DeviceTier`."""
        return [self._shape.of_slot(self._memory[slot]) for slot in slots.tolist()]

    def span(self, *, batch: int, tokens: int) -> PageSpan:
        """See `DeviceTier`."""
        return Span(self._shape, batch=batch, tokens=tokens, dtype=self._model.dtype, devices=self._model.devices)

    def write(self, slots: npt.NDArray[np.int64], computed: Computed, *, first: int) -> hicache.WriterEvent:
        """See `DeviceTier`."""
        computed.fill(self._shape, self.pages(slots), first=first)
        return hicache.READY

    def close(self) -> None:
        """See `DeviceTier`."""
        self.pool.close()


def open_tier(
    namespace: Namespace, shape: PageShape, model: ModelShape, *, size: str | int
) -> tuple[DeviceTier, str | None]:
    """The device tier for a model: in the memory of its GPU where all layers are on one, else in main memory.

    Returns:
        The tier; and why it is in main memory though the model is not, if so.

    Raises:
        ConfigError: a size that is none, or more than the GPU has free.
    """
    driver, why = _driver_of(model, "the device tier is in main memory, and pages go to the model through it")
    if driver is None or model.on_gpu is None:
        return MainMemory(namespace, shape, model, size=size), why
    from hicache_transformers.gpu import GpuMemory

    return GpuMemory(namespace, shape, device=model.on_gpu, dtype=model.dtype, size=size, driver=driver), None


def open_window(shape: PageShape, model: ModelShape, *, size: str | int) -> tuple[GpuWindow | None, str | None]:
    """Memory on a model's GPU through which the pages of a service pass; None where its layers are not on one.

    Returns:
        The window; and why there is none though the model is not in main memory, if so.

    Raises:
        ConfigError: a size that is none, or more than the GPU has free.
    """
    driver, why = _driver_of(model, "pages go to the model through main memory, and calls wait for their copies")
    if driver is None or model.on_gpu is None:
        return None, why
    from hicache_transformers.window import GpuWindow

    return GpuWindow(shape, device=model.on_gpu, dtype=model.dtype, size=size, driver=driver), None


def _driver_of(model: ModelShape, else_: str) -> tuple[CudaDriver | None, str | None]:
    """The GPU that has all of a model; or why hicache cannot use it, and what happens then."""
    why = None
    if model.on_gpu is not None:
        from hicache.cuda.pool import open_device

        try:
            return open_device(model.on_gpu.index), None
        except ConfigError as error:
            why = str(error)
    elif places := sorted({str(device) for device in model.devices if device.type != "cpu"}):
        why = f"the model's layers are on {', '.join(places)}, and hicache[cuda] takes one NVIDIA GPU for all of them"
    return None, None if why is None else f"{else_}: {why}"
