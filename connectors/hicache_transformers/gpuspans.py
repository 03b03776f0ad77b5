"""Pages in slots of a GPU's memory, which torch gathers into a model's cache and scatters back, on the device.

What waits for what: torch reads and writes slots on the calling thread's current stream, as the model computes, and
nobody waits for it. Whoever gets slots next waits, on its stream, for the event behind what was put in for them here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hicache.cuda.driver import CudaDriver, Stream
from hicache.cuda.events import CudaEvent
from hicache.cuda.lanes import CudaCopy
from hicache.errors import CacheClosed, HicacheError
from hicache_transformers.convert import PageShape

__all__ = ["GpuPages", "GpuSpan", "SlotMemory", "Slots"]

Slots: TypeAlias = npt.NDArray[np.int64]

_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers carry elements of any type, bit for bit."""


class SlotMemory:
    """Slots on one GPU, `(layers, 2, slots, tokens, kv_heads, head_dim)`. Thread-safe.

    Args:
        shape: sizes of a page.
        device: of the model's keys and values.
        dtype: of theirs.
        driver: of the device.
    """

    def __init__(self, shape: PageShape, *, device: torch.device, dtype: torch.dtype, driver: CudaDriver) -> None:
        self.shape = shape
        self._device = device
        self._dtype = dtype
        self._carrier = _CARRIERS[dtype.itemsize]
        self._driver = driver
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None  # of carriers
        self._uses: dict[int, CudaEvent | None] = {driver.current_stream().ptr: None}  # behind what each did last

    # ---- between slots and a model's keys and values

    def gather(
        self,
        layer: int,
        index: torch.Tensor,
        target: torch.Tensor,
        *,
        start: int,
        copies: Sequence[CudaCopy] = (),
        source: torch.Tensor | None = None,
    ) -> None:
        """Copy pages of one layer into `target`, `(2, kv_heads, columns, head_dim)`, from column `start` on.

        They come from the slots, or from the memory `source`, which is like them.

        Raises:
            CacheClosed: the memory was given back.
            HicacheError: a copy that was to bring them failed.
        """
        stream = self._driver.current_stream()
        for copy in copies:
            if not copy.let_wait(layer, stream):
                raise HicacheError(f"pages that were on their way to the GPU did not come (layer {layer})")
        with self._lock:
            memory = self._open() if source is None else source
            found = memory[layer].index_select(1, index).flatten(1, 2).transpose(1, 2)
            first, end = max(start, 0), min(start + found.shape[2], target.shape[2])
            target[:, :, first:end].copy_(found[:, :, first - start : end - start])

    def scatter(self, layer: int, index: torch.Tensor, pair: Sequence[Any], *, row: int, begin: int) -> None:
        """Copy one layer's keys and values of a row, from token `begin` on, into slots; within `use(writes=True)`."""
        size = self.shape.tokens
        end = begin + len(index) * size
        for plane, tensor in enumerate(pair):
            rows = self.carried(tensor)[row, :, begin:end].transpose(0, 1)
            pages = rows.reshape(len(index), size, *rows.shape[1:])
            with self._lock:
                self._open()[layer, plane].index_copy_(0, index, pages)

    def apart(self, pages: int) -> torch.Tensor:
        """Memory for so many pages beside the slots, as `gather` takes it."""
        shape = self.shape
        size = (shape.layers, 2, pages, shape.tokens, shape.kv_heads, shape.row // self._dtype.itemsize)
        return torch.empty(size, dtype=self._carrier, device=self._device)

    def take_apart(self, slots: Slots, target: torch.Tensor, *, at: int) -> None:
        """Copy slots into such memory, from page `at` on; the calling stream must have waited for their copies."""
        if len(slots):
            with self.use(), self._lock:
                target[:, :, at : at + len(slots)] = self._open().index_select(2, self.index(slots))

    def zeros(self, batch: int, tokens: int) -> torch.Tensor:
        """Memory for a layer, `(2, batch, kv_heads, tokens, head_dim)`, as its carrier."""
        shape = self.shape
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

    # ---- order

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
                self._meet(stream)
                self._uses[stream.ptr] = None
            for other, event in self._uses.items() if writes else ():
                if other != stream.ptr and event is not None:
                    self._driver.wait(stream, event.event)
        try:
            yield used
        finally:
            with self._lock:
                made = self._driver.event()
                self._driver.record(made, stream)
                used.append(CudaEvent(self._driver, made))
                self._uses[stream.ptr] = used[0]

    def ends(self) -> list[CudaEvent]:
        """Events behind all uses so far: nobody reads or writes slots that were given up before, once they passed."""
        with self._lock:
            return [event for event in self._uses.values() if event is not None]

    def _meet(self, stream: Stream) -> None:
        """A stream uses slots for the first time."""

    def _open(self) -> torch.Tensor:
        if self._memory is None:
            raise CacheClosed("the cache was closed: its memory on the GPU was given back")
        return self._memory


@dataclass(frozen=True, slots=True)
class GpuPages:
    """Pages in the memory of a GPU.

    Attributes:
        slots: where they are.
        copies: what still brings some of them.
        source: the memory whose slots those are; None is that of the span's own tier.
    """

    slots: Slots
    copies: tuple[CudaCopy, ...] = ()
    source: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where a row's columns from `start` on come from: pages, or a row of a model's cache from token `first` on."""

    row: int
    start: int
    index: torch.Tensor | None = None
    pages: GpuPages | None = None
    layers: Sequence[tuple[Any, Any]] = ()
    source: int = 0
    first: int = 0


class GpuSpan:
    """See `PageSpan`. It remembers what goes where: each layer is put together when it is asked for, by itself.

    Args:
        memory: where its pages are.
        batch: rows.
        tokens: columns.

    Attributes:
        tokens: as given.
    """

    def __init__(self, memory: SlotMemory, *, batch: int, tokens: int) -> None:
        self.tokens = tokens
        self._memory = memory
        self._batch = batch
        self._rows: list[_Rows] = []

    def put_pages(self, row: int, pages: GpuPages, *, start: int) -> None:
        """See `Span`: what would lie outside the columns is left out."""
        size = self._memory.shape.tokens
        before = max(-start, 0) // size
        within = pages.slots[before : max(-(-(self.tokens - start) // size), 0)]
        if len(within):
            self._rows.append(_Rows(row, start + before * size, self._memory.index(within), pages))

    def put_layers(self, layers: Sequence[tuple[Any, Any]], *, row: int, source: int, first: int, start: int) -> None:
        """See `Span`."""
        self._rows.append(_Rows(row, start, None, None, layers, source, first))

    def layers(self, devices: Sequence[torch.device]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """See `Span`: all of it by copies on the device."""
        for layer in range(len(devices)):
            yield self.layer(layer)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's; see `SlotMemory.gather` for what it raises."""
        with self._memory.use():
            return self._layer(layer)

    def _layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self._memory
        planes = memory.zeros(self._batch, self.tokens)
        for rows in self._rows:
            if rows.index is not None and rows.pages is not None:
                copies, source = rows.pages.copies, rows.pages.source
                target = planes[:, rows.row]
                memory.gather(layer, rows.index, target, start=rows.start, copies=copies, source=source)
                continue
            end = rows.first + self.tokens - rows.start
            for plane, tensor in enumerate(rows.layers[layer]):
                part = memory.carried(tensor)[rows.source, :, rows.first : end]
                planes[plane, rows.row, :, rows.start :].copy_(part)
        keys, values = memory.of_model(planes)
        return keys, values
