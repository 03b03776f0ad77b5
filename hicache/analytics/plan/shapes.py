"""What a model keeps for each token and request, layer by layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from hicache.core.keys import MAX_LAYERS
from hicache.errors import ConfigError

BITS: Final = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "fp8": 8,
    "int8": 8,
    "uint8": 8,
    "fp4": 4,
    "int4": 4,
}
"""Bits of an element."""

FULL: Final = "attention"
LATENT: Final = "latent attention"
WINDOW: Final = "sliding window"
RECURRENT: Final = "recurrent"
NONE: Final = "without state"


def bits_of(dtype: str, option: str) -> int:
    """Bits of an element of a type by its name.

    Raises:
        ConfigError: an unknown one.
    """
    bits = BITS.get(dtype.removeprefix("torch."))
    if bits is None:
        raise ConfigError(f"{option} {dtype:.40}: use one of {', '.join(BITS)}")
    return bits


def check_layers(layers: int, what: str) -> None:
    """See that a number of layers is one that a geometry can have.

    Raises:
        ConfigError: it is more.
    """
    if layers > MAX_LAYERS:
        raise ConfigError(f"{what} {layers}: more than {MAX_LAYERS} layers; check the number")


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps. Layers that keep the same are equal.

    Attributes:
        kind: `FULL`, `LATENT`, `WINDOW`, `RECURRENT` or `NONE`.
        kv_heads: key-value heads that ranks share out; 0 where each rank keeps all (latent).
        key_dim: elements of a key row of one token and head; of the whole row where it is latent.
        value_dim: the same of a value row; 0 where there is none.
        window: tokens that a sliding window sees; 0 elsewhere.
        conv_elements: of a recurrent layer, elements of its convolution's last inputs, a request.
        state_elements: of a recurrent layer, elements of its state, a request.
    """

    kind: str
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0
    conv_elements: int = 0
    state_elements: int = 0

    @property
    def per_token(self) -> bool:
        """Whether it keeps something for each token."""
        return self.kind in (FULL, LATENT, WINDOW)

    def describe(self) -> str:
        """In a few words."""
        if self.kind == LATENT:
            return f"{self.key_dim} elements a token, the same on each rank"
        if self.kind == RECURRENT:
            return f"{self.state_elements:,} elements of state and {self.conv_elements:,} of convolution a request"
        if self.kind == NONE:
            return "keeps nothing"
        heads = f"{self.kv_heads} kv head{'s' if self.kv_heads != 1 else ''} of {self.key_dim}"
        if self.value_dim != self.key_dim:
            heads += f" and {self.value_dim}"
        return f"{heads}, the last {self.window:,} tokens" if self.window else heads


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's state.

    Attributes:
        name: of the model.
        source: where these values come from.
        layers: in order.
        query_heads: heads of queries, which bound tensor parallelism; 0 where it is not known.
        dtype: of its elements, as the model says.
        parameters: how many; 0 where it is not known.
        weight_bytes: bytes of all weights; 0 where it is not known.
    """

    name: str
    source: str
    layers: tuple[Layer, ...]
    query_heads: int = 0
    dtype: str = "bfloat16"
    parameters: int = 0
    weight_bytes: int = 0

    def kinds(self) -> list[tuple[Layer, int]]:
        """Different layers and how many there are of each, in the order of their first."""
        return list(Counter(self.layers).items())
