"""Layers that are filled when they are read, and that tell what the model has added to them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache_transformers.pending import put_pending, watch_layer

CPU = torch.device("cpu")
ONE = torch.arange(12.0).reshape(1, 1, 6, 2)


def state_of(layers: int = 1) -> Any:
    return sys.modules["transformers"].DynamicCache(config=SimpleNamespace(num_hidden_layers=layers))


def pend(state: Any, *, fill: Callable[[], Any] | None = None) -> list[str]:
    """Let layer 0 be pending; the list tells when it was filled."""
    told: list[str] = []

    def filled() -> tuple[torch.Tensor, torch.Tensor]:
        told.append("filled")
        return ONE, -ONE

    put_pending(state, 0, fill or filled, tokens=6, dtype=torch.float32, device=CPU)
    return told


def test_a_layer_is_filled_once_when_it_is_read_and_not_when_its_length_is_asked() -> None:
    state = state_of()
    told = pend(state)
    assert state.get_seq_length() == 6
    assert not told
    keys, values = state.update(ONE, ONE, 0)
    assert keys.shape[2] == values.shape[2] == state.get_seq_length() == 12
    assert torch.equal(values[:, :, :6], -ONE)
    assert told == ["filled"]


@pytest.mark.parametrize("first", ["keys", "values"])
def test_a_layer_that_is_changed_before_it_was_read_is_filled_before(first: str) -> None:
    """As by who crops, reorders or selects rows of one that he never looked at."""
    state = state_of()
    told = pend(state)
    layer = state.layers[0]
    setattr(layer, first, ONE[:, :, :2])
    assert torch.equal(getattr(layer, first), ONE[:, :, :2])
    other = "values" if first == "keys" else "keys"
    assert getattr(layer, other).shape[2] == 6
    assert told == ["filled"]


def test_a_layer_that_is_given_up_is_not_filled_any_more() -> None:
    """As `reset` does: else its next tokens would come behind a prefix that was forgotten."""
    state = state_of()
    told = pend(state)
    layer = state.layers[0]
    layer.keys = layer.values = None
    layer.is_initialized = False
    assert layer.keys is None
    assert layer.values is None
    assert state.get_seq_length() == 0
    assert not told


def test_rows_of_a_pending_layer_can_be_repeated() -> None:
    state = state_of()
    pend(state)
    state.batch_repeat_interleave(3)
    assert state.layers[0].keys.shape == (3, 1, 6, 2)


def test_what_filling_raises_comes_out_once_and_the_layer_stays_without() -> None:
    def lost() -> Any:
        raise LookupError("lost")

    state = state_of()
    pend(state, fill=lost)
    with pytest.raises(LookupError, match="lost"):
        state.update(ONE, ONE, 0)


def test_who_watches_hears_of_all_there_is_until_he_has_heard_enough() -> None:
    state = state_of(2)
    pend(state)
    heard: list[tuple[int, int]] = []

    def came(layer: int, keys: torch.Tensor, values: torch.Tensor) -> bool:
        assert keys.shape == values.shape
        heard.append((layer, int(keys.shape[2])))
        return int(keys.shape[2]) > 12

    for layer in range(2):
        watch_layer(state, layer, partial(came, layer))
    for _ in range(3):
        for layer in range(2):
            state.update(ONE, ONE, layer)
    assert heard == [(0, 12), (1, 6), (0, 18), (1, 12), (1, 18)]


def test_a_layer_that_has_something_already_keeps_it() -> None:
    state = state_of()
    state.update(ONE, ONE, 0)
    heard: list[int] = []
    watch_layer(state, 0, lambda keys, _: bool(heard.append(int(keys.shape[2]))))
    assert state.get_seq_length() == 6
    assert state.update(ONE, ONE, 0)[0].shape[2] == 12
    assert heard == [12]
