"""From a model to the namespace of its pages."""

from __future__ import annotations

import os
from typing import Any

from hicache.core.identity import Namespace
from hicache.core.layout import KVGeometry
from hicache.runtime.modelconfig import deciding_settings, model_and_revision, quantization_of
from hicache_transformers.model import ModelShape, text_config
from hicache_transformers.weights import differ_from_folder, weights_revision

__all__ = ["identify"]


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
        revision: commit or digest of its weights; by default that of its folder, or the hub's commit.
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
    folder = getattr(model.config, "_name_or_path", None)
    if found is None:  # made in memory, and nobody else can have it by a name
        found, known = f"transformers/{type(model).__name__}", revision or weights_revision(model)
    elif revision is None and folder and os.path.isdir(folder) and differ_from_folder(model, folder):
        known = weights_revision(model)
        warnings.append(f"the weights are not those in {folder}: their pages are named by what is in memory")
    namespace = Namespace(
        found,
        revision=known,
        geometry=geometry,
        page_size=page_size,
        hash="sha256",
        rope=deciding_settings(config),
        numerics=numerics or _numerics(config, shape),
    )
    return namespace, warnings


def _numerics(config: Any, shape: ModelShape) -> str:
    """`transformers/attention implementation/kv dtype`, and quantisation where there is one."""
    quantization = quantization_of(config)
    parts = ["transformers", shape.attention, shape.dtype_name]
    return "/".join([*parts, f"quantization={quantization}"] if quantization else parts)
