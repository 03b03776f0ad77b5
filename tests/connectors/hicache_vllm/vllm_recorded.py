"""Modules that stand for vLLM's, made of what was recorded of its releases, and its configuration objects."""

from __future__ import annotations

import abc
import inspect
import json
from dataclasses import dataclass, field, make_dataclass
from enum import Enum, StrEnum
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

RELEASES = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
RELEASE = "0.32.0"
"""The one that stands for all where nothing is said of releases."""

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_UTILS = "vllm.distributed.kv_transfer.kv_connector.utils"
_SOURCES = "vllm.v1.metrics.cache_hit_source"
_CPU = "vllm.v1.attention.backends.cpu_attn"


@cache
def record(release: str) -> dict[str, Any]:
    """What `tests/engines/record.py` has found in a release."""
    found: dict[str, Any] = json.loads((Path(__file__).parents[2] / f"data/vllm_{release}.json").read_text())
    return found


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


@dataclass
class Stats:
    data: dict[str, Any] = field(default_factory=dict)


class PromMetrics:
    """Made as vLLM's: with classes of metrics, names and values of labels."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        self._counter_cls, self._gauge_cls = metric_types["counter"], metric_types["gauge"]
        self._labelnames = labelnames
        self.per_engine_labelvalues = per_engine_labelvalues


class Forwards:
    """Stands for vLLM's module of forward contexts: `current` is the one of the step that begins, or None."""

    current: Any = None

    @classmethod
    def begin(cls, release: str = "", *, mode: str = "NONE", computes: bool = True, parts: int = 0) -> None:
        """A step begins, by graphs of one kind, or in so many parts; or nothing is computed."""
        release = release or RELEASE
        kind = Enum("CUDAGraphMode", record(release)["graphs"])  # type: ignore[misc]
        fields = {name.rstrip("="): None for name in record(release)["forward"]}
        said = {
            "attn_metadata": {} if computes else None,
            "cudagraph_runtime_mode": kind[mode],
            "ubatch_slices": [None] * parts or None,
        }
        assert said.keys() <= fields.keys()
        cls.current = SimpleNamespace(**fields | said)

    @classmethod
    def get(cls) -> Any:
        assert cls.current is not None, "no forward context is set"
        return cls.current


def recorded_class(release: str, name: str, more: dict[str, str] | None = None) -> type:
    """A class whose methods have the recorded signatures; abstract ones are abstract, others do nothing."""
    space: dict[str, Any] = {
        method: _member(method, text) for method, text in (record(release)["classes"][name] | (more or {})).items()
    }
    if name == "KVConnectorBase_V1":
        space["__init__"] = _remember
        space["bind_connector_metadata"] = _bind
    return abc.ABCMeta(name, (), space)


def _remember(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
    self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config


def _bind(self: Any, connector_metadata: Any) -> None:
    self._connector_metadata = connector_metadata


def _member(name: str, text: str) -> Any:
    kind, _, names = text.partition(":")

    def method(*arguments: Any, **named: Any) -> None:
        return None

    method.__name__ = name
    method.__signature__ = signature_of(names.split())  # type: ignore[attr-defined]
    found: Any = abc.abstractmethod(method) if kind.startswith("abstract ") else method
    wrap = {"property": property, "classmethod": classmethod}.get(kind.removeprefix("abstract "))
    return found if wrap is None else wrap(found)


def signature_of(names: list[str]) -> inspect.Signature:
    kinds = inspect.Parameter
    parameters = []
    for name in names:
        plain = name.rstrip("=").lstrip("*").removeprefix("kw:")
        kind = kinds.POSITIONAL_OR_KEYWORD
        if name.startswith("**"):
            kind = kinds.VAR_KEYWORD
        parameters.append(kinds(plain, kind, default=None if name.endswith("=") else kinds.empty))
    return inspect.Signature(parameters)


def recorded_fields(release: str, name: str) -> type:
    """A dataclass with the recorded fields of an event."""
    return make_dataclass(
        name,
        [
            (text.rstrip("="), Any, field(default=None)) if text.endswith("=") else (text, Any)
            for text in record(release)["events"][name]
        ],
    )


def modules(more: dict[str, str] | None = None, *, kernel: Any = None, release: str = RELEASE) -> dict[str, ModuleType]:
    """What has to be in `sys.modules`.

    Args:
        more: further methods of the connector's base class, as a newer release may have them.
        kernel: stands for the CPU backend's kernel that writes keys and values.
        release: whose interface it is.
    """
    known = record(release)
    contents: dict[str, dict[str, Any]] = {
        _BASE: {
            "KVConnectorBase_V1": recorded_class(release, "KVConnectorBase_V1", more),
            "SupportsHMA": recorded_class(release, "SupportsHMA"),
            "KVConnectorMetadata": recorded_class(release, "KVConnectorMetadata"),
            "KVConnectorWorkerMetadata": recorded_class(release, "KVConnectorWorkerMetadata"),
            "KVConnectorRole": Role,
        },
        _METRICS: {"KVConnectorStats": Stats, "KVConnectorPromMetrics": PromMetrics},
        _UTILS: {"get_current_attn_backend": lambda config: SimpleNamespace(get_name=lambda: config.backend)},
        "vllm.distributed.kv_events": {name: recorded_fields(release, name) for name in known["events"]},
        "vllm.forward_context": {
            "get_forward_context": Forwards.get,
            "is_forward_context_available": lambda: Forwards.current is not None,
        },
        _CPU: {"_get_attn_isa": lambda *_: "vec"},
        "vllm.distributed.utils": {"get_pp_indices": lambda layers, rank, size: (layers // size * rank, 0)},
    }
    if known["hit_sources"] is not None:
        contents[_SOURCES] = {"CacheHitSource": StrEnum("CacheHitSource", known["hit_sources"])}
    found: dict[str, ModuleType] = {}
    for name, content in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        found[name].__dict__.update(content)
    found["vllm"].__dict__["_custom_ops"] = SimpleNamespace(cpu_attn_reshape_and_cache=kernel)
    return found


class FullAttentionSpec:
    """One layer's cache, as vLLM describes it."""

    def __init__(self, *, heads: int, width: int, block: int, dtype: torch.dtype) -> None:
        self.num_kv_heads = self.num_heads = heads
        self.head_size = self.head_size_v = width
        self.block_size = block
        self.dtype = dtype
        self.sliding_window = self.attention_chunk_size = None
        self.non_causal = False

    @property
    def unpadded_page_size_bytes(self) -> int:
        return 2 * self.num_heads * self.block_size * self.head_size * self.dtype.itemsize


class SlidingWindowSpec(FullAttentionSpec):
    """A kind that is not cached."""


def cache_config(spec: Any, *others: Any) -> SimpleNamespace:
    """A `KVCacheConfig` of one group, or more."""
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=each) for each in (spec, *others)])


def vllm_config(extra: dict[str, Any], spec: Any, *, layers: int, tp: int = 1, **changed: Any) -> SimpleNamespace:
    """A `VllmConfig`, as far as a connector reads it. `changed` replaces by dotted names with two underscores."""
    config = SimpleNamespace(
        backend="CPU_ATTN",
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=extra,
            engine_id="engine-1",
            kv_load_failure_policy="recompute",
            is_kv_producer=True,
            is_kv_consumer=True,
        ),
        model_config=SimpleNamespace(
            model="example/tiny",
            revision="1",
            dtype=spec.dtype,
            quantization=None,
            hf_overrides={},
            hf_text_config=SimpleNamespace(),
            seed=0,
            use_mla=False,
            is_multimodal_model=False,
            is_mm_prefix_lm=False,
            get_total_num_hidden_layers=lambda: layers,
            get_total_num_kv_heads=lambda: spec.num_kv_heads * tp,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False, enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=False, async_scheduling=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=1, rank=0, use_ubatching=False),
        device_config=SimpleNamespace(device_type="cpu"),
        load_config=SimpleNamespace(load_format="auto"),
    )
    for path, value in changed.items():
        *where, name = path.split("__")
        holder: Any = config
        for step in where:
            holder = getattr(holder, step)
        setattr(holder, name, value)
    return config
