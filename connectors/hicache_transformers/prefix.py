"""One call's prompts: what the cache has of them becomes the model's cache, what the model computed becomes pages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch

from hicache_transformers.batch import Batch, Engine
from hicache_transformers.model import layers_of, new_state
from hicache_transformers.pending import put_pending, watch_layer
from hicache_transformers.rows import Row, columns_to_fill, generated_tokens
from hicache_transformers.sources import PageRequest, Separation
from hicache_transformers.storing import LayeredRequest, LayerStores, is_compiled
from hicache_transformers.tiers import Computed, LayeredSpan, PageSpan

__all__ = ["Engine", "PagesLost", "Prefix", "begin"]


class PagesLost(Exception):  # noqa: N818  no error of the caller's: the call is generated without the cache
    """A layer that the model has asked for did not come."""


class Prefix:
    """The prompts of one call. A context manager; for one thread at a time. Made by `PrefixCache.prefix`.

    Leaving it stores the prompts' pages, unless an exception leaves it or `commit` was called before.

    Attributes:
        past_key_values: a `DynamicCache` with what need not be computed, for `generate` or `forward`, which fill it
            up; None where the call goes past the cache.
        cached_tokens: for each prompt, how many of its tokens came from the cache.
    """

    def __init__(self, state: Any = None, cached: Sequence[int] = (), *, batch: Batch | None = None) -> None:
        self.past_key_values = state
        self.cached_tokens = tuple(cached)
        self._batch = batch

    def commit(self, sequences: Any = None, *, pad_token: int | None = None) -> None:
        """Store what the model has computed. Never raises for the cache's sake; works once.

        Args:
            sequences: what `generate` returned, `(batch, columns)`: prompts and what follows. Without it only the
                prompts are stored.
            pad_token: what stands behind sequences that ended before others.
        """
        batch, self._batch = self._batch, None
        if batch is None:
            return
        try:
            layers = _computed(batch, self.past_key_values)
            for at, row in enumerate(batch.rows if layers else ()):
                try:
                    sequence = None if sequences is None else sequences[at * batch.repeats]
                    following = _following(batch, row, sequence, layers, pad_token)
                    if following is None:
                        batch.engine.counters.bypass("state", "what came back is not what was asked: it is not stored")
                        continue
                    _store(batch, at, layers, following)
                except Exception as error:
                    batch.engine.counters.failed("storing pages", error)
        finally:  # also where somebody breaks it off
            batch.close(aborted=False)

    def close(self, *, aborted: bool = False) -> None:
        """Let go of everything; what was not committed is not stored. Idempotent.

        Args:
            aborted: the call ended without success; it is counted as such.
        """
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.close(aborted=aborted)

    def __enter__(self) -> Prefix:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        self.close(aborted=kind is not None)


def begin(
    engine: Engine,
    rows: Sequence[Row],
    whose: Separation,
    *,
    repeats: int = 1,
    deadline: float | None = None,
    layered: bool = False,
    early: bool = False,
) -> Prefix:
    """Look the prompts of a call up and put what there is into a new cache for the model.

    Args:
        engine: of the call.
        rows: its prompts.
        whose: separates them from others.
        repeats: rows that the model's cache shall have for each prompt.
        deadline: seconds for all prompts' pages to come.
        layered: whether layers may be put together when the model wants them, which may raise then.
        early: whether what the model computes of the prompts is theirs for sure, so that it is stored at once.

    Raises:
        HicacheError: the cache failed; nothing is held then.
    """
    if is_compiled(engine.model):  # what is traced may neither wait for a layer nor tell of it
        layered = early = False
    requests: list[PageRequest] = []
    batch = Batch(engine, rows, requests, repeats)
    try:
        for row in rows:  # one by one: what has begun is let go of where the next fails
            requests.append(engine.source.begin(row.tokens, whose, deadline=deadline))  # noqa: PERF401
        for request in requests:  # all were begun before, so that the call waits for one deadline and not for each
            request.load(layered=layered)
        hits = [request.usable * engine.pages.tokens for request in requests]
        fill = columns_to_fill(rows, hits, batch.columns)
        state = _state(batch, fill, layered=layered)
        if early:
            _watch(batch, state)
    except BaseException:
        with suppress(Exception):
            batch.close(aborted=True)
        raise
    cached = [max(0, min(row.padding + hit, fill) - row.padding) for row, hit in zip(rows, hits, strict=True)]
    prompt_tokens = sum(len(row.tokens) for row in rows)
    batch.reused = sum(cached)
    engine.counters.add(prompts=len(rows), prompt_tokens=prompt_tokens, reused_tokens=batch.reused)
    return Prefix(state, cached, batch=batch)


def _state(batch: Batch, fill: int, *, layered: bool) -> Any:
    """A cache for the model whose first columns are filled."""
    engine = batch.engine
    state = new_state(engine.model)
    if fill:
        span = engine.source.span(batch=len(batch.rows), tokens=fill)
        for at, (row, request) in enumerate(zip(batch.rows, batch.requests, strict=True)):
            pages = request.pages()
            span.put_pages(at, pages, start=row.padding)
            if row.padding + len(pages) * engine.pages.tokens < fill:
                _compute(engine, span, at, row, pages)
        if layered and isinstance(span, LayeredSpan):
            _put_pending(batch, state, span)
            return state
        _put(engine, state, span)
        if batch.repeats > 1:
            state.batch_repeat_interleave(batch.repeats)
    if not layered:
        batch.arrived()
    return state


def _compute(engine: Engine, span: PageSpan, at: int, row: Row, pages: Any) -> None:
    """Bring a row up to the columns that other rows have, by a forward pass of its own behind its pages."""
    hit, wanted = len(pages) * engine.pages.tokens, span.tokens - row.padding
    state = new_state(engine.model)
    if hit:
        before = engine.source.span(batch=1, tokens=hit)
        before.put_pages(0, pages, start=0)
        _put(engine, state, before)
    ids = torch.from_numpy(row.tokens[hit:wanted].astype(np.int64))[None].to(engine.model.device)
    with torch.no_grad():
        engine.model(input_ids=ids, past_key_values=state, use_cache=True)
    span.put_layers(layers_of(state), row=at, source=0, first=hit, start=row.padding + hit)


def _put(engine: Engine, state: Any, span: PageSpan) -> None:
    for layer, (keys, values) in enumerate(span.layers(engine.shape.devices)):
        state.update(keys, values, layer)


def _put_pending(batch: Batch, state: Any, span: LayeredSpan) -> None:
    shape, repeats = batch.engine.shape, batch.repeats
    left = set(range(shape.layers))

    def fill(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if batch.ended:
            raise PagesLost
        try:
            keys, values = span.layer(layer)
            left.discard(layer)
            if not left:
                batch.arrived()
        except Exception as error:
            batch.engine.counters.failed("loading pages", error)
            batch.engine.counters.add(reused_tokens=-batch.reused)
            batch.reused, batch.ended = 0, True
            raise PagesLost from error
        return (
            (keys, values)
            if repeats == 1
            else (keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0))
        )

    for layer, device in enumerate(shape.devices):
        put_pending(state, layer, partial(fill, layer), tokens=span.tokens, dtype=shape.dtype, device=device)


def _watch(batch: Batch, state: Any) -> None:
    """Let the prompts be stored layer by layer, where the cache can."""
    requests = [request for request in batch.requests if isinstance(request, LayeredRequest)]
    if len(requests) < len(batch.requests):
        return
    engine = batch.engine
    stores = LayerStores(batch.rows, requests, repeats=batch.repeats, shape=engine.shape, counters=engine.counters)
    for layer in range(engine.shape.layers):
        watch_layer(state, layer, partial(stores.came, layer))


def _computed(batch: Batch, state: Any) -> list[tuple[Any, Any]]:
    """Each layer's keys and values if they are those of the whole prompts; beams, for one, make other rows of them."""
    shape = batch.engine.shape
    if state.get_seq_length() < batch.columns:
        return []  # the prompts were not run to their end; what came from the cache need not be put together for that
    layers = layers_of(state)
    if not layers:
        return []
    tokens = int(layers[0][0].shape[2])
    wanted = (len(batch.rows) * batch.repeats, shape.kv_heads, tokens, shape.head_dim)
    if len(layers) == shape.layers and all(
        tuple(tensor.shape) == wanted and tensor.dtype == shape.dtype and tensor.device == device
        for pair, device in zip(layers, shape.devices, strict=True)
        for tensor in pair
    ):
        return layers
    batch.engine.counters.bypass("state", "the model's cache came back in another shape: nothing of it is stored")
    return []


def _following(batch: Batch, row: Row, sequence: Any, layers: Sequence[tuple[Any, Any]], pad_token: int | None) -> Any:
    """Generated tokens that have keys and values: the last one has none yet. None where they may be those of others."""
    if sequence is None:
        return np.empty(0, np.uint32)
    found = generated_tokens(row, sequence, batch.columns, pad_token=pad_token)
    return None if found is None else found[: int(layers[0][0].shape[2]) - batch.columns]


def _store(batch: Batch, at: int, layers: Sequence[tuple[Any, Any]], following: Any) -> None:
    engine, row = batch.engine, batch.rows[at]
    computed = Computed(layers, at * batch.repeats, row.padding)
    stored, dropped = batch.requests[at].store(following, computed)
    engine.counters.add(stored_pages=stored, dropped_pages=dropped)
    batch.requests[at].close()  # its slots can serve the next row
