"""The device tier on a GPU by itself: pages in and out, order between streams, and what is refused."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest
import torch
from transformers_gpu import BATCH, CPU, PAGE, of_fake

import hicache
from hicache.errors import CacheClosed, ConfigError
from hicache.testing.cuda import FakeCuda
from hicache_transformers.convert import PageShape
from hicache_transformers.gpu import GpuMemory
from hicache_transformers.model import ModelShape
from hicache_transformers.tiers import Computed, MainMemory, open_tier, open_window


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


def test_memory_that_was_given_back_is_not_touched() -> None:
    memory, _ = tier(FakeCuda())
    span = memory.span(batch=1, tokens=4)
    span.put_pages(0, memory.pages(np.array([1])), start=0)
    memory.close()
    with pytest.raises(CacheClosed, match="given back"):
        list(span.layers([CPU] * 2))


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
    devices: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    made, why = open_tier(*namespace_and_shapes(*devices), size=4)
    assert isinstance(made, MainMemory)
    assert why is not None
    assert words in why
    assert "hicache[cuda]" in why
    made.close()


@pytest.mark.parametrize(("devices", "words"), [(("cuda:0",), "needs cupy"), (("cuda:0", "cuda:1"), "cuda:0, cuda:1")])
def test_a_services_pages_go_through_main_memory_then_and_one_line_says_why(
    devices: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    _, shape, model = namespace_and_shapes(*devices)
    window, why = open_window(shape, model, size=4)
    assert window is None
    assert why is not None
    assert words in why
    assert "calls wait for their copies" in why


def test_on_a_processor_there_is_nothing_to_say() -> None:
    made, why = open_tier(*namespace_and_shapes("cpu", "cpu"), size=4)
    assert isinstance(made, MainMemory)
    assert why is None
    made.close()
    assert open_window(*namespace_and_shapes("cpu", "cpu")[1:], size=4) == (None, None)


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
        "hicache_transformers.opening.open_tier",
        lambda namespace, shape, found, size: plain(
            namespace, shape, dataclasses.replace(found, devices=(torch.device("mps"),) * 2), size=size
        ),
    )
    assert any("layers are on mps" in warning for warning in opened(model).warnings)
