"""Batches: where prompts begin, and how many columns are worth taking from the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hicache_transformers.rows import FORWARD_TOKENS, Bypass, Row, columns_to_fill, generated_tokens, read_rows


def rows(*sizes: tuple[int, int]) -> list[Row]:
    return [Row(padding, np.arange(tokens, dtype=np.uint32)) for padding, tokens in sizes]


def test_prompts_begin_behind_their_padding() -> None:
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 0, 9]])
    found = read_rows(ids, torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    assert [row.padding for row in found] == [2, 0]
    assert [row.tokens.tolist() for row in found] == [[5, 6], [7, 8, 0, 9]]
    assert all(row.tokens.dtype == np.uint32 for row in found)
    assert [row.tokens.tolist() for row in read_rows(ids, None)] == ids.tolist()
    assert [row.padding for row in read_rows(ids, torch.tensor([[False, False, True, True], [True] * 4]))] == [2, 0]


@pytest.mark.parametrize(
    ("ids", "mask", "reason"),
    [
        (None, None, "input"),
        ([[1, 2]], None, "input"),
        (torch.tensor([1, 2]), None, "input"),
        (torch.zeros(0, 3, dtype=torch.long), None, "input"),
        (torch.tensor([[1.0, 2.0]]), None, "input"),
        (torch.tensor([[-1, 2]]), None, "input"),
        (torch.tensor([[2**32, 2]]), None, "input"),
        (torch.tensor([[0, 2]]), None, "mask"),
        (torch.tensor([[1, 2]]), torch.tensor([[1, 1, 1]]), "mask"),
        (torch.tensor([[1, 2]]), torch.tensor([[1, 0]]), "mask"),
        (torch.tensor([[1, 2, 3]]), torch.tensor([[1, 0, 1]]), "mask"),
        (torch.tensor([[1, 2]]), torch.tensor([[0, 0]]), "mask"),
        (torch.tensor([[1, 2]]), torch.tensor([[2, 1]]), "mask"),
        (torch.tensor([[1, 2]]), torch.tensor([[0.5, 1.0]]), "mask"),
        (torch.tensor([[1, 2]]), torch.tensor([[-torch.inf, 0.0]]), "mask"),
        (torch.tensor([[1, 2]]), "mask", "mask"),
    ],
)
def test_what_is_no_batch_of_prompts_goes_past_the_cache(ids: Any, mask: Any, reason: str) -> None:
    with pytest.raises(Bypass) as bypass:
        read_rows(ids, mask, pad_token=0)
    assert bypass.value.reason == reason
    assert str(bypass.value)


def test_nothing_in_the_cache_leaves_the_batch_whole() -> None:
    assert columns_to_fill(rows((0, 100), (90, 10)), [0, 0], 100) == 0


def test_one_column_is_left_to_compute() -> None:
    assert columns_to_fill(rows((0, 32)), [32], 32) == 31


def test_small_gaps_are_computed_together_large_ones_alone() -> None:
    batch = rows((0, 200), (0, 200), (0, 200))
    assert columns_to_fill(batch, [192, 192, 176], 200) == 176
    assert columns_to_fill(batch, [192, 192, 0], 200) == 192


def test_no_other_number_of_columns_costs_less() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        columns = int(random.integers(2, 300))
        lengths = random.integers(1, columns + 1, int(random.integers(1, 5)))
        batch = rows(*((columns - int(length), int(length)) for length in lengths))
        hits = [int(random.integers(0, length)) for length in lengths]
        chosen = columns_to_fill(batch, hits, columns)

        def cost(fill: int, batch: list[Row] = batch, hits: list[int] = hits, columns: int = columns) -> int:
            lacks = [fill - row.padding - hit for row, hit in zip(batch, hits, strict=True)]
            alone = sum(FORWARD_TOKENS + lack for lack in lacks if lack > 0)
            return alone + len(batch) * (columns - fill)

        assert 0 <= chosen < columns
        if any(hits):
            assert cost(chosen) == min(cost(fill) for fill in range(columns))


def test_generated_tokens_are_what_follows_the_prompt() -> None:
    row = Row(2, np.array([5, 6], np.uint32))
    sequence = torch.tensor([0, 0, 5, 6, 7, 9, 9])

    def found(sequence: torch.Tensor, pad_token: int | None) -> list[int]:
        tokens = generated_tokens(row, sequence, 4, pad_token=pad_token)
        assert tokens is not None
        return tokens.tolist()

    assert found(sequence, None) == [7, 9, 9]
    assert found(sequence, 9) == [7]
    assert found(torch.tensor([0, 0, 5, 6, 9, 9]), 9) == []


@pytest.mark.parametrize("sequence", [torch.tensor([0, 0, 5, 8, 7]), torch.tensor([[0, 0, 5, 6, 7]]), "text"])
def test_another_prompts_sequence_is_not_stored_under_this_one(sequence: Any) -> None:
    row = Row(2, np.array([5, 6], np.uint32))
    assert generated_tokens(row, sequence, 4, pad_token=None) is None
