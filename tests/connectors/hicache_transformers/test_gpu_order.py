"""Who waits for whom in the memory of a GPU, where streams stand still as long as they like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers_gpu import CPU, window_on

from hicache.errors import CacheClosed, ConfigError
from hicache.testing.cuda import FakeCuda
from hicache_transformers.convert import PageShape
from hicache_transformers.gpuspans import GpuPages
from hicache_transformers.keeper import Keeper
from hicache_transformers.window import GpuWindow

SHAPE = PageShape(layers=2, kv_heads=2, head_group=1, tokens=4, row=16)


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def window(cuda: FakeCuda) -> Any:
    made = window_on(cuda, SHAPE, torch.bfloat16, 16)
    yield made
    made.close()
    made.close()
    assert not cuda.registered


def computed(tokens: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = torch.randint(0, 2**15, (2, 2, 1, 2, tokens, 8), dtype=torch.int16).view(torch.bfloat16)
    return [(pair[0], pair[1]) for pair in found]


def written(window: GpuWindow, slots: Any, layers: Any, *, begin: int = 0) -> Any:
    index = window.index(np.array(slots))
    with window.use(writes=True) as used:
        for layer, pair in enumerate(layers):
            window.scatter(layer, index, pair, row=0, begin=begin)
    return used[0]


def read(window: GpuWindow, slots: Any, **settings: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    span = window.span(batch=1, tokens=4 * len(slots))
    span.put_pages(0, GpuPages(np.array(slots), **settings), start=0)
    return list(span.layers([CPU] * 2))


def test_what_goes_down_comes_up_again_in_canonical_form(cuda: FakeCuda, window: GpuWindow) -> None:
    """Through pinned memory, by layers on the way down; head by head in a page, as other engines read it."""
    layers = computed()
    event = written(window, [3, 0, 2], layers, begin=2)
    rows = window.blocks.buffer(3)
    for part in ((0, 1), (1, 2)):
        copy = window.blocks.store(None, np.arange(3), [3, 0, 2], behind=event, layers=part)
        assert copy.wait(None)
        assert copy.results is not None
    for page in range(3):
        shown = SHAPE.of_canonical(rows[page])  # (layers, 2, head group, head in group, token, row bytes)
        for layer, pair in enumerate(layers):
            for plane, tensor in enumerate(pair):
                part = tensor[0, :, 2 + 4 * page : 6 + 4 * page].contiguous().view(torch.uint8).numpy()
                assert (shown[layer, plane, :, 0] == part).all()
    (found,) = window.blocks.statistics()
    assert found.pages_device_to_host == 3
    assert found.bytes_device_to_host == 3 * SHAPE.page_bytes
    copy = window.blocks.load(None, np.arange(3), [5, 6, 7], inside=0, behind=window.ends())
    copy.wait(None)
    for pair, wanted in zip(read(window, [5, 6, 7]), layers, strict=True):
        for tensor, source in zip(pair, wanted, strict=True):
            assert torch.equal(tensor.view(torch.int16), source[:, :, 2:14].view(torch.int16))


def test_a_copy_up_waits_for_every_stream_that_still_reads_its_slots(cuda: FakeCuda, window: GpuWindow) -> None:
    went: list[str] = []
    streams = [cuda.stream(), cuda.stream()]
    gates = []
    for stream in streams:
        cuda.use(stream)
        gates.append(cuda.gate(stream))
        read(window, [1])
        cuda.compute(stream, lambda: went.append("read"))
    cuda.use(cuda.default)
    window.blocks.buffer(1)[:] = 7
    copy = window.blocks.load(None, np.arange(1), [1], inside=0, behind=window.ends())
    assert not copy.wait(0.05)
    gates[0].open()
    assert not copy.wait(0.05)
    gates[1].open()
    cuda.finish()
    assert copy.wait(None)
    assert sorted(went) == ["read", "read"]


def test_a_copy_down_waits_for_what_was_put_into_its_slots(cuda: FakeCuda, window: GpuWindow) -> None:
    stream = cuda.stream()
    cuda.use(stream)
    gate = cuda.gate(stream)
    event = written(window, [1], computed())
    window.blocks.buffer(1)
    copy = window.blocks.store(None, np.arange(1), [1], behind=event)
    assert not copy.wait(0.05)
    gate.open()
    assert copy.wait(None)


def test_a_writer_waits_for_other_streams_and_not_for_its_own(cuda: FakeCuda, window: GpuWindow) -> None:
    reading, writing = cuda.stream(), cuda.stream()
    cuda.use(reading)
    gate = cuda.gate(reading)
    read(window, [1])
    went: list[str] = []
    cuda.use(writing)
    written(window, [1], computed())
    cuda.compute(writing, lambda: went.append("written"))
    cuda.finish()
    assert not went
    gate.open()
    cuda.finish()
    assert went == ["written"]


def test_slots_are_given_all_or_none_and_one_eighth_is_for_what_has_no_room(window: GpuWindow) -> None:
    assert window.pages == 14
    first = window.reserve(10)
    assert first is not None
    assert window.reserve(5) is None
    rest = window.reserve(4)
    assert rest is not None
    with window.lane() as lane:
        assert sorted([*first, *rest, *lane]) == list(range(16))
    window.release(rest)
    assert window.free == 4
    none = window.reserve(0)
    assert none is not None
    assert none.dtype == np.int64
    window.release(first)


def test_pages_are_taken_apart_from_slots_that_others_get(window: GpuWindow) -> None:
    layers = computed()
    written(window, [14, 15], layers)
    apart = window.apart(3)
    window.take_apart(np.array([14, 15]), apart, at=1)
    window.take_apart(np.array([], np.int64), apart, at=3)
    written(window, [14, 15], computed())
    for pair, wanted in zip(read(window, [1, 2], source=apart), layers, strict=True):
        for tensor, source in zip(pair, wanted, strict=True):
            assert torch.equal(tensor.view(torch.int16), source[:, :, :8].view(torch.int16))


def test_what_is_closed_is_not_touched(cuda: FakeCuda) -> None:
    window = window_on(cuda, SHAPE, torch.bfloat16, 16)
    window.close()
    with pytest.raises(CacheClosed, match="given back"):
        read(window, [1])
    with pytest.raises(CacheClosed, match="given back"):
        written(window, [1], computed())


def test_more_than_the_gpu_has_is_refused(cuda: FakeCuda) -> None:
    def full(*_: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ConfigError, match=r"16 pages of 8 KiB do not fit on cpu: 256 MiB of 256 MiB are free"):
        GpuWindow(SHAPE, device=CPU, dtype=torch.bfloat16, size=16, driver=cuda, make=full)
    with pytest.raises(ConfigError, match="device"):
        GpuWindow(SHAPE, device=CPU, dtype=torch.bfloat16, size="much", driver=cuda)


def test_what_follows_a_copy_is_done_in_order_and_whatever_fails(caplog: pytest.LogCaptureFixture) -> None:
    keeper = Keeper()
    done: list[int] = []
    assert keeper.flush(0)

    def fails() -> None:
        raise LookupError("no such thing")

    for number in range(20):
        keeper.add(fails if number == 3 else lambda number=number: done.append(number))  # type: ignore[misc]
    assert keeper.flush()
    assert done == [number for number in range(20) if number != 3]
    assert "what follows a copy has failed" in caplog.text
    assert keeper.close(5)
    assert keeper.close(0)
    keeper.add(lambda: done.append(99))  # at once, as nobody else would
    assert done[-1] == 99
