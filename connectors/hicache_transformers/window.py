"""Memory on the GPU through which pages pass on their way from and to a service's memory.

Pages lie there as engines have them, a token behind the other with all its heads, so that few and long runs are copied
over the link; torch turns them, on the device, into what the model's cache wants. Slots are taken for a copy, and are
free again once nothing reads or writes them: the copy has ended, and uses by torch are ordered by `ends`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from hicache.cuda.blocks import BlockPlane, CudaBlocks
from hicache.cuda.driver import CudaDriver
from hicache.cuda.options import DEFAULTS, CudaOptions
from hicache.errors import ConfigError
from hicache.runtime.options import pool_pages
from hicache.units import format_size
from hicache_transformers.convert import PageShape
from hicache_transformers.gpuspans import GpuSpan, SlotMemory, Slots

__all__ = ["GpuWindow"]

_LANE_SHARE: Final = 8
"""Of the slots, one in so many is for what finds no room in the others, or comes over the network."""

Shape = tuple[int, ...]


def of_torch(shape: Shape, device: torch.device) -> torch.Tensor:
    """Bytes on a device, from torch's allocator."""
    return torch.empty(shape, dtype=torch.uint8, device=device)


class GpuWindow(SlotMemory):
    """Slots for pages that are under way. Thread-safe.

    Args:
        shape: sizes of a page.
        device: of the model's keys and values.
        dtype: of theirs.
        size: pages, or bytes with a unit.
        driver: of the device.
        options: how pages are copied.
        make: makes its memory.

    Attributes:
        blocks: copies between slots and a service's memory.
        pages: slots that `reserve` can give.

    Raises:
        ConfigError: a size that is none, or more than the device has free; ...
    """

    def __init__(
        self,
        shape: PageShape,
        *,
        device: torch.device,
        dtype: torch.dtype,
        size: str | int,
        driver: CudaDriver,
        options: CudaOptions = DEFAULTS,
        make: Callable[[Shape, torch.device], torch.Tensor] = of_torch,
    ) -> None:
        super().__init__(shape, device=device, dtype=dtype, driver=driver)
        count = max(2, pool_pages(size, page_bytes=shape.page_bytes, tier="device"))
        memory = self._made(count, make)
        self._memory = memory.view(self._carrier)
        self.blocks = CudaBlocks(
            _planes(shape, memory),
            tokens=shape.tokens,
            head_group=shape.head_group,
            row_bytes=shape.row,
            keep=[memory],
            driver=driver,
            options=options,
        )
        self.pages = count - max(1, count // _LANE_SHARE)
        self._free = deque(range(self.pages))
        self._lane: Slots = np.arange(self.pages, count)
        self._lane_lock = threading.Lock()

    def _made(self, count: int, make: Callable[[Shape, torch.device], torch.Tensor]) -> torch.Tensor:
        shape = self.shape
        try:
            with torch.inference_mode(mode=False):  # else it could be written in that mode only
                return make((shape.layers, 2, count, shape.tokens, shape.kv_heads, shape.row), self._device)
        except torch.cuda.OutOfMemoryError as error:
            free, total = self._driver.memory()
            raise ConfigError(
                f"{count} pages of {format_size(count * shape.page_bytes)} do not fit on {self._device}: "
                f"{format_size(free)} of {format_size(total)} are free; give device= less"
            ) from error

    def reserve(self, pages: int) -> Slots | None:
        """Slots for so many pages, all of them or None. Whoever uses them on a stream waits for `ends` before."""
        with self._lock:
            if pages > len(self._free):
                return None
            return np.array([self._free.popleft() for _ in range(pages)], np.int64)

    def release(self, slots: Slots) -> None:
        """Give slots back. Their copies have ended; what torch does with them was put into a stream within `use`."""
        with self._lock:
            self._free.extend(slots.tolist())

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        with self._lock:
            return len(self._free)

    @contextmanager
    def lane(self) -> Iterator[Slots]:
        """The slots for what has no room, for one caller at a time, who waits for no other slots meanwhile."""
        with self._lane_lock:
            yield self._lane

    def span(self, *, batch: int, tokens: int) -> GpuSpan:
        """A span of its pages."""
        return GpuSpan(self, batch=batch, tokens=tokens)

    def close(self) -> None:
        """Let copies end, unpin the service's memory and let go of its own. Idempotent."""
        with self._lock:
            self._memory = None
        self.blocks.close()


def _planes(shape: PageShape, memory: torch.Tensor) -> list[list[BlockPlane]]:
    """Keys and values of each layer, `(slots, tokens, kv_heads, row bytes)`, without gaps."""
    count = memory.shape[2]
    steps = (shape.tokens * shape.kv_heads * shape.row, shape.kv_heads * shape.row, shape.row)
    return [
        [BlockPlane(memory[layer, plane].data_ptr(), count, shape.tokens, shape.kv_heads, steps) for plane in range(2)]
        for layer in range(shape.layers)
    ]
