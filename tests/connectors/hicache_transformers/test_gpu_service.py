"""A model on a GPU whose pages a service keeps: straight between both memories, layer by layer, whatever happens."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers_gpu import ModelCuda, Overlapped, prompt, window_on

from hicache.config import Config, Drain, Host, Listen, Size
from hicache.cuda.kept import KEPT
from hicache.errors import ConfigError
from hicache.rpc.client.loans import Loan
from hicache.testing.serving import ServedApp
from hicache_transformers.cache import PrefixCache
from hicache_transformers.connected import ConnectedGpuPages
from hicache_transformers.gpurequest import GpuRequest
from hicache_transformers.window import GpuWindow
from hicache_transformers.writers import Writer


@pytest.fixture
def service() -> Iterator[ServedApp]:
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        listen = Listen(addresses=(f"unix://{folder}/s.sock",))
        host = Host(bytes=Size(2**22), pool_bytes=Size(2**21))
        with ServedApp(Config(listen=listen, host=host, drain=Drain(seconds=0.2))) as served:
            yield served


@pytest.fixture
def on_gpu(
    model: Any, service: ServedApp, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[PrefixCache, GpuWindow]]]:
    """Opens caches of the service whose model is on a fake device; nothing of them is left at the end."""
    made: list[tuple[PrefixCache, ModelCuda]] = []

    def opened(cuda: ModelCuda, *, of: Any = None, device: Any = "64KiB", **settings: Any) -> Any:
        windows: list[GpuWindow] = []

        def window(shape: Any, shaped: Any, *, size: Any) -> tuple[GpuWindow, None]:
            windows.append(window_on(cuda, shape, shaped.dtype, size))
            return windows[0], None

        monkeypatch.setattr("hicache_transformers.opening.open_window", window)
        settings = {"address": service.address, "page_size": 4, "required": True, "timeout": 20} | settings
        cache = PrefixCache(model if of is None else of, device=device, **settings)
        made.append((cache, cuda))
        return cache, windows[0]

    yield opened
    for cache, cuda in made:
        cache.close()
        assert bool(cuda.registered) is (cuda.timeline.broken is not None)
        assert not cuda.allocated


@pytest.fixture
def on_cpu(service: ServedApp) -> Iterator[Callable[..., PrefixCache]]:
    """Opens caches of the service as without a GPU."""
    made: list[PrefixCache] = []

    def opened(model: Any, **settings: Any) -> PrefixCache:
        made.append(PrefixCache(model, address=service.address, page_size=4, required=True, timeout=20, **settings))
        return made[-1]

    yield opened
    for cache in made:
        cache.close()


def quiet(cache: PrefixCache, window: GpuWindow) -> bool:
    """Whether nobody has a slot of the window, a lease or a lent page."""
    cache.flush()
    return window.free == window.pages and cache.cache.state.open_leases == 0


def held(cache: PrefixCache, ids: torch.Tensor) -> list[bytes]:
    """What the service has of a prompt, page by page."""
    with cache.cache.request(ids[0].numpy().astype("uint32"), logits=False) as request:
        pages = np.empty((len(request.load()), cache.cache.host.page_bytes), np.uint8)
        assert request.read_into(pages) == len(pages)
    return [page.tobytes() for page in pages]


@pytest.mark.parametrize(("dtype", "head_group"), [(torch.float32, None), (torch.bfloat16, 1)])
@pytest.mark.parametrize("device", ["64KiB", 5])
def test_text_and_pages_are_those_of_main_memory(
    on_gpu: Any, on_cpu: Any, tiny_model: Any, batch: Any, dtype: torch.dtype, head_group: int | None, device: Any
) -> None:
    """Also where the window is smaller than most prompts, which go through it in pieces then."""
    model = tiny_model(dtype=dtype)
    ids, mask = batch(prompt(seed=5, tokens=30)[0], prompt(seed=6, tokens=9)[0], prompt(seed=7, tokens=3)[0])
    settings = {"head_group": head_group}
    plain = on_cpu(model, name="cpu", **settings)
    cache, window = on_gpu(ModelCuda(), of=model, device=device, name="gpu", **settings)
    assert isinstance(cache._source, ConnectedGpuPages)
    texts: list[list[torch.Tensor]] = []
    for one in (plain, cache):
        texts.append([])
        for _ in range(2):
            texts[-1].append(one.generate(prompt()))
            texts[-1].append(one.generate(ids, attention_mask=mask, num_return_sequences=2))
            one.flush()
            texts[-1].append(one.generate(torch.cat([texts[-1][0], prompt(seed=8, tokens=7)], 1)))
            one.flush()
    assert all(torch.equal(here, there) for here, there in zip(*texts, strict=True))
    found, wanted = cache.statistics(), plain.statistics()
    assert found == wanted
    assert found.reused_tokens > 100
    assert found.stored_pages > 20
    known = held(plain, texts[0][-1])
    assert len(known) == 15
    assert held(cache, texts[0][-1]) == known
    assert quiet(cache, window)


@pytest.mark.parametrize("seed", range(4))
def test_many_prompts_in_any_order_of_streams(model: Any, on_gpu: Any, seed: int) -> None:
    cache, window = on_gpu(ModelCuda(seed=seed), device="24KiB")
    asked = [prompt(seed=10 + number % 3, tokens=30 + number % 3) for number in range(9)]
    for ids in asked:
        assert torch.equal(cache.generate(ids), model.generate(ids))
        cache.flush()
    assert cache.statistics().reused_tokens == 6 * 28
    assert not cache.statistics().failures
    assert quiet(cache, window)


@pytest.mark.parametrize("repeats", [1, 2])
def test_the_first_layer_is_computed_while_the_last_is_on_its_way(
    model: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch, repeats: int
) -> None:
    monkeypatch.setattr("hicache.cuda.putting._STEP_BYTES", 1)  # thin layers go one by one, too
    cuda = Overlapped()
    cache, window = on_gpu(cuda)
    assert cuda.registered  # the service's memory, before any call
    expected = model.generate(prompt(), num_return_sequences=repeats)
    cache.generate(prompt())
    cache.flush()
    cuda.armed = True
    open_when_computed: list[bool] = []

    def computed_first(*_: Any) -> None:
        assert cuda.held is not None
        open_when_computed.append(cuda.held.is_open)
        cuda.held.open()

    hook = model.projections[0][3].register_forward_hook(computed_first)
    text = cache.generate(prompt(), num_return_sequences=repeats)
    hook.remove()
    assert open_when_computed[0] is False
    assert torch.equal(text, expected)
    assert cache.statistics().reused_tokens == 40
    assert quiet(cache, window)


@pytest.mark.case("RACE-2")
def test_layers_go_down_while_the_next_are_computed_and_count_when_all_have_come(
    model: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a prompt is there for others before its call has generated its last token."""
    monkeypatch.setattr("hicache_transformers.writers.STEP_BYTES", 1)
    cache, window = on_gpu(ModelCuda())
    ids = prompt()[0].numpy().astype("uint32")
    writers: list[Writer] = []
    begun: list[int] = []
    seen: list[int] = []

    def in_last_layer(*_: Any) -> None:
        begun.append(sum(len(writer._copies) for writer in writers))
        cache.cache.report_prefill(1, 1.0)  # whatever was asked of the service before is answered
        seen.append(cache.cache.match(ids).pages)

    def generated(*_: Any) -> None:
        cache.flush()
        seen.append(cache.cache.match(ids).pages)

    def made(*given: Any) -> Writer:
        writers.append(Writer(*given))
        return writers[-1]

    monkeypatch.setattr("hicache_transformers.gpurequest.Writer", made)
    expected = model.generate(prompt())
    hooks = [
        model.projections[1][1].register_forward_hook(in_last_layer),
        model.head.register_forward_hook(generated),
    ]
    assert torch.equal(cache.generate(prompt()), expected)
    for hook in hooks:
        hook.remove()
    assert begun[0] == 1
    assert seen[:2] == [0, 10]
    assert quiet(cache, window)
    assert cache.statistics().stored_pages == 12


@pytest.mark.case("LEAK-1")
@pytest.mark.parametrize("when", ["first layer", "last layer", "second token"])
def test_a_call_that_is_broken_off_leaves_nothing(model: Any, on_gpu: Any, when: str) -> None:
    """What was computed of the prompt to its end counts; of a half nothing does."""
    cache, window = on_gpu(ModelCuda())
    expected = model.generate(prompt())
    places = {"first layer": (0, 3, 1), "last layer": (1, 1, 1), "second token": (0, 3, 2)}
    layer, part, call = places[when]
    calls = [0]

    def broken(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt

    for known in (False, True):
        calls[0] = 0
        hook = model.projections[layer][part].register_forward_hook(broken)
        with pytest.raises(KeyboardInterrupt):
            cache.generate(prompt() if not known else prompt(seed=2))
        hook.remove()
        assert quiet(cache, window)
        cache.generate(prompt(seed=2))
        cache.flush()
    before = cache.statistics().reused_tokens
    assert torch.equal(cache.generate(prompt()), expected)
    assert cache.statistics().reused_tokens - before == (40 if when == "second token" else 0)
    assert not cache.statistics().failures
    assert quiet(cache, window)


@pytest.mark.parametrize("way", ["generate", "streamer", "prefix"])
def test_pages_that_do_not_come_are_computed(model: Any, on_gpu: Any, way: str) -> None:
    """A copy fails; where nothing could be taken back it is waited for, and what came before counts."""
    cuda = ModelCuda()
    cache, window = on_gpu(cuda)
    expected = model.generate(prompt())
    cache.generate(prompt())
    cache.flush()
    for _ in range(2):  # the step, and then the first of its pages
        cuda.fail("memcpy_batch_async", "cudaErrorInvalidValue", 1)
    if way == "prefix":
        with cache.prefix(prompt()) as prefix:
            assert prefix.cached_tokens == (0,)
            assert torch.equal(model.generate(prompt(), past_key_values=prefix.past_key_values), expected)
    else:
        arguments = {"streamer": object()} if way == "streamer" else {}
        assert torch.equal(cache.generate(prompt(), **arguments), expected)
    assert cache.statistics().failures == ({"loading pages: HicacheError": 1} if way == "generate" else {})
    assert quiet(cache, window)
    assert torch.equal(cache.generate(prompt()), expected)
    assert cache.statistics().reused_tokens == 40
    assert quiet(cache, window)


@pytest.mark.parametrize("when", ["load", "store"])
def test_a_gpu_that_fails_costs_no_token_and_what_it_may_still_write_to_is_kept(
    model: Any, on_gpu: Any, request: pytest.FixtureRequest, when: str
) -> None:
    request.addfinalizer(KEPT.clear)  # as the process's end does
    cuda = ModelCuda()
    cache, _ = on_gpu(cuda)
    expected = {seed: model.generate(prompt(seed=seed)) for seed in (1, 2)}
    cache.generate(prompt())
    cache.flush()
    cuda.fail("work", "cudaErrorIllegalAddress", 700)
    for seed in (1 if when == "load" else 2, 1):
        assert torch.equal(cache.generate(prompt(seed=seed)), expected[seed])
    cache.flush()
    assert cache.statistics().failures
    assert any(isinstance(kept, GpuRequest) for kept in KEPT)
    assert cache.cache.state.open_leases == len([kept for kept in KEPT if isinstance(kept, GpuRequest)])


def test_pages_that_cannot_be_copied_down_are_not_shown(
    model: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of which a single layer is lacking, and those behind it."""
    monkeypatch.setattr("hicache_transformers.writers.STEP_BYTES", 1)
    cuda = ModelCuda()
    cache, window = on_gpu(cuda)
    expected = model.generate(prompt())
    cuda.fail("memcpy_batch_async", "cudaErrorInvalidValue", 1, after=1)  # layer 1, and then the fourth of its pages
    cuda.fail("memcpy_batch_async", "cudaErrorInvalidValue", 1, after=3)
    assert torch.equal(cache.generate(prompt()), expected)
    assert quiet(cache, window)
    found = cache.statistics()
    assert found.failures == {"storing pages: HicacheError": 1}
    assert (found.stored_pages, found.dropped_pages) == (3, 7)
    assert len(held(cache, prompt())) == 3
    assert torch.equal(cache.generate(prompt()), expected)
    assert quiet(cache, window)
    assert len(held(cache, prompt())) == 10


@pytest.mark.case("RACE-1")
@pytest.mark.parametrize("way", ["generate", "prefix"])
def test_pages_that_the_service_took_back_are_not_used(
    model: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Whether they were still the call's is asked behind the copy, and before any token is drawn."""
    cache, window = on_gpu(ModelCuda())
    expected = model.generate(prompt())
    cache.generate(prompt())
    cache.flush()
    asked: list[int] = []

    def good(loan: Loan) -> int:
        asked.append(len(loan.slots))
        return len(loan.slots) if len(asked) == 1 else 6

    monkeypatch.setattr(Loan, "good", good)
    if way == "generate":
        assert torch.equal(cache.generate(prompt()), expected)
        assert cache.statistics().failures == {"loading pages: HicacheError": 1}
    else:
        with cache.prefix(prompt()) as prefix:
            assert prefix.cached_tokens == (24,)
            monkeypatch.undo()
            assert torch.equal(model.generate(prompt(), past_key_values=prefix.past_key_values), expected)
    assert len(asked) == 2
    assert quiet(cache, window)


@pytest.mark.parametrize("device", ["64KiB", 5])
def test_a_service_that_goes_away_in_the_middle(model: Any, on_gpu: Any, service: ServedApp, device: Any) -> None:
    cache, window = on_gpu(ModelCuda(), device=device, timeout=1.0)
    expected = [model.generate(prompt(seed=seed)) for seed in (1, 2)]
    cache.generate(prompt())
    cache.flush()
    calls = [0]

    def stop(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 1:
            service.stop()

    hook = model.projections[0][3].register_forward_hook(stop)
    for _ in range(2):
        for seed, text in enumerate(expected, 1):
            assert torch.equal(cache.generate(prompt(seed=seed)), text)
    hook.remove()
    cache.flush()
    assert window.free == window.pages


def test_a_service_out_of_reach_sends_pages_through_a_buffer(
    model: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one on another host does, whose pages are streamed."""
    monkeypatch.setattr("hicache.rpc.client.request.ConnectedRequest.lend", lambda *_, **__: None)
    monkeypatch.setattr("hicache_transformers.writers.STAGED_BYTES", 1)
    for name, device in (("large", "64KiB"), ("small", 5)):
        cache, window = on_gpu(ModelCuda(), name=name, device=device)
        for _ in range(2):
            assert torch.equal(cache.generate(prompt()), model.generate(prompt()))
            cache.flush()
        found = cache.statistics()
        assert (found.reused_tokens, found.stored_pages, found.dropped_pages) == (40, 14, 0)
        assert not found.failures
        assert quiet(cache, window)


def test_what_the_service_has_no_room_for_is_dropped(model: Any, on_gpu: Any) -> None:
    """And is tried again at the call's end, where there may be room."""
    cache, window = on_gpu(ModelCuda())
    slots = cache.cache.host.slots
    with cache.cache.request(np.arange(4 * slots, dtype=np.uint32) % 97) as other:
        other.allocate(slots - 6)
        cache.generate(prompt())
        cache.flush()
        assert window.free == window.pages
        found = cache.statistics()
        assert (found.stored_pages, found.dropped_pages) == (6, 6)
        assert not found.failures


def test_threads_on_streams_of_their_own(model: Any, on_gpu: Any) -> None:
    cuda = ModelCuda(seed=3)
    cache, window = on_gpu(cuda, device="32KiB")
    asked = [prompt(seed=10 + number, tokens=30 + number) for number in range(4)]
    expected = [model.generate(ids) for ids in asked]
    right: list[bool] = []

    def work(first: int) -> None:
        cuda.use(cuda.stream())
        numbers = [number % 4 for number in range(first, first + 6)]
        right.extend(torch.equal(cache.generate(asked[number]), expected[number]) for number in numbers)

    threads = [threading.Thread(target=work, args=(2 * number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 12
    assert not cache.statistics().failures
    assert quiet(cache, window)


def test_clearing_takes_what_is_under_way_too(model: Any, on_gpu: Any) -> None:
    cuda = ModelCuda()
    cache, window = on_gpu(cuda)
    gate = cuda.gate(cuda.default)
    cache.generate(prompt())
    clearing = threading.Thread(target=cache.clear)
    clearing.start()
    clearing.join(0.05)
    gate.open()
    clearing.join()
    cache.flush()
    assert held(cache, prompt()) == []
    assert quiet(cache, window)


def test_after_closing_calls_go_on_without_it(model: Any, on_gpu: Any) -> None:
    cuda = ModelCuda()
    cache, _ = on_gpu(cuda)
    expected = model.generate(prompt())
    with cache.prefix(prompt()) as prefix:
        assert torch.equal(model.generate(prompt(), past_key_values=prefix.past_key_values), expected)
        cache.close()
        assert not cuda.registered
    assert torch.equal(cache.generate(prompt()), expected)
    assert cache.statistics().bypassed == {"closed": 1}


def test_settings_and_a_service_that_is_not_there(model: Any, service: ServedApp, on_gpu: Any) -> None:
    cache, window = on_gpu(ModelCuda(), device=20)
    assert any("come in pieces" in warning for warning in cache.warnings)
    assert window.pages == 18
    with pytest.raises(ConfigError, match="storage= is the service's business"):
        on_gpu(ModelCuda(), storage="file:///nowhere")
    cuda = ModelCuda()
    with pytest.raises(Exception, match="nothing"):
        on_gpu(cuda, address="unix:///nothing/there.sock", timeout=0.1)
    assert not cuda.registered


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["64KiB", 5])
def test_on_a_real_gpu(tiny_model: Any, on_cpu: Any, device: Any) -> None:
    """What the fake is for, there: straight from the service's memory, layer by layer, or in pieces."""
    model = tiny_model().cuda()
    cache = on_cpu(model, device=device)
    assert isinstance(cache._source, ConnectedGpuPages)
    asked = [prompt(seed=10 + number, tokens=30 + number).cuda() for number in range(3)]
    for ids in asked * 3:
        assert torch.equal(cache.generate(ids), model.generate(ids))
        cache.flush()
    assert cache.statistics().reused_tokens == 6 * 28
    assert not cache.statistics().failures
    assert quiet(cache, cache._source.window)
