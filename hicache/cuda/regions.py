"""Where the bytes of pages lie in an engine's tensors: addresses and strides, by explicit description.

A region is memory of some layers and planes of all slots. It is described by numbers alone, so the same code serves
memory that the CPU cannot see, and the CPU's own in tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from hicache.errors import GeometryError
from hicache.memory.layout import LAYOUTS, PageLayout

__all__ = ["DEVICE_LAYOUTS", "Region", "TensorMemory", "regions_of"]

DEVICE_LAYOUTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **LAYOUTS,
        # FLASH_ATTN: keys and values before or behind the blocks, tokens or heads first; and rows that hold a token's
        # key and value of one head side by side. One tensor a layer.
        "split/nhd": ("plane", "slot", "token", "head", "dim"),
        "split/hnd": ("plane", "slot", "head", "token", "dim"),
        "blocks/nhd": ("slot", "plane", "token", "head", "dim"),
        "blocks/hnd": ("slot", "plane", "head", "token", "dim"),
        "rows": ("slot", "head", "token", "content"),
        # SGLang: all keys of a layer in one tensor, all values in another; slots and tokens are one axis.
        "planes": ("slot", "token", "head", "dim"),
    }
)
"""Order of the axes of an engine's tensors, by the layout's name. Latent state has no plane and no head axis. "content"
is a key and a value behind each other; layouts without a layer axis have one tensor a layer, and "planes" one for the
keys and one for the values of each layer, in the order k0, v0, k1, v1, ..."""

_AXES: Final = ("slot", "layer", "plane", "token", "head", "dim")


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """One tensor as numbers.

    Attributes:
        address: of its first element.
        shape: elements along each axis.
        strides: bytes from one element to the next along each axis.
        itemsize: bytes of an element.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of_array(cls, array: Any) -> TensorMemory:
        """A numpy array's."""
        return cls(array.ctypes.data, tuple(array.shape), tuple(array.strides), array.itemsize)


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of consecutive layers and planes of all slots. Rows (one token and head in one plane) are one run.

    Attributes:
        address: of the first row of slot 0.
        first_layer: layer of the page that comes first.
        first_plane: plane that comes first.
        shape: (slots, layers, planes, tokens, heads).
        strides: bytes from one of each to the next.
    """

    address: int
    first_layer: int
    first_plane: int
    shape: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int, int]

    @property
    def slots(self) -> int:
        """Places of a page, or of a part of one, that it has."""
        return self.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens of a slot: a page's, or fewer where an engine's blocks are smaller than pages."""
        return self.shape[3]


def regions_of(
    tensors: TensorMemory | Sequence[TensorMemory], layout: str, page: PageLayout, *, tokens: int = 0
) -> list[Region]:
    """The regions of an engine's tensors.

    Args:
        tensors: one with all layers; or a list with one a layer, two where keys and values are apart ("planes").
        layout: a key of `DEVICE_LAYOUTS`.
        page: sizes of a page.
        tokens: tokens of a slot, where that is a part of a page; 0 is a whole page.

    Raises:
        GeometryError: an unknown layout; another number of tensors, other shapes or row strides than it says; slots
            that are parts of a page and do not divide it.
    """
    tokens = tokens or page.tokens
    if page.tokens % tokens:
        raise GeometryError(f"slots of {tokens} tokens do not divide pages of {page.tokens}: use a divisor")
    axes = _axes(layout, page)
    if isinstance(tensors, TensorMemory):
        tensors = (tensors,)
    elif layout == "layer_first":
        axes = tuple(axis for axis in axes if axis != "layer")
    planes = page.planes if layout == "planes" else 1
    wanted = 1 if "layer" in axes else planes * page.layers
    if len(tensors) != wanted:
        raise GeometryError(
            f'{len(tensors)} tensors given for {page.layers} layers: layout "{layout}" of {page.kind} pages wants '
            f"{wanted}, in the order of layers"
        )
    found = [_region(tensor, at, axes, page, tokens, planes=planes) for at, tensor in enumerate(tensors)]
    counts = {region.slots for region in found}
    if len(counts) > 1:
        raise GeometryError(f"the tensors hold {sorted(counts)} slots: give each layer as many")
    return found


def _axes(layout: str, page: PageLayout) -> tuple[str, ...]:
    axes = DEVICE_LAYOUTS.get(layout)
    if axes is None:
        raise GeometryError(f"unknown device layout {layout!r:.40}: use one of {', '.join(DEVICE_LAYOUTS)}")
    if page.kind == "opaque" and layout != "opaque":
        raise GeometryError(f'{page.describe()} have no layers and heads for layout "{layout}": use "opaque"')
    if page.kind == "mla" and layout == "rows":
        raise GeometryError(f'{page.describe()} have no keys and values side by side: use layout "planes"')
    absent = {"plane", "head"} if page.kind == "mla" else set()
    return tuple(axis for axis in axes if axis not in absent)


def _region(
    tensor: TensorMemory, at: int, axes: tuple[str, ...], page: PageLayout, tokens: int, *, planes: int
) -> Region:
    """One tensor's. Axes that it lacks have length 1; `planes` tensors make a layer."""
    shape, strides = _split_slots(tensor, axes, tokens)
    if len(shape) != len(axes):
        raise GeometryError(f"tensor {at} has shape {tensor.shape}, its layout the axes ({', '.join(axes)})")
    sizes, steps = dict(zip(axes, shape, strict=True)), dict(zip(axes, strides, strict=True))
    row = _check_row(sizes, steps, tensor, at, page)
    expected = {"layer": page.layers, "plane": page.planes, "token": tokens, "head": page.heads}
    for axis, size in expected.items():
        if sizes.get(axis, size) != size:
            raise GeometryError(f"tensor {at} has {sizes[axis]} along its axis {axis}, expected {size}: {tensor.shape}")
    if "content" in axes:
        sizes["plane"], steps["plane"] = page.planes, row
    first_layer, first_plane = (0, 0) if "layer" in axes else divmod(at, planes)
    where = ("slot", "layer", "plane", "token", "head")
    lengths = tuple(sizes.get(axis, 1) for axis in where)
    jumps = tuple(steps.get(axis, 0) for axis in where)
    return Region(tensor.address, first_layer, first_plane, _five(lengths), _five(jumps))


def _split_slots(tensor: TensorMemory, axes: tuple[str, ...], tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Engines often have one axis of slots x tokens; cut it in two where the layout has them side by side."""
    shape, strides = tensor.shape, tensor.strides
    if len(shape) != len(axes) - 1 or "token" not in axes or axes.index("token") != axes.index("slot") + 1:
        return shape, strides
    at = axes.index("slot")
    if shape[at] % tokens:
        return shape, strides
    cut = (shape[at] // tokens, tokens)
    return (*shape[:at], *cut, *shape[at + 1 :]), (*strides[:at], strides[at] * tokens, *strides[at:])


def _check_row(sizes: dict[str, int], steps: dict[str, int], tensor: TensorMemory, at: int, page: PageLayout) -> int:
    """Bytes of one row; that rows are as long as the page says, and each is one run."""
    last = next(axis for axis in ("dim", "content", "byte") if axis in sizes)
    wanted = page.row_bytes * (page.planes if last == "content" else 1)
    if sizes[last] * tensor.itemsize != wanted:
        raise GeometryError(f"tensor {at} has rows of {sizes[last] * tensor.itemsize} bytes, expected {wanted}")
    if sizes[last] > 1 and steps[last] != tensor.itemsize:
        raise GeometryError(f"the last axis of tensor {at} is not contiguous: give one whose rows lie in one run")
    return page.row_bytes


def _five(values: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    first, second, third, fourth, fifth = values
    return first, second, third, fourth, fifth
