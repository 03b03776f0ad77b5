"""What a model's Hugging Face configuration says about its pages, in one spelling for all engines.

The connectors for vLLM and transformers build their namespaces from this, so that pages of one are pages of the other
where model, revision, geometry, page size and numerics agree. Configurations are looked at by attribute, whatever
release of transformers made them: neither it nor an engine is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from hicache.runtime.fingerprint import revision_of

__all__ = ["deciding_settings", "model_and_revision", "quantization_of", "rope_settings", "rope_types"]

_THETAS: Final = ("rope_theta", "rotary_emb_base")
_PARTS: Final = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
_TYPE_NAMES: Final = {"su": "longrope"}  # as older files call them
_LENGTH: Final = "original_max_position_embeddings"
_LENGTH_COUNTS: Final = ("llama3", "yarn", "longrope", "dynamic")


def deciding_settings(config: Any, *, quantization: str | None = None) -> dict[str, Any] | None:
    """What besides the weights decides what pages hold: for `Namespace(rope=...)`.

    Args:
        config: the configuration of the text model, as loaded, with what the user overrode.
        quantization: how weights are quantised when they are loaded; by default what the configuration says.

    Returns:
        A mapping of JSON values with `rope` and `quantization`, as far as there are such; None without any.
    """
    found: dict[str, Any] = {}
    rope = rope_settings(config)
    if rope:
        found["rope"] = rope
    quantization = quantization or quantization_of(config)
    if quantization:
        found["quantization"] = quantization
    return found or None


def rope_settings(config: Any) -> dict[str, Any]:
    """Rotary position settings, the same whether a file or release has them in one mapping or in several attributes.

    Returns:
        The settings by their names; by kind of layer where layers differ; empty where there are none.
    """
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = {str(kind): value for kind, value in given.items() if isinstance(value, Mapping)}
    if by_layer:
        return {kind: _one_rope(config, value) for kind, value in by_layer.items()}
    return _one_rope(config, given)


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary positions in use, such as "default", "llama3" or "dynamic"; empty without any."""
    settings = rope_settings(config)
    if "rope_type" in settings:
        return {settings["rope_type"]}
    return {one["rope_type"] for one in settings.values() if one}


def quantization_of(config: Any) -> str | None:
    """How the checkpoint's weights are quantised, such as "gptq"; None where they are not."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else getattr(given, "quant_method", None)
    return str(getattr(method, "value", method) or "unnamed")


def model_and_revision(
    model: str | None, revision: str | None, config: Any = None
) -> tuple[str | None, str | None, list[str]]:
    """A model's name and what tells its weights from others of that name. Reads a few samples where it is a folder.

    Args:
        model: name or folder; by default where the configuration was loaded from.
        revision: commit or digest, if the user gave one.
        config: the configuration, which knows the commit of what came from a hub.

    Returns:
        The name, or None if nothing has one; the revision, or None; what deserves a word.

    Raises:
        NamespaceError: a folder that cannot be read.
    """
    loaded_from = getattr(config, "_name_or_path", None) or getattr(config, "name_or_path", None)
    name = model or loaded_from or None
    if revision is None:
        folder = next((path for path in (loaded_from, model) if path and os.path.isdir(path)), None)
        revision = revision_of(folder) if folder is not None else getattr(config, "_commit_hash", None)
    if name is not None and revision is None:
        return name, None, [f"weights of {name} are told apart by name only: give a revision when they may change"]
    return name, revision, []


def _one_rope(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    theta = given.get("rope_theta", _first(config, _THETAS))
    if theta is None and not given:
        return {}
    kind = str(given.get("rope_type") or given.get("type") or "default")
    kind = _TYPE_NAMES.get(kind, kind)
    found = {name: value for name, value in given.items() if name not in ("type", "rope_type") and value is not None}
    if theta is not None:
        found["rope_theta"] = theta
    part = given.get("partial_rotary_factor", _first(config, _PARTS))
    found.pop("partial_rotary_factor", None)
    if part is not None and part != 1:
        found["partial_rotary_factor"] = part
    found.pop(_LENGTH, None)
    if kind in _LENGTH_COUNTS:
        # Some files have it beside the mapping, and then it is the one that counts; others mean the model's own length.
        length = getattr(config, _LENGTH, None) or given.get(_LENGTH)
        found[_LENGTH] = length or getattr(config, "max_position_embeddings", None)
    return {"rope_type": kind} | found


def _first(config: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
