"""The copy kernel: its arithmetic covers every byte once, its very source does so on the CPU, and it compiles."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.cuda import kernels
from hicache.cuda.kernels import (
    LANES,
    LARGEST_CHUNK,
    SMALLEST_CHUNK,
    SOURCE,
    THREADS,
    KernelTable,
    chunk_bytes,
    first_chunks,
    kernel_table,
)
from hicache.cuda.runs import RunTable
from hicache.errors import ConfigError
from hicache.testing.cudacopy import chunks_of, moves_of
from hicache.testing.nvrtc import Compiler, find_compilers

lengths = st.lists(st.one_of(st.integers(1, 600), st.integers(1, 70_000)), min_size=1, max_size=30)


@given(length=lengths, chunk=st.sampled_from([512, 1024, 16384]), blocks=st.integers(1, 9), warps=st.integers(1, 17))
def test_the_chunks_of_a_grid_are_every_byte_once(length: list[int], chunk: int, blocks: int, warps: int) -> None:
    first = first_chunks(np.array(length, np.int64), chunk)
    found: list[list[tuple[int, int]]] = [[] for _ in length]
    for run, offset, size in chunks_of(first.tolist(), length, chunk, blocks=blocks, warps=warps):
        assert 0 < size <= chunk
        found[run].append((offset, size))
    for size, pieces in zip(length, found, strict=True):
        reached = 0
        for offset, piece in sorted(pieces):
            assert offset == reached
            reached += piece
        assert reached == size


@given(source=st.integers(0, 40), target=st.integers(0, 40), size=st.integers(1, 5000))
def test_the_accesses_of_a_chunk_are_every_byte_once_and_aligned(source: int, target: int, size: int) -> None:
    reached = 0
    for offset, width in moves_of(source, target, size):
        assert offset == reached
        assert (source + offset) % width == 0
        assert (target + offset) % width == 0
        reached += width
    assert reached == size
    if (source - target) % 16 == 0 and size >= 16 + 15:
        assert any(width == 16 for _, width in moves_of(source, target, size))


@given(
    blocks=st.integers(1, 40),
    length=st.one_of(st.lists(st.integers(1, 1 << 22), min_size=1, max_size=50), st.just([34_816] * 500)),
)
def test_warps_have_nearly_the_same_to_do(blocks: int, length: list[int]) -> None:
    """No block has more than one chunk more than another, and large copies have several chunks a warp."""
    numbers = np.array(length, np.int64)
    table = kernel_table(RunTable(numbers, numbers, numbers), blocks=blocks)
    first = table.words[3 * table.runs :]
    shares = np.diff([int(first[-1]) * block // blocks for block in range(blocks + 1)])
    assert shares.max() - shares.min() <= 1
    warps = blocks * THREADS // LANES
    if numbers.sum() >= warps * 4 * SMALLEST_CHUNK:
        assert first[-1] >= warps * 4


@pytest.mark.parametrize(
    ("total", "warps", "chunk"),
    [(1, 1, 512), (512 * 4 * 16, 16, 512), (1024 * 4 * 16, 16, 1024), (1 << 40, 256, LARGEST_CHUNK), (0, 5, 512)],
)
def test_the_chunk_grows_with_the_copy(total: int, warps: int, chunk: int) -> None:
    assert chunk_bytes(total, warps) == chunk


def test_a_grid_without_blocks_is_refused() -> None:
    numbers = np.ones(1, np.int64)
    with pytest.raises(ConfigError, match="0 blocks moves nothing: use 1 or more"):
        kernel_table(RunTable(numbers, numbers, numbers), blocks=0)


def test_the_source_and_its_description_agree() -> None:
    defined = dict(re.findall(r"#define (\w+) (\d+)", SOURCE))
    assert defined == {"LANES": str(LANES), "THREADS": str(THREADS)}
    signature = re.search(rf"{kernels.NAME}\((.*?)\)", SOURCE, re.DOTALL)
    assert signature is not None
    assert tuple(part.split()[-1].lstrip("*") for part in signature[1].split(",")) == kernels.ARGUMENTS


# ---- the source itself, run on the CPU

_SHIM = """
#include <cstddef>
#include <cstdint>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct Dim { int x; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
static long accesses[17];
static bool misaligned = false;
template <typename Unit> static Unit __ldcs(const Unit* from) {
    misaligned |= reinterpret_cast<uintptr_t>(from) % sizeof(Unit) != 0;
    return *from;
}
template <typename Unit> static void __stcs(Unit* to, Unit value) {
    misaligned |= reinterpret_cast<uintptr_t>(to) % sizeof(Unit) != 0;
    accesses[sizeof(Unit)]++;
    *to = value;
}
"""

_LOOP = """
extern "C" int run_grid(const i64* source, const i64* target, const i64* length, const i64* first, i64 runs,
                        i64 chunk, int blocks, int threads) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (int block = 0; block < blocks; block++)
        for (int thread = 0; thread < threads; thread++) {
            blockIdx.x = block;
            threadIdx.x = thread;
            hicache_copy_runs(source, target, length, first, runs, chunk);
        }
    return misaligned;
}
extern "C" long wide() { return accesses[16]; }
"""


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernel's source, compiled for the CPU with every thread of the grid run in turn."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++ or c++) is here: the kernel's source is not run on the CPU")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(_SHIM + SOURCE + _LOOP, encoding="utf-8")
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-o", "kernel.so", "kernel.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


def run_on_cpu(library: Any, table: KernelTable, blocks: int, threads: int) -> bool:
    """Whether every access was aligned."""
    columns = [ctypes.c_void_p(address) for address in table.addresses(table.words.ctypes.data)]
    return not library.run_grid(*columns, ctypes.c_int64(table.runs), ctypes.c_int64(table.chunk), blocks, threads)


@given(
    length=st.lists(st.one_of(st.integers(1, 100), st.integers(1, 9000)), min_size=1, max_size=12),
    gaps=st.integers(0, 2**32 - 1),
    blocks=st.integers(1, 4),
    warps=st.sampled_from([1, 2, 16]),
    aligned=st.booleans(),
)
def test_the_source_copies_every_run_exactly(
    on_cpu: Any, length: list[int], gaps: int, blocks: int, warps: int, aligned: bool
) -> None:
    random = np.random.default_rng(gaps)
    sizes = np.array(length, np.int64)
    step = 16 if aligned else 1
    places = []
    for _ in range(2):
        order, at, reached = random.permutation(len(sizes)), np.zeros(len(sizes), np.int64), 0
        for run in order:
            reached += int(random.integers(0, 3)) * step
            at[run] = reached
            reached += -(-length[run] // step) * step
        places.append((at, reached))
    memory = np.zeros(places[0][1] + places[1][1] + 2 * LARGEST_CHUNK, np.uint8)  # room for whoever writes too far
    base = -(-memory.ctypes.data // 16) * 16 - memory.ctypes.data
    split = -(-places[0][1] // 16) * 16 + base
    source, target = memory[base:split], memory[split:]
    source[:] = random.integers(0, 256, len(source))
    expected = target.copy()
    for run, size in enumerate(length):
        start, to = int(places[0][0][run]), int(places[1][0][run])
        expected[to : to + size] = source[start : start + size]
    table = RunTable(source.ctypes.data + places[0][0], target.ctypes.data + places[1][0], sizes)
    before = on_cpu.wide()
    assert run_on_cpu(on_cpu, kernel_table(table, blocks=blocks), blocks, warps * LANES)
    assert np.array_equal(target, expected)
    if aligned:
        assert on_cpu.wide() - before == sum(size // 16 for size in length)  # all but the tails, 16 bytes at a time


# ---- for GPUs


@pytest.fixture(scope="module")
def compilers() -> list[Compiler]:
    found = find_compilers()
    if not found:
        pytest.skip("neither nvcc nor NVRTC (pip install nvidia-cuda-nvrtc) is here: the copy kernel is not compiled")
    return found


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_the_kernel_compiles(compilers: list[Compiler], target: str, tmp_path: Path) -> None:
    """To machine code, without a warning, by every compiler that is here."""
    for compiler in compilers:
        code, said = compiler.compile(SOURCE, target, tmp_path)
        assert not said.strip()
        assert code[:4] == b"\x7fELF"
        assert kernels.NAME.encode() in code


def test_what_does_not_compile_is_told(compilers: list[Compiler], tmp_path: Path) -> None:
    for compiler in compilers:
        with pytest.raises(ValueError, match="nonsense"):
            compiler.compile(SOURCE + "\nnonsense", "sm_90", tmp_path)
