"""Cells: one page x one layer x one head group, and the layer groups whose cells are alike."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from hicache.core.framing import frame_number, frame_text
from hicache.core.keys import MAX_HEAD_GROUPS, MAX_LAYERS
from hicache.errors import GeometryError
from hicache.units import whole_number

__all__ = ["DTYPE_BYTES", "LayerGroup", "check_count", "check_label", "check_layers", "dtype_name", "row_length"]

DTYPE_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of an element, for the constructors that take a dtype's name. Others give `row_bytes`."""

_LABEL = re.compile(r"[A-Za-z0-9._+-]{1,64}")
_MAX_BYTES: Final = 2**40


def check_label(value: object, what: str) -> str:
    """The value, if it is a label: text that needs no escaping anywhere; else a `GeometryError` that names `what`."""
    if not isinstance(value, str) or _LABEL.fullmatch(value) is None:
        raise GeometryError(f"{what} {value!r:.60} must be 1 to 64 letters, digits, '.', '_', '+' or '-'")
    return value


def check_count(value: object, what: str, *, least: int = 1, most: int = _MAX_BYTES) -> int:
    """The value as an int, if it is an integer in range; else a `GeometryError` that names `what`."""
    number = whole_number(value)
    if number is None or not least <= number <= most:
        raise GeometryError(f"{what} {value!r:.40} must be an integer of {least} to {most}")
    return number


def dtype_name(dtype: Any) -> Any:
    """The name of a dtype given by name, or as torch's or numpy's own; anything else as it is."""
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    found = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)  # numpy's dtypes, and its scalar types
    if found is None and type(dtype).__module__ == "torch":
        found = str(dtype).removeprefix("torch.")
    return dtype if found is None else found


def check_layers(layers: int | tuple[int, int]) -> tuple[int, int]:
    """A number of layers or a range, as an absolute range that is not empty; else a `GeometryError`."""
    first, behind = layers if isinstance(layers, tuple) and len(layers) == 2 else (0, layers)
    start = check_count(first, "first layer", least=0, most=MAX_LAYERS - 1)
    end = check_count(behind, "layers", least=1, most=MAX_LAYERS)
    if start >= end:
        raise GeometryError(f"layers {start} to {end} are empty: end must be above start")
    return start, end


def _largest_divisor(number: int, limit: int) -> int:
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


def row_length(dim: int, dtype: Any, row_bytes: int | None) -> int:
    """Bytes of one row of `dim` elements: `row_bytes` where given, else by the dtype's size."""
    if row_bytes is not None:
        return check_count(row_bytes, "row_bytes")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise GeometryError(f"dtype {dtype!r:.40} has no known size: use one of {known}, or give row_bytes")
    return dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Consecutive layers whose cells are alike.

    Attributes:
        layers: absolute range, (first, behind the last).
        kv_heads: key-value heads of all ranks together; 0 where the state has no head axis and each rank of a
            tensor-parallel group holds all of it (MLA latents, opaque pages).
        head_group: kv heads of one cell; 0 without a head axis.
        token_bytes: bytes of one token in one cell; 0 where `page_bytes` is given.
        page_bytes: bytes of one cell whatever the page size; 0 where `token_bytes` is given.
        kind: label, such as "mha" or "mla".
        dtype: label of the elements.
        dims: label of the sizes behind the token axis, such as "128" or "512+64".

    Raises:
        GeometryError: a value out of range, or a head group that does not divide the heads.
    """

    layers: tuple[int, int]
    kv_heads: int
    head_group: int
    token_bytes: int
    page_bytes: int = 0
    kind: str = "mha"
    dtype: str = "bfloat16"
    dims: str = "1"

    def __post_init__(self) -> None:
        self._set("layers", check_layers(self.layers))
        self._set("kv_heads", check_count(self.kv_heads, "kv_heads", least=0, most=MAX_HEAD_GROUPS))
        self._set("token_bytes", check_count(self.token_bytes, "token bytes of a cell", least=0))
        self._set("page_bytes", check_count(self.page_bytes, "page bytes of a cell", least=0))
        self._set("dtype", dtype_name(self.dtype))
        if (self.token_bytes == 0) == (self.page_bytes == 0):
            raise GeometryError("a cell has either bytes per token or bytes per page: give exactly one")
        for value, what in ((self.kind, "kind"), (self.dtype, "dtype"), (self.dims, "dims")):
            check_label(value, what)
        if self.kv_heads == 0:
            self._set("head_group", check_count(self.head_group, "head_group without a head axis", least=0, most=0))
            return
        self._set("head_group", check_count(self.head_group, "head_group", most=MAX_HEAD_GROUPS))
        if self.kv_heads % self.head_group:
            fits = _largest_divisor(self.kv_heads, self.head_group)
            raise GeometryError(
                f"head_group={self.head_group} does not divide {self.kv_heads} kv heads: use head_group={fits}"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def layer_count(self) -> int:
        """Number of layers."""
        return self.layers[1] - self.layers[0]

    @property
    def head_groups(self) -> int:
        """Cells of one layer; 1 without a head axis."""
        return self.kv_heads // self.head_group if self.kv_heads else 1

    def cell_bytes(self, page_size: int) -> int:
        """Bytes of one page x one layer x one head group."""
        return self.page_bytes or self.token_bytes * page_size

    def record(self) -> bytes:
        """The group as framed fields, for digests."""
        numbers = (*self.layers, self.kv_heads, self.head_group, self.token_bytes, self.page_bytes)
        texts = (self.kind, self.dtype, self.dims)
        return b"".join((*map(frame_number, numbers), *map(frame_text, texts)))

    def describe(self) -> dict[str, Any]:
        """The group for people and manifests; JSON types only."""
        return {
            "layers": list(self.layers),
            "kind": self.kind,
            "dtype": self.dtype,
            "dims": self.dims,
            "kv_heads": self.kv_heads,
            "head_group": self.head_group,
            "token_bytes": self.token_bytes,
            "page_bytes": self.page_bytes,
        }
