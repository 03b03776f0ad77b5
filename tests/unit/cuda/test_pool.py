"""Device pools on CUDA: over an engine's tensors, or allocated; what does not fit is refused when they are made."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.cuda import CudaDevicePool, CudaEvent, CudaOptions
from hicache.cuda.cupy_driver import open_driver
from hicache.cuda.events import event_behind
from hicache.cuda.streams import tell_allocator
from hicache.errors import CacheClosed, ConfigError, GeometryError
from hicache.memory.host import MmapHostPool
from hicache.memory.writer import ThreadEvent
from hicache.testing.cuda import FakeCuda

GEOMETRY = hicache.KVGeometry.mha(layers=2, kv_heads=2, head_dim=8, dtype="float16")
PAGE = 4
SLOTS = 6
PLAIN = CudaOptions(method="plain")


class Tensor:
    """An array in a fake device's memory, as frameworks show theirs."""

    def __init__(self, cuda: FakeCuda, shape: tuple[int, ...], dtype: str = "float16", **change: Any) -> None:
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        self.address = cuda.malloc(size)
        self.__cuda_array_interface__ = {
            "data": (self.address, False),
            "shape": shape,
            "typestr": kind.str,
            "strides": None,
            "version": 3,
        } | change

    @property
    def bytes(self) -> Any:
        shape = self.__cuda_array_interface__["shape"]
        size = int(np.prod(shape)) * 2
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))


class TorchLike:
    """A tensor as torch describes its own."""

    def __init__(
        self, cuda: FakeCuda, shape: tuple[int, ...], *, dtype: str = "bfloat16", device: str = "cuda"
    ) -> None:
        self.shape, self.dtype, self.layout = shape, f"torch.{dtype}", "torch.strided"
        self.device = type("Device", (), {"type": device, "index": 0, "__str__": lambda self: f"{device}:0"})()
        self.address = cuda.malloc(int(np.prod(shape)) * 2)

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return 2

    def stride(self) -> tuple[int, ...]:
        return tuple(int(np.prod(self.shape[at + 1 :])) for at in range(len(self.shape)))


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(memory=1 << 22)


def layers(cuda: FakeCuda, shape: tuple[int, ...] = (2, SLOTS, PAGE, 2, 8), **options: Any) -> list[Tensor]:
    return [Tensor(cuda, shape, **options) for _ in range(2)]


def attach(cuda: FakeCuda, tensors: Any, layout: str = "layer_first", geometry: Any = GEOMETRY) -> CudaDevicePool:
    return CudaDevicePool.attach(tensors, geometry, page_size=PAGE, layout=layout, driver=cuda, options=PLAIN)


def random_page(size: int) -> Any:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("layer_first", (2, SLOTS, PAGE, 2, 8)),
        ("split/nhd", (2, SLOTS, PAGE, 2, 8)),
        ("split/hnd", (2, SLOTS, 2, PAGE, 8)),
        ("blocks/nhd", (SLOTS, 2, PAGE, 2, 8)),
        ("blocks/hnd", (SLOTS, 2, 2, PAGE, 8)),
        ("rows", (SLOTS, 2, PAGE, 16)),
    ],
)
def test_pages_go_in_and_out_of_an_engines_tensors_in_each_layout(
    cuda: FakeCuda, layout: str, shape: tuple[int, ...]
) -> None:
    pool = attach(cuda, layers(cuda, shape), layout)
    page = random_page(pool.page_bytes)
    assert (pool.slots, pool.layers, pool.synchronous) == (SLOTS, 2, False)
    pool.write_page(3, page)
    assert np.array_equal(pool.read_page(3), page)
    pool.poison(np.array([3]))
    assert set(pool.read_page(3).tolist()) == {0xEE}
    pool.close()


def test_a_page_lies_where_the_layout_says(cuda: FakeCuda) -> None:
    """Against numpy's own view of the same memory."""
    tensors = layers(cuda, (SLOTS, 2, 2, PAGE, 8))
    pool = attach(cuda, tensors, "blocks/hnd")
    page = random_page(pool.page_bytes)
    pool.write_page(4, page)
    canonical = page.reshape(1, 2, 2, PAGE, 2, 16)  # (head group, layer, plane, token, head, bytes)
    for layer, tensor in enumerate(tensors):
        seen = tensor.bytes.reshape(SLOTS, 2, 2, PAGE, 16)[4]  # (plane, head, token, bytes)
        assert np.array_equal(seen, canonical[0, layer].transpose(0, 2, 1, 3))


def test_latent_pages_and_allocated_pools(cuda: FakeCuda) -> None:
    latent = hicache.KVGeometry.mla(layers=2, latent_dim=8, rope_dim=4, dtype="float16")
    for geometry, layout in ((latent, None), (GEOMETRY, "page_first"), (GEOMETRY, None)):
        pool = CudaDevicePool.allocate(geometry, page_size=PAGE, slots=SLOTS, layout=layout, driver=cuda, options=PLAIN)
        page = random_page(pool.page_bytes)
        pool.write_page(SLOTS - 1, page)
        assert np.array_equal(pool.read_page(SLOTS - 1), page)
        assert "CUDA device 0" in repr(pool)
        pool.close()
        pool.close()
        with pytest.raises(CacheClosed):
            pool.read_page(0)
    assert not cuda.allocated


def test_memory_that_was_allocated_is_shown_to_frameworks(cuda: FakeCuda) -> None:
    pool = CudaDevicePool.allocate(GEOMETRY, page_size=PAGE, slots=SLOTS, driver=cuda, options=PLAIN)
    pool.write_page(3, random_page(pool.page_bytes))
    shown = pool.__cuda_array_interface__
    assert shown["shape"] == (2, 2, SLOTS, PAGE, 2, 16)  # (layer, plane, slot, token, head, bytes)
    size = int(np.prod(shown["shape"]))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(shown["data"][0])).reshape(shown["shape"])
    canonical = pool.read_page(3).reshape(2, 2, PAGE, 2, 16)
    assert np.array_equal(memory[:, :, 3], canonical)
    pool.close()
    assert not hasattr(pool, "__cuda_array_interface__")
    assert not hasattr(attach(cuda, layers(cuda)), "__cuda_array_interface__")


def test_torchs_tensors_are_taken_by_what_they_say_of_themselves(cuda: FakeCuda) -> None:
    geometry = hicache.KVGeometry.mha(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16")
    tensors = [TorchLike(cuda, (2, SLOTS, PAGE, 2, 8)) for _ in range(2)]
    pool = attach(cuda, tensors, geometry=geometry)
    pool.write_page(0, bytes(pool.page_bytes))
    assert not pool.read_page(0).any()


def test_gather_and_scatter_wait_until_it_is_done(cuda: FakeCuda) -> None:
    pool = attach(cuda, layers(cuda))
    host = MmapHostPool(3, pool.page_bytes)
    pages = random_page(3 * pool.page_bytes).reshape(3, -1)
    host.pages[:] = pages
    pool.scatter(host, np.arange(3), np.array([5, 0, 1]))
    host.pages[:] = 0
    pool.gather(np.array([1, 5]), host, np.array([0, 2]))
    assert np.array_equal(host.page(0), pages[2])
    assert np.array_equal(host.page(2), pages[0])
    pool.scatter(host, np.array([1]), np.array([5]), layers=(1, 2))
    half = pool.page_bytes // 2
    assert np.array_equal(pool.read_page(5)[:half], pages[0][:half])
    assert not pool.read_page(5)[half:].any()
    host.close()


def test_reading_waits_for_what_the_engines_streams_hold() -> None:
    for seed in range(8):
        cuda = FakeCuda(seed=seed, memory=1 << 22)
        first, second = cuda.stream(), cuda.stream()
        pool = CudaDevicePool.allocate(GEOMETRY, page_size=PAGE, slots=2, driver=cuda, stream=first, options=PLAIN)
        pool.computes_on(second.ptr)
        start, half = next(iter(cuda.allocated)), pool.page_bytes
        cuda.memset_async(start, 7, half, first)
        cuda.memset_async(start + half, 7, half, second)
        assert set(pool.read_page(0).tolist()) == {7}
        assert set(pool.read_page(1).tolist()) == {7}
        pool.close()


def test_events_of_the_device_are_writer_events(cuda: FakeCuda) -> None:
    pool = attach(cuda, layers(cuda))
    gate = cuda.gate(cuda.default)
    event = pool.record()
    assert isinstance(event, CudaEvent)
    assert not event.query()
    assert not event.wait(0.001)
    gate.open()
    assert event.wait(None)
    assert event.query()
    assert event.wait(5.0)
    assert event_behind(cuda, event) is event.event
    assert event_behind(cuda, ThreadEvent()) is None
    torchs = type("Event", (), {"cuda_event": event.event.ptr})()
    assert event_behind(cuda, torchs) is event.event


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda cuda: [np.zeros((2, SLOTS, PAGE, 2, 8), np.float16)] * 2, "tensor 0 is a ndarray: give a torch tensor"),
        (lambda cuda: [TorchLike(cuda, (2, SLOTS, PAGE, 2, 8), device="cpu")] * 2, "hicache.TensorDevicePool takes"),
        (lambda cuda: layers(cuda, (2, SLOTS, PAGE, 3, 8)), "expected 2: (2, 6, 4, 3, 8)"),
        (lambda cuda: layers(cuda, (2, SLOTS, PAGE, 2, 4)), "rows of 8 bytes, expected 16"),
        (lambda cuda: layers(cuda)[:1], "1 tensors given for 2 layers"),
        (lambda cuda: [], "no tensor was given"),
        (lambda cuda: layers(cuda, dtype="float32"), "dtype float32, the geometry float16"),
        (lambda cuda: layers(cuda, typestr="|V2"), "elements of type '|V2'"),
        (lambda cuda: layers(cuda, data=(4096, True)), "read-only"),
        (lambda cuda: [layers(cuda)[0]] * 2, "share memory"),
        (
            lambda cuda: layers(cuda, strides=(768, 128, 32, 16, 4)),
            "last axis of tensor 0 is not contiguous",
        ),
        (lambda cuda: layers(cuda, strides=(768, 0, 32, 16, 2)), "expanded or cut"),
    ],
)
def test_what_is_no_pool_of_such_pages_is_refused(cuda: FakeCuda, change: Any, said: str) -> None:
    with pytest.raises(GeometryError) as caught:
        attach(cuda, change(cuda))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensors_of_two_devices_and_of_main_memory_are_refused(cuda: FakeCuda) -> None:
    tensors = layers(cuda)
    cuda.adopt(tensors[1].address, 4, device=1)
    with pytest.raises(GeometryError, match="tensor 1 is on CUDA device 1, the pool on device 0"):
        attach(cuda, tensors)
    with pytest.raises(GeometryError, match="tensor 0 is in main memory"):
        attach(FakeCuda(), tensors)


def test_slots_and_pages_that_do_not_exist_are_refused(cuda: FakeCuda) -> None:
    pool = attach(cuda, layers(cuda))
    host = MmapHostPool(1, 4096)
    for call, said in (
        (lambda: pool.read_page(SLOTS), "device slot 6 does not exist: the pool has 6"),
        (lambda: pool.read_page("a"), "no slot number"),  # type: ignore[arg-type]
        (lambda: pool.write_page(0, b"short"), "a page has 512 bytes, not 5"),
        (lambda: pool.write_page(0, 7), "bytes or a numpy array"),
        (lambda: pool.gather(np.zeros(1, np.int64), host, np.zeros(1, np.int64)), "host pages have 4096 bytes"),
        (lambda: pool.check_geometry(GEOMETRY, 8), "open it with the pool's geometry"),
    ):
        with pytest.raises(GeometryError) as caught:
            call()  # type: ignore[no-untyped-call]
        assert said in str(caught.value)
    host.close()


def test_more_than_the_device_has_is_refused_with_the_numbers() -> None:
    cuda = FakeCuda(memory=4096)
    with pytest.raises(ConfigError, match=r"device pool of 100 pages of 50 KiB .* 4 KiB of 4 KiB are free"):
        CudaDevicePool.allocate(GEOMETRY, page_size=PAGE, slots=100, driver=cuda)
    cuda.fail("malloc", "cudaErrorMemoryAllocation", 2)  # taken by others between the look and the call
    with pytest.raises(ConfigError, match="does not fit on CUDA device 0"):
        CudaDevicePool.allocate(GEOMETRY, page_size=PAGE, slots=1, driver=cuda)
    cuda.fail("malloc", "cudaErrorECCUncorrectable", 214)
    with pytest.raises(ConfigError, match="cannot be allocated: malloc: cudaErrorECCUncorrectable"):
        CudaDevicePool.allocate(GEOMETRY, page_size=PAGE, slots=1, driver=cuda)
    for slots in (0, True, "many"):
        with pytest.raises(ConfigError, match="slots of a device pool must be a positive integer"):
            CudaDevicePool.allocate(GEOMETRY, page_size=PAGE, slots=slots, driver=cuda)  # type: ignore[arg-type]
    with pytest.raises(GeometryError, match="not for memory made here"):
        CudaDevicePool.allocate(GEOMETRY, page_size=PAGE, slots=1, layout="rows", driver=cuda)
    with pytest.raises(ConfigError, match=r"stream .* is none"):
        CudaDevicePool.allocate(GEOMETRY, page_size=PAGE, slots=1, stream="fast", driver=cuda)
    assert not cuda.allocated


@pytest.mark.parametrize(
    "options", [{"pinned": "maybe"}, {"method": "magic"}, {"reuse": "never"}, {"blocks": 0}, {"in_flight_bytes": True}]
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        CudaOptions(**options)


def test_without_cupy_the_extra_is_named() -> None:
    with pytest.raises(ConfigError, match=r"needs cupy, .*pip install 'hicache\[cuda\]'"):
        CudaDevicePool.allocate(GEOMETRY, page_size=PAGE, slots=1)
    with pytest.raises(ConfigError, match="needs cupy"):
        open_driver(0)


def test_streams_that_torchs_allocator_knows_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps a stream's handle, and records an event in it when the tensor is freed: long after a pool is closed."""

    class OneStream:
        ptr = 4711

    told: list[tuple[int, object]] = []
    torch: Any = SimpleNamespace(cuda=SimpleNamespace(ExternalStream=lambda ptr, device: (ptr, device)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    device = SimpleNamespace(type="cuda")
    tensor = SimpleNamespace(device=device, record_stream=told.append)
    stream = OneStream()
    tell_allocator([tensor, SimpleNamespace(device=device)], stream)
    assert told == [(4711, device)]
    gone = weakref.ref(stream)
    del stream
    gc.collect()
    assert gone() is not None
