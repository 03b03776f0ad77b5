"""Beside torch on a real device: its tensors, streams, events and allocator, and memory that processes share.

`benchmarks/gpu_check.sh tests` runs these where there is one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.core.arenas import ArenaPlan
from hicache.cuda import CudaDevicePool, CudaOptions
from hicache.cuda.driver import CudaDriver, CudaError
from hicache.cuda.pinned import HostPins, PinnedHostPool
from hicache.memory.arena import Arena, MappedArena

pytestmark = pytest.mark.gpu
torch: Any = pytest.importorskip("torch")

LAYERS, SLOTS, PAGE, HEADS, DIM = 3, 24, 16, 4, 64
GEOMETRY = hicache.KVGeometry.mha(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16")
SECONDS = 30.0
DELAY = 64 << 20
ALL = np.arange(SLOTS)


@pytest.fixture(scope="module")
def driver() -> CudaDriver:
    from hicache.cuda.cupy_driver import open_driver

    return open_driver()


def tensors() -> list[Any]:
    """An engine's, of random bits, one a layer."""
    shape = (2, SLOTS, PAGE, HEADS, DIM)
    made = [torch.randint(-32768, 32767, shape, dtype=torch.int16, device="cuda") for _ in range(LAYERS)]
    return [one.view(torch.bfloat16) for one in made]


def bits(kv: list[Any]) -> list[Any]:
    return [one.view(torch.int16).clone() for one in kv]


def same(kv: list[Any], wanted: list[Any]) -> bool:
    return all(torch.equal(one.view(torch.int16), other) for one, other in zip(kv, wanted, strict=True))


@pytest.fixture(params=["plain", "batch", "kernel"])
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[list[Any], CudaDevicePool, Any, Any]]:
    """Tensors, a pool over them, pinned host memory and what copies between the two."""
    kv = tensors()
    options = CudaOptions(method=request.param, pinned="require")
    pool = CudaDevicePool.attach(kv, GEOMETRY, page_size=PAGE, layout="split/nhd", options=options)
    host = pool.host_pool(GEOMETRY, PAGE, SLOTS)
    copies = pool.cuda_engine(host)
    assert copies.statistics().choice is not None
    assert copies.statistics().choice.notes == ()  # type: ignore[union-attr]
    yield kv, pool, host, copies
    assert copies.close(SECONDS) == 0
    host.close()
    pool.close()


def test_an_engines_tensors_go_down_and_come_up_bit_for_bit(engine: Any) -> None:
    kv, pool, _, copies = engine
    wanted = bits(kv)
    assert copies.device_to_host(ALL, ALL[::-1].copy(), ready=pool.record(), done=lambda _: None).wait(SECONDS)
    for tensor in kv:
        tensor.zero_()
    copy = copies.host_to_device(ALL[::-1].copy(), ALL, done=lambda _: None)
    stream = pool.driver.current_stream()
    assert all(copy.let_wait(layer, stream, SECONDS) for layer in range(LAYERS))
    assert same(kv, wanted)  # on torch's stream, which was let wait
    assert copy.wait(SECONDS)
    assert copies.statistics().failed_pages == 0


def test_a_copy_down_waits_for_torchs_event(engine: Any) -> None:
    kv, _, host, copies = engine
    side, delay = torch.cuda.Stream(), torch.empty(DELAY, dtype=torch.uint8, device="cuda")
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(side):
        for _ in range(50):
            delay.add_(1)
        for tensor in kv:
            tensor.view(torch.int16).fill_(7)
        written = torch.cuda.Event()
        written.record()
    assert copies.device_to_host(ALL, ALL, ready=written, done=lambda _: None).wait(SECONDS)
    assert (host.pages.view(np.int16) == 7).all()
    never = torch.cuda.Event()  # recorded nowhere: has no handle yet, and counts as passed
    assert copies.device_to_host(ALL, ALL, ready=never, done=lambda _: None).wait(SECONDS)
    assert copies.statistics().failed_pages == 0
    side.synchronize()


def test_the_allocator_gives_memory_back_behind_streams_that_have_ended() -> None:
    """Torch keeps the handles of streams that it was told of, and records events in them when tensors are freed."""
    for _ in range(3):
        kv = tensors()
        pool = CudaDevicePool.attach(kv, GEOMETRY, page_size=PAGE, layout="split/nhd")
        host = pool.host_pool(GEOMETRY, PAGE, SLOTS)
        copies = pool.cuda_engine(host)
        assert copies.device_to_host(ALL, ALL, ready=pool.record(), done=lambda _: None).wait(SECONDS)
        copies.close(SECONDS)
        host.close()
        pool.close()
        del copies, pool
        gc.collect()
        del kv
        gc.collect()
        torch.empty(1 << 20, device="cuda").fill_(1)  # looks which freed memory is no longer in use
        torch.cuda.synchronize()


def test_memory_that_was_allocated_here_is_torchs_without_a_copy() -> None:
    pool = CudaDevicePool.allocate(GEOMETRY, page_size=PAGE, slots=SLOTS)
    seen = torch.as_tensor(pool, device="cuda")
    assert seen.data_ptr() == pool.__cuda_array_interface__["data"][0]
    page = np.random.default_rng(1).integers(0, 256, pool.page_bytes, np.uint8)
    pool.write_page(5, page)
    assert int(seen.sum(dtype=torch.int64)) >= int(page.sum())
    assert np.array_equal(pool.read_page(5), page)
    seen.zero_()
    assert not pool.read_page(5).any()  # behind torch's stream
    pool.close()


def test_any_thread_may_call_the_driver(driver: CudaDriver) -> None:
    device, host = driver.malloc(4096), driver.host_alloc(4096)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            stream, event = driver.stream(), driver.event()
            for _ in range(20):
                driver.memcpy_async(device, host, 4096, stream)
                if driver.batches:
                    driver.memcpy_batch_async([device], [host], [4096], stream)
                driver.record(event, stream)
                driver.query(event)
                driver.synchronize(event)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    driver.free(device)
    driver.host_free(host)
    assert not failed


def test_shared_memory_is_pinned_where_it_lies_and_reached_by_its_own_address(driver: CudaDriver) -> None:
    host = PinnedHostPool.open(ArenaPlan.of(GEOMETRY, PAGE), SLOTS, driver=driver, pinning="require")
    start, size = host.pages.ctypes.data, host.pages.nbytes
    for address in (start, start + size - 1):
        assert driver.pointer(address).kind == "host"
    with pytest.raises(CudaError, match="cudaErrorHostMemoryAlreadyRegistered"):
        driver.host_register(start, size)
    host.close()
    with pytest.raises(CudaError):
        driver.host_unregister(start)


def test_memory_that_another_process_writes_is_pinned_or_the_reason_is_told(driver: CudaDriver) -> None:
    arena = Arena(4, 1 << 20)
    with contextlib.closing(arena):
        theirs = MappedArena(os.dup(arena.fd), 4, 1 << 20, size=arena.size, writable=False)
        pins = HostPins(driver)
        pinned = pins.pin(theirs.rows.ctypes.data, arena.size, "theirs", writes=False)
        said = pins.statistics().failures
        assert pinned or "which this device cannot pin" in said[0]
        if pinned:
            arena.rows[:] = 9
            device, back = driver.malloc(1 << 20), driver.host_alloc(1 << 20)
            stream, event = driver.stream(), driver.event()
            driver.memcpy_async(device, theirs.rows.ctypes.data, 1 << 20, stream)
            driver.memcpy_async(back, device, 1 << 20, stream)
            driver.record(event, stream)
            driver.synchronize(event)
            assert driver.pointer(theirs.rows.ctypes.data).kind == "host"
            driver.free(device)
            driver.host_free(back)
        pins.close()
        theirs.close()
