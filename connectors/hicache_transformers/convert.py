"""Between pages and the keys and values of a model's cache, by bulk copies of bytes: exact for every dtype.

A model's cache has, a layer, keys and values of shape `(batch, kv_heads, tokens, head_dim)`. Between it and pages lies
one array in main memory, a *span*: `(layers, 2, batch, kv_heads, tokens, row bytes)`, keys before values. A page is
seen in its order of axes: `(layers, 2, head group, head in group, token, row bytes)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Bytes", "PageShape", "Span"]

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PageShape:
    """Sizes of a page.

    Attributes:
        layers: layers of the model.
        kv_heads: key-value heads of the model.
        head_group: heads that lie together in canonical form; divides `kv_heads`.
        tokens: tokens a page.
        row: bytes of one token and head, of its key or its value.
    """

    layers: int
    kv_heads: int
    head_group: int
    tokens: int
    row: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.layers * 2 * self.kv_heads * self.tokens * self.row

    def slots(self, count: int) -> Bytes:
        """Zeroed memory for so many pages, `(slots, layers, 2, token, head, row bytes)`: layout "page_first"."""
        return np.zeros((count, self.layers, 2, self.tokens, self.kv_heads, self.row), np.uint8)

    def of_slot(self, slot: Bytes) -> Bytes:
        """One slot of `slots` as a page."""
        groups = self.kv_heads // self.head_group
        split = slot.reshape(self.layers, 2, self.tokens, groups, self.head_group, self.row)
        return split.transpose(0, 1, 3, 4, 2, 5)

    def of_canonical(self, page: Bytes) -> Bytes:
        """One page in canonical form, `(page_bytes,)`, as a page."""
        groups = self.kv_heads // self.head_group
        split = page.reshape(groups, self.layers, 2, self.tokens, self.head_group, self.row)
        return split.transpose(1, 2, 0, 4, 3, 5)


class Span:
    """Keys and values of some tokens of a batch, in main memory. For one thread.

    Args:
        shape: sizes of the pages that it exchanges.
        batch: rows.
        tokens: columns.
        dtype: of the elements.
        devices: to which `layers` brings them; pinned where one is a GPU, so that its copies do not block the thread.
    """

    def __init__(
        self,
        shape: PageShape,
        *,
        batch: int,
        tokens: int,
        dtype: torch.dtype,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self.shape = shape
        self.tokens = tokens
        width = shape.row // dtype.itemsize
        # Zeros: padding is masked, but its weight of zero times something infinite would not be zero.
        size = (shape.layers, 2, batch, shape.kv_heads, tokens, width)
        pinned = any(device.type == "cuda" for device in devices)
        self._tensor = torch.zeros(size, dtype=dtype, pin_memory=pinned)
        self._bytes: Bytes = self._tensor.view(torch.uint8).numpy()

    def put_pages(self, row: int, pages: Sequence[Bytes], *, start: int) -> None:
        """Copy pages into a row, the first token of the first page into column `start`.

        What would lie behind the last column, or before the first where `start` is negative, is left out.
        """
        for page, theirs, mine in self._places(row, pages, start):
            np.copyto(mine, page[..., theirs, :])

    def fill_pages(self, row: int, pages: Sequence[Bytes], *, start: int) -> None:
        """Copy a row into pages, from column `start` on. All of them lie inside the span."""
        for page, theirs, mine in self._places(row, pages, start):
            np.copyto(page[..., theirs, :], mine)

    def put_layers(self, layers: Sequence[tuple[Any, Any]], *, row: int, source: int, first: int, start: int) -> None:
        """Copy keys and values of a model's cache into a row, from column `start` on.

        Args:
            layers: keys and values of each layer, `(batch, kv_heads, tokens, head_dim)`, on any device.
            row: where to write.
            source: row to read in `layers`.
            first: token to begin with there; the span's remaining columns are filled.
            start: column.
        """
        end = first + self.tokens - start
        for layer, planes in enumerate(layers):
            for plane, tensor in enumerate(planes):
                self._tensor[layer, plane, row, :, start:].copy_(tensor.detach()[source, :, first:end])

    def layers(self, devices: Sequence[torch.device]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values layer by layer, `(batch, kv_heads, tokens, head_dim)`, each on the layer's device.

        To a GPU they go in the order of its current stream, behind which the model computes. Nothing may be written
        into the span from then on; its memory is torch's, which gives it to nobody before they are there.
        """
        for of_layer, device in zip(self._tensor, devices, strict=True):
            yield of_layer[0].to(device, non_blocking=True), of_layer[1].to(device, non_blocking=True)

    def _places(self, row: int, pages: Sequence[Bytes], start: int) -> Iterator[tuple[Bytes, slice, Bytes]]:
        size, groups = self.shape.tokens, self.shape.kv_heads // self.shape.head_group
        mine = self._bytes[:, :, row]
        split = mine.reshape(*mine.shape[:2], groups, self.shape.head_group, *mine.shape[3:])
        for at, page in enumerate(pages):
            begin = start + at * size
            first, end = max(begin, 0), min(begin + size, self.tokens)
            if first < end:
                yield page, slice(first - begin, end - begin), split[..., first:end, :]
