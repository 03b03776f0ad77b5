"""From a model to the namespace of its pages."""

from __future__ import annotations

import os
from typing import Any, Final

from hicache.core.identity import Namespace
from hicache.core.layout import KVGeometry
from hicache.runtime.modelconfig import deciding_settings, model_and_revision, quantization_of
from hicache_transformers.model import ModelShape, text_config
from hicache_transformers.weights import same_as_files, weights_revision

__all__ = ["identify"]

_TOLD: Final = {
    False: "the weights are not those in {}: their pages are named by what is in memory",
    None: "the weights cannot be compared with files in {}: their pages are named by what is in memory, and other "
    "engines find them only where both are given a revision",
}


def identify(
    model: Any,
    shape: ModelShape,
    *,
    page_size: int,
    name: str | None = None,
    revision: str | None = None,
    numerics: str | None = None,
    head_group: int | None = None,
    layer_partition: int | None = None,
) -> tuple[Namespace, list[str]]:
    """Name the pages of a model.

    Args:
        model: a transformers model.
        shape: what it keeps.
        page_size: tokens a page.
        name: name under which pages are shared; by default where the model was loaded from.
        revision: commit or digest of its weights; by default that of its folder, or the hub's commit, where what is in
            memory is what its files hold, else a digest of what is in memory.
        numerics: which kernels may share pages; by default `transformers/ATTENTION/DTYPE`.
        head_group: kv heads an object.
        layer_partition: layers an object.

    Returns:
        The namespace, and what works but deserves a word.

    Raises:
        ConfigError, GeometryError, NamespaceError: pages cannot be named; says what to change.
    """
    geometry = KVGeometry.mha(
        shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype_name,
        head_group=head_group,
        layer_partition=layer_partition,
    )
    config = text_config(model.config)
    found, known, warnings = model_and_revision(name, revision, model.config)
    if revision is None:
        files = _files_of(model.config)
        same = None if files is None else same_as_files(model, files)
        if known is None or not same:
            known, warnings = weights_revision(model), [] if files is None else [_TOLD[same].format(files)]
    namespace = Namespace(
        found or f"transformers/{type(model).__name__}",  # made in memory: nobody else can have it by a name
        revision=known,
        geometry=geometry,
        page_size=page_size,
        hash="sha256",
        rope=deciding_settings(config),
        numerics=numerics or _numerics(config, shape),
    )
    return namespace, warnings


def _files_of(config: Any) -> str | None:
    """The folder with the files that a model was loaded from: its own, or the hub's copy on this machine."""
    place, commit = getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None)
    if not place or os.path.isdir(place):
        return place or None
    if commit is None:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(place, "config.json", revision=commit)
    except Exception:  # no hub, or a name that is none there
        return None
    return os.path.dirname(found) if isinstance(found, str) else None


def _numerics(config: Any, shape: ModelShape) -> str:
    """`transformers/attention implementation/kv dtype`, and quantisation where there is one."""
    quantization = quantization_of(config)
    parts = ["transformers", shape.attention, shape.dtype_name]
    return "/".join([*parts, f"quantization={quantization}"] if quantization else parts)
