"""Layers of a model's cache that are filled when they are first read, and that tell when the model has added to them.

A model asks a layer's cache for nothing but its length before it computes that layer. So the first layers are computed
while pages of the last ones are still copied up; and the first are copied down while the last are still computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch

__all__ = ["put_pending", "watch_layer"]

Fill: TypeAlias = Callable[[], tuple[torch.Tensor, torch.Tensor]]
Came: TypeAlias = Callable[[torch.Tensor, torch.Tensor], bool]


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
    made = _ours(state, layer)
    made.is_initialized = True  # else the first update would begin with nothing
    made.dtype, made.device = dtype, device
    made.pending, made.pending_tokens = fill, tokens


def watch_layer(state: Any, layer: int, came: Came) -> None:
    """Let somebody hear what a layer holds when the model has added to it.

    Args:
        state: the `DynamicCache`.
        layer: which.
        came: gets all keys and values, until it returns True. It runs inside the model, and raises nothing.
    """
    _ours(state, layer).came = came


def _ours(state: Any, layer: int) -> Any:
    """A layer of a cache, made one of our kind with all that it has."""
    plain: Any = state.layers[layer]
    if "pending" not in vars(plain):
        kind: Any = type(plain)
        made = _kind(kind)()
        vars(made).update(vars(plain), pending=None, came=None)
        state.layers[layer] = made
    return state.layers[layer]


@cache
def _kind(plain: Any) -> type[Any]:
    """A kind of layer whose keys and values may be pending."""

    def settle(self: Any) -> None:
        fill, self.pending = vars(self).get("pending"), None
        if fill is not None:
            vars(self)["keys"], vars(self)["values"] = fill()

    def part(name: str) -> property:
        def read(self: Any) -> Any:
            settle(self)
            return vars(self)[name]

        def write(self: Any, value: Any) -> None:
            if value is None:  # all of it is given up
                self.pending = None
                vars(self).setdefault("keys", None), vars(self).setdefault("values", None)
            settle(self)
            vars(self)[name] = value

        return property(read, write)

    def length(self: Any, *given: Any) -> int:
        found: int = (
            self.pending_tokens if vars(self).get("pending") is not None else plain.get_seq_length(self, *given)
        )
        return found

    def update(self: Any, *given: Any, **named: Any) -> Any:
        found = plain.update(self, *given, **named)
        came = vars(self).get("came")
        if came is not None and came(self.keys, self.values):
            self.came = None
        return found

    own = {"keys": part("keys"), "values": part("values"), "get_seq_length": length, "update": update}
    # A kind that registers its classes for models must not find this one.
    return type(plain.__name__, (plain,), own | ({"_layer_type": None} if hasattr(plain, "_layer_type") else {}))
