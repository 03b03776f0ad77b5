"""A device tier in the memory of the GPU that the model is on: hits cost copies on the device, stores block nobody.

What waits for what: pages are read on the calling thread's current stream of torch, as the model computes, and are
complete before, as the cache hands out no others. Slots are written on that stream too, behind what other streams
still read of those that were in them before; the cache shows the pages once the event behind the writing has passed.
Copies up wait for all streams that have been used here. What is here was tried with a fake of CUDA: no GPU was at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hicache.core.identity import Namespace
from hicache.cuda.driver import CudaDriver, Stream
from hicache.cuda.events import CudaEvent
from hicache.cuda.lanes import CudaCopy
from hicache.cuda.options import DEFAULTS, CudaOptions
from hicache.cuda.pool import CudaDevicePool
from hicache.errors import ConfigError
from hicache.runtime.layered import LayeredLoad
from hicache.runtime.options import pool_pages
from hicache_transformers.convert import PageShape
from hicache_transformers.gpuspans import GpuPages, GpuSpan, SlotMemory, Slots
from hicache_transformers.tiers import Computed

__all__ = ["GpuMemory", "of_pool"]


def of_pool(pool: CudaDevicePool, device: torch.device) -> torch.Tensor:
    """A pool's memory as a tensor on its GPU, not a copy: bytes `(layers, 2, slots, tokens, kv_heads, row bytes)`."""
    tensor: torch.Tensor = torch.as_tensor(pool, device=device)
    return tensor


class GpuMemory(SlotMemory):
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
        super().__init__(shape, device=device, dtype=dtype, driver=driver)
        self.pool = CudaDevicePool.allocate(
            namespace.geometry,
            page_size=namespace.page_size,
            slots=max(1, pool_pages(size, page_bytes=shape.page_bytes, tier="device")),
            layout="layer_first",
            stream=driver.current_stream(),
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
            self._memory = memory.view(self._carrier)
        except BaseException:
            self.pool.close()
            raise

    def pages(self, slots: Slots, under_way: LayeredLoad | None = None) -> GpuPages:
        """See `LayeredTier`. Copies under way are waited for layer by layer, by the stream that reads."""
        copies = () if under_way is None else under_way.copies
        return GpuPages(slots, tuple(copy for copy in copies if isinstance(copy, CudaCopy)))

    def span(self, *, batch: int, tokens: int) -> GpuSpan:
        """See `DeviceTier`."""
        return GpuSpan(self, batch=batch, tokens=tokens)

    def write(self, slots: Slots, computed: Computed, *, first: int) -> CudaEvent:
        """See `DeviceTier`. The keys and values must be of the current stream, or ordered before it."""
        index, begin = self.index(slots), computed.padding + first * self.shape.tokens
        with self.use(writes=True) as used:
            for layer, pair in enumerate(computed.layers):
                self.scatter(layer, index, pair, row=computed.row, begin=begin)
        return used[0]

    def write_layer(self, layer: int, index: torch.Tensor, pair: tuple[Any, Any], *, row: int, begin: int) -> CudaEvent:
        """See `LayeredTier`; as `write` otherwise."""
        with self.use(writes=True) as used:
            self.scatter(layer, index, pair, row=row, begin=begin)
        return used[0]

    def close(self) -> None:
        """See `DeviceTier`. Waits for what uses it on the device."""
        with self._lock:
            self._memory = None
            self.pool.close()

    def _meet(self, stream: Stream) -> None:
        self.pool.computes_on(stream)
