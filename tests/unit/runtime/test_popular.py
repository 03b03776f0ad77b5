"""Counting prefixes in bounded memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hicache.runtime.popular import Popular


@given(st.lists(st.integers(0, 30), max_size=400), st.integers(1, 8))
def test_counts_are_right_within_what_they_say(numbers: list[int], kept: int) -> None:
    """The true count lies between what was seen and what may have been before; memory is bounded."""
    popular, true = Popular(kept), Counter(numbers)
    for number in numbers:
        popular.note(b"n", bytes([number]), asked=2, hit=1)
        assert len(popular._counts) <= 2 * kept
    for prefix in popular.top(100):
        assert prefix.requests <= true[prefix.page_hash[0]] <= prefix.requests + prefix.uncertain
        assert (prefix.asked_pages, prefix.hit_pages) == (2 * prefix.requests, prefix.requests)


def test_what_is_hot_is_never_lost() -> None:
    """A prefix of a twentieth of all requests stays first among thousands that come once."""
    popular, random = Popular(32), np.random.default_rng(1)
    for number in range(20_000):
        hot = random.random() < 0.05
        popular.note(b"n", b"hot" if hot else number.to_bytes(4, "little"), asked=1, hit=int(hot))
    first = popular.top(1)[0]
    assert first.page_hash == b"hot"
    assert first.requests > 800
