"""Three ways to carry out a run table, behind one interface.

`plain` asks for one copy a run. `batch` hands many runs to one call, which the copy engines carry out. `kernel` lets a
few multiprocessors move the bytes themselves, which neither needs a copy engine nor pays for each run. Which is faster
depends on the length of the runs, the direction and the machine; `hicache.cuda.choice` measures it.

All put work into a stream and return. What they read and write must stay as it is until that work has passed.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import numpy as np

from hicache.cuda.driver import CudaDriver, CudaError, DeviceFacts, Event, Kernel, Stream
from hicache.cuda.kernels import NAME, SOURCE, THREADS, KernelTable, kernel_table
from hicache.cuda.runs import RunTable

__all__ = [
    "METHODS",
    "TABLE_RUNS",
    "BatchExecutor",
    "Executor",
    "Executors",
    "KernelExecutor",
    "PlainExecutor",
    "default_blocks",
    "open_executors",
]

METHODS: Final = ("plain", "batch", "kernel")
"""By name, those that leave the multiprocessors alone first."""

BATCH_RUNS: Final = 2048
"""Runs of one call. Enough that its own cost is small beside theirs, few enough that the link starts on the first
while the next are prepared. Drivers of CUDA 13.0 are known to fail on calls with fifty thousand."""

_DIRECT_RUNS: Final = 8
"""Up to so many runs the kernel reads its table from pinned memory itself: that is a few reads over the link, where a
copy would be one more piece of work in the stream."""
TABLE_RUNS: Final = 8_000
"""Runs of one launch: its table is a quarter of a MiB. More are several launches."""
_TABLES: Final = 8
"""Tables that may be in use at once; one more waits until the first of them is no longer needed. Their memory is taken
when the executor is made, as taking some can make a device wait for all that it does."""
_MOST_BLOCKS: Final = 16
_MULTIPROCESSORS_A_BLOCK: Final = 8


class Executor(ABC):
    """One way to carry out run tables. Any thread may call it.

    Attributes:
        name: one of `METHODS`.
    """

    name: str

    @abstractmethod
    def run(self, table: RunTable, stream: Stream) -> None:
        """Put the copies of a table into a stream.

        Raises:
            CudaError: a call failed. Some of the copies may be in the stream.
        """

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Give back what it holds, once all its work has passed. Idempotent."""


class PlainExecutor(Executor):
    """One call a run."""

    name = "plain"

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def run(self, table: RunTable, stream: Stream) -> None:
        """Put the copies into the stream one by one."""
        copy = self._driver.memcpy_async
        columns = (table.destination.tolist(), table.source.tolist(), table.length.tolist())
        for target, source, length in zip(*columns, strict=True):
            copy(target, source, length, stream)


class BatchExecutor(Executor):
    """One call for up to `BATCH_RUNS` runs. Host memory must be pinned."""

    name = "batch"

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def run(self, table: RunTable, stream: Stream) -> None:
        """Put the copies into the stream, batch after batch."""
        for at in range(0, len(table), BATCH_RUNS):
            part = table[at : at + BATCH_RUNS]
            targets, sources = part.destination.tolist(), part.source.tolist()
            self._driver.memcpy_batch_async(targets, sources, part.length.tolist(), stream)


@dataclass(slots=True)
class _Buffer:
    """Room for one table, in pinned memory and on the device, until the event passes."""

    host: int
    device: int
    free: Event


class KernelExecutor(Executor):
    """The kernel of `hicache.cuda.kernels`, compiled when this is made. Host memory must be pinned.

    Args:
        driver: the device.
        blocks: of the grid: how much of the device it takes, half a multiprocessor each.

    Raises:
        CudaError: the kernel does not compile, or there is no memory for its tables.
    """

    name = "kernel"

    def __init__(self, driver: CudaDriver, *, blocks: int) -> None:
        self.blocks = blocks
        self._driver = driver
        self._kernel: Kernel = driver.compile(SOURCE, NAME)
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []  # the one that was used longest ago is first
        try:
            for _ in range(_TABLES):
                self._buffers.append(self._buffer())
        except CudaError:
            self.close()
            raise

    def run(self, table: RunTable, stream: Stream) -> None:
        """Put tables and kernels into the stream; waits while all buffers for tables are in use."""
        for at in range(0, len(table), TABLE_RUNS):
            self._launch(kernel_table(table[at : at + TABLE_RUNS], blocks=self.blocks), stream)

    def close(self) -> None:
        """Wait for the tables that are in use, and give their memory back."""
        with self._lock:
            buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            self._driver.synchronize(buffer.free)
            self._driver.free(buffer.device)
            self._driver.host_free(buffer.host)

    def _launch(self, made: KernelTable, stream: Stream) -> None:
        driver, size = self._driver, made.words.nbytes
        with self._lock:
            buffer = self._free_buffer()
            try:
                ctypes.memmove(buffer.host, made.words.ctypes.data, size)
                base = buffer.host
                if made.runs > _DIRECT_RUNS:
                    base = buffer.device
                    driver.memcpy_async(base, buffer.host, size, stream)
                arguments = [np.int64(value) for value in (*made.addresses(base), made.runs, made.chunk)]
                driver.launch(self._kernel, (self.blocks, 1, 1), (THREADS, 1, 1), arguments, stream)
            finally:
                # Also behind a failure: the table's copy may be under way.
                self._fence(buffer, stream)

    def _fence(self, buffer: _Buffer, stream: Stream) -> None:
        try:
            self._driver.record(buffer.free, stream)
        except CudaError:
            self._buffers.remove(buffer)  # for good: nobody can tell when its table is no longer read
            raise

    def _free_buffer(self) -> _Buffer:
        """One whose table nobody reads any more, now the last in the list; waits for the first if there is none."""
        if not self._buffers:
            raise CudaError("a copy kernel", "no table", -1, "its tables are in use for good, or it is closed")
        buffer = next((one for one in self._buffers if self._driver.query(one.free)), None)
        if buffer is None:
            buffer = self._buffers[0]
            self._driver.synchronize(buffer.free)
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        return buffer

    def _buffer(self) -> _Buffer:
        size = 8 * (4 * TABLE_RUNS + 1)
        host = self._driver.host_alloc(size)
        try:
            return _Buffer(host, self._driver.malloc(size), self._driver.event())
        except CudaError:
            self._driver.host_free(host)
            raise


@dataclass(frozen=True, slots=True)
class Executors:
    """Those that work here.

    Attributes:
        usable: by name, in the order of `METHODS`; `plain` is always among them.
        absent: for each of the others, why it is.
    """

    usable: dict[str, Executor]
    absent: dict[str, str]

    def close(self) -> None:
        """Close all."""
        for executor in self.usable.values():
            executor.close()


def default_blocks(facts: DeviceFacts) -> int:
    """Blocks of the copy kernel: one for so many multiprocessors, so that it takes a sixteenth of the device."""
    return min(_MOST_BLOCKS, max(1, facts.multiprocessors // _MULTIPROCESSORS_A_BLOCK))


def open_executors(driver: CudaDriver, facts: DeviceFacts, *, pinned: bool, blocks: int | None = None) -> Executors:
    """Make all executors that can work, the kernel compiled.

    Args:
        driver: the device.
        facts: what it is.
        pinned: whether the host pool's memory is; batches and kernels can reach no other.
        blocks: of the copy kernel's grid; None is `default_blocks`.
    """
    usable: dict[str, Executor] = {PlainExecutor.name: PlainExecutor(driver)}
    absent: dict[str, str] = {}
    reason = _unreachable(facts, pinned=pinned)
    if driver.batches and not reason:
        usable[BatchExecutor.name] = BatchExecutor(driver)
    else:
        absent[BatchExecutor.name] = reason or driver.no_batches
    if not reason:
        try:
            usable[KernelExecutor.name] = KernelExecutor(driver, blocks=blocks or default_blocks(facts))
        except CudaError as error:
            reason = str(error)
    if reason:
        absent[KernelExecutor.name] = reason
    return Executors(usable, absent)


def _unreachable(facts: DeviceFacts, *, pinned: bool) -> str:
    """Why the device itself cannot use the host pool's addresses; empty where it can."""
    if not pinned:
        return "the host memory is not pinned, and this way reaches no other"
    if not facts.maps_host:
        return f"{facts.name} cannot reach pinned memory by the host's own addresses"
    return ""
