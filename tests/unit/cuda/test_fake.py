"""The fake refuses what CUDA, cupy and its bindings refuse, so that tests over it fail where a GPU would."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache.cuda.driver import CudaError
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS

SIZE = 4 * mmap.PAGESIZE


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(kernels=KERNELS)


@pytest.fixture
def mapped() -> Iterator[int]:
    """Address of memory of `SIZE` bytes whose last page can only be read."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE)
    memory = mmap.mmap(fd, SIZE)
    os.close(fd)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.mprotect(ctypes.c_void_p(address + SIZE - mmap.PAGESIZE), mmap.PAGESIZE, mmap.PROT_READ)
    yield address
    memory.close()


# ---- memory


def test_memory_that_is_not_mapped_cannot_be_pinned(cuda: FakeCuda, mapped: int) -> None:
    writable = SIZE - mmap.PAGESIZE
    cuda.host_register(mapped, writable)
    cuda.host_unregister(mapped)
    for address, size in ((8192, 4096), (mapped, 0), (mapped, 1 << 46)):
        with pytest.raises(CudaError, match=r"cudaHostRegister: cudaErrorInvalidValue \(1\): .* not mapped"):
            cuda.host_register(address, size)
    assert cuda.registered == {}


def test_memory_that_can_only_be_read_is_pinned_only_as_that(cuda: FakeCuda, mapped: int) -> None:
    with pytest.raises(CudaError, match="cudaErrorInvalidValue"):
        cuda.host_register(mapped, SIZE)
    cuda.host_register(mapped, SIZE, read_only=True)
    assert cuda.registered == {mapped: SIZE}


def test_memory_is_given_back_as_it_was_taken(cuda: FakeCuda, mapped: int) -> None:
    allocated, device = cuda.host_alloc(64), cuda.malloc(64)
    cuda.host_register(mapped, 4096)
    for give_back, address, name in (
        (cuda.host_unregister, allocated, "cudaErrorHostMemoryNotRegistered"),
        (cuda.host_unregister, mapped + 64, "cudaErrorHostMemoryNotRegistered"),
        (cuda.host_free, mapped, "cudaErrorInvalidValue"),
        (cuda.host_free, device, "cudaErrorInvalidValue"),
        (cuda.free, allocated, "cudaErrorInvalidValue"),
        (cuda.free, device + 64, "cudaErrorInvalidValue"),
    ):
        with pytest.raises(CudaError, match=name):
            give_back(address)
    cuda.host_free(allocated)
    cuda.free(device)
    cuda.host_unregister(mapped)


@pytest.mark.parametrize("call", ["memcpy_async", "memcpy_batch_async"])
def test_a_copy_is_of_memory_that_is_pinned_as_a_whole(cuda: FakeCuda, mapped: int, call: str) -> None:
    device, stream = cuda.malloc(256), cuda.stream()
    cuda.host_register(mapped + 128, 4096)

    def copy(host: int, size: int) -> None:
        if call == "memcpy_async":
            cuda.memcpy_async(device, host, size, stream)
        else:
            cuda.memcpy_batch_async([device], [host], [size], stream)

    copy(mapped + 128, 256)
    for host, size in ((mapped, 256), (mapped + 128 + 4096 - 8, 16)):
        with pytest.raises(CudaError, match="cudaErrorInvalidValue"):
            copy(host, size)
    cuda.finish()
    if call == "memcpy_async":
        copy(mapped, 128)  # not pinned at all: slower, and fine
    else:
        with pytest.raises(CudaError, match="cudaErrorInvalidValue"):
            copy(mapped, 128)


# ---- numbers


@pytest.mark.parametrize("number", [-1, 1 << 63])
def test_addresses_have_63_bits(cuda: FakeCuda, number: int) -> None:
    for call in (
        lambda: cuda.pointer(number),
        lambda: cuda.memcpy_async(number, 1, 1, cuda.stream()),
        lambda: cuda.memset_async(number, 0, 1, cuda.stream()),
        lambda: cuda.malloc(number),
        lambda: cuda.host_alloc(number),
    ):
        with pytest.raises(CudaError, match="OverflowError"):
            call()
    with pytest.raises(TypeError):
        cuda.memcpy_async(1, 1, 1.0, cuda.stream())  # type: ignore[arg-type]


def test_batches_take_pythons_own_integers_only(cuda: FakeCuda) -> None:
    """An array's numbers have a buffer, so the bindings would take where they lie for the address."""
    device, host, stream = cuda.malloc(64), cuda.host_alloc(64), cuda.stream()
    of_arrays: Any = (
        ([np.int64(device)], [host], [64]),
        ([device], list(np.array([host])), [64]),
        ([device], [host], [np.int64(64)]),
    )
    for runs in of_arrays:
        with pytest.raises(CudaError, match=r"cudaMemcpyBatchAsync: TypeError \(-1\)"):
            cuda.memcpy_batch_async(*runs, stream)
    for runs in (([], [], []), ([device], [host], [0]), ([device], [host, host], [8])):
        with pytest.raises(CudaError, match="cudaErrorInvalidValue"):
            cuda.memcpy_batch_async(*runs, stream)
    assert not cuda.waiting


def test_the_default_stream_takes_no_batches(cuda: FakeCuda) -> None:
    device, host = cuda.malloc(64), cuda.host_alloc(64)
    for stream in (cuda.default, SimpleNamespace(ptr=0)):
        with pytest.raises(CudaError, match=r"cudaMemcpyBatchAsync: cudaErrorInvalidValue \(1\)"):
            cuda.memcpy_batch_async([device], [host], [64], stream)  # type: ignore[arg-type]
    cuda.memcpy_async(device, host, 64, cuda.default)


@pytest.mark.parametrize(
    ("grid", "block", "arguments", "error"),
    [
        ([1, 1, 1], (32, 1, 1), [], TypeError),
        ((1, 1, 1), (32, 1, 1), ["1"], TypeError),
        ((1, 1, 1), (32, 1, 1), [np.int32(1)], CudaError),
        ((1, 1 << 16, 1), (32, 1, 1), [], CudaError),
        ((0, 1, 1), (32, 1, 1), [], CudaError),
        ((1, 1, 1), (2048, 1, 1), [], CudaError),
    ],
)
def test_a_launch_has_tuples_and_arguments_of_64_bits(
    cuda: FakeCuda, grid: Any, block: Any, arguments: Any, error: type[Exception]
) -> None:
    kernel = cuda.compile("hicache_copy_runs", "hicache_copy_runs")
    with pytest.raises(error):
        cuda.launch(kernel, grid, block, arguments, cuda.stream())
    assert not cuda.waiting


# ---- streams and events


def test_handles_of_nobody_are_refused(cuda: FakeCuda) -> None:
    nobody: Any = SimpleNamespace(ptr=10_000)
    for call in (
        lambda: cuda.external_stream(10_000),
        lambda: cuda.external_event(10_000),
        lambda: cuda.query(nobody),
        lambda: cuda.wait(cuda.stream(), nobody),
    ):
        with pytest.raises(CudaError, match=r"cudaErrorInvalidResourceHandle \(400\)"):
            call()


def test_time_is_told_between_events_that_have_passed_and_were_made_for_it(cuda: FakeCuda) -> None:
    stream = cuda.stream()
    start, end, untimed = cuda.event(timing=True), cuda.event(timing=True), cuda.event()
    for event in (start, untimed):
        cuda.record(event, stream)
    for pair in ((start, end), (start, untimed)):
        with pytest.raises(CudaError, match="cudaErrorInvalidResourceHandle"):
            cuda.elapsed(*pair)
    gate = cuda.gate(stream)
    cuda.record(end, stream)
    cuda.finish()
    with pytest.raises(CudaError, match=r"cudaErrorNotReady \(600\)"):
        cuda.elapsed(start, end)
    gate.open()
    cuda.finish()
    assert cuda.elapsed(start, end) >= 0
