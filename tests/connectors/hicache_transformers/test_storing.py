"""What becomes of layers that are taken while a model computes: of chunks, of what fails, of what is not understood."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers_gpu import CPU

from hicache.errors import HicacheError
from hicache_transformers.counters import Counters
from hicache_transformers.model import ModelShape
from hicache_transformers.rows import Row
from hicache_transformers.storing import LayerStores, store_at_once
from hicache_transformers.tiers import Computed

SHAPE = ModelShape(2, 8, torch.float32, (CPU, CPU), "eager", takes_positions=True)


class Writer:
    """Writes down what it is told; fails at a layer."""

    def __init__(self, *, fails: int | None = None) -> None:
        self.done = 0
        self.told: list[str] = []
        self._fails = fails

    def layer(self, pair: Any, *, row: int, padding: int) -> None:
        if self.done == self._fails:
            raise HicacheError("no")
        self.done += 1
        self.told.append(f"{row} {padding} {tuple(pair[0].shape)[2]}")

    def commit(self) -> tuple[int, int]:
        self.told.append("committed")
        return 3, 0

    def abandon(self) -> None:
        self.told.append("abandoned")


class Request:
    """Gives its writer, when it is asked for the time `ready`."""

    def __init__(self, writer: Writer | None, *, ready: int = 1) -> None:
        self.made = writer
        self.asked = 0
        self._ready = ready

    def extend(self, more: Any) -> None:
        self.more = more

    def writer(self, *, wait: bool) -> Writer | None:
        self.asked += 1
        return self.made if wait or self.asked >= self._ready else None


def layer(tokens: int, *, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, 2, tokens, 8), torch.zeros(rows, 2, tokens, 8)


def stores(*requests: Request) -> tuple[LayerStores, Counters]:
    rows = [Row(at, np.zeros(6 - at, np.uint32)) for at in range(len(requests))]
    counters = Counters()
    made: Any = list(requests)
    return LayerStores(rows, made, repeats=2, shape=SHAPE, counters=counters), counters


def test_each_row_is_taken_layer_by_layer_and_committed_behind_the_last() -> None:
    """One that is not ready for the first layer gets it with the next."""
    early, late, none = Request(Writer()), Request(Writer(), ready=2), Request(None)
    taken, counters = stores(early, late, none)
    assert taken.came(0, *layer(6, rows=6))
    assert early.made is not None
    assert late.made is not None
    assert early.made.told == ["0 0 6"]
    assert late.made.told == []
    assert taken.came(1, *layer(6, rows=6))
    assert early.made.told == ["0 0 6", "0 0 6", "committed"]
    assert late.made.told == ["2 1 6", "2 1 6", "committed"]
    assert counters.snapshot().stored_pages == 6
    assert taken.came(0, *layer(7, rows=6))  # it wants no more
    assert (early.asked, late.asked) == (1, 2)


def test_chunks_are_waited_for() -> None:
    request = Request(Writer())
    taken, _ = stores(request, Request(None))
    for number in range(2):
        assert not taken.came(number, *layer(4))
    assert request.asked == 0
    for number in range(2):
        assert taken.came(number, *layer(6))
    assert request.made is not None
    assert request.made.told[-1] == "committed"


def test_a_row_that_fails_does_not_keep_others_from_being_stored() -> None:
    fails, good = Request(Writer(fails=1)), Request(Writer())
    taken, counters = stores(fails, good)
    for number in range(2):
        assert taken.came(number, *layer(6))
    assert fails.made is not None
    assert good.made is not None
    assert fails.made.told == ["0 0 6", "abandoned"]
    assert good.made.told[-1] == "committed"
    assert counters.snapshot().failures == {"storing pages: HicacheError": 1}


@pytest.mark.parametrize("what", ["rows", "order", "tokens"])
def test_what_is_not_understood_is_left_to_the_calls_end(what: str) -> None:
    request = Request(Writer())
    taken, counters = stores(request, Request(None))
    assert taken.came(0, *layer(6))
    second = {"rows": (1, 6, 3), "order": (0, 6, 4), "tokens": (1, 7, 4)}[what]
    assert taken.came(second[0], *layer(second[1], rows=second[2]))
    assert taken.came(1, *layer(6))
    assert request.made is not None
    assert request.made.told == ["0 0 6", "abandoned"]
    assert not counters.snapshot().failures


def test_a_store_at_once_that_fails_is_given_up() -> None:
    computed = Computed([layer(6), layer(6)], row=1, padding=0)
    request: Any = Request(Writer(fails=1))
    with pytest.raises(HicacheError):
        store_at_once(request, np.zeros(0, np.uint32), computed)
    assert request.made.told == ["1 0 6", "abandoned"]
    none: Any = Request(None)
    assert store_at_once(none, np.zeros(0, np.uint32), computed) == (0, 0)
