"""Pages and the model's own cache: the bytes go where canonical-v1 says, for every dtype and grouping of heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hicache
from hicache_transformers.convert import PageShape, Span

LAYERS, HEADS, TOKENS, DIM = 3, 4, 4, 8


def shape(dtype: torch.dtype, head_group: int = HEADS) -> PageShape:
    return PageShape(layers=LAYERS, kv_heads=HEADS, head_group=head_group, tokens=TOKENS, row=DIM * dtype.itemsize)


def kept(dtype: torch.dtype, *, batch: int = 2, tokens: int = 11) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a model's cache holds, with random bytes."""
    torch.manual_seed(0)
    size = (LAYERS, 2, batch, HEADS, tokens, DIM * dtype.itemsize)
    tensors = torch.randint(0, 256, size, dtype=torch.uint8).view(dtype)
    return [(of_layer[0], of_layer[1]) for of_layer in tensors]


def as_bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.case("PLUG-1")
@pytest.mark.parametrize("head_group", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pages_are_canonical_and_come_back_bit_for_bit(dtype: torch.dtype, head_group: int) -> None:
    pages, layers = shape(dtype, head_group), kept(dtype)
    memory = pages.slots(3)
    geometry = hicache.KVGeometry.mha(LAYERS, kv_heads=HEADS, head_dim=DIM, dtype=dtype, head_group=head_group)
    pool = hicache.TensorDevicePool.attach(memory, geometry, page_size=TOKENS, layout="page_first")
    span = Span(pages, batch=1, tokens=8, dtype=dtype)
    span.put_layers(layers, row=0, source=1, first=2, start=0)
    span.fill_pages(0, [pages.of_slot(memory[slot]) for slot in (2, 0)], start=0)

    # As the format has it: (head group, layer, 2, token, head in group, dim).
    for number, slot in enumerate((2, 0)):
        first = 2 + number * TOKENS
        stacked = torch.stack([torch.stack(pair) for pair in layers])[:, :, 1, :, first : first + TOKENS]
        expected = as_bytes(stacked).reshape(LAYERS, 2, HEADS // head_group, head_group, TOKENS, pages.row)
        page = pool.read_page(slot)
        assert np.array_equal(page, expected.transpose(2, 0, 1, 4, 3, 5).reshape(-1))
        assert np.array_equal(pages.of_canonical(page), pages.of_slot(memory[slot]))

    back = Span(pages, batch=1, tokens=8, dtype=dtype)
    back.put_pages(0, [pages.of_slot(memory[2]), pages.of_canonical(pool.read_page(0))], start=0)
    for (keys, values), (old_keys, old_values) in zip(back.layers([torch.device("cpu")] * 3), layers, strict=True):
        assert np.array_equal(as_bytes(keys[0]), as_bytes(old_keys[1, :, 2:10]))
        assert np.array_equal(as_bytes(values[0]), as_bytes(old_values[1, :, 2:10]))
    pool.close()


@pytest.mark.parametrize(("start", "tokens"), [(0, 8), (3, 9), (3, 5), (6, 7), (9, 8)])
def test_pages_are_cut_at_the_last_column_and_padding_is_zero(start: int, tokens: int) -> None:
    pages = shape(torch.float32)
    memory = pages.slots(2)
    memory[:] = np.random.default_rng(0).integers(1, 256, memory.shape, np.uint8)
    span = Span(pages, batch=2, tokens=tokens, dtype=torch.float32)
    span.put_pages(1, [pages.of_slot(slot) for slot in memory], start=start)
    there = min(max(tokens - start, 0), 2 * TOKENS)
    for layer, (keys, _) in enumerate(span.layers([torch.device("cpu")] * LAYERS)):
        assert keys.shape == (2, HEADS, tokens, DIM)
        assert not as_bytes(keys[0]).any()
        assert not as_bytes(keys[1, :, :start]).any()
        whole = memory[:, layer, 0].reshape(2 * TOKENS, HEADS, -1).transpose(1, 0, 2)
        assert np.array_equal(as_bytes(keys[1, :, start : start + there]), whole[:, :there])


def test_a_row_can_be_filled_behind_pages() -> None:
    pages, layers = shape(torch.float32), kept(torch.float32)
    span = Span(pages, batch=1, tokens=9, dtype=torch.float32)
    span.put_layers(layers, row=0, source=0, first=4, start=5)
    for (keys, values), (old_keys, old_values) in zip(span.layers([torch.device("cpu")] * 3), layers, strict=True):
        for new, old in ((keys, old_keys), (values, old_values)):
            assert np.array_equal(as_bytes(new[0, :, 5:]), as_bytes(old[0, :, 4:8]))
            assert not as_bytes(new[0, :, :5]).any()


def test_what_goes_to_a_gpu_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one at hand: that torch is asked for pinned memory, there and nowhere else."""
    asked: list[bool] = []
    zeros = torch.zeros

    def seen(*size: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return zeros(*size, **options)

    monkeypatch.setattr(torch, "zeros", seen)
    pages = PageShape(layers=1, kv_heads=1, tokens=4, row=8, head_group=1)
    for devices in ((), (torch.device("cpu"),), (torch.device("cuda", 0),)):
        Span(pages, batch=1, tokens=4, dtype=torch.float32, devices=devices)
    assert asked == [False, False, True]
