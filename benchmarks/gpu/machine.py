"""The device that is measured: a GPU, or for a dry run a fake, whose times mean nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hicache.cuda.driver import CudaDriver, Kernel, Stream
from hicache.cuda.executors import Executors, open_executors
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS

__all__ = ["Machine", "bytes_at", "opened"]

BUSY: Final = "hicache_bench_busy"
READING: Final = "hicache_bench_read"

SOURCE: Final = r"""
typedef long long i64;

// Arithmetic only: a warp never waits for memory.
extern "C" __global__ void hicache_bench_busy(i64 turns, float* out) {
    float a = threadIdx.x, b = a + 1, c = a + 2, d = a + 3;
    for (i64 i = 0; i < turns; i++) {
        a = a * 1.0001f + 0.5f;
        b = b * 1.0001f + 0.5f;
        c = c * 1.0001f + 0.5f;
        d = d * 1.0001f + 0.5f;
    }
    if (a + b + c + d == -1.0f) out[0] = a;  // never: keeps the work from being left out
}

// Device memory only: the whole buffer is read `turns` times.
extern "C" __global__ void hicache_bench_read(i64 turns, const float4* data, i64 count, float* out) {
    float sum = 0;
    for (i64 turn = 0; turn < turns; turn++)
        for (i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x; at < count; at += (i64)gridDim.x * blockDim.x) {
            const float4 four = data[at];
            sum += four.x + four.y + four.z + four.w;
        }
    if (sum == -1.0f) out[0] = sum;
}
"""

_THREADS: Final = 256
_BLOCKS_A_MULTIPROCESSOR: Final = 64
"""Many short blocks, as the kernels of a model have: others get in between."""


@dataclass(slots=True)
class Machine:
    """A device, what measures on it, and how large the measurements are.

    Attributes:
        driver: of the device.
        fake: whether it is none.
        busy, reading: kernels that keep it busy.
        out: a word that they may write.
        data: memory that `reading` reads.
        data_bytes: its size.
    """

    driver: CudaDriver
    fake: bool
    busy: Kernel
    reading: Kernel
    out: int
    data: int
    data_bytes: int

    def facts(self) -> dict[str, Any]:
        """For the results."""
        facts = self.driver.facts()
        return {name: getattr(facts, name) for name in facts.__slots__} | {"fake": self.fake}

    def size(self, real: int, fake: int) -> int:
        """How much: on a GPU, and in a dry run."""
        return fake if self.fake else real

    def executors(self, blocks: int | None = None) -> Executors:
        """All that work here, for pinned memory."""
        return open_executors(self.driver, self.driver.facts(), pinned=True, blocks=blocks)

    def compute(self, turns: int, stream: Stream) -> None:
        """Arithmetic for a while, on all multiprocessors."""
        arguments = [np.int64(turns), np.int64(self.out)]
        self.driver.launch(self.busy, (self._blocks(), 1, 1), (_THREADS, 1, 1), arguments, stream)

    def read(self, turns: int, stream: Stream) -> None:
        """Reads of device memory for a while, on all multiprocessors."""
        arguments = [np.int64(turns), np.int64(self.data), np.int64(self.data_bytes // 16), np.int64(self.out)]
        self.driver.launch(self.reading, (self._blocks(), 1, 1), (_THREADS, 1, 1), arguments, stream)

    def seconds(self, work: Callable[[Stream], object], stream: Stream) -> float:
        """Of what `work` puts into the stream, between events."""
        driver = self.driver
        start, end = driver.event(timing=True), driver.event(timing=True)
        driver.record(start, stream)
        work(stream)
        driver.record(end, stream)
        driver.synchronize(end)
        return max(driver.elapsed(start, end), 1e-9)

    def passed(self, stream: Stream) -> None:
        """Wait for all that is in the stream."""
        event = self.driver.event()
        self.driver.record(event, stream)
        self.driver.synchronize(event)

    @contextmanager
    def device_memory(self, size: int) -> Iterator[int]:
        """Memory on the device, for a while; its address."""
        address = self.driver.malloc(size)
        try:
            yield address
        finally:
            self.driver.free(address)

    @contextmanager
    def host_memory(self, size: int) -> Iterator[int]:
        """Pinned memory, for a while; its address."""
        address = self.driver.host_alloc(size)
        try:
            yield address
        finally:
            self.driver.host_free(address)

    def _blocks(self) -> int:
        return self.driver.facts().multiprocessors * _BLOCKS_A_MULTIPROCESSOR


@contextmanager
def opened(*, fake: bool) -> Iterator[Machine]:
    """The current device.

    Raises:
        ConfigError: there is none, or cupy is missing; says what to do.
    """
    driver: CudaDriver
    if fake:
        # What keeps a device busy copies nothing, so its models have no runs.
        driver = FakeCuda(memory=1 << 25, kernels={**KERNELS, BUSY: _nothing, READING: _nothing})
    else:
        from hicache.cuda.cupy_driver import open_driver

        driver = open_driver()
    size = (1 << 20) if fake else (512 << 20)
    kernels = [driver.compile(SOURCE, name) for name in (BUSY, READING)]
    out, data = driver.malloc(256), driver.malloc(size)
    try:
        yield Machine(driver, fake, *kernels, out, data, size)
    finally:
        driver.free(data)
        driver.free(out)


def bytes_at(address: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Host memory as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _nothing(_cuda: FakeCuda, _arguments: Any) -> list[tuple[int, int, int]]:
    return []
