"""A layout is believed once the engine's own kernel has written known keys and values where it says they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from hicache_vllm.layouts import BlockShape, Layout

__all__ = ["Write", "proven"]

_BLOCKS: Final = 3
_BASE: Final = 251
"""Whole numbers up to so many are exact in every dtype of 16 bits and more."""

Write: TypeAlias = Callable[[Any, Any, Any, Any], None]
"""Writes keys and values `(tokens, heads, width)` into a cache tensor, at slots `(tokens,)`."""


def proven(layout: Layout, shape: BlockShape, *, dtype: Any, cache: Callable[[int], Any], write: Write) -> bool:
    """Whether a layout tells where the kernel puts each element. Never raises: what cannot be shown is not proven.

    Tokens go into two of three blocks in an order of their own, once for each digit of their elements' numbers, so that
    no two elements look alike and a block too much shows.

    Args:
        layout: to be proven.
        shape: of the blocks.
        dtype: torch's, of the elements.
        cache: makes a cache tensor of so many blocks, filled with zeros, that lies as the engine's do.
        write: the engine's kernel.
    """
    elements = 2 * shape.tokens * shape.heads * shape.width
    try:
        digit = 1
        while digit <= elements:
            if not _lands(layout, shape, dtype, cache(_BLOCKS), write, digit):
                return False
            digit *= _BASE
    except Exception:
        return False
    return True


def _lands(layout: Layout, shape: BlockShape, dtype: Any, cache: Any, write: Write, digit: int) -> bool:
    import torch

    tokens = 2 * shape.tokens
    slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(7)) + shape.tokens
    slots = slots.to(cache.device)
    count = torch.arange(tokens * shape.heads * shape.width).reshape(tokens, shape.heads, shape.width)
    keys = (count // digit % _BASE + 1).to(device=cache.device, dtype=dtype)
    write(keys, -keys, cache, slots)
    for plane, written in zip(layout.planes(cache, shape), (keys, -keys), strict=True):
        rows = plane.permute(0, 2, 3, 1, 4, 5).reshape(_BLOCKS * shape.tokens, shape.heads, shape.width)
        if not torch.equal(rows[slots], written) or bool(rows[: shape.tokens].any()):
            return False
    return True
