"""From a model and a wish to the numbers of `hicache plan`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from hicache.analytics.plan.footprint import MOST_TOKENS, Footprint, Layout
from hicache.analytics.plan.shapes import ModelShape
from hicache.errors import ConfigError

DEFINITIONS: Final = {
    "token_bytes": "bytes of one token in the whole model, each key and value counted once; sliding windows as if they "
    "had no end",
    "rank_token_bytes": "the same on the rank that has the most, copies of heads and latents included, before context "
    "parallelism shares out tokens",
    "group_token_bytes": "the same on all ranks of tensor and pipeline parallelism together",
    "page_bytes": "token_bytes * page_size: what hicache keeps of a page, each key and value once",
    "request_bytes": "one request of `tokens`: whole pages, windows as far as they reach, recurrent state",
    "tail_bytes": "of those, the part of the last page that no token uses",
    "all_bytes": "all requests without sharing",
    "all_bytes_shared": "all requests, the whole pages of what they share kept once",
    "rank_bytes_shared": "the same on the rank that has the most",
    "kv_budget_bytes": "gpu_memory * memory_share - weights on a rank - overhead",
    "most_requests": "requests of `tokens` that fit into kv_budget_bytes on every rank",
    "tiers": "what a host or storage tier of a size holds of pages that are kept once",
}

OVERHEAD: Final = 2 * 2**30
"""Of activations, graphs and the runtime on each GPU, where nothing else is known. An assumption: measure yours."""
MEMORY_SHARE: Final = 0.9
"""Of a GPU's memory that an engine may take: the customary setting of serving engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for.

    Attributes:
        tokens: of a request, prompt and answer.
        requests: at the same time.
        shared: tokens that all begin with.
        gpu_memory: bytes of each GPU, or None.
        memory_share: of it that may be used.
        weights: bytes of all weights; None takes the model's own, where it is known.
        overhead: bytes on each GPU for all else.
        tiers: bytes of tiers by name.

    Raises:
        ConfigError: a value that cannot be.
    """

    tokens: int = 8192
    requests: int = 1
    shared: int = 0
    gpu_memory: int | None = None
    memory_share: float = MEMORY_SHARE
    weights: int | None = None
    overhead: int = OVERHEAD
    tiers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("requests", 1), ("shared", 0)):
            if not least <= getattr(self, name) <= MOST_TOKENS:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be {least} to {MOST_TOKENS}")
        if self.shared > self.tokens:
            raise ConfigError(f"--shared {self.shared}: is above --tokens {self.tokens}; it is a part of them")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"--memory-share {self.memory_share}: must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class TierFit:
    """What a tier holds: pages, their tokens, and requests that share nothing."""

    tier: str
    bytes: int
    pages: int
    tokens: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFit:
    """What a GPU has room for; see `DEFINITIONS`."""

    gpu_memory: int
    weights_bytes: int
    weights_on_a_rank: int
    overhead: int
    kv_budget_bytes: int
    most_tokens: int
    most_requests: int
    most_requests_shared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All numbers; see `DEFINITIONS`.

    Attributes:
        footprint: the arithmetic behind them.
        wish: what was asked for.
        gpu: None where no GPU was given.
    """

    footprint: Footprint
    wish: Wish
    request_bytes: int
    tail_bytes: int
    all_bytes: int
    all_bytes_shared: int
    rank_bytes_shared: int
    tiers: tuple[TierFit, ...]
    gpu: GpuFit | None

    def document(self) -> dict[str, Any]:
        """Ready for JSON."""
        found, model, layout = self.footprint, self.footprint.model, self.footprint.layout
        return {
            "model": {
                "name": model.name,
                "source": model.source,
                "layers": [
                    {"kind": layer.kind, "count": count, "keeps": layer.describe()} for layer, count in model.kinds()
                ],
                "dtype": model.dtype,
                "parameters": model.parameters,
                "weight_bytes": model.weight_bytes,
            },
            "layout": asdict(layout) | {"dtype": layout.dtype or model.dtype},
            "wish": asdict(self.wish),
            "token_bytes": found.token_bytes,
            "rank_token_bytes": found.rank_token_bytes,
            "group_token_bytes": found.group_token_bytes,
            "page_bytes": found.page_bytes,
            "state_bytes": found.state_bytes,
            "request_bytes": self.request_bytes,
            "tail_bytes": self.tail_bytes,
            "all_bytes": self.all_bytes,
            "all_bytes_shared": self.all_bytes_shared,
            "rank_bytes_shared": self.rank_bytes_shared,
            "tiers": [asdict(tier) for tier in self.tiers],
            "gpu": None if self.gpu is None else asdict(self.gpu),
            "definitions": DEFINITIONS,
        }


def plan(model: ModelShape, layout: Layout, wish: Wish) -> Plan:
    """Compute.

    Raises:
        ConfigError: what cannot be, or is not known.
    """
    found = Footprint(model, layout)
    tokens = wish.tokens
    return Plan(
        footprint=found,
        wish=wish,
        request_bytes=found.request_bytes(tokens),
        tail_bytes=found.tail_bytes(tokens),
        all_bytes=found.bytes_of(wish.requests, tokens),
        all_bytes_shared=found.bytes_of(wish.requests, tokens, shared=wish.shared),
        rank_bytes_shared=found.rank_bytes(wish.requests, tokens, shared=wish.shared),
        tiers=tuple(_tier(found, name, size, tokens) for name, size in wish.tiers.items()),
        gpu=None if wish.gpu_memory is None else _gpu(found, wish, wish.gpu_memory),
    )


def _tier(found: Footprint, name: str, size: int, tokens: int) -> TierFit:
    page = found.page_bytes
    pages = size // page if page else 0
    request = found.request_bytes(tokens)
    return TierFit(name, size, pages, pages * found.layout.page_size, size // request if request else 0)


def _gpu(found: Footprint, wish: Wish, memory: int) -> GpuFit:
    weights = found.model.weight_bytes if wish.weights is None else wish.weights
    if not weights and wish.weights is None:
        raise ConfigError("--gpu-memory: the weights' size is not known for this model; give it by --weights, as 15GiB")
    layout = found.layout
    on_rank = -(-weights // (layout.tp * layout.pp))
    budget = int(memory * wish.memory_share) - on_rank - wish.overhead
    token = found.rank_token_bytes
    return GpuFit(
        gpu_memory=memory,
        weights_bytes=weights,
        weights_on_a_rank=on_rank,
        overhead=wish.overhead,
        kv_budget_bytes=budget,
        most_tokens=max(0, budget) // token * layout.cp if token else 0,
        most_requests=found.most_requests(budget, wish.tokens),
        most_requests_shared=found.most_requests(budget, wish.tokens, shared=wish.shared),
    )
