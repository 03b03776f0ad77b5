"""The device tier in a GPU's memory: a fake of CUDA holds the pages, and copies them in any order that is allowed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers_gpu import BATCH, CPU, ModelCuda, Overlapped, of_fake, prompt

from hicache.storage.memory import MemoryBackend
from hicache.testing.cuda import FakeCuda
from hicache_transformers.convert import PageShape
from hicache_transformers.gpu import GpuMemory
from hicache_transformers.model import ModelShape

PAGE = 4


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

        monkeypatch.setattr("hicache_transformers.opening.open_tier", opened_tier)
        return cuda

    return make


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
            cuda = on_gpu(ModelCuda())
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
    on_gpu(ModelCuda(seed=seed))
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
    cuda = on_gpu(Overlapped())
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
    cuda = on_gpu(ModelCuda())
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
    assert cache.statistics().reused_tokens == 80  # of the last two calls: what the first has lost does not count
    assert cache.cache.statistics().open_requests == 0


def test_a_call_that_computes_nothing_asks_for_no_layer(model: Any, opened: Any, on_gpu: Any) -> None:
    """It leaves nothing behind, whether or not the copies come that nobody waited for."""
    cuda = on_gpu(ModelCuda())
    cache = opened(device="12KiB", host="256KiB")
    went_down(cache, prompt(), prompt(seed=2))
    for _ in range(2):
        cuda.fail("memcpy_batch_async", "cudaErrorInvalidValue", 1)
    assert torch.equal(cache.generate(prompt(), max_new_tokens=0), prompt())
    assert not cache.statistics().failures
    cache.flush()
    assert cache.cache.statistics().open_requests == 0


@pytest.mark.parametrize("known", [False, True])
def test_a_prompt_is_there_for_others_while_its_call_generates(
    model: Any, opened: Any, on_gpu: Any, known: bool
) -> None:
    """Layer by layer when the model has it; with pages on their way up, when the last of them has come."""
    on_gpu(ModelCuda())
    cache = opened(device="48KiB", host="256KiB")
    if known:
        went_down(cache, prompt()[:, :21], *(prompt(seed=seed, tokens=120) for seed in (2, 3)))
    ids, found = prompt()[0].numpy().astype("uint32"), []

    def generated(*_: Any) -> None:
        cache.flush()
        found.append(cache.cache.match(ids).pages)

    expected = model.generate(prompt())
    hook = model.head.register_forward_hook(generated)
    assert torch.equal(cache.generate(prompt()), expected)
    hook.remove()
    assert found[0] == 10
    assert cache.statistics().reused_tokens == (20 if known else 0)
    assert not cache.statistics().failures


def test_a_call_that_is_broken_off_in_its_prompt_stores_nothing(model: Any, opened: Any, on_gpu: Any) -> None:
    on_gpu(ModelCuda())
    cache = opened()

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.projections[1][1].register_forward_hook(broken)
    with pytest.raises(KeyboardInterrupt):
        cache.generate(prompt())
    hook.remove()
    cache.flush()
    assert cache.cache.match(prompt()[0].numpy().astype("uint32")).pages == 0
    assert cache.cache.statistics().open_requests == 0


def test_layers_that_are_not_where_they_were_are_not_stored(model: Any, opened: Any, on_gpu: Any) -> None:
    """As with a cache that was offloaded: main memory cannot be put into slots by copies on the device."""
    on_gpu(ModelCuda())
    cache = opened()
    object.__setattr__(cache._shape, "devices", (CPU, torch.device("meta")))
    with cache.prefix(prompt()) as prefix:
        model.generate(prompt(), past_key_values=prefix.past_key_values)
    assert cache.statistics().bypassed == {"state": 1}
    assert cache.statistics().stored_pages == 0


@pytest.mark.parametrize("way", ["another generate", "compiled"])
def test_where_the_first_pass_may_be_of_other_tokens_or_is_traced_prompts_are_stored_at_the_end(
    tiny_model: Any, opened: Any, on_gpu: Any, way: str
) -> None:
    class Other(tiny_model):  # type: ignore[misc]
        def generate(self, *given: Any, **named: Any) -> Any:
            return super().generate(*given, **named)

    on_gpu(ModelCuda())
    model = Other() if way == "another generate" else tiny_model()
    if way == "compiled":
        model._compiled_call_impl = model._call_impl
    cache = opened(model)
    found: list[int] = []
    ids = prompt()[0].numpy().astype("uint32")
    hook = model.head.register_forward_hook(lambda *_: found.append(cache.cache.match(ids).pages))
    cache.generate(prompt())
    hook.remove()
    assert set(found) == {0}
    assert cache.statistics().stored_pages == 12


@pytest.mark.parametrize("way", ["streamer", "prefix"])
def test_where_it_cannot_be_taken_back_copies_are_waited_for(model: Any, opened: Any, on_gpu: Any, way: str) -> None:
    cuda = on_gpu(ModelCuda())
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
    on_gpu(ModelCuda(memory=1 << 21))
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
    cuda = on_gpu(ModelCuda(seed=3))
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
    cuda = on_gpu(ModelCuda())
    cache = opened()
    gate = cuda.gate(cuda.default)  # what the model has put into its stream is not done
    cache.generate(prompt())
    ids = prompt()[0].numpy().astype("uint32")
    assert cache.statistics().stored_pages == 12  # 41 tokens of the prompt, and 7 that were generated
    assert cache.cache.match(ids).pages == 0
    gate.open()
    cache.flush()
    assert cache.cache.match(ids).pages == 10


def test_memory_that_was_given_back_is_not_touched(model: Any, opened: Any, on_gpu: Any) -> None:
    cuda = on_gpu(ModelCuda())
    cache = opened()
    cache.generate(prompt())
    with cache.prefix(prompt()) as prefix:
        model.generate(prompt(), past_key_values=prefix.past_key_values)
        cache.close()
        assert not cuda.allocated
        prefix.commit(torch.cat([prompt(), prompt(seed=9, tokens=8)], 1))
    assert cache.statistics().failures == {"storing pages: CacheClosed": 1}
    assert torch.equal(cache.generate(prompt()), model.generate(prompt()))


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
