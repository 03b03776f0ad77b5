"""Real models of transformers over the device tier of a GPU, which a fake of CUDA holds: the text is that without."""

from __future__ import annotations

import ctypes
import math
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import BaseStreamer

from hicache.config import Config, Drain, Host, Listen, Size
from hicache.cuda import CudaDevicePool, CudaOptions
from hicache.cuda.driver import Event, Stream
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS
from hicache.testing.serving import ServedApp
from hicache_transformers.gpu import GpuMemory
from hicache_transformers.window import GpuWindow

NEW = {"max_new_tokens": 8, "do_sample": False}
CPU = torch.device("cpu")


class ModelCuda(FakeCuda):
    """The model computes on the CPU, as the current stream: what that waits for, its thread has to."""

    def wait(self, stream: Stream, event: Event) -> None:
        super().wait(stream, event)
        if stream is self.default:
            self.synchronize(event)


def of_fake(pool: CudaDevicePool, _: torch.device) -> torch.Tensor:
    shown = pool.__cuda_array_interface__
    memory = (ctypes.c_uint8 * math.prod(shown["shape"])).from_address(shown["data"][0])
    return torch.from_numpy(np.ctypeslib.as_array(memory).reshape(shown["shape"]))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = ModelCuda(memory=1 << 25, kernels=KERNELS)

    def opened_tier(namespace: Any, shape: Any, model: Any, *, size: Any) -> Any:
        options = CudaOptions(method="batch")
        settings = {"device": CPU, "dtype": model.dtype, "size": size, "driver": cuda, "options": options}
        return GpuMemory(namespace, shape, **settings, view=of_fake), None

    monkeypatch.setattr("hicache_transformers.opening.open_tier", opened_tier)
    monkeypatch.setattr("hicache.cuda.putting._STEP_BYTES", 1)  # layer by layer, however thin
    return cuda


@pytest.mark.usefixtures("on_gpu")
def test_cold_from_the_device_and_from_main_memory(model: Any, opened: Any, prompt: Any) -> None:
    """The device tier holds one prompt, so each comes up again, and the model waits for it layer by layer."""
    asked = [prompt(tokens, seed=tokens) for tokens in (100, 97)]
    expected = [model.generate(ids, **NEW) for ids in asked]
    cache = opened(model, device=8)
    for turn in range(6):
        assert torch.equal(cache.generate(asked[turn % 2], **NEW), expected[turn % 2])
        cache.flush()
    assert torch.equal(cache.generate(asked[1], **NEW), expected[1])
    found = cache.statistics()
    assert found.reused_tokens == 5 * 96
    assert not found.failures
    assert not found.bypassed
    assert cache.cache.statistics().copies.pages_host_to_device


@pytest.mark.usefixtures("on_gpu")
def test_batches_and_sampling(llama: Any, opened: Any, prompt: Any, batch: Any) -> None:
    given = batch(prompt(60), prompt(41, seed=2))
    settings = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.9, "top_k": 20, "num_return_sequences": 3}
    cache = opened(llama, device=8)
    torch.manual_seed(7)
    expected = llama.generate(**given, **settings)
    for _ in range(3):
        torch.manual_seed(7)
        assert torch.equal(cache.generate(**given, **settings), expected)
        cache.flush()
        cache.generate(prompt(100, seed=5), **NEW)
        cache.flush()
    assert not cache.statistics().failures
    assert cache.cache.statistics().copies.pages_host_to_device


def test_pages_that_do_not_come_are_computed(on_gpu: FakeCuda, llama: Any, opened: Any, prompt: Any) -> None:
    cache = opened(llama, device=8)
    expected = llama.generate(prompt(100), **NEW)
    for ids in (prompt(100), prompt(100, seed=2)):
        cache.generate(ids, **NEW)
        cache.flush()
    for _ in range(2):
        on_gpu.fail("memcpy_batch_async", "cudaErrorInvalidValue", 1)
    assert torch.equal(cache.generate(prompt(100), **NEW), expected)
    assert cache.statistics().failures == {"loading pages: HicacheError": 1}


@pytest.fixture
def service_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Settings of a cache whose pages a service keeps, for a model on the fake."""
    cuda = ModelCuda(memory=1 << 25, kernels=KERNELS)

    def made(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
        memory = torch.full(sizes, 0xEE, dtype=torch.uint8, device=device)
        cuda.adopt(memory.data_ptr(), memory.numel())
        return memory

    def window(shape: Any, model: Any, *, size: Any) -> Any:
        settings = {"device": CPU, "dtype": model.dtype, "size": size, "driver": cuda, "make": made}
        return GpuWindow(shape, **settings, options=CudaOptions(method="batch")), None

    monkeypatch.setattr("hicache_transformers.opening.open_window", window)
    for step in ("hicache.cuda.putting._STEP_BYTES", "hicache_transformers.writers.STEP_BYTES"):
        monkeypatch.setattr(step, 1)
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        listen = Listen(addresses=(f"unix://{folder}/s.sock",))
        with ServedApp(Config(listen=listen, host=Host(bytes=Size(2**24)), drain=Drain(seconds=0.2))) as served:
            yield {"address": served.address, "host": None, "required": True, "timeout": 20}
    assert not cuda.registered


@pytest.mark.parametrize("device", [64, 5])
def test_pages_of_a_service(service_on_gpu: Any, model: Any, opened: Any, prompt: Any, device: int) -> None:
    """Straight to the model, layer by layer, or in pieces; and found while the call that stored them generates."""
    cache = opened(model, device=device, **service_on_gpu)
    asked = [prompt(tokens, seed=tokens) for tokens in (100, 97)]
    for ids in asked * 2:
        assert torch.equal(cache.generate(ids, **NEW), model.generate(ids, **NEW))
        cache.flush()
    chat = torch.cat([model.generate(asked[0], **NEW), prompt(20, seed=3)], 1)
    mask = torch.ones_like(chat)  # as what was generated may look like padding
    assert torch.equal(
        cache.generate(chat, attention_mask=mask, **NEW), model.generate(chat, attention_mask=mask, **NEW)
    )
    found = cache.statistics()
    assert found.reused_tokens == 3 * 96
    assert not found.failures
    assert not found.bypassed
    cache.close()


def test_batches_of_a_service(service_on_gpu: Any, llama: Any, opened: Any, prompt: Any, batch: Any) -> None:
    given = batch(prompt(60), prompt(41, seed=2))
    settings = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.9, "top_k": 20, "num_return_sequences": 3}
    cache = opened(llama, device=64, **service_on_gpu)
    torch.manual_seed(7)
    expected = llama.generate(**given, **settings)
    for _ in range(3):
        torch.manual_seed(7)
        assert torch.equal(cache.generate(**given, **settings), expected)
        cache.flush()
    assert not cache.statistics().failures
    assert cache.statistics().reused_tokens
    cache.close()


class Stops(BaseStreamer):
    """Somebody has had enough after some tokens; and how many pages others found by then."""

    def __init__(self, cache: Any, ids: torch.Tensor) -> None:
        self.found: list[int] = []
        self._cache = cache
        self._ids = ids[0].numpy().astype("uint32")

    def put(self, value: Any) -> None:
        del value
        self._cache.flush()
        self.found.append(self._cache.cache.match(self._ids).pages)
        if len(self.found) == 3:  # the prompt, and two tokens
            raise KeyboardInterrupt

    def end(self) -> None:
        """Never comes."""


def test_a_call_that_is_broken_off_has_stored_its_prompt(
    service_on_gpu: Any, llama: Any, opened: Any, prompt: Any
) -> None:
    cache = opened(llama, device=64, **service_on_gpu)
    ids = prompt(100)
    streamer = Stops(cache, ids)
    with pytest.raises(KeyboardInterrupt):
        cache.generate(ids, streamer=streamer, **NEW)
    assert streamer.found == [0, 6, 6]
    cache.flush()
    assert torch.equal(cache.generate(ids, **NEW), llama.generate(ids, **NEW))
    assert cache.statistics().reused_tokens == 96
    assert not cache.statistics().failures
    cache.flush()
    assert cache.cache.state.open_leases == 0
    cache.close()
