"""Layers of a model's cache that are filled when they are first read: each waits for its own pages, not for others'.

A model asks a layer's cache for nothing but its length before it computes that layer. So the first layers are computed
while pages of the last ones are still copied up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch

__all__ = ["put_pending"]

Fill: TypeAlias = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def put_pending(state: Any, layer: int, fill: Fill, *, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Let a layer of a model's empty cache be filled when its keys or values are first read.

    Args:
        state: the `DynamicCache`.
        layer: which.
        fill: gives keys and values, `(batch, kv_heads, tokens, head_dim)`; called once, by whoever reads them. What it
            raises comes out of the model.
        tokens: their columns.
        dtype: of them.
        device: of them.
    """
    plain: Any = type(state.layers[layer])
    made = _kind(plain)()
    made.is_initialized = True  # else the first update would begin with nothing
    made.dtype, made.device = dtype, device
    made.pending, made.pending_tokens = fill, tokens
    state.layers[layer] = made


@cache
def _kind(plain: Any) -> type[Any]:
    """A kind of layer whose keys and values may be pending."""

    def settle(self: Any) -> None:
        fill, self.pending = self.__dict__.get("pending"), None
        if fill is not None:
            self.__dict__["keys"], self.__dict__["values"] = fill()

    def part(name: str) -> property:
        def read(self: Any) -> Any:
            settle(self)
            return self.__dict__[name]

        def write(self: Any, value: Any) -> None:
            self.__dict__[name] = value

        return property(read, write)

    def length(self: Any, *given: Any) -> int:
        found: int = (
            self.pending_tokens if self.__dict__.get("pending") is not None else plain.get_seq_length(self, *given)
        )
        return found

    return type(plain.__name__, (plain,), {"keys": part("keys"), "values": part("values"), "get_seq_length": length})
