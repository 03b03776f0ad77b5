"""From what vLLM says of itself to our namespace, and to where this rank's blocks lie in pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from hicache.core.identity import Namespace
from hicache.core.layout import CANONICAL, KVGeometry
from hicache.core.partition import plan_shards
from hicache.errors import ConfigError
from hicache.runtime.modelconfig import model_and_revision
from hicache_vllm.compat import Facts
from hicache_vllm.layouts import LAYOUTS, OPAQUE, BlockShape, Layout, PageForm
from hicache_vllm.settings import Settings

__all__ = ["Identity", "block_shape", "candidates", "identify"]

LEAST_PAGE: Final = 64
"""Tokens a page, at least, where nobody says otherwise: small enough for short prefixes, large enough for objects."""

_PLAIN: Final = ("float32", "float16", "bfloat16")
_BY_BACKEND: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "CPU_ATTN": {"vec": ("cpu_attn/vec",), "vec16": ("cpu_attn/vec",), "amx": ("cpu_attn/amx",)},
    "FLASH_ATTN": {"": ("rows", "split/nhd", "split/hnd", "blocks/nhd", "blocks/hnd")},
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What names this engine's pages, and how they are put together.

    Attributes:
        namespace: everything besides tokens that decides about reuse.
        form: of this rank's part of a page.
        page_bytes: of that part.
        warnings: what works but deserves a word.
    """

    namespace: Namespace
    form: PageForm
    page_bytes: int
    warnings: tuple[str, ...]

    @property
    def canonical(self) -> bool:
        """Whether other engines understand the pages."""
        return self.namespace.geometry.format == CANONICAL

    @property
    def blocks(self) -> int:
        """Blocks a page."""
        return self.form.per_page


def candidates(facts: Facts) -> tuple[Layout, ...]:
    """The layouts that a backend may have, all of them described; none where it has to be opaque."""
    if facts.kv_heads == 0 or facts.kv_dtype not in _PLAIN or facts.row != 2 * facts.width * facts.item:
        return ()
    return tuple(LAYOUTS[name] for name in _BY_BACKEND.get(facts.backend, {}).get(facts.isa, ()))


def block_shape(facts: Facts, *, canonical: bool) -> BlockShape:
    """Blocks of this rank."""
    if canonical:
        return BlockShape(facts.local_heads, facts.block, facts.width, facts.item)
    return BlockShape(facts.local_heads, facts.block, facts.row, 1, planes=1)


def identify(facts: Facts, settings: Settings, proves: Callable[[Layout], bool]) -> Identity:
    """Name the pages of one engine, and of one of its ranks.

    Every process of the engine has to come to the same namespace, so `proves` must tell the same in all of them.

    Args:
        facts: of this process.
        settings: the user's.
        proves: whether a layout is what the backend has; asked only where this process can tell.

    Raises:
        ConfigError, GeometryError, NamespaceError: pages cannot be named safely; says what to change.
    """
    page_size = _page_size(facts, settings)
    layouts = candidates(facts)
    known = tuple(layout for layout in layouts if proves(layout))
    warnings = []
    if not known:
        why = "the backend's kernel writes otherwise" if layouts else f"{facts.backend}, {facts.kv_dtype}"
        warnings.append(f"the layout of KV blocks is not understood ({why}): pages are shared with this vLLM only")
    shape = block_shape(facts, canonical=bool(known))
    head_group = 1
    if known:
        head_group = settings.head_group or shape.heads
        geometry = KVGeometry.mha(
            facts.layers,
            kv_heads=facts.kv_heads,
            head_dim=facts.width,
            dtype=facts.kv_dtype,
            head_group=head_group,
            layer_partition=settings.layer_partition,
        )
    else:
        geometry = _opaque(facts, settings, page_size)
    plan = plan_shards(
        geometry,
        page_size,
        tp_rank=facts.tp_rank,
        tp_size=facts.tp,
        pp_layers=_own_layers(facts) if facts.stages else None,
    )
    first, end = _own_layers(facts)
    halves = known[0].halves if known else OPAQUE.halves
    form = PageForm(shape, end - first, head_group, page_size // facts.block, halves)
    if form.page_bytes != plan.page_bytes:
        raise ConfigError(
            f"a page of this rank has {form.page_bytes} bytes in vLLM and {plan.page_bytes} by the model's heads and "
            "layers: not understood"
        )
    model, revision, told = _model(facts, settings)
    namespace = Namespace(
        model,
        revision=revision,
        geometry=geometry,
        page_size=page_size,
        hash="sha256",
        rope=_settings(facts),
        scales=settings.scales_digest,
        numerics=settings.numerics or _numerics(facts),
    )
    return Identity(namespace, form, plan.page_bytes, (*warnings, *told, *plan.warnings))


def _page_size(facts: Facts, settings: Settings) -> int:
    block = facts.block
    if settings.page_size is None:
        return -(-LEAST_PAGE // block) * block
    if settings.page_size % block:
        fits = max(1, round(settings.page_size / block)) * block
        raise ConfigError(
            f"page_size={settings.page_size} is no multiple of vLLM's block size {block}: use {fits}, or leave it out"
        )
    return settings.page_size


def _own_layers(facts: Facts) -> tuple[int, int]:
    if not facts.stages:
        return 0, facts.layers
    ends = (*facts.stages[1:], facts.layers)
    return facts.stages[facts.pp_rank], ends[facts.pp_rank]


def _opaque(facts: Facts, settings: Settings, page_size: int) -> KVGeometry:
    version = "-".join(part for part in (facts.version, facts.isa) if part)
    return KVGeometry.opaque(
        engine="vllm",
        backend=facts.backend,
        version=version or "unknown",
        shape=f"{facts.block}x{facts.width}-{facts.kv_dtype}",
        cell_bytes=page_size * facts.row,
        layers=facts.layers,
        head_groups=facts.kv_heads or None,
        layer_partition=settings.layer_partition,
    )


def _model(facts: Facts, settings: Settings) -> tuple[str, str | None, list[str]]:
    _, revision, told = model_and_revision(facts.folder or facts.model, settings.revision or facts.revision)
    return settings.model or facts.model, revision, told


def _settings(facts: Facts) -> dict[str, Any] | None:
    """What decides about pages besides the weights: as other engines spell it, and changes that only vLLM knows."""
    overrides = {"hf_overrides": facts.overrides} if facts.overrides else {}
    return {**(facts.positions or {}), **overrides} or None


def _numerics(facts: Facts) -> str:
    """`vllm/attention backend/kv dtype`, and whatever else changes what these kernels write."""
    parts = ["vllm", facts.backend, facts.kv_dtype]
    if facts.dtype != facts.kv_dtype:
        parts.append(f"dtype={facts.dtype}")
    if facts.quantization:
        parts.append(f"quantization={facts.quantization}")
    return "/".join(parts)


def tensor_layout(tensor: Any, facts: Facts, identity: Identity, proves: Callable[[Layout], bool]) -> Layout:
    """The description of a layer's tensor, by its shape and by what the backend's kernel writes.

    Raises:
        ConfigError: none fits.
    """
    if not identity.canonical:
        return OPAQUE
    reasons = []
    for layout in candidates(facts):
        try:
            layout.planes(tensor, identity.form.shape)
        except ConfigError as error:
            reasons.append(str(error))
            continue
        if proves(layout):
            return layout
        reasons.append(f"layout {layout.name}: the backend's kernel writes otherwise")
    raise ConfigError("; ".join(reasons))
