"""Engines' tensors as arrays of bytes: looked at where they are, checked first, never converted.

Dtypes that numpy lacks (bfloat16, FP8) are why everything here is bytes: a copy of bytes is exact for every dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hicache.errors import GeometryError
from hicache.memory.base import Bytes
from hicache.memory.layout import PageLayout, layout_axes

__all__ = ["check_apart", "device_view", "overlaps_itself", "view_bytes"]

_MOST_WORK: Final[Any] = 1_000_000  # steps of the search for a common byte, then one is assumed; most need a handful


def view_bytes(tensor: Any, *, where: str, page: PageLayout) -> tuple[Bytes, int]:
    """A tensor or array as writable uint8, same axes, the last counted in bytes; and its element size.

    Args:
        tensor: a torch tensor on the CPU, or a numpy array. Not copied; the array keeps it alive.
        where: which tensor it is, for messages.
        page: what it has to hold.

    Raises:
        GeometryError: on another device, of a wrong dtype, without a last axis that lies in one run, read-only, or
            with elements that share memory.
    """
    array, name, itemsize = _array(tensor, where)
    _check_dtype(name, itemsize, where, page)
    if not array.flags.writeable:
        raise GeometryError(f"{where} is read-only: give writable memory")
    if overlaps_itself(array):
        raise GeometryError(f"{where} is expanded or cut so that its elements share memory: give a tensor of its own")
    return array, itemsize


def check_apart(arrays: Sequence[Bytes]) -> None:
    """See that no two layers lie in the same bytes, where a page of one would overwrite a page of the other.

    Args:
        arrays: one per layer, from `view_bytes`.

    Raises:
        GeometryError: two share memory, or are cut so that it cannot be told.
    """
    bounds = sorted((*_bounds(array), at) for at, array in enumerate(arrays) if array.size)
    for position, (_, end, at) in enumerate(bounds):
        for start, _, other in bounds[position + 1 :]:
            if start >= end:
                break
            if np.may_share_memory(arrays[at], arrays[other], max_work=_MOST_WORK):
                low, high = sorted((at, other))
                raise GeometryError(
                    f"the tensors of layers {low} and {high} share memory: give each layer memory of its own"
                )


def _bounds(array: Bytes) -> tuple[int, int]:
    """Addresses of the first byte and behind the last."""
    steps = [stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True)]
    start = array.ctypes.data
    return start + sum(step for step in steps if step < 0), start + sum(step for step in steps if step > 0) + 1


def overlaps_itself(array: Bytes) -> bool:
    """Whether an element may lie in another's bytes: ordered by stride, each axis must step over all before it."""
    if not array.size:
        return False
    reach = 1
    for stride, size in sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


def device_view(
    array: Bytes, itemsize: int, name: str, page: PageLayout, *, where: str, one_layer: bool = False
) -> Bytes:
    """A tensor in layout `name` as (slot, layer, plane, token, head, row byte); axes it lacks have length 1.

    Args:
        array: from `view_bytes`.
        itemsize: from `view_bytes`.
        name: a key of `LAYOUTS`.
        page: what it has to hold.
        where: which tensor it is, for messages.
        one_layer: whether the tensor holds one layer only and has no layer axis.

    Raises:
        GeometryError: another shape than the layout says.
    """
    axes = layout_axes(name, page)
    if one_layer:
        axes = tuple(axis for axis in axes if axis != "layer")
    sizes = _sizes(page, name)
    array = _split_slots(array, axes, sizes)
    expected = tuple(sizes[axis] for axis in axes)
    if array.ndim != len(axes) or any(b is not None and a != b for a, b in zip(array.shape, expected, strict=True)):
        _refuse_shape(array, itemsize, axes, expected, where)
    return _ordered(array, axes, name)


def _sizes(page: PageLayout, name: str) -> dict[str, int | None]:
    if name == "opaque":
        return {"slot": None, "byte": page.page_bytes}
    sizes: dict[str, int | None] = {"slot": None, "layer": page.layers, "plane": page.planes}
    return sizes | {"token": page.tokens, "head": page.heads, "dim": page.row_bytes}


def _split_slots(array: Bytes, axes: Sequence[str], sizes: dict[str, int | None]) -> Bytes:
    """Engines often have one axis of slots x tokens; cut it in two where the layout has them side by side."""
    if array.ndim != len(axes) - 1 or "token" not in axes or axes.index("token") != axes.index("slot") + 1:
        return array
    at, tokens = axes.index("slot"), sizes["token"]
    if not tokens or array.shape[at] % tokens:
        return array
    return array.reshape(*array.shape[:at], array.shape[at] // tokens, tokens, *array.shape[at + 1 :])


def _refuse_shape(array: Bytes, itemsize: int, axes: Sequence[str], expected: Sequence[int | None], where: str) -> None:
    shape = (*array.shape[:-1], array.shape[-1] // itemsize) if array.ndim else ()
    ends = [*expected[:-1], (expected[-1] or 0) // itemsize]
    wanted = ", ".join(f"{axis}={'any' if size is None else size}" for axis, size in zip(axes, ends, strict=True))
    raise GeometryError(f"{where} has shape {shape}, expected ({wanted})")


def _ordered(array: Bytes, axes: Sequence[str], name: str) -> Bytes:
    if name == "opaque":
        return array[:, None, None, None, None, :]
    order = ("slot", "layer", "plane", "token", "head", "dim")
    present = [axis for axis in order if axis in axes]
    array = array.transpose([axes.index(axis) for axis in present])
    missing = tuple(at for at, axis in enumerate(order) if axis not in axes)
    return np.expand_dims(array, missing)


def _array(tensor: Any, where: str) -> tuple[Bytes, str, int]:
    if isinstance(tensor, np.ndarray):
        return _numpy_bytes(tensor, where)
    torch = sys.modules.get("torch")  # a tensor is here only where torch was imported
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _torch_bytes(tensor, where, torch)
    raise GeometryError(f"{where} is a {type(tensor).__name__}: give a torch tensor or a numpy array")


def _numpy_bytes(array: np.ndarray[Any, Any], where: str) -> tuple[Bytes, str, int]:
    if array.dtype.kind not in "iuf":
        raise GeometryError(f"{where} has dtype {array.dtype}: give plain numbers")
    _check_rows(array.ndim, array.ndim and array.strides[-1] == array.itemsize, where)
    return array.view(np.uint8), array.dtype.name, array.itemsize


def _torch_bytes(tensor: Any, where: str, torch: Any) -> tuple[Bytes, str, int]:
    if tensor.device.type != "cpu":
        raise GeometryError(
            f"{where} is on device {tensor.device}: this pool copies with the CPU and takes only CPU tensors"
        )
    if tensor.layout != torch.strided:
        raise GeometryError(f"{where} is sparse ({tensor.layout}): give a dense tensor")
    _check_rows(tensor.ndim, tensor.ndim and tensor.stride(-1) == 1, where)
    name = str(tensor.dtype).removeprefix("torch.")
    array: Bytes = tensor.detach().view(torch.uint8).numpy()
    return array, name, tensor.element_size()


def _check_rows(ndim: int, contiguous: bool | int, where: str) -> None:
    if ndim == 0:
        raise GeometryError(f"{where} is a single number: give the whole pool's tensor")
    if not contiguous:
        raise GeometryError(f"the last axis of {where} is not contiguous: give a tensor whose rows lie in one run")


def _check_dtype(name: str, itemsize: int, where: str, page: PageLayout) -> None:
    expected = page.element_bytes
    if page.kind == "opaque" or expected is None:
        return
    # Integers of the right size carry any dtype, and bytes do: numpy has no bfloat16, engines keep FP8 in uint8.
    carrier = name.removeprefix("u").startswith("int") and itemsize == expected
    if name not in {page.dtype, "uint8"} and not carrier:
        raise GeometryError(f"{where} has dtype {name}, the geometry {page.dtype} ({expected} bytes an element)")
