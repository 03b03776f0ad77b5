"""Stores that begin while a model computes: each layer of the prompts is taken when the model has it.

Nothing is published before every layer of its tokens was taken. What is generated is stored at the call's end; and all
of it is, where a prompt's pages could not be taken before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from hicache_transformers.counters import Counters
from hicache_transformers.model import ModelShape
from hicache_transformers.rows import Row
from hicache_transformers.sources import PageRequest, Tokens
from hicache_transformers.tiers import Computed

__all__ = ["LayerStores", "LayeredRequest", "PageWriter", "is_compiled", "store_at_once", "takes_prompts_as_given"]


class PageWriter(Protocol):
    """Slots for some pages of one prompt, written layer by layer. For one thread.

    Attributes:
        done: layers that were written.
    """

    done: int

    def layer(self, pair: tuple[Any, Any], *, row: int, padding: int) -> None:
        """Take the next layer; waits for nothing but where the writer says so.

        Args:
            pair: its keys and values, `(batch, kv_heads, tokens, head_dim)`.
            row: of the prompt in them.
            padding: columns before its first token.
        """
        ...

    def commit(self) -> tuple[int, int]:
        """All layers were taken: publish the pages when they are written.

        Returns:
            As `PageRequest.store`.
        """
        ...

    def abandon(self) -> None:
        """Nothing comes of it, nor of pages behind it."""
        ...


@runtime_checkable
class LayeredRequest(PageRequest, Protocol):
    """A prompt whose pages can be stored layer by layer."""

    def extend(self, more: Tokens) -> None:
        """The prompt grew."""
        ...

    def writer(self, *, wait: bool) -> PageWriter | None:
        """For the whole pages behind those that came from the cache or were taken before.

        Args:
            wait: whether to wait for copies that still bring pages, and take what finds no room in pieces.

        Returns:
            None where there are none, or not now.

        Raises:
            HicacheError: it could not be done.
        """
        ...


def takes_prompts_as_given(model: Any) -> bool:
    """Whether `generate` is that of transformers, which computes the very tokens that it is given.

    Of others it is known at the end only, by what they return.
    """
    from transformers import GenerationMixin

    return getattr(model.generate, "__func__", None) is GenerationMixin.generate


def is_compiled(model: Any) -> bool:
    """Whether torch traces the model's forward pass, by `model.compile()` or `torch.compile(model.forward)`."""
    forward = getattr(model, "forward", None)
    return (
        getattr(model, "_compiled_call_impl", None) is not None
        or getattr(forward, "_torchdynamo_orig_callable", None) is not None
    )


def store_at_once(request: LayeredRequest, more: Tokens, computed: Computed) -> tuple[int, int]:
    """`PageRequest.store` for such a request."""
    request.extend(more)
    writer = request.writer(wait=True)
    if writer is None:
        return 0, 0
    try:
        for pair in computed.layers:
            writer.layer(pair, row=computed.row, padding=computed.padding)
    except BaseException:
        writer.abandon()
        raise
    return writer.commit()


class LayerStores:
    """Takes the layers of a call's prompts as the model computes them. For one thread.

    Args:
        rows: the prompts.
        requests: of each.
        repeats: rows of the model's cache for each prompt.
        shape: what the model keeps.
        counters: told of failures.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        requests: Sequence[LayeredRequest],
        *,
        repeats: int,
        shape: ModelShape,
        counters: Counters,
    ) -> None:
        self._rows = rows
        self._requests = requests
        self._repeats = repeats
        self._shape = shape
        self._counters = counters
        self._columns = rows[0].padding + len(rows[0].tokens)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._writers: dict[int, PageWriter] = {}
        self._wanted = set(range(len(requests)))
        self._over = False

    def came(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """The model has computed more of a layer; whether this needs to hear no more of it. Never raises."""
        if self._over:
            return True
        if int(keys.shape[2]) < self._columns:
            return False  # the prompts come in chunks
        if layer != len(self._pairs) or not self._fits(layer, keys, values):
            self._end()  # whatever that is, the call's end decides about it
            return True
        self._pairs.append((keys, values))
        last = layer + 1 == self._shape.layers
        for at in sorted(self._wanted):
            try:
                self._take(at, last=last)
            except Exception as error:
                self._counters.failed("storing pages", error)
                self._drop(at)
        if last:
            self._end()
        return True

    def _fits(self, layer: int, *pair: torch.Tensor) -> bool:
        shape = self._shape
        wanted = (len(self._rows) * self._repeats, shape.kv_heads, self._columns, shape.head_dim)
        return all(
            tuple(one.shape) == wanted and one.dtype == shape.dtype and one.device == shape.devices[layer]
            for one in pair
        )

    def _take(self, at: int, *, last: bool) -> None:
        """What there is of one prompt."""
        writer = self._writers.get(at) or self._requests[at].writer(wait=False)
        if writer is None:
            return
        self._writers[at] = writer
        for pair in self._pairs[writer.done :]:
            writer.layer(pair, row=at * self._repeats, padding=self._rows[at].padding)
        if last:
            del self._writers[at]
            stored, _ = writer.commit()  # what found no room is tried again at the call's end
            self._counters.add(stored_pages=stored)

    def _drop(self, at: int) -> None:
        """Nothing more is taken of a prompt."""
        self._wanted.discard(at)
        writer = self._writers.pop(at, None)
        if writer is not None:
            writer.abandon()

    def _end(self) -> None:
        self._over = True
        self._pairs.clear()
        for at in range(len(self._requests)):
            self._drop(at)
