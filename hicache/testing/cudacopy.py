"""The copy kernel's own arithmetic on the CPU: which bytes each thread of a grid would move.

It repeats, in other words, what `hicache.cuda.kernels.SOURCE` does, so that tests can see that every byte
of a table is moved once for any grid, and a `FakeCuda` can run the kernel.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Final

from hicache.cuda.driver import CudaError
from hicache.cuda.kernels import LANES, NAME
from hicache.testing.cuda import FakeCuda, KernelModel, Run

__all__ = ["KERNELS", "chunks_of", "copy_runs", "moves_of"]

_WIDTHS: Final = (16, 8, 4, 1)


def chunks_of(first: Sequence[int], length: Sequence[int], chunk: int, *, blocks: int, warps: int) -> Iterator[Run]:
    """What each warp of a grid takes: (run, offset in it, bytes), warp after warp."""
    chunks = first[-1]
    for block in range(blocks):
        share = range(chunks * block // blocks, chunks * (block + 1) // blocks)
        for warp in range(warps):
            for at in share[warp::warps]:
                run = bisect_right(first, at) - 1
                offset = (at - first[run]) * chunk
                yield run, offset, min(length[run] - offset, chunk)


def moves_of(source: int, target: int, size: int) -> Iterator[tuple[int, int]]:
    """How the lanes of a warp move one chunk: (offset, bytes) of each access."""
    width = next(width for width in _WIDTHS if (source ^ target) % width == 0)
    head = min(-source % width, size)
    body = (size - head) // width * width
    yield from ((at, 1) for at in range(min(head, LANES)))
    yield from ((at, width) for at in range(head, head + body, width))
    yield from ((at, 1) for at in range(head + body, min(size, head + body + LANES)))


def copy_runs(cuda: FakeCuda, arguments: Sequence[Any]) -> list[Run]:
    """The kernel's model: the runs that it copies, found in its table as it lies in memory when the kernel begins."""
    *columns, runs, chunk = (int(argument) for argument in arguments)
    source, target, length = (_words(cuda, address, runs) for address in columns[:3])
    first = _words(cuda, columns[3], runs + 1)
    return [
        (target[run] + offset, source[run] + offset, size)
        for run, offset, size in chunks_of(first, length, chunk, blocks=1, warps=1)
    ]


KERNELS: Final[dict[str, KernelModel]] = {NAME: copy_runs}
"""For `FakeCuda(kernels=...)`."""


def _words(cuda: FakeCuda, address: int, count: int) -> list[int]:
    if cuda.pointer(address).kind not in {"device", "host"}:
        raise CudaError("a kernel", "cudaErrorIllegalAddress", 700, f"its table at {address:#x}")
    return list((ctypes.c_int64 * count).from_address(address))
