"""The copy kernel, and the arithmetic that divides runs among its warps.

Runs are cut into chunks. Each block of a grid takes an equal share of all chunks, which follow each other, and its
warps take those in turn, so that a run of megabytes and thousands of small ones keep all warps equally busy and a
block walks through memory in order. `first` has the number of each run's first chunk: a warp looks for its first chunk
by bisection, and from then on only steps.

The grid is small and stays for the whole copy: what limits it is the link, and a few multiprocessors fill that, so
the model keeps the others. Bytes go straight between device memory and pinned host memory, both by the host's own
addresses; nothing in the kernel knows the direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from hicache.cuda.runs import Numbers, RunTable
from hicache.errors import ConfigError

__all__ = [
    "ARGUMENTS",
    "LARGEST_CHUNK",
    "NAME",
    "SMALLEST_CHUNK",
    "SOURCE",
    "THREADS",
    "KernelTable",
    "chunk_bytes",
    "first_chunks",
    "kernel_table",
]

NAME: Final = "hicache_copy_runs"

THREADS: Final = 512
"""Of a block: 16 warps. With 4 accesses of 16 bytes in flight a thread, a block has 32 KiB on their way, and with at
most 64 registers a thread it takes half a multiprocessor. Measured by the compiler, for all three targets: more in
flight takes more registers, so that nothing else would fit beside it."""

LANES: Final = 32
SMALLEST_CHUNK: Final = 512
"""One access of 16 bytes of each lane."""
LARGEST_CHUNK: Final = 16 << 10
"""Eight turns of a warp with all its accesses in flight: the search for the next chunk is small beside it."""
_CHUNKS_A_WARP: Final = 4
"""Fewer would leave warps idle at the end, while others have one more chunk to move."""

ARGUMENTS: Final = ("source", "target", "length", "first", "runs", "chunk")
"""Of the kernel, all as 64 bits."""

SOURCE: Final = r"""
typedef long long i64;
typedef unsigned long long u64;

#define LANES 32
#define THREADS 512

// Whole units of one type. All loads of a turn, `FLIGHT` of them, are issued before the first store waits for one.
template <typename Unit, int FLIGHT>
__device__ __forceinline__ void move_units(const char* source, char* target, i64 units, int lane) {
    const Unit* from = reinterpret_cast<const Unit*>(source);
    Unit* to = reinterpret_cast<Unit*>(target);
    Unit held[FLIGHT];
    i64 at = lane;
#pragma unroll 1
    for (; at + (FLIGHT - 1) * LANES < units; at += FLIGHT * LANES) {
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) held[i] = __ldcs(from + at + i * LANES);
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) __stcs(to + at + i * LANES, held[i]);
    }
#pragma unroll
    for (int i = 0; i < FLIGHT; i++)
        if (at + i * LANES < units) held[i] = __ldcs(from + at + i * LANES);
#pragma unroll
    for (int i = 0; i < FLIGHT; i++)
        if (at + i * LANES < units) __stcs(to + at + i * LANES, held[i]);
}

// Bytes up to the first address that suits the unit, units, and the bytes behind the last one.
template <typename Unit, int FLIGHT>
__device__ __forceinline__ void move_bytes(const char* source, char* target, i64 bytes, int lane) {
    i64 head = (i64)((0 - (u64)source) & (sizeof(Unit) - 1));
    if (head > bytes) head = bytes;
    const i64 units = (bytes - head) / (i64)sizeof(Unit);
    const i64 end = head + units * (i64)sizeof(Unit);
    if (lane < head) target[lane] = source[lane];
    move_units<Unit, FLIGHT>(source + head, target + head, units, lane);
    if (end + lane < bytes) target[end + lane] = source[end + lane];
}

// The widest access that suits both addresses at once.
__device__ __forceinline__ void move_chunk(const char* source, char* target, i64 bytes, int lane) {
    const u64 apart = (u64)source ^ (u64)target;
    if ((apart & 15) == 0) move_bytes<uint4, 4>(source, target, bytes, lane);
    else if ((apart & 7) == 0) move_bytes<uint2, 4>(source, target, bytes, lane);
    else if ((apart & 3) == 0) move_bytes<unsigned int, 2>(source, target, bytes, lane);
    else move_bytes<unsigned char, 1>(source, target, bytes, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
hicache_copy_runs(const i64* source, const i64* target, const i64* length, const i64* first, i64 runs, i64 chunk) {
    const int lane = threadIdx.x % LANES;
    const int warps = blockDim.x / LANES;
    const i64 chunks = first[runs];
    const i64 end = chunks * (blockIdx.x + 1) / gridDim.x;
    i64 at = chunks * blockIdx.x / gridDim.x + threadIdx.x / LANES;
    if (at >= end) return;

    i64 run = 0;
    for (i64 behind = runs; behind - run > 1;) {
        const i64 middle = run + (behind - run) / 2;
        if (first[middle] <= at) run = middle;
        else behind = middle;
    }
#pragma unroll 1
    for (; at < end; at += warps) {
#pragma unroll 1
        while (first[run + 1] <= at) run++;
        const i64 offset = (at - first[run]) * chunk;
        const i64 left = length[run] - offset;
        move_chunk(reinterpret_cast<const char*>(source[run] + offset), reinterpret_cast<char*>(target[run] + offset),
                   left < chunk ? left : chunk, lane);
    }
}
"""
"""CUDA C++ without any header, for NVRTC."""


@dataclass(frozen=True, slots=True)
class KernelTable:
    """A run table as the kernel reads it.

    Attributes:
        words: int64: sources, targets, lengths, first chunks (one more than runs).
        runs: how many.
        chunk: bytes of a chunk.
    """

    words: Numbers
    runs: int
    chunk: int

    def addresses(self, base: int) -> tuple[int, int, int, int]:
        """Where the four columns lie once `words` are at an address."""
        step = 8 * self.runs
        return base, base + step, base + 2 * step, base + 3 * step


def chunk_bytes(total: int, warps: int) -> int:
    """Bytes of a chunk for so many bytes and warps: a power of two between the smallest and the largest.

    Small copies get small chunks, so that all warps have some.
    """
    share = max(1, total // (warps * _CHUNKS_A_WARP))
    return min(max(1 << (share.bit_length() - 1), SMALLEST_CHUNK), LARGEST_CHUNK)


def first_chunks(length: Numbers, chunk: int) -> Numbers:
    """The number of each run's first chunk, and behind the last the number of all: (runs + 1,) int64."""
    first = np.zeros(len(length) + 1, np.int64)
    np.cumsum(-(-length // chunk), out=first[1:])
    return first


def kernel_table(table: RunTable, *, blocks: int) -> KernelTable:
    """A table for a grid of so many blocks of `THREADS` threads.

    Raises:
        ConfigError: not at least one block.
    """
    if blocks < 1:
        raise ConfigError(f"a copy kernel of {blocks} blocks moves nothing: use 1 or more")
    chunk = chunk_bytes(table.total, blocks * (THREADS // LANES))
    columns = (table.source, table.destination, table.length, first_chunks(table.length, chunk))
    return KernelTable(np.concatenate(columns), len(table), chunk)
