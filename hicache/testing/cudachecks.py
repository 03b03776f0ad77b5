"""What CUDA and cupy refuse before anything is put into a stream, so that a fake refuses it too."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from hicache.cuda.driver import CudaError

__all__ = ["check_batch", "check_launch", "check_mapped", "check_numbers", "check_whole", "inside"]

_ADDRESSES: Final = 1 << 63
"""cupy takes addresses and sizes as signed numbers of 64 bits."""
_MOST_THREADS: Final = 1024  # of a block
_MOST_BLOCKS: Final = ((1 << 31) - 1, 65_535, 65_535)
_ARGUMENT_BYTES: Final = 8
"""Of each argument of our kernels. CUDA reads as many from wherever a shorter one lies."""


def check_numbers(call: str, *numbers: Any) -> None:
    """See that cupy takes these as addresses or sizes.

    Raises:
        TypeError: one is no integer.
        CudaError: one is negative, or needs more than 63 bits.
    """
    for number in numbers:
        if not 0 <= operator.index(number) < _ADDRESSES:
            raise CudaError(call, "OverflowError", -1, f"{number} is no address or size")


def check_batch(
    stream: int, default: int, targets: Sequence[Any], sources: Sequence[Any], sizes: Sequence[Any]
) -> None:
    """See that cudaMemcpyBatchAsync takes these, but for where the addresses are.

    Args:
        stream: handle of the stream.
        default: handle of the default stream, which takes no batches.
        targets: of the runs.
        sources: of the runs.
        sizes: of the runs.

    Raises:
        CudaError: it does not, or the bindings do not: an array's own numbers would be read as where they lie.
    """
    call = "cudaMemcpyBatchAsync"
    for numbers in (targets, sources, sizes):
        if not all(type(number) is int for number in numbers):
            raise CudaError(call, "TypeError", -1, "a number that is none of Python's own")
        check_numbers(call, *numbers)
    if not len(targets) == len(sources) == len(sizes) or not sizes or min(sizes) <= 0 or stream in (0, default):
        raise CudaError(call, "cudaErrorInvalidValue", 1)


def check_launch(grid: Any, block: Any, arguments: Sequence[Any]) -> None:
    """See that a kernel of arguments of 64 bits can be launched so.

    Raises:
        TypeError: cupy does not take the type of something.
        CudaError: the device does not take the sizes.
    """
    if not isinstance(grid, tuple) or not isinstance(block, tuple):
        raise TypeError("cupy takes grids and blocks as tuples only")
    threads = block[0] * block[1] * block[2]
    if min(*grid, *block) < 1 or threads > _MOST_THREADS or any(map(operator.gt, grid, _MOST_BLOCKS)):
        raise CudaError("cuLaunchKernel", "CUDA_ERROR_INVALID_VALUE", 1)
    for argument in arguments:
        if not isinstance(argument, (int, np.generic)):
            raise TypeError(f"cupy takes no {type(argument).__name__} as a kernel's argument")
        if isinstance(argument, np.generic) and argument.itemsize != _ARGUMENT_BYTES:
            raise CudaError("cuLaunchKernel", "CUDA_ERROR_INVALID_VALUE", 1, f"{type(argument).__name__}: not 64 bits")


def check_mapped(address: int, size: int, *, read_only: bool) -> None:
    """See that cudaHostRegister takes a range: all of it mapped, for writing too unless it is to be read only.

    Raises:
        CudaError: it is not.
    """
    end, reached = address + size, address
    for start, stop, rights in _mappings():
        if start <= reached < stop and "r" in rights and ("w" in rights or read_only):
            reached = stop
    if size < 1 or reached < end:
        raise CudaError("cudaHostRegister", "cudaErrorInvalidValue", 1, f"{size} bytes at {address:#x} are not mapped")


def check_whole(call: str, ranges: Mapping[int, int], address: int, size: int) -> None:
    """See that a range of host memory is pinned as a whole or not at all.

    Args:
        call: that copies it.
        ranges: those that are pinned, address to bytes.
        address: of the range.
        size: of the range.

    Raises:
        CudaError: a part of it is.
    """
    touched = any(start < address + size and address < start + held for start, held in ranges.items())
    if touched and not inside(ranges, address, size):
        raise CudaError(call, "cudaErrorInvalidValue", 1, f"{size} bytes at {address:#x} are pinned in part")


def inside(ranges: Mapping[int, int], address: int, size: int) -> bool:
    """Whether a range lies in one of these, address to bytes."""
    return any(start <= address and address + size <= start + held for start, held in ranges.items())


def _mappings() -> Iterator[tuple[int, int, str]]:
    """This process's, by address: (start, end, rights)."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        where, rights = line.split()[:2]
        start, _, stop = where.partition("-")
        yield int(start, 16), int(stop, 16), rights
