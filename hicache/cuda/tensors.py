"""Engines' tensors as numbers: where they are, by what they say of themselves and by what CUDA says of the address.

No framework is imported. A tensor of torch, and everything with `__cuda_array_interface__`, tells its address, shape
and strides itself.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hicache.cuda.driver import CudaDriver
from hicache.cuda.regions import Region, TensorMemory, regions_of
from hicache.errors import GeometryError
from hicache.memory.layout import PageLayout
from hicache.memory.tensors import check_apart, overlaps_itself

__all__ = ["DeviceTensor", "as_tensors", "check_device", "device_of", "regions_checked"]

_TYPES: Final = {"f": "float", "i": "int", "u": "uint"}


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """One tensor.

    Attributes:
        memory: where it is.
        dtype: name of its elements' type.
    """

    memory: TensorMemory
    dtype: str


def as_tensors(tensors: Any, page: PageLayout) -> tuple[list[DeviceTensor], bool]:
    """What an engine has given, and whether it was one tensor rather than a list.

    Raises:
        GeometryError: something that is no tensor, is in main memory, is sparse, or has another dtype.
    """
    one = not isinstance(tensors, (list, tuple))
    given: Sequence[Any] = [tensors] if one else tensors
    if not given:
        raise GeometryError("no tensor was given: give one for all layers, or one per layer")
    found = []
    for at, tensor in enumerate(given):
        where = "the device tensor" if one else f"tensor {at}"
        made = _of_torch(tensor, where) if hasattr(tensor, "data_ptr") else _of_interface(tensor, where)
        _check_dtype(made, where, page)
        found.append(made)
    return found, one


def device_of(tensors: Any) -> int | None:
    """The device of an engine's first tensor, as far as it says so itself."""
    first = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
    device = getattr(first, "device", None)
    number = getattr(device, "index", None)  # of torch
    if number is None:
        number = getattr(device, "id", None)  # of cupy
    return number if isinstance(number, int) else None


def check_device(tensors: Sequence[DeviceTensor], driver: CudaDriver) -> None:
    """See that all tensors are in the memory of the driver's device.

    Raises:
        GeometryError: one is not; says where it is.
    """
    for at, tensor in enumerate(tensors):
        place = driver.pointer(tensor.memory.address)
        if place.kind not in ("device", "managed"):
            raise GeometryError(
                f"tensor {at} is in main memory ({place.kind}): use hicache.TensorDevicePool for it, or put it on "
                f"device {driver.device}"
            )
        if place.device != driver.device:
            raise GeometryError(
                f"tensor {at} is on CUDA device {place.device}, the pool on device {driver.device}: give each device "
                "a pool of its own"
            )


def regions_checked(
    tensors: Sequence[DeviceTensor], page: PageLayout, layout: str, *, one: bool, tokens: int = 0
) -> list[Region]:
    """The regions of the tensors.

    Args:
        tensors: in the order of layers.
        page: what their slots hold.
        layout: a key of `DEVICE_LAYOUTS`.
        one: whether they were given as one tensor.
        tokens: of a slot, where that is a part of a page; 0 is a whole page.

    Raises:
        GeometryError: another number, shape or stride than the layout says; elements that share memory.
    """
    memories = [tensor.memory for tensor in tensors]
    regions = regions_of(memories[0] if one else memories, layout, page, tokens=tokens)
    phantoms = [_phantom(memory) for memory in memories]
    for at, phantom in enumerate(phantoms):
        if overlaps_itself(phantom):
            raise GeometryError(
                f"tensor {at} is expanded or cut so that its elements share memory: give a tensor of its own"
            )
    check_apart(phantoms)
    return regions


def _of_torch(tensor: Any, where: str) -> DeviceTensor:
    if tensor.device.type != "cuda":
        raise GeometryError(
            f"{where} is on device {tensor.device}: hicache.TensorDevicePool takes tensors in main memory, this pool "
            "those on CUDA"
        )
    if "strided" not in str(tensor.layout):
        raise GeometryError(f"{where} is sparse ({tensor.layout}): give a dense tensor")
    size = int(tensor.element_size())
    strides = tuple(int(stride) * size for stride in tensor.stride())
    memory = TensorMemory(int(tensor.data_ptr()), tuple(int(length) for length in tensor.shape), strides, size)
    return DeviceTensor(memory, str(tensor.dtype).removeprefix("torch."))


def _of_interface(tensor: Any, where: str) -> DeviceTensor:
    described = getattr(tensor, "__cuda_array_interface__", None)
    if described is None:
        kind = type(tensor).__name__
        raise GeometryError(
            f"{where} is a {kind}: give a torch tensor on CUDA, or an array with __cuda_array_interface__"
        )
    address, read_only = described["data"]
    if read_only:
        raise GeometryError(f"{where} is read-only: give writable memory")
    shape = tuple(int(length) for length in described["shape"])
    kind, size = _element(str(described["typestr"]), where)
    strides = described.get("strides")
    if strides is None:
        strides = tuple(size * math.prod(shape[at + 1 :]) for at in range(len(shape)))
    return DeviceTensor(TensorMemory(int(address), shape, tuple(int(step) for step in strides), size), kind)


def _element(typestr: str, where: str) -> tuple[str, int]:
    found = re.fullmatch(r"[<|=]([fiu])(\d+)", typestr)
    if found is None:
        raise GeometryError(f"{where} has elements of type {typestr!r:.20}: give plain numbers")
    size = int(found[2])
    return f"{_TYPES[found[1]]}{8 * size}", size


def _check_dtype(tensor: DeviceTensor, where: str, page: PageLayout) -> None:
    expected, size = page.element_bytes, tensor.memory.itemsize
    if page.kind == "opaque" or expected is None:
        return
    # Integers of the right size carry any dtype, and bytes do: engines keep FP8 in uint8.
    carrier = tensor.dtype.removeprefix("u").startswith("int") and size == expected
    if tensor.dtype not in {page.dtype, "uint8"} and not carrier:
        raise GeometryError(
            f"{where} has dtype {tensor.dtype}, the geometry {page.dtype} ({expected} bytes an element): give the "
            "geometry the tensors' dtype"
        )


def _phantom(memory: TensorMemory) -> Any:
    """An array of the same addresses, to reckon with: nothing of it is ever read."""
    shape, strides = (*memory.shape, memory.itemsize), (*memory.strides, 1)
    low = sum(step * (size - 1) for step, size in zip(strides, shape, strict=True) if step < 0)
    high = sum(step * (size - 1) for step, size in zip(strides, shape, strict=True) if step > 0) + 1
    span = np.ctypeslib.as_array(_bytes_at(memory.address + low, high - low))
    return np.ndarray(shape, np.uint8, buffer=span, offset=-low, strides=strides)


def _bytes_at(address: int, size: int) -> Any:
    return (ctypes.c_uint8 * size).from_address(address)
