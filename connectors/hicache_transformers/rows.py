"""The prompts of a batch: where each begins in its row, and how many columns of the batch the cache can fill.

A batch is padded on the left. Positions are counted from a prompt's own first token, so keys and values of a prompt
do not depend on its padding, and page `p` of it lies in the columns from `padding + p * page_size` on. The model's
cache has one length for the whole batch: its first columns, the same number in every row. Rows that have less in
the cache than others are brought up by a forward pass of their own where that is cheaper than to compute the columns
that they lack in every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Bypass", "Row", "columns_to_fill", "generated_tokens", "read_rows"]

FORWARD_TOKENS: Final = 64
"""A forward pass of one row costs about as much as so many tokens in a larger one, beside its own tokens."""


class Bypass(Exception):  # noqa: N818  no error: a call that the cache leaves alone
    """This call goes past the cache.

    Attributes:
        reason: a word for statistics.
    """

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of a batch.

    Attributes:
        padding: columns before its first token.
        tokens: its token ids, uint32.
    """

    padding: int
    tokens: npt.NDArray[np.uint32]


def read_rows(input_ids: Any, attention_mask: Any | None, *, pad_token: int | None = None) -> list[Row]:
    """The prompts of a batch.

    Args:
        input_ids: integer tensor or array (batch, columns).
        attention_mask: of the same shape, 1 for tokens and 0 for padding; None where nothing is padded.
        pad_token: token that padding would consist of, where no mask says so.

    Raises:
        Bypass: what is no batch of prompts that end in the last column.
    """
    ids = _array(input_ids)
    if ids is None or ids.ndim != 2 or 0 in ids.shape or ids.dtype.kind not in "iu":
        raise Bypass("input", "the input is no batch of token ids: give input_ids of shape (batch, tokens)")
    if ids.min() < 0 or ids.max() >= 2**32:
        raise Bypass("input", "token ids must lie between 0 and 2^32-1")
    if attention_mask is None:
        if pad_token is not None and (ids == pad_token).any():
            raise Bypass("mask", "the input has padding tokens and no attention_mask: give the tokenizer's")
        return [Row(0, row.astype(np.uint32)) for row in ids]
    mask = _array(attention_mask)
    if mask is None or mask.shape != ids.shape:
        raise Bypass("mask", "the attention_mask has another shape than the input: give one value a token")
    other = (mask != 0) & (mask != 1)
    mask = (mask == 1).astype(np.int64)
    if other.any() or not mask[:, -1].all() or (np.diff(mask, axis=1) < 0).any():
        raise Bypass("mask", "the attention_mask is no left padding: use a tokenizer with padding_side='left'")
    padding = (mask == 0).sum(axis=1)
    return [Row(int(pad), row[int(pad) :].astype(np.uint32)) for pad, row in zip(padding, ids, strict=True)]


def columns_to_fill(rows: Sequence[Row], hits: Sequence[int], columns: int) -> int:
    """How many leading columns of the batch to take from the cache, so that the least is computed.

    Args:
        rows: the prompts.
        hits: tokens of each that are in the cache.
        columns: of the batch; at least the last one is left to be computed.

    Returns:
        A number of columns; 0 where nothing is in the cache. Rows whose hit ends before it must be brought up to it.
    """
    if not any(hits):
        return 0
    ends = [min(row.padding + hit, columns - 1) for row, hit in zip(rows, hits, strict=True)]

    def cost(fill: int) -> int:
        behind = [fill - end for end in ends if end < fill]
        return sum(behind) + FORWARD_TOKENS * len(behind) + len(rows) * (columns - fill)

    return min(sorted(set(ends), reverse=True), key=cost)


def generated_tokens(row: Row, sequence: Any, columns: int, *, pad_token: int | None) -> npt.NDArray[np.uint32] | None:
    """The tokens that were generated behind a prompt, without the padding behind a prompt that ended before others.

    Args:
        row: the prompt.
        sequence: prompt and what follows, with the prompt's padding.
        columns: of the prompt's batch.
        pad_token: what `generate` puts behind the end; if real tokens at the end look like it they are left out too.

    Returns:
        The tokens; None for a sequence that does not begin with the prompt: then nobody knows what was computed.
    """
    array = _array(sequence)
    if array is None or array.ndim != 1 or not np.array_equal(array[row.padding : columns], row.tokens):
        return None
    found = array[columns:]
    if pad_token is not None:
        real = np.flatnonzero(found != pad_token)
        found = found[: int(real[-1]) + 1 if len(real) else 0]
    return found.astype(np.uint32)


def _array(tensor: Any) -> npt.NDArray[Any] | None:
    if isinstance(tensor, np.ndarray):
        return tensor
    if not hasattr(tensor, "detach"):
        return None
    array: npt.NDArray[Any] = tensor.detach().cpu().numpy()
    return array
