"""A device tier in the memory of the GPU that the model is on: hits cost copies on the device, stores block nobody.

What waits for what: pages are read on the calling thread's current stream of torch, as the model computes, and are
complete before, as the cache hands out no others. Slots are written on that stream too, behind what other streams
still read of those that were in them before; the cache shows the pages once the event behind the writing has passed.
Copies up wait for all streams that have been used here. What is here was tried with a fake of CUDA: no GPU was at hand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hicache.core.identity import Namespace
from hicache.cuda.driver import CudaDriver
from hicache.cuda.events import CudaEvent
from hicache.cuda.lanes import CudaCopy
from hicache.cuda.options import DEFAULTS, CudaOptions
from hicache.cuda.pool import CudaDevicePool
from hicache.errors import CacheClosed, ConfigError, HicacheError
from hicache.runtime.layered import LayeredLoad
from hicache.runtime.options import pool_pages
from hicache_transformers.convert import PageShape
from hicache_transformers.tiers import Computed

__all__ = ["GpuMemory", "GpuPages", "GpuSpan", "of_pool"]

Slots: TypeAlias = npt.NDArray[np.int64]

_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers carry elements of any type, bit for bit."""


def of_pool(pool: CudaDevicePool, device: torch.device) -> torch.Tensor:
    """A pool's memory as a tensor on its GPU, not a copy: bytes `(layers, 2, slots, tokens, kv_heads, row bytes)`."""
    tensor: torch.Tensor = torch.as_tensor(pool, device=device)
    return tensor


class GpuMemory:
    """A device tier in a GPU's memory; see `DeviceTier`. Calls put work into the current stream and return.

    Args:
        namespace: of the pages.
        shape: sizes of a page.
        device: of the model's keys and values.
        dtype: of theirs.
        size: pages, or bytes with a unit.
        driver: of the device.
        options: how pages are copied between it and main memory.
        view: makes the tensor over the pool's memory.

    Attributes:
        pool: over its memory.

    Raises:
        ConfigError: a size that is none, or more than the device has free; a torch that copies the memory.
    """

    layered = True

    def __init__(
        self,
        namespace: Namespace,
        shape: PageShape,
        *,
        device: torch.device,
        dtype: torch.dtype,
        size: str | int,
        driver: CudaDriver,
        options: CudaOptions = DEFAULTS,
        view: Callable[[CudaDevicePool, torch.device], torch.Tensor] = of_pool,
    ) -> None:
        self._shape = shape
        self._device = device
        self._dtype = dtype
        self._carrier = _CARRIERS[dtype.itemsize]
        self._driver = driver
        self._lock = threading.Lock()
        stream = driver.current_stream()
        self._uses: dict[int, CudaEvent | None] = {stream.ptr: None}  # by stream: behind what it did here last
        self.pool = CudaDevicePool.allocate(
            namespace.geometry,
            page_size=namespace.page_size,
            slots=max(1, pool_pages(size, page_bytes=shape.page_bytes, tier="device")),
            layout="layer_first",
            stream=stream,
            options=options,
            driver=driver,
        )
        try:
            with torch.inference_mode(mode=False):  # else it could be written in that mode only
                memory = view(self.pool, device)
            if memory.data_ptr() != self.pool.__cuda_array_interface__["data"][0]:
                raise ConfigError(
                    f"torch {torch.__version__} copies memory that it shall show: use another, or address="
                )
            self._memory: torch.Tensor | None = memory.view(self._carrier)
        except BaseException:
            self.pool.close()
            raise

    def pages(self, slots: Slots, under_way: LayeredLoad | None = None) -> GpuPages:
        """See `DeviceTier`. Copies under way are waited for layer by layer, by the stream that reads."""
        copies = () if under_way is None else under_way.copies
        return GpuPages(slots, tuple(copy for copy in copies if isinstance(copy, CudaCopy)))

    def span(self, *, batch: int, tokens: int) -> GpuSpan:
        """See `DeviceTier`."""
        return GpuSpan(self, self._shape, batch=batch, tokens=tokens)

    def write(self, slots: Slots, computed: Computed, *, first: int) -> CudaEvent:
        """See `DeviceTier`. The keys and values must be of the current stream, or ordered before it."""
        size = self._shape.tokens
        begin = computed.padding + first * size
        end = begin + len(slots) * size
        index = self.index(slots)
        with self.use(writes=True) as used:
            for layer, pair in enumerate(computed.layers):
                for plane, tensor in enumerate(pair):
                    rows = self.carried(tensor)[computed.row, :, begin:end].transpose(0, 1)
                    pages = rows.reshape(len(slots), size, *rows.shape[1:])
                    with self._lock:
                        self._open()[layer, plane].index_copy_(0, index, pages)
        return used[0]

    def gather(
        self, layer: int, index: torch.Tensor, target: torch.Tensor, *, start: int, copies: Sequence[CudaCopy] = ()
    ) -> None:
        """Copy pages of one layer into `target`, `(2, kv_heads, columns, head_dim)`, from column `start` on.

        Raises:
            CacheClosed: the memory was given back.
            HicacheError: a copy that was to bring them failed.
        """
        stream = self._driver.current_stream()
        for copy in copies:
            if not copy.let_wait(layer, stream):
                raise HicacheError(f"pages that were on their way to the GPU did not come (layer {layer})")
        with self._lock:
            found = self._open()[layer].index_select(1, index).flatten(1, 2).transpose(1, 2)
            first, end = max(start, 0), min(start + found.shape[2], target.shape[2])
            target[:, :, first:end].copy_(found[:, :, first - start : end - start])

    def zeros(self, batch: int, tokens: int) -> torch.Tensor:
        """Memory for a layer, `(2, batch, kv_heads, tokens, head_dim)`, as its carrier."""
        shape = self._shape
        # Zeros: padding is masked, but its weight of zero times something infinite would not be zero.
        size = (2, batch, shape.kv_heads, tokens, shape.row // self._dtype.itemsize)
        return torch.zeros(size, dtype=self._carrier, device=self._device)

    def of_model(self, tensor: torch.Tensor) -> torch.Tensor:
        """A carrier's elements as the model's."""
        return tensor.view(self._dtype)

    def carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """The model's elements as their carrier's."""
        return tensor.detach().view(self._carrier)

    def index(self, slots: Slots) -> torch.Tensor:
        """Slots on the device."""
        return torch.tensor(slots, dtype=torch.int64).to(self._device, non_blocking=True)

    @contextmanager
    def use(self, *, writes: bool = False) -> Iterator[list[CudaEvent]]:
        """Around work that is put into the current stream, so that whoever gets its slots next waits for it.

        Gives a list, which has the event behind that work afterwards.
        """
        used: list[CudaEvent] = []
        with self._lock:
            self._open()
            stream = self._driver.current_stream()
            if stream.ptr not in self._uses:
                self.pool.computes_on(stream)
                self._uses[stream.ptr] = None
            for other, event in self._uses.items() if writes else ():
                if other != stream.ptr and event is not None:
                    self._driver.wait(stream, event.event)
        try:
            yield used
        finally:
            with self._lock:
                used.append(self.pool.record(stream))
                self._uses[stream.ptr] = used[0]

    def close(self) -> None:
        """See `DeviceTier`. Waits for what uses it on the device."""
        with self._lock:
            self._memory = None
            self.pool.close()

    def _open(self) -> torch.Tensor:
        if self._memory is None:
            raise CacheClosed("the cache was closed: its memory on the GPU was given back")
        return self._memory


@dataclass(frozen=True, slots=True)
class GpuPages:
    """Pages in the memory of a GPU, and copies that still bring some of them."""

    slots: Slots
    copies: tuple[CudaCopy, ...] = ()

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where a row's columns from `start` on come from: pages, or a row of a model's cache from token `first` on."""

    row: int
    start: int
    index: torch.Tensor | None = None
    copies: Sequence[CudaCopy] = ()
    layers: Sequence[tuple[Any, Any]] = ()
    source: int = 0
    first: int = 0


class GpuSpan:
    """See `PageSpan`. It remembers what goes where: each layer is put together when it is asked for, by itself.

    Args:
        memory: the tier.
        shape: sizes of its pages.
        batch: rows.
        tokens: columns.

    Attributes:
        tokens: as given.
    """

    def __init__(self, memory: GpuMemory, shape: PageShape, *, batch: int, tokens: int) -> None:
        self.tokens = tokens
        self._memory = memory
        self._shape = shape
        self._batch = batch
        self._rows: list[_Rows] = []

    def put_pages(self, row: int, pages: GpuPages, *, start: int) -> None:
        """See `Span`: what would lie outside the columns is left out."""
        size = self._shape.tokens
        before = max(-start, 0) // size
        within = pages.slots[before : max(-(-(self.tokens - start) // size), 0)]
        if len(within):
            self._rows.append(_Rows(row, start + before * size, self._memory.index(within), pages.copies))

    def put_layers(self, layers: Sequence[tuple[Any, Any]], *, row: int, source: int, first: int, start: int) -> None:
        """See `Span`."""
        self._rows.append(_Rows(row, start, None, (), layers, source, first))

    def layers(self, devices: Sequence[torch.device]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """See `Span`: all of it by copies on the device."""
        for layer in range(len(devices)):
            yield self.layer(layer)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's; see `GpuMemory.gather` for what it raises."""
        with self._memory.use():
            return self._layer(layer)

    def _layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self._memory
        planes = memory.zeros(self._batch, self.tokens)
        for rows in self._rows:
            if rows.index is not None:
                memory.gather(layer, rows.index, planes[:, rows.row], start=rows.start, copies=rows.copies)
                continue
            end = rows.first + self.tokens - rows.start
            for plane, tensor in enumerate(rows.layers[layer]):
                part = memory.carried(tensor)[rows.source, :, rows.first : end]
                planes[plane, rows.row, :, rows.start :].copy_(part)
        keys, values = memory.of_model(planes)
        return keys, values
