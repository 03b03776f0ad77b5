"""The arithmetic: bytes of a token, a page, a request and many of them, on one rank and on all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hicache.analytics.plan.shapes import FULL, LATENT, RECURRENT, WINDOW, Layer, ModelShape, bits_of
from hicache.errors import ConfigError

MOST_RANKS = 65_536
MOST_TOKENS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model's state is kept.

    Attributes:
        dtype: of keys and values; None is the model's own.
        state_dtype: of recurrent state; None is the model's own.
        scale_bytes: of quantisation scales, for each token, head and row (key or value), or each latent row.
        row_bytes: of one row of a token and head, where rows are packed; None computes it.
        page_size: tokens a page.
        tp, pp, cp: ranks that share heads, layers and tokens.

    Raises:
        ConfigError: a value that cannot be.
    """

    dtype: str | None = None
    state_dtype: str | None = None
    scale_bytes: int = 0
    row_bytes: int | None = None
    page_size: int = 16
    tp: int = 1
    pp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp"):
            if not 1 <= getattr(self, name) <= MOST_RANKS:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be 1 to {MOST_RANKS}")


@dataclass(frozen=True, slots=True)
class Part:
    """The layers of one kind on one rank.

    Attributes:
        layer: one of them.
        layers: how many.
        token_bytes: of one token in all of them; 0 for recurrent ones.
        state_bytes: of one request in all of them; 0 for others.
    """

    layer: Layer
    layers: int
    token_bytes: int
    state_bytes: int


class Footprint:
    """What a model's state takes in a layout. Immutable.

    Attributes:
        model: its shape.
        layout: how it is kept.
        parts: of the whole model, each thing counted once.
        stages: of each pipeline stage, what one rank has, copies of heads and latents included.
        largest: of those, the one with the most bytes a token.
    """

    def __init__(self, model: ModelShape, layout: Layout) -> None:
        """Compute.

        Raises:
            ConfigError: the model cannot be shared out so.
        """
        self.model = model
        self.layout = layout
        if layout.pp > len(model.layers):
            raise ConfigError(f"--pp {layout.pp}: the model has {len(model.layers)} layers; use at most as many stages")
        self._bits = bits_of(layout.dtype or model.dtype, "--dtype")
        self._state_bits = bits_of(layout.state_dtype or model.dtype, "--state-dtype")
        self.parts = self._parts(model.layers, tp=1)
        self.stages = [self._parts(layers, tp=layout.tp) for layers in self._stages()]
        self.largest = max(self.stages, key=lambda parts: (_token_bytes(parts), _state_bytes(parts)))

    # ---- of one token and page

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the whole model, each thing counted once; windows are counted as if they had no end."""
        return _token_bytes(self.parts)

    @property
    def rank_token_bytes(self) -> int:
        """The same on the rank that has the most, without sharing out tokens."""
        return _token_bytes(self.largest)

    @property
    def group_token_bytes(self) -> int:
        """The same on all ranks together: what is kept more than once counts so often."""
        return sum(_token_bytes(parts) for parts in self.stages) * self.layout.tp

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in the whole model, each thing counted once: what hicache keeps of it."""
        return self.token_bytes * self.layout.page_size

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's recurrent state in the whole model."""
        return _state_bytes(self.parts)

    # ---- of requests

    def pages(self, tokens: int) -> int:
        """Pages of a request, the last one begun included."""
        return -(-tokens // self.layout.page_size)

    def tail_bytes(self, tokens: int) -> int:
        """Bytes of the last page, in the whole model, that no token uses."""
        return (self.pages(tokens) * self.layout.page_size - tokens) * self.token_bytes

    def request_bytes(self, tokens: int) -> int:
        """One request in the whole model, each thing counted once."""
        return self._requests(self.parts, tokens, count=1, shared=0, cp=1)

    def bytes_of(self, count: int, tokens: int, *, shared: int = 0) -> int:
        """Many requests of equal length in the whole model, which begin with the same `shared` tokens."""
        return self._requests(self.parts, tokens, count=count, shared=shared, cp=1)

    def rank_bytes(self, count: int, tokens: int, *, shared: int = 0) -> int:
        """The same on the rank that has the most."""
        stages = (self._requests(parts, tokens, count=count, shared=shared, cp=self.layout.cp) for parts in self.stages)
        return max(stages)

    def most_requests(self, budget: int, tokens: int, *, shared: int = 0) -> int:
        """How many requests fit where each rank has so many bytes for them; 0 where not even one does."""
        none = self.rank_bytes(1, tokens, shared=shared)
        if budget < none:
            return 0
        found = 1
        while self.rank_bytes(2 * found, tokens, shared=shared) <= budget:
            found *= 2
            if found > MOST_TOKENS:  # what takes no memory has no bound
                return found
        step = found
        while step := step // 2:
            if self.rank_bytes(found + step, tokens, shared=shared) <= budget:
                found += step
        return found

    def window_pages(self, layer: Layer) -> int:
        """Pages that a sliding window of any place touches."""
        return -(-(layer.window - 1) // self.layout.page_size) + 1

    def _requests(self, parts: list[Part], tokens: int, *, count: int, shared: int, cp: int) -> int:
        page, pages = self.layout.page_size, self.pages(tokens)
        whole = min(shared, tokens) // page  # a page that others go on in is their own
        total = 0
        for part in parts:
            kept = pages if part.layer.kind != WINDOW else min(pages, self.window_pages(part.layer))
            common = max(0, whole - (pages - kept)) if count > 1 else 0
            held = -(-common // cp) + count * -(-(kept - common) // cp)
            total += held * page * part.token_bytes + count * part.state_bytes
        return total

    # ---- of layers

    def _stages(self) -> list[tuple[Layer, ...]]:
        """Layers in order, the first stages one more where they do not divide."""
        layers, pp = self.model.layers, self.layout.pp
        size, more = divmod(len(layers), pp)
        starts = [stage * size + min(stage, more) for stage in range(pp + 1)]
        return [layers[start:end] for start, end in pairwise(starts)]

    def _parts(self, layers: tuple[Layer, ...], *, tp: int) -> list[Part]:
        counts: dict[Layer, int] = {}
        for layer in layers:
            counts[layer] = counts.get(layer, 0) + 1
        return [
            Part(layer, count, count * self._layer_bytes(layer, tp), count * self._layer_state(layer, tp))
            for layer, count in counts.items()
        ]

    def _layer_bytes(self, layer: Layer, tp: int) -> int:
        if not layer.per_token:
            return 0
        rows = [dim for dim in (layer.key_dim, layer.value_dim) if dim]
        row_bytes = self.layout.row_bytes
        size = sum(-(-dim * self._bits // 8) if row_bytes is None else row_bytes for dim in rows)
        size += len(rows) * self.layout.scale_bytes
        return size if layer.kind == LATENT else self.heads(layer, tp) * size

    def heads(self, layer: Layer, tp: int) -> int:
        """Key-value heads of a layer on one rank; fewer heads than ranks are kept more than once.

        Raises:
            ConfigError: they cannot be shared out evenly.
        """
        heads = layer.kv_heads
        if heads % tp and tp % heads:
            raise ConfigError(
                f"--tp {tp}: {heads} kv heads cannot be shared out over it evenly, nor kept equally often: "
                f"use a divisor or a multiple of {heads}"
            )
        return max(1, heads // tp)

    def _layer_state(self, layer: Layer, tp: int) -> int:
        if layer.kind != RECURRENT:
            return 0
        return -(-(layer.conv_elements + layer.state_elements) // tp * self._state_bits // 8)


def copies(layer: Layer, tp: int) -> int:
    """How many ranks of a tensor-parallel group keep the same."""
    if layer.kind == LATENT:
        return tp
    return max(1, tp // layer.kv_heads) if layer.kind in (FULL, WINDOW) else 1


def _token_bytes(parts: list[Part]) -> int:
    return sum(part.token_bytes for part in parts)


def _state_bytes(parts: list[Part]) -> int:
    return sum(part.state_bytes for part in parts)
