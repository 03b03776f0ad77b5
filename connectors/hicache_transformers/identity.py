"""From a model to the namespace of its pages."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

import torch

from hicache.core.identity import Namespace
from hicache.core.layout import KVGeometry
from hicache.errors import ConfigError
from hicache.runtime.modelconfig import deciding_settings, model_and_revision, quantization_of
from hicache_transformers.model import ModelShape, text_config

__all__ = ["identify", "weights_revision"]

_SAMPLES: Final = 16
_SAMPLE: Final = 1024  # elements


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
    if found is None:  # made in memory, and nobody else can have it by a name
        found, known = f"transformers/{type(model).__name__}", revision or weights_revision(model)
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


def weights_revision(model: Any) -> str:
    """Digest of a model's weights in memory: each parameter's name, shape, dtype, and 16 samples of its elements.

    Returns:
        `weights-` and 32 hex digits.

    Raises:
        ConfigError: they cannot be read.
    """
    digest = sha256(b"hicache-weights-v1")
    try:
        for name, tensor in sorted(model.named_parameters()):
            digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
            flat = tensor.detach().reshape(-1)
            last = max(0, flat.numel() - _SAMPLE)
            for at in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                digest.update(flat[at : at + _SAMPLE].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"the weights cannot be read for a digest ({error}): give name= and revision=") from error
    return f"weights-{digest.hexdigest()[:32]}"


def _numerics(config: Any, shape: ModelShape) -> str:
    """`transformers/attention implementation/kv dtype`, and quantisation where there is one."""
    quantization = quantization_of(config)
    parts = ["transformers", shape.attention, shape.dtype_name]
    return "/".join([*parts, f"quantization={quantization}"] if quantization else parts)
