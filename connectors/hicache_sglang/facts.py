"""What the engine's own arguments say about its pages: read where a release keeps them, done without elsewhere."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = [
    "Weights",
    "engine_facts",
    "names_adapters",
    "passes_prefixes",
    "served_weights",
    "started_weights",
]

_NAMES: Final = (
    *("model_path", "revision", "dtype", "quantization", "kv_cache_dtype", "attention_backend"),
    *("json_model_override_args", "speculative_draft_model_path", "enable_lora", "lora_paths"),
    *("quantization_param_path", "torchao_config", "modelopt_quant", "rl_quant_profile", "load_format"),
    "hicache_storage_backend_extra_config",
)
_ACCESSORS: Final = (
    ("sglang.srt.runtime_context", "get_server_args"),
    ("sglang.srt.server_args", "get_global_server_args"),
)


@dataclass(frozen=True, slots=True)
class Weights:
    """Which weights an engine serves now, as far as it says so; another value means that they were exchanged.

    Attributes:
        path: where they were loaded from.
        version: the label that whoever exchanged them gave.
        changes: of the two, since the engine began; 0 where a release does not count them.
        labelled: whether the last change was the label.
    """

    path: str | None = None
    version: str | None = None
    changes: int = 0
    labelled: bool = False


def started_weights() -> Weights:
    """What an engine was started with. Never raises."""
    return Weights(_now("model_path", []), _now("weight_version", []))


def served_weights() -> Weights:
    """What it serves now. Cheap, for every call. Never raises."""
    log = getattr(_called("sglang.srt.runtime_context", "get_context"), "overrides_log", list)
    try:
        changed = [fields for _, fields in log() if "model_path" in fields or "weight_version" in fields]
        path, version = _now("model_path", changed), _now("weight_version", changed)
        return Weights(path, version, len(changed), bool(changed) and "weight_version" in changed[-1])
    except Exception:  # another release keeps another kind of log
        return started_weights()


def _now(name: str, changed: list[dict[str, Any]]) -> Any:
    return next((fields[name] for fields in reversed(changed) if name in fields), getattr(_arguments(), name, None))


def engine_facts() -> dict[str, Any]:
    """SGLang's arguments that decide what its pages hold, by name, without those that are not known. Never raises."""
    arguments = _arguments()
    found = {fact: getattr(arguments, fact, None) for fact in _NAMES}
    facts = {fact: value for fact, value in found.items() if value is not None}
    kernel = getattr(_called("sglang.srt.runtime_context", "get_exec"), "kernel", None)
    chosen = getattr(kernel, "attention_backend", None)
    if chosen is not None:
        facts["attention_backend"] = chosen
    return facts


def names_adapters() -> bool:
    """Whether this SGLang's storage hashes begin with the adapter and the salt of a request."""
    try:
        return hasattr(importlib.import_module("sglang.srt.mem_cache.utils"), "storage_namespace_seed")
    except Exception:
        return False


def passes_prefixes(facts: Mapping[str, Any]) -> bool | None:
    """Whether calls tell what stands before their pages; None where that is not known. Never raises."""
    given = facts.get("hicache_storage_backend_extra_config")
    try:
        if isinstance(given, str):
            given = json.loads(Path(given[1:]).read_bytes() if given.startswith("@") else given)
        return None if given is None else bool(given.get("hicache_storage_pass_prefix_keys", False))
    except Exception:  # a file in another form
        return None


def _arguments() -> Any:
    return next((found for place in _ACCESSORS if (found := _called(*place)) is not None), None)


def _called(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)()
    except Exception:  # another release keeps them elsewhere, or they are not published in this process
        return None
