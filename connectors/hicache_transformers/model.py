"""What a model is to the cache: refused where pages would not be what they are named, measured everywhere else."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hicache.core.identity import Adapter
from hicache.errors import ConfigError
from hicache.runtime.modelconfig import rope_types
from hicache_transformers.rows import Bypass

__all__ = ["ModelShape", "ModelWatch", "describe_model", "layers_of", "new_state", "text_config"]

_FIXED_ROPE: Final = frozenset({"default", "linear", "llama3", "yarn"})
_PLAIN_LAYER: Final = "DynamicLayer"
_NEAR: Final = 0.05
_WATCHED: Final = 16  # elements of each parameter


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's own cache holds, as measured.

    Attributes:
        kv_heads: key-value heads.
        head_dim: elements of a head.
        dtype: of keys and values.
        devices: where each layer's are.
        attention: the attention implementation, such as "sdpa".
        takes_positions: whether `forward` takes position_ids, so that padding does not move positions.
    """

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]
    attention: str
    takes_positions: bool

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.devices)

    @property
    def on_gpu(self) -> torch.device | None:
        """The NVIDIA GPU that has all layers, if one has."""
        (first, *others) = set(self.devices)
        return first if not others and first.type == "cuda" else None

    @property
    def dtype_name(self) -> str:
        """Such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


def describe_model(model: Any) -> ModelShape:
    """Look at a model, and run it twice over two tokens, to see what its cache holds.

    Raises:
        ConfigError: a model whose pages cannot be reused; says why.
    """
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(model, "generate", None)):
        raise ConfigError(f"{type(model).__name__} is no transformers model that generates: give one with generate()")
    _refuse_kinds(model, config)
    with torch.no_grad():
        try:
            first, second = (_probe(model, last) for last in (2, 3))
        except ConfigError:
            raise
        except Exception as error:  # whatever a model raises
            raise ConfigError(f"{type(model).__name__} cannot be run over two tokens: {error}") from error
    keys, values = first[0]
    if any(tensor.shape != keys.shape or tensor.dtype != keys.dtype for pair in first for tensor in pair):
        raise ConfigError("layers of this model keep keys and values of different shapes or dtypes: not stored yet")
    if keys.ndim != 4 or keys.shape[0] != 1 or keys.shape[2] != 2 or values.shape != keys.shape:
        raise ConfigError(f"this model's cache keeps keys of shape {tuple(keys.shape)} for two tokens: not understood")
    _check_heads(config, int(keys.shape[1]))
    _check_causal(first, second)
    return ModelShape(
        kv_heads=int(keys.shape[1]),
        head_dim=int(keys.shape[3]),
        dtype=keys.dtype,
        devices=tuple(keys.device for keys, _ in first),
        attention=attention_of(model),
        takes_positions="position_ids" in _parameters(model),
    )


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the language model."""
    choose = getattr(config, "get_text_config", None)
    return choose(decoder=True) if callable(choose) else config


def attention_of(model: Any) -> str:
    """The attention implementation in use."""
    return str(getattr(text_config(model.config), "_attn_implementation", None) or "any")


def new_state(model: Any) -> Any:
    """An empty `DynamicCache` for a model."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def layers_of(state: Any) -> list[tuple[Any, Any]]:
    """Keys and values of each layer that a model's cache holds; empty where it holds none yet."""
    layers = [(layer.keys, layer.values) for layer in state.layers]
    return [] if any(keys is None or values is None for keys, values in layers) else layers


class ModelWatch:
    """Notices that a model is no longer what it was when the cache was opened. Thread-safe.

    Whatever writes to weights (an optimiser, loading a state, another dtype or device) leaves another tensor or a
    higher version of the same one. Writing to a tensor's `data`, as merging an adapter does, leaves neither: so some
    elements of each are compared as well.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._attention = attention_of(model)
        self._weights = self._marks()
        self._samples = _sample_views(model)
        self._content = self._read()

    def check(self, adapter: Adapter | None) -> None:
        """See that the model may use the cache now.

        Args:
            adapter: whose weights are active, as far as the caller says.

        Raises:
            Bypass: it may not.
        """
        model = self._model
        if getattr(model, "training", False):
            raise Bypass("training", "the model is in training mode, where dropout decides: call model.eval()")
        if adapter is not None and adapter.digest is None:
            raise Bypass(
                "adapter", f"adapter {adapter.name!r:.60} has no digest: the name alone may mean other weights"
            )
        if adapter is None and _has_adapter(model):
            raise Bypass(
                "adapter", "the model has adapters: say which weights are in use by adapter=hicache.Adapter(...)"
            )
        if attention_of(model) != self._attention:
            raise Bypass("attention", "the attention implementation was changed: make a new PrefixCache")
        if self._marks() != self._weights or self._read() != self._content:
            raise Bypass("weights", "the model's weights were changed or moved: make a new PrefixCache, with revision=")
        if any(torch.is_autocast_enabled(kind) for kind in {"cpu", model.device.type}):
            raise Bypass("autocast", "autocast changes what keys and values are: load the model in that dtype instead")

    def _marks(self) -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), _version(tensor)) for tensor in self._model.parameters()]

    def _read(self) -> list[bytes]:
        return [_content(views) for views in self._samples]


def _content(views: list[torch.Tensor]) -> bytes:
    with torch.no_grad():
        found: bytes = torch.cat(views).cpu().view(torch.uint8).numpy().tobytes()
    return found


def _sample_views(model: Any) -> list[list[torch.Tensor]]:
    """A few elements from the middle of each parameter, as views of it; by device and dtype, to be read in one go."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in model.parameters():
        weight = tensor.detach()
        if not weight.numel():
            continue
        flat = weight.view(-1) if weight.is_contiguous() else weight
        while flat.ndim > 1:  # of one that does not lie in one run, a row: anything else were a copy
            flat = flat[flat.shape[0] // 2]
        middle = max(0, flat.numel() - _WATCHED) // 2
        found.setdefault((weight.device, weight.dtype), []).append(flat[middle : middle + _WATCHED])
    return list(found.values())


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _has_adapter(model: Any) -> bool:
    return bool(getattr(model, "peft_config", None)) or bool(getattr(model, "_hf_peft_config_loaded", False))


def _refuse_kinds(model: Any, config: Any) -> None:
    text = text_config(config)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError("encoder-decoder models are not supported: what they keep depends on the encoder's input")
    if text is not config:
        raise ConfigError("multimodal models are not supported: their pages depend on more than token ids")
    if getattr(text, "kv_lora_rank", None):
        raise ConfigError(
            "MLA models are not supported: transformers keeps their latents expanded, which other engines do not"
        )
    moving = rope_types(text) - _FIXED_ROPE
    if moving:
        raise ConfigError(
            f"rotary positions of type {', '.join(sorted(moving))} are not supported: keys may depend on how long the "
            "prompt is in the end"
        )
    if int(getattr(model, "tp_size", None) or getattr(model, "_tp_size", None) or 1) > 1:
        raise ConfigError("the model is split by tensor parallelism: load it without tp_plan")
    if getattr(model, "training", False):
        raise ConfigError("the model is in training mode: call model.eval() first")
    if any(tensor.device.type == "meta" for tensor in model.parameters()):
        raise ConfigError("parts of the model are offloaded or not loaded (device meta): load it into memory")
    kinds = {type(layer).__name__ for layer in new_state(model).layers} - {_PLAIN_LAYER}
    if kinds:
        raise ConfigError(
            f"the model's cache has layers of kind {', '.join(sorted(kinds))}: only full attention is supported, "
            "no sliding window, recurrent or indexed layers"
        )


def _probe(model: Any, last: int) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.tensor([[1, last]], device=model.device)
    state = new_state(model)
    model(input_ids=ids, past_key_values=state, use_cache=True)
    kinds = {type(layer).__name__ for layer in state.layers} - {_PLAIN_LAYER}
    layers = layers_of(state)
    if kinds or not layers:
        raise ConfigError("the model does not keep its keys and values in a DynamicCache: it is not supported")
    return layers


def _check_heads(config: Any, heads: int) -> None:
    told = getattr(text_config(config), "num_key_value_heads", None)
    if told is not None and int(told) != heads:
        raise ConfigError(
            f"the model keeps {heads} kv heads, its configuration says {told}: it is split over processes, or repeats "
            "heads, and is not supported"
        )


def _check_causal(first: Sequence[Any], second: Sequence[Any]) -> None:
    """The same first token before two different ones: where attention is causal it has the same keys and values."""
    for ones, others in zip(first, second, strict=True):
        for one, other in zip(ones, others, strict=True):
            here, there = one[:, :, 0].float(), other[:, :, 0].float()
            if (here - there).abs().max() > _NEAR * here.abs().max():
                raise ConfigError(
                    "what the model keeps of a token depends on later tokens (no causal attention, or prefix-LM): "
                    "nothing of it can be reused"
                )


def _parameters(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
