"""From ids to tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hicache.analytics.prompts import IdPages, TokenPages, expand
from hicache.analytics.trace import TraceRequest, pack_ids
from hicache.errors import ConfigError


def request(ids: list[int], *, unit: int = 8, tokens: int | None = None, **changes: Any) -> TraceRequest:
    return TraceRequest(
        time=0.0,
        ids=pack_ids(ids),
        unit=unit,
        input_tokens=len(ids) * unit if tokens is None else tokens,
        output_tokens=0,
        scope="",
        place="line 1",
        **changes,
    )


def test_one_page_an_id_counts_the_partial_last() -> None:
    prompt = IdPages().prompt(request([3, 4, 5], tokens=17))
    assert prompt.tokens.tolist() == [3, 4, 5]
    assert [prompt.covered(pages) for pages in range(4)] == [0, 8, 16, 17]


@pytest.mark.case("PAGE-3")
@pytest.mark.parametrize(("page", "whole"), [(1, 17), (2, 16), (4, 16), (8, 16), (16, 16), (24, 0)])
def test_tokens_are_cut_to_whole_pages(page: int, whole: int) -> None:
    prompt = TokenPages(page).prompt(request([3, 4, 5], tokens=17))
    assert len(prompt.tokens) == whole
    assert prompt.covered(whole // page) == whole


def test_tail_without_an_id_is_dropped() -> None:
    assert len(TokenPages(8).prompt(request([3, 4], tokens=19)).tokens) == 16


def test_expansion_is_a_fixed_function_of_the_id() -> None:
    a, b = expand(pack_ids([1, 2]), unit=64), expand(pack_ids([2, 1]), unit=64)
    assert a.dtype == np.uint32
    assert a[:64].tolist() == b[64:].tolist()
    assert a[64:].tolist() == b[:64].tolist()
    assert a[:3].tolist() == [574581089, 2113851966, 3226749710]  # other versions must read what this one stored


def test_expansion_tells_ids_apart() -> None:
    rows = expand(pack_ids([*range(1000), 2**32 - 1]), unit=16).reshape(-1, 16)
    assert len(np.unique(rows, axis=0)) == 1001
    assert len(np.unique(rows)) > 0.999 * rows.size


@pytest.mark.parametrize(("page", "use"), [(6, "use 4,"), (7, "use 4,"), (12, "use 8,"), (100, "use 96,")])
def test_page_size_that_does_not_divide(page: int, use: str) -> None:
    with pytest.raises(ConfigError, match=use):
        TokenPages(page).prompt(request([1, 2]))
