"""Reads what a model keeps from the `config.json` that it is published with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hicache.analytics.plan.shapes import FULL, LATENT, NONE, RECURRENT, WINDOW, Layer, ModelShape, check_layers
from hicache.errors import ConfigError

MOST_CONFIG: Final = 16 * 2**20  # bytes; published ones have some kilobytes, an index of weights a few megabytes
_MOST: Final = 2**31
_INDEX: Final = "model.safetensors.index.json"

_NAMES: Final = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
}
_LAYER_TYPES: Final = {
    "full_attention": FULL,
    "attention": FULL,
    "global": FULL,
    "*": FULL,
    "sliding_attention": WINDOW,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "mamba2": RECURRENT,
    "M": RECURRENT,
    "mlp": NONE,
    "moe": NONE,
    "-": NONE,
    "E": NONE,
}
_NOT_COUNTED: Final = {
    "num_kv_shared_layers": "layers that use the state of others",
    "is_encoder_decoder": "an encoder",
    "index_topk": "an indexer with keys of its own",
}
_RECURRENT_SIGNS: Final = ("mamba_d_state", "ssm_state_size", "linear_num_value_heads", "conv_L_cache")


def read_model(path: Path) -> ModelShape:
    """A model's shape from its `config.json`, or from the folder that has it.

    The weights' size comes from the index of safetensors beside it, where there is one.

    Raises:
        ConfigError: it cannot be read, or describes a model that this cannot count.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _load(file)
    index = file.parent / _INDEX
    size = 0
    if index.is_file():
        total = _load(index).get("metadata", {})
        size = total.get("total_size", 0) if isinstance(total, Mapping) else 0
    return shape_of(config, name=str(path), source=str(file), weight_bytes=size if type(size) is int else 0)


def shape_of(
    config: Mapping[str, Any], *, name: str, source: str, parameters: int = 0, weight_bytes: int = 0
) -> ModelShape:
    """A model's shape from the content of its `config.json`.

    Raises:
        ConfigError: a value is missing or wrong, or the model keeps something that this cannot count.
    """
    return _Reader(config, source).shape(name, parameters, weight_bytes)


def _load(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_CONFIG + 1)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; name a model's config.json, its folder, or a preset") from None
    if len(data) > MOST_CONFIG:
        raise ConfigError(f"{file}: more than {MOST_CONFIG // 2**20} MiB, so it is no config.json of a model")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: no valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: must be a JSON object, as config.json of a model is")
    return found


class _Reader:
    """One config, and the errors about it."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        inner = config.get("text_config", config.get("llm_config"))  # models of text and pictures
        self._config = {**config, **inner} if isinstance(inner, Mapping) else config
        self._source = source
        for field, what in _NOT_COUNTED.items():
            if self._config.get(field):
                raise ConfigError(f"{source}: {field} says that the model has {what}, which is not counted here yet")

    def shape(self, name: str, parameters: int, weight_bytes: int) -> ModelShape:
        kinds = self._kinds()
        made = {kind: self._makers[kind](self) for kind in dict.fromkeys(kinds)}
        dtype = self._config.get("dtype") or self._config.get("torch_dtype") or "bfloat16"
        return ModelShape(
            name,
            self._source,
            tuple(made[kind] for kind in kinds),
            query_heads=self._count("heads") if self._has("heads") else 0,
            dtype=str(dtype),
            parameters=parameters,
            weight_bytes=weight_bytes,
        )

    # ---- which layers

    def _kinds(self) -> list[str]:
        kinds = self._listed() or self._by_rule()
        if RECURRENT not in kinds and any(self._config.get(field) for field in _RECURRENT_SIGNS):
            raise ConfigError(
                f"{self._source}: the model has recurrent state, and nothing here says in which layers, or it is "
                f"beside attention in the same layer: such models are not counted here yet"
            )
        return kinds

    def _listed(self) -> list[str]:
        """Kinds of layers that the config lists one by one; empty where it does not."""
        fields = ("layer_types", "layers_block_type", "hybrid_override_pattern")
        field = next((name for name in fields if self._config.get(name)), None)
        if field is None:
            return []
        types = self._config[field]
        if not isinstance(types, list | str):
            raise ConfigError(f"{self._source}: {field} must be a list of the layers' types")
        layers = self._count("layers") if self._has("layers") else len(types)
        check_layers(layers, f"{self._source}: {_NAMES['layers'][0]}")
        if len(types) < layers:
            raise ConfigError(f"{self._source}: {field} has {len(types)} entries, and the model {layers} layers")
        return [self._kind(value) for value in types[:layers]]

    def _by_rule(self) -> list[str]:
        """Kinds of layers by a period, or by what all are."""
        layers = self._count("layers")
        check_layers(layers, f"{self._source}: {_NAMES['layers'][0]}")
        if self._config.get("attn_layer_period"):
            offset = self._number("attn_layer_offset", least=0)
            period = self._number("attn_layer_period")
            return [FULL if layer % period == offset else RECURRENT for layer in range(layers)]
        if (full := self._config.get("attn_layer_indices")) is not None:
            if not isinstance(full, list):
                raise ConfigError(f"{self._source}: attn_layer_indices must be a list of layers")
            return [FULL if layer in full else RECURRENT for layer in range(layers)]
        if self._config.get("full_attention_interval"):
            every = self._number("full_attention_interval")
            return [FULL if layer % every == every - 1 else RECURRENT for layer in range(layers)]
        if not self._has("heads") and self._config.get("state_size"):
            return [RECURRENT] * layers  # Mamba alone
        return self._attention_kinds(layers)

    def _attention_kinds(self, layers: int) -> list[str]:
        if self._config.get("kv_lora_rank"):
            return [LATENT] * layers
        if not self._config.get("sliding_window") or self._config.get("use_sliding_window") is False:
            return [FULL] * layers
        if self._config.get("use_sliding_window") and self._config.get("max_window_layers"):
            full = self._number("max_window_layers")
            return [FULL if layer < full else WINDOW for layer in range(layers)]
        field = "sliding_window_pattern" if "sliding_window_pattern" in self._config else "_sliding_window_pattern"
        if self._config.get(field):
            every = self._number(field)
            return [FULL if (layer + 1) % every == 0 else WINDOW for layer in range(layers)]
        return [WINDOW] * layers

    def _kind(self, value: object) -> str:
        kind = _LAYER_TYPES.get(str(value))
        if kind is None:
            raise ConfigError(
                f"{self._source}: layers of type {str(value)!r:.40} are not counted here; known are "
                f"{', '.join(_LAYER_TYPES)}: give the numbers by --layers, --kv-heads and --head-dim"
            )
        return LATENT if kind == FULL and self._config.get("kv_lora_rank") else kind

    # ---- what each keeps

    def _full(self, window: int = 0) -> Layer:
        heads = self._count("heads")
        kv_heads = self._count("kv_heads") if self._has("kv_heads") else heads
        if self._config.get("multi_query") and not self._config.get("new_decoder_architecture"):
            kv_heads = 1
        dim = self._number("head_dim") if self._config.get("head_dim") else self._count("hidden") // heads
        if not dim:
            raise ConfigError(f"{self._source}: hidden_size is less than num_attention_heads, which leaves no head")
        return Layer(WINDOW if window else FULL, kv_heads, dim, dim, window)

    def _window(self) -> Layer:
        return self._full(self._number("sliding_window"))

    def _latent(self) -> Layer:
        return Layer(LATENT, 0, self._number("kv_lora_rank") + self._number("qk_rope_head_dim", least=0))

    def _recurrent(self) -> Layer:
        if "linear_num_value_heads" in self._config:  # a gated delta rule
            keys = self._number("linear_num_key_heads") * self._number("linear_key_head_dim")
            heads, dim = self._number("linear_num_value_heads"), self._number("linear_value_head_dim")
            conv = (2 * keys + heads * dim) * (self._number("linear_conv_kernel_dim") - 1)
            return Layer(
                RECURRENT, conv_elements=conv, state_elements=heads * self._number("linear_key_head_dim") * dim
            )
        state = self._first("mamba_d_state", "ssm_state_size", "state_size")
        kernel = self._first("mamba_d_conv", "conv_kernel") - 1
        names = ("mamba_n_heads", "mamba_num_heads", "num_heads")
        if any(name in self._config for name in names):  # Mamba-2
            heads = self._first(*names)
            inner = heads * self._first("mamba_d_head", "mamba_head_dim", "head_dim")
            conv = inner + 2 * self._first("mamba_n_groups", "n_groups") * state
            return Layer(RECURRENT, conv_elements=conv * kernel, state_elements=inner * state)
        inner = self._first("mamba_expand", "expand") * self._count("hidden")
        return Layer(RECURRENT, conv_elements=inner * kernel, state_elements=inner * state)

    _makers: Final[dict[str, Callable[[_Reader], Layer]]] = {
        FULL: _full,
        WINDOW: _window,
        LATENT: _latent,
        RECURRENT: _recurrent,
        NONE: lambda _: Layer(NONE),
    }

    # ---- values

    def _has(self, name: str) -> bool:
        return any(self._config.get(field) is not None for field in _NAMES[name])

    def _count(self, name: str) -> int:
        return self._first(*_NAMES[name])

    def _first(self, *fields: str) -> int:
        return self._number(next((field for field in fields if self._config.get(field) is not None), fields[0]))

    def _number(self, field: str, *, least: int = 1) -> int:
        value = self._config.get(field)
        if value is None:
            raise ConfigError(f"{self._source}: {field} is missing, which a model of this kind has")
        if type(value) is not int or not least <= value <= _MOST:
            raise ConfigError(f"{self._source}: {field} {value!s:.40} must be a whole number of {least} or more")
        return value
