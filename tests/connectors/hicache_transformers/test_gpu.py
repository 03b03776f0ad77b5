"""The device tier in a GPU's memory: a fake of CUDA holds the pages, and copies them in any order that is allowed."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hicache
from hicache.cuda import CudaDevicePool, CudaOptions
from hicache.cuda.driver import Event, Stream
from hicache.errors import CacheClosed, ConfigError
from hicache.storage.memory import MemoryBackend
from hicache.testing.cuda import FakeCuda
from hicache.testing.cudacopy import KERNELS
from hicache.testing.cudastreams import Gate
from hicache_transformers.convert import PageShape
from hicache_transformers.gpu import GpuMemory
from hicache_transformers.model import ModelShape
from hicache_transformers.tiers import Computed, MainMemory, open_tier

PAGE = 4
BATCH = CudaOptions(method="batch")
CPU = torch.device("cpu")


class ModelCuda(FakeCuda):
    """The model computes on the CPU, as the current stream: what that waits for, its thread has to."""

    def wait(self, stream: Stream, event: Event) -> None:
        super().wait(stream, event)
        if stream is self.current_stream():
            self.synchronize(event)


def of_fake(pool: CudaDevicePool, device: torch.device) -> torch.Tensor:
    """As torch makes one of memory on a GPU."""
    assert device == CPU
    shown = pool.__cuda_array_interface__
    memory = (ctypes.c_uint8 * math.prod(shown["shape"])).from_address(shown["data"][0])
    return torch.from_numpy(np.ctypeslib.as_array(memory).reshape(shown["shape"]))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeCuda]:
    """Lets caches that are opened from now on have their device tier on a fake device."""

    def make(cuda: FakeCuda) -> FakeCuda:
        def opened_tier(namespace: Any, shape: PageShape, model: ModelShape, *, size: Any) -> Any:
            made = GpuMemory(
                namespace,
                shape,
                device=CPU,
                dtype=model.dtype,
                size=size,
                driver=cuda,
                options=BATCH,
                view=of_fake,
            )
            return made, None

        monkeypatch.setattr("hicache_transformers.cache.open_tier", opened_tier)
        return cuda

    return make


def prompt(*, seed: int = 1, tokens: int = 41) -> torch.Tensor:
    return torch.randint(2, 97, (1, tokens), generator=torch.Generator().manual_seed(seed))


def stored(backend: MemoryBackend) -> dict[str, bytes]:
    return {str(key): entry.payload.tobytes() for key, entry in backend._entries.items()}


@pytest.mark.parametrize(
    ("dtype", "head_group"), [(torch.float32, None), (torch.float32, 1), (torch.bfloat16, None), (torch.bfloat16, 1)]
)
def test_text_and_stored_bytes_are_those_of_main_memory(
    tiny_model: Any, opened: Any, on_gpu: Any, batch: Any, dtype: torch.dtype, head_group: int | None
) -> None:
    model = tiny_model(dtype=dtype)
    ids, mask = batch(prompt(seed=5, tokens=30)[0], prompt(seed=6, tokens=9)[0], prompt(seed=7, tokens=3)[0])
    settings = {"head_group": head_group, "device": "256KiB", "host": "256KiB"}
    texts: list[list[torch.Tensor]] = []
    backends: list[MemoryBackend] = []
    cuda = None
    for gpu in (False, True):
        if gpu:
            cuda = on_gpu(ModelCuda(memory=1 << 20, kernels=KERNELS))
        backends.append(MemoryBackend())
        cache = opened(model, storage=backends[-1], **settings)
        texts.append([])
        for _ in range(2):
            texts[-1].append(cache.generate(prompt()))
            texts[-1].append(cache.generate(ids, attention_mask=mask, num_return_sequences=2))
            texts[-1].append(cache.generate(torch.cat([texts[-1][0], prompt(seed=8, tokens=7)], 1)))
        found = cache.statistics()
        assert not found.failures
        assert not found.bypassed
        assert found.reused_tokens > 100
        assert cache.cache.statistics().pages.device > 0
        cache.close()
    assert all(torch.equal(here, there) for here, there in zip(*texts, strict=True))
    assert stored(backends[0]) == stored(backends[1])
    if dtype == torch.float32:
        assert torch.equal(texts[1][0], model.generate(prompt()))
    assert cuda is not None
    assert not cuda.allocated
    assert not cuda.registered


@pytest.mark.parametrize("seed", range(6))
def test_pages_that_went_down_come_up_again_in_any_order_of_streams(
    model: Any, opened: Any, on_gpu: Any, seed: int
) -> None:
    """The device tier holds less than two prompts, so all of them go down, by the writer's event, and come up again."""
    on_gpu(ModelCuda(memory=1 << 20, kernels=KERNELS, seed=seed))
    cache = opened(device="12KiB", host="256KiB")
    asked = [prompt(seed=10 + number, tokens=30 + number) for number in range(3)]
    expected = [model.generate(ids) for ids in asked]
    for ids, text in itertools.islice(zip(itertools.cycle(asked), itertools.cycle(expected), strict=True), 9):
        assert torch.equal(cache.generate(ids), text)
        cache.flush()
    found = cache.cache.statistics()
    assert found.copies.pages_host_to_device
    assert found.copies.pages_device_to_host
    assert not found.copies.failed_pages
    assert not cache.statistics().failures
    assert cache.statistics().reused_tokens > 6 * 16


class Overlapped(ModelCuda):
    """Once it is armed, the stream of copies up stands still behind the first layer's event, until it is opened."""

    armed = False
    held: Gate | None = None

    def record(self, event: Event, stream: Stream) -> None:
        super().record(event, stream)
        if self.armed and self.held is None and self.timeline.streams[stream.ptr].priority == "high":
            self.held = self.gate(self.timeline.streams[stream.ptr])


def went_down(cache: Any, *prompts: torch.Tensor) -> None:
    """Let prompts be in main memory only, but for the last one."""
    for ids in prompts:
        cache.generate(ids)
        cache.flush()


@pytest.mark.parametrize("repeats", [1, 2])
def test_the_first_layer_is_computed_while_the_last_is_on_its_way(
    model: Any, opened: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch, repeats: int
) -> None:
    monkeypatch.setattr("hicache.cuda.putting._STEP_BYTES", 1)  # thin layers go one by one, too
    cuda = on_gpu(Overlapped(memory=1 << 20, kernels=KERNELS))
    expected = model.generate(prompt(), num_return_sequences=repeats)
    cache = opened(device="12KiB", host="256KiB")
    went_down(cache, prompt(), prompt(seed=2))
    cuda.armed = True
    open_when_computed: list[bool] = []

    def computed_first(*_: Any) -> None:
        if not open_when_computed:
            open_when_computed.append(cuda.held is not None and cuda.held.is_open)
            assert cuda.held is not None
            cuda.held.open()

    hook = model.projections[0][3].register_forward_hook(computed_first)
    text = cache.generate(prompt(), num_return_sequences=repeats)
    hook.remove()
    assert open_when_computed == [False]
    assert torch.equal(text, expected)
    assert cache.statistics().reused_tokens == 40
    assert not cache.statistics().failures


def test_pages_that_do_not_come_are_computed(model: Any, opened: Any, on_gpu: Any) -> None:
    cuda = on_gpu(ModelCuda(memory=1 << 20, kernels=KERNELS))
    expected = model.generate(prompt())
    cache = opened(device="12KiB", host="256KiB")
    went_down(cache, prompt(), prompt(seed=2))
    for _ in range(2):  # the step, and then the first of its pages
        cuda.fail("memcpy_batch_async", "cudaErrorInvalidValue", 1)
    assert torch.equal(cache.generate(prompt()), expected)
    assert cache.statistics().failures == {"loading pages: HicacheError": 1}
    for _ in range(2):
        assert torch.equal(cache.generate(prompt()), expected)
    assert len(cache.statistics().failures) == 1
    assert cache.cache.statistics().open_requests == 0


@pytest.mark.parametrize("way", ["streamer", "prefix"])
def test_where_it_cannot_be_taken_back_copies_are_waited_for(model: Any, opened: Any, on_gpu: Any, way: str) -> None:
    cuda = on_gpu(ModelCuda(memory=1 << 20, kernels=KERNELS))
    cache = opened(device="12KiB", host="256KiB")
    went_down(cache, prompt(), prompt(seed=2))
    for _ in range(2):
        cuda.fail("memcpy_batch_async", "cudaErrorInvalidValue", 1)
    expected = model.generate(prompt())
    if way == "streamer":
        assert torch.equal(cache.generate(prompt(), streamer=object()), expected)
    else:
        with cache.prefix(prompt()) as prefix:
            assert prefix.cached_tokens == (0,)
            assert torch.equal(model.generate(prompt(), past_key_values=prefix.past_key_values), expected)
    assert not cache.statistics().failures


def test_a_row_that_lags_is_brought_up_behind_pages_on_their_way(
    model: Any, opened: Any, on_gpu: Any, batch: Any
) -> None:
    on_gpu(ModelCuda(memory=1 << 21, kernels=KERNELS))
    prompts = [prompt(seed=seed, tokens=161)[0] for seed in range(4)]
    cache = opened(device="170KiB", host="1MiB")
    went_down(
        cache, *(known[None] for known in prompts[:3]), prompts[3][None, :30], prompt(seed=9, tokens=600)[:, :250]
    )
    ids, mask = batch(*prompts)
    expected = model.generate(ids, attention_mask=mask)
    assert torch.equal(cache.generate(ids, attention_mask=mask), expected)
    assert not cache.statistics().failures
    assert cache.cache.statistics().copies.pages_host_to_device


def test_threads_on_streams_of_their_own(model: Any, opened: Any, on_gpu: Any) -> None:
    cuda = on_gpu(ModelCuda(memory=1 << 20, kernels=KERNELS, seed=3))
    cache = opened(device="24KiB", host="256KiB")
    asked = [prompt(seed=10 + number, tokens=30 + number) for number in range(4)]
    expected = [model.generate(ids) for ids in asked]
    right: list[bool] = []

    def work(first: int) -> None:
        cuda.use(cuda.stream())
        for number in range(first, first + 6):
            right.append(torch.equal(cache.generate(asked[number % 4]), expected[number % 4]))
            cache.flush()

    threads = [threading.Thread(target=work, args=(2 * number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 12
    assert not cache.statistics().failures
    assert cache.cache.statistics().copies.pages_host_to_device


def test_storing_waits_for_nobody_and_is_seen_behind_the_writers_event(model: Any, opened: Any, on_gpu: Any) -> None:
    cuda = on_gpu(ModelCuda(memory=1 << 20, kernels=KERNELS))
    cache = opened()
    gate = cuda.gate(cuda.default)  # what the model has put into its stream is not done
    cache.generate(prompt())
    ids = prompt()[0].numpy().astype("uint32")
    assert cache.statistics().stored_pages == 12  # 41 tokens of the prompt, and 7 that were generated
    assert cache.cache.match(ids).pages == 0
    gate.open()
    cache.flush()
    assert cache.cache.match(ids).pages == 10


def tier(cuda: FakeCuda, *, view: Any = of_fake) -> tuple[GpuMemory, PageShape]:
    geometry = hicache.KVGeometry.mha(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", head_group=1)
    shape = PageShape(layers=2, kv_heads=2, head_group=1, tokens=PAGE, row=16)
    namespace = hicache.Namespace("m", revision="r", geometry=geometry, page_size=PAGE, hash="sha256")
    dtype = torch.bfloat16
    return GpuMemory(namespace, shape, device=CPU, dtype=dtype, size=8, driver=cuda, options=BATCH, view=view), shape


def computed(tokens: int = 16) -> Computed:
    size = (2, 2, 1, 2, tokens, 8)
    found = torch.randint(0, 2**15, size, dtype=torch.int16, generator=torch.Generator().manual_seed(3))
    layers = [(pair[0], pair[1]) for pair in found.view(torch.bfloat16)]
    return Computed(layers, row=0, padding=2)


@pytest.mark.parametrize(("start", "tokens"), [(0, 8), (3, 9), (3, 5), (6, 7), (9, 8), (-4, 8), (-6, 5), (-5, 2)])
def test_pages_are_cut_at_both_ends_and_padding_is_zero(start: int, tokens: int) -> None:
    memory, _ = tier(FakeCuda())
    kept = computed()
    memory.write(np.array([5, 0, 2]), kept, first=0)  # tokens 2 to 13
    span = memory.span(batch=2, tokens=tokens)
    span.put_pages(1, memory.pages(np.array([5, 0, 2])), start=start)
    for (keys, values), pair in zip(span.layers([CPU] * 2), kept.layers, strict=True):
        for tensor, source in zip((keys, values), pair, strict=True):
            wanted = torch.zeros(2, 2, tokens, 8, dtype=torch.int16)
            for column in range(max(start, 0), min(start + 12, tokens)):
                wanted[1, :, column] = source.view(torch.int16)[0, :, 2 + column - start]
            assert torch.equal(tensor.view(torch.int16), wanted)
    memory.close()


def test_a_writer_waits_for_what_other_streams_read_of_its_slots() -> None:
    """And not for its own, which is in order."""
    cuda = FakeCuda()
    memory, _ = tier(cuda)
    reading, writing = cuda.stream(), cuda.stream()
    cuda.use(reading)
    gate = cuda.gate(reading)
    span = memory.span(batch=1, tokens=4)
    span.put_pages(0, memory.pages(np.array([1])), start=0)
    list(span.layers([CPU] * 2))
    went: list[str] = []
    memory.write(np.array([2]), computed(), first=0)
    cuda.use(writing)
    memory.write(np.array([1]), computed(), first=0)
    cuda.compute(writing, lambda: went.append("written"))
    cuda.finish()
    assert not went
    gate.open()
    cuda.finish()
    assert went == ["written"]
    memory.close()


def test_copies_up_wait_for_every_stream_that_has_read() -> None:
    cuda = FakeCuda()
    memory, _ = tier(cuda)
    other = cuda.stream()
    cuda.use(other)
    gate = cuda.gate(other)
    span = memory.span(batch=1, tokens=4)
    span.put_pages(0, memory.pages(np.array([1])), start=0)
    list(span.layers([CPU] * 2))
    ends = memory.pool.ends_of_use(np.array([1]))
    cuda.finish()
    assert not all(cuda.query(event) for event in ends)
    gate.open()
    cuda.finish()
    assert all(cuda.query(event) for event in ends)
    list(span.layers([CPU] * 2))
    assert len(memory.pool.ends_of_use(np.array([1]))) == len(ends)  # each stream once
    memory.close()


def test_memory_that_was_given_back_is_not_touched(model: Any, opened: Any, on_gpu: Any) -> None:
    cuda = on_gpu(ModelCuda(memory=1 << 20, kernels=KERNELS))
    cache = opened()
    cache.generate(prompt())
    with cache.prefix(prompt()) as prefix:
        model.generate(prompt(), past_key_values=prefix.past_key_values)
        cache.close()
        assert not cuda.allocated
        prefix.commit(torch.cat([prompt(), prompt(seed=9, tokens=8)], 1))
    assert cache.statistics().failures == {"storing pages: CacheClosed": 1}
    memory, _ = tier(FakeCuda())
    span = memory.span(batch=1, tokens=4)
    span.put_pages(0, memory.pages(np.array([1])), start=0)
    memory.close()
    with pytest.raises(CacheClosed, match="given back"):
        list(span.layers([CPU] * 2))
    assert torch.equal(cache.generate(prompt()), model.generate(prompt()))


def namespace_and_shapes(*devices: str) -> tuple[Any, PageShape, ModelShape]:
    geometry = hicache.KVGeometry.mha(layers=len(devices), kv_heads=2, head_dim=8, dtype="float32")
    namespace = hicache.Namespace("m", revision="r", geometry=geometry, page_size=PAGE, hash="sha256")
    shape = PageShape(layers=len(devices), kv_heads=2, head_group=2, tokens=PAGE, row=32)
    found = tuple(torch.device(device) for device in devices)
    return namespace, shape, ModelShape(2, 8, torch.float32, found, "eager", takes_positions=True)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (("cuda:0", "cuda:0"), "needs cupy"),
        (("cuda:0", "cuda:1"), "layers are on cuda:0, cuda:1"),
        (("cuda:0", "cpu"), "layers are on cuda:0, and"),
        (("mps", "mps"), "layers are on mps"),
    ],
)
def test_else_the_tier_is_in_main_memory_and_one_line_says_why(
    devices: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    made, why = open_tier(*namespace_and_shapes(*devices), size=4)
    assert isinstance(made, MainMemory)
    assert why is not None
    assert words in why
    assert "hicache[cuda]" in why
    assert caplog.messages == [f"hicache: {why}"]
    made.close()


def test_on_a_processor_there_is_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    made, why = open_tier(*namespace_and_shapes("cpu", "cpu"), size=4)
    assert isinstance(made, MainMemory)
    assert why is None
    assert not caplog.messages
    made.close()


def test_more_than_the_gpu_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(memory=1 << 12)
    monkeypatch.setattr("hicache.cuda.pool.open_device", lambda _: cuda)
    with pytest.raises(ConfigError, match="does not fit on CUDA device 0: 4 KiB of 4 KiB are free"):
        open_tier(*namespace_and_shapes("cuda:0", "cuda:0"), size=100)


def test_a_torch_that_copies_the_memory_is_refused() -> None:
    cuda = FakeCuda()
    with pytest.raises(ConfigError, match="copies memory that it shall show"):
        tier(cuda, view=lambda pool, device: of_fake(pool, device).clone())
    assert not cuda.allocated


def test_warnings_come_with_the_cache(model: Any, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = open_tier
    monkeypatch.setattr(
        "hicache_transformers.cache.open_tier",
        lambda namespace, shape, found, size: plain(
            namespace, shape, dataclasses.replace(found, devices=(torch.device("mps"),) * 2), size=size
        ),
    )
    assert any("layers are on mps" in warning for warning in opened(model).warnings)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_real_gpu(tiny_model: Any, opened: Any, dtype: torch.dtype) -> None:
    """What the fake is for, there: pages come back bit for bit from the GPU, from main memory and from storage."""
    backend = MemoryBackend()
    model = tiny_model(dtype=dtype).cuda()
    asked = [prompt(seed=10 + number, tokens=30 + number).cuda() for number in range(3)]
    cache = opened(model, storage=backend, device="12KiB", host="256KiB")
    assert not cache.warnings
    kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for times in range(3):
        for number, ids in enumerate(asked):
            with cache.prefix(ids) as prefix, torch.no_grad():
                (cached,) = prefix.cached_tokens
                assert (cached == 0) is (times == 0)
                layers = [(layer.keys, layer.values) for layer in prefix.past_key_values.layers]
                for pair, first in zip(layers, kept.get(number, ()), strict=bool(times)):
                    assert all(torch.equal(one, other[:, :, :cached]) for one, other in zip(pair, first, strict=True))
                model(ids[:, cached:], past_key_values=prefix.past_key_values)
                layers = [(layer.keys, layer.values) for layer in prefix.past_key_values.layers]
                kept.setdefault(number, layers)
            cache.flush()
    for ids in asked if dtype == torch.float32 else ():  # a hit rounds otherwise than a whole prefill
        assert torch.equal(cache.generate(ids), model.generate(ids))
        cache.flush()
    found = cache.cache.statistics()
    assert found.copies.pages_host_to_device
    assert not found.copies.failed_pages
    assert not cache.statistics().failures
    cache.close()
    again = opened(model, storage=backend)
    with again.prefix(asked[0]) as prefix:
        assert prefix.cached_tokens == (28,)
        for layer, (keys, values) in zip(prefix.past_key_values.layers, kept[0], strict=True):
            assert torch.equal(layer.keys, keys[:, :, :28])
            assert torch.equal(layer.values, values[:, :, :28])
