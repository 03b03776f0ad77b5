"""The formulas of a plan with its numbers in them, and where they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from hicache.analytics.plan.footprint import Part, copies
from hicache.analytics.plan.report import Plan
from hicache.analytics.plan.shapes import FULL, LATENT, NONE, RECURRENT, WINDOW, bits_of

SOURCES: Final = {
    FULL: "Vaswani et al. 2017, arXiv:1706.03762; fewer kv heads: Shazeer 2019, arXiv:1911.02150 (MQA), "
    "Ainslie et al. 2023, arXiv:2305.13245 (GQA)",
    LATENT: "DeepSeek-V2, arXiv:2405.04434: a compressed latent and one decoupled rotary key a token",
    WINDOW: "Beltagy et al. 2020, arXiv:2004.05150; Mistral 7B, arXiv:2310.06825",
    RECURRENT: "Gu and Dao 2023, arXiv:2312.00752 (Mamba); Dao and Gu 2024, arXiv:2405.21060 (Mamba-2); "
    "Yang et al. 2024, arXiv:2412.06464 (gated delta rule)",
}
PAGING: Final = "Kwon et al. 2023, arXiv:2309.06180 (paged attention)"
SHARING: Final = "Zheng et al. 2023, arXiv:2312.07104 (prefixes in a radix tree)"
PARALLEL: Final = "Shoeybi et al. 2019, arXiv:1909.08053 (heads over tensor-parallel ranks)"


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the arithmetic: what, the formula, the same with numbers, and its source."""

    what: str
    formula: str
    numbers: str
    source: str


def steps(plan: Plan) -> Iterator[Step]:
    """The arithmetic of a plan, in order."""
    found, wish, layout = plan.footprint, plan.wish, plan.footprint.layout
    for part in found.parts:
        if part.layer.kind != NONE:
            yield _part(plan, part)
    yield Step(
        "one token",
        "sum over kinds of layers",
        f"{' + '.join(str(part.token_bytes) for part in found.parts)} = {found.token_bytes:,} B",
        f"model: {found.model.source}",
    )
    if layout.tp * layout.pp > 1:
        yield from _ranks(plan)
    pages = found.pages(wish.tokens)
    yield Step(
        "pages of a request",
        "ceil(tokens / page_size)",
        f"ceil({wish.tokens:,} / {layout.page_size}) = {pages:,}, of which {plan.tail_bytes:,} B are unused tail",
        PAGING,
    )
    for part in found.parts:
        if part.layer.kind == WINDOW:
            yield Step(
                "pages of a sliding window",
                "min(pages, ceil((window - 1) / page_size) + 1)",
                f"min({pages:,}, ceil({part.layer.window - 1:,} / {layout.page_size}) + 1) = "
                f"{min(pages, found.window_pages(part.layer)):,}",
                f"a window begins anywhere in a page; {PAGING}",
            )
    yield Step(
        "one request",
        "pages * page_size * bytes of a token, by kind of layer, + recurrent state",
        f"{plan.request_bytes:,} B",
        PAGING,
    )
    yield _many(plan)
    if plan.gpu is not None:
        yield from _gpu(plan)


def _part(plan: Plan, part: Part) -> Step:
    layer, layout, model = part.layer, plan.footprint.layout, plan.footprint.model
    if layer.kind == RECURRENT:
        bits = bits_of(layout.state_dtype or model.dtype, "--state-dtype")
        return Step(
            f"{part.layers} x {layer.kind}, a request",
            "layers * (state + convolution) * bits / 8",
            f"{part.layers} * ({layer.state_elements} + {layer.conv_elements}) * {bits} / 8 = {part.state_bytes:,} B",
            SOURCES[RECURRENT],
        )
    bits = bits_of(layout.dtype or model.dtype, "--dtype")
    row = f"{layer.key_dim} * {bits} / 8" if layout.row_bytes is None else f"{layout.row_bytes}"
    row = f"({row} + {layout.scale_bytes})" if layout.scale_bytes else row
    if layer.kind == LATENT:
        formula, numbers = "layers * (latent + rope) * bits / 8", f"{part.layers} * {row}"
    else:
        formula, numbers = (
            "2 * layers * kv_heads * head_dim * bits / 8",
            f"2 * {part.layers} * {layer.kv_heads} * {row}",
        )
    if layout.scale_bytes:
        formula += " + scales of each row"
    return Step(
        f"{part.layers} x {layer.kind}, a token", formula, f"{numbers} = {part.token_bytes:,} B", SOURCES[layer.kind]
    )


def _ranks(plan: Plan) -> Iterator[Step]:
    found, layout = plan.footprint, plan.footprint.layout
    for layer, _ in found.model.kinds():
        if layer.per_token:
            heads = "all" if layer.kind == LATENT else f"max(1, {layer.kv_heads} / {layout.tp}) heads"
            yield Step(
                f"{layer.kind} on a rank",
                "all of a latent" if layer.kind == LATENT else "max(1, kv_heads / tp) heads",
                f"{heads}, kept by {copies(layer, layout.tp)} rank{'s' if copies(layer, layout.tp) != 1 else ''}",
                PARALLEL,
            )
    yield Step(
        "one token on the fullest rank",
        "the same over the layers of its stage; layers are shared out evenly, the first stages have one more",
        f"{found.rank_token_bytes:,} B; all {layout.tp * layout.pp} ranks {found.group_token_bytes:,} B",
        PARALLEL,
    )


def _many(plan: Plan) -> Step:
    wish, page = plan.wish, plan.footprint.layout.page_size
    whole = wish.shared // page
    return Step(
        f"{wish.requests:,} requests",
        "shared pages once + requests * (pages - shared pages), shared pages = floor(shared / page_size)",
        f"floor({wish.shared:,} / {page}) = {whole:,} shared pages: {plan.all_bytes_shared:,} B "
        f"instead of {plan.all_bytes:,} B",
        SHARING,
    )


def _gpu(plan: Plan) -> Iterator[Step]:
    gpu, wish, layout = plan.gpu, plan.wish, plan.footprint.layout
    assert gpu is not None
    yield Step(
        "for KV on a GPU",
        "gpu_memory * memory_share - weights / (tp * pp) - overhead",
        f"{gpu.gpu_memory:,} * {wish.memory_share:g} - {gpu.weights_bytes:,} / {layout.tp * layout.pp} - "
        f"{gpu.overhead:,} = {gpu.kv_budget_bytes:,} B",
        "memory_share and overhead are assumptions, see --help; weights are taken to be shared out evenly",
    )
    yield Step(
        "requests at once",
        "the most whose bytes on the fullest rank fit",
        f"{gpu.most_requests:,}; {gpu.most_requests_shared:,} with what they share kept once",
        "from the above",
    )
