"""From SGLang's host pool and configuration to our namespace and the shards of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from msgspec.structs import replace

from hicache.core.identity import Namespace
from hicache.core.layout import KVGeometry
from hicache.core.partition import ShardPlan, plan_shards
from hicache.errors import ConfigError
from hicache.runtime.modelconfig import model_and_revision
from hicache_sglang.adapters import adapters_digest
from hicache_sglang.pool import PoolShape
from hicache_sglang.settings import Settings, scales_digest

__all__ = ["Identity", "identify"]

_FP8: Final = {
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float8_e5m2": "float8_e5m2",
}
_RECAST: Final = ("quantization", "torchao_config", "modelopt_quant", "rl_quant_profile")
_PLAIN: Final = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, slots=True)
class Identity:
    """What names this rank's pages.

    Attributes:
        namespace: everything besides tokens that decides about reuse.
        plan: the shards that this rank holds, and where they lie in a canonical page of it.
        head_group: kv heads a shard; 1 for MLA.
        warnings: what works but deserves a word.
    """

    namespace: Namespace
    plan: ShardPlan
    head_group: int
    warnings: tuple[str, ...]


def identify(
    config: Any, shape: PoolShape, settings: Settings, facts: Mapping[str, Any], *, pool: str | None = None
) -> Identity:
    """Name the pages of one rank.

    Args:
        config: SGLang's `HiCacheStorageConfig`.
        shape: the host pool.
        settings: the user's.
        facts: what is known of the engine's own arguments, by their names; may be empty.
        pool: SGLang's name of a pool beside the KV cache; None for the KV cache itself.

    Raises:
        ConfigError, GeometryError, NamespaceError: pages cannot be named safely; says what to change.
    """
    if int(getattr(config, "attn_cp_size", 1) or 1) > 1 or int(getattr(config, "dcp_size", 1) or 1) > 1:
        raise ConfigError("context parallelism splits pages over ranks: switch it off, or use no storage")
    if pool is not None:  # what users say of heads and layers is about the KV cache
        settings = replace(settings, kv_heads=None, head_group=None, layers=None, layer_partition=None)
    elif bool(config.is_mla_model) != (shape.kind == "mla"):
        raise ConfigError(
            f"SGLang says is_mla_model={config.is_mla_model}, its host pool is {shape.kind}: not understood"
        )
    dtype = _dtype(shape, settings, facts)
    rank = tp_rank, tp_size = (0, 1) if shape.kind == "mla" else (int(config.tp_rank), int(config.tp_size))
    if settings.address:  # a service would wait for all ranks, which know nothing of each other: each is a model
        rank = (0, 1)
    geometry, head_group = _geometry(shape, settings, dtype, rank[1])
    stage = (shape.first_layer, shape.first_layer + shape.layers)
    plan = plan_shards(geometry, shape.page_size, tp_rank=rank[0], tp_size=rank[1], pp_layers=stage)
    if plan.page_bytes != shape.page_bytes:
        raise ConfigError(
            f"a page of the host pool has {shape.page_bytes} bytes, by kv_heads and layers it had {plan.page_bytes}: "
            "correct kv_heads or layers, or leave them out"
        )
    model, revision, warnings = _model(config, settings, facts)
    numerics = settings.numerics or _numerics(shape, dtype, facts)
    if rank != (tp_rank, tp_size):
        numerics += f"/rank={tp_rank}of{tp_size}"
    if pool is not None:
        numerics += _of_pool(pool, config, facts)
    namespace = Namespace(
        model,
        revision=revision,
        geometry=geometry,
        page_size=shape.page_size,
        hash="sha256",
        rope=_overrides(facts),
        scales=_scales(settings, facts),
        numerics=numerics,
    )
    return Identity(namespace, plan, head_group, (*warnings, *plan.warnings))


def _of_pool(pool: str, config: Any, facts: Mapping[str, Any]) -> str:
    """What tells a further pool's pages apart: its layers are counted by itself, not by the model."""
    parts = [f"/pool={pool}"]
    if int(config.pp_size) > 1:
        parts.append(f"stage={config.pp_rank}of{config.pp_size}")
    if pool.startswith("draft"):
        parts.append(f"draft={facts.get('speculative_draft_model_path') or 'any'}")
    return "/".join(parts)


def _dtype(shape: PoolShape, settings: Settings, facts: Mapping[str, Any]) -> str:
    """The elements' logical type. FP8 pools keep plain bytes, and two kinds of FP8 must never look alike."""
    if shape.dtype in _PLAIN:
        return shape.dtype
    given = settings.kv_dtype or facts.get("kv_cache_dtype")
    if shape.dtype == "uint8" and given in _FP8:
        return _FP8[given]
    raise ConfigError(
        f'the host pool keeps {shape.dtype} and SGLang says kv cache dtype {given!r}: add "kv_dtype": "fp8_e4m3" '
        'or "fp8_e5m2", whichever it is'
    )


def _geometry(shape: PoolShape, settings: Settings, dtype: str, tp_size: int) -> tuple[KVGeometry, int]:
    # Draft layers belong to the engine's own arrangement, so a whole-model count holds only without them.
    end = shape.first_layer + shape.layers
    whole = settings.layers is not None and not shape.draft_layers
    layers = (0, settings.layers) if whole and settings.layers is not None else (shape.first_layer, end)
    if shape.kind == "mla":
        return (
            KVGeometry.mla(
                layers,
                latent_dim=shape.latent,
                rope_dim=shape.rope,
                dtype=dtype,
                layer_partition=settings.layer_partition,
                row_bytes=shape.row_bytes,
            ),
            1,
        )
    head_group = settings.head_group or shape.heads
    geometry = KVGeometry.mha(
        layers,
        kv_heads=settings.kv_heads or shape.heads * tp_size,
        head_dim=shape.row,
        dtype=dtype,
        head_group=head_group,
        layer_partition=settings.layer_partition,
    )
    return geometry, head_group


def _model(config: Any, settings: Settings, facts: Mapping[str, Any]) -> tuple[str, str | None, list[str]]:
    # What SGLang passes may be a served name; a suffix says how its pool lays out pages.
    model = settings.model or config.model_name or facts.get("model_path")
    if not model:
        raise ConfigError('the model has no name: add "model": "org/name" to the extra config')
    loaded = SimpleNamespace(name_or_path=facts.get("model_path"))  # that folder's weights, whatever the name
    _, revision, told = model_and_revision(model, settings.revision or facts.get("revision"), loaded)
    return model, revision, told


def _overrides(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """What no revision tells: changes of the model's configuration and weights while it is loaded, and its adapters."""
    given, adapters = facts.get("json_model_override_args"), adapters_digest(facts.get("lora_paths"))
    found = {"json_model_override_args": str(given)} if given and str(given).strip() != "{}" else {}
    found |= {name: str(facts[name]) for name in _RECAST if facts.get(name)}
    found |= {"load_format": "dummy"} if facts.get("load_format") == "dummy" else {}  # weights that are made up
    return found | ({"adapters": adapters} if adapters else {}) or None


def _scales(settings: Settings, facts: Mapping[str, Any]) -> bytes | None:
    """Digest of static scales: the user's, or of the file that SGLang reads them from."""
    path = facts.get("quantization_param_path")
    if settings.scales is not None or not path:
        return scales_digest(settings)
    try:
        return sha256(Path(str(path)).read_bytes()).digest()
    except OSError as error:
        raise ConfigError(
            f"the KV scales of --quantization-param-path cannot be read ({error}): give their digest by "
            '"scales" in the extra config'
        ) from error


def _numerics(shape: PoolShape, dtype: str, facts: Mapping[str, Any]) -> str:
    """`sglang/attention backend/kv dtype`, and whatever else changes what these kernels write."""
    parts = ["sglang", str(facts.get("attention_backend") or "any"), dtype]
    for name in ("dtype", "quantization"):
        value = facts.get(name)
        if value and value != "auto":
            parts.append(f"{name}={value}")
    if shape.draft_layers:
        parts.append(f"draft={shape.draft_layers}:{facts.get('speculative_draft_model_path') or 'any'}")
    return "/".join(parts)
