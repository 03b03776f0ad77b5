"""What a model is to the cache: refused where pages would not be what they are named, measured everywhere else."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hicache.errors import ConfigError
from hicache.runtime.modelconfig import rope_types

__all__ = [
    "ModelShape",
    "attention_of",
    "describe_model",
    "is_training",
    "layers_of",
    "new_state",
    "on_autocast",
    "plain_model",
    "text_config",
]

_FIXED_ROPE: Final = frozenset({"default", "linear", "llama3", "yarn"})
_PLAIN_LAYER: Final = "DynamicLayer"
_NEAR: Final = 0.05
_SMALLEST: Final = 4  # tokens of a vocabulary that nothing is known of


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
            first, second = (_probe(model, last) for last in _two_tokens(config))
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


def plain_model(model: Any) -> Any:
    """The model itself, where it comes wrapped by `torch.compile`: its `generate` runs that, not the compiled one."""
    return getattr(model, "_orig_mod", model)


def is_training(model: Any) -> bool:
    """Whether any part of a model is in training mode."""
    return any(part.training for part in model.modules())


def on_autocast(model: Any) -> bool:
    """Whether autocast is on in this thread, for the model or for a CPU."""
    return any(torch.is_autocast_enabled(kind) for kind in {"cpu", model.device.type})


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
    if is_training(model):
        raise ConfigError("the model, or a part of it, is in training mode: call model.eval() first")
    if any(tensor.device.type == "meta" for tensor in model.parameters()):
        raise ConfigError("parts of the model are offloaded or not loaded (device meta): load it into memory")
    if on_autocast(model):
        raise ConfigError("autocast is on: open the cache outside of it, with the model loaded in that dtype")
    kinds = {type(layer).__name__ for layer in new_state(model).layers} - {_PLAIN_LAYER}
    if kinds:
        raise ConfigError(
            f"the model's cache has layers of kind {', '.join(sorted(kinds))}: only full attention is supported, "
            "no sliding window, recurrent or indexed layers"
        )


def _two_tokens(config: Any) -> tuple[int, int]:
    """Tokens far from the ends of the vocabulary: those at its beginning may be unused and all alike."""
    size = max(int(getattr(text_config(config), "vocab_size", None) or 0), _SMALLEST)
    return size // 3, 2 * size // 3


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
            difference, size = (here - there).abs(), here.abs()
            # Some elements of a first token may be larger than all others by far, so the mean tells too.
            if difference.max() > _NEAR * size.max() or difference.mean() > _NEAR * size.mean():
                raise ConfigError(
                    "what the model keeps of a token depends on later tokens (no causal attention, or prefix-LM): "
                    "nothing of it can be reused"
                )


def _parameters(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
