"""The sampled memory against caches of each size that are simulated page by page."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b
from math import isfinite

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.core.whatif import FACTORS, SizeGhost, WhatIf, WhatIfStatistics

Prompt = tuple[int, ...]
"""Pages by number: equal numbers in equal places after equal pasts are equal pages."""


def names(prompt: Prompt) -> list[bytes]:
    """Chained hashes, 32 bytes each."""
    found, before = [], b""
    for page in prompt:
        before = blake2b(before + page.to_bytes(8, "little"), digest_size=32).digest()
        found.append(before)
    return found


def exact_misses(prompts: Iterable[Prompt], size: int) -> int:
    """Pages that an LRU cache of so many misses; a prompt's pages come at once, the first one last."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    missed = 0
    for prompt in prompts:
        pages = names(prompt)
        missed += sum(page not in cache for page in pages)
        for page in reversed(pages):
            cache[page] = None
            cache.move_to_end(page)
        while len(cache) > size:
            cache.popitem(last=False)
    return missed


def told(prompts: Iterable[Prompt], pages: int, *, sample: int) -> WhatIfStatistics:
    whatif = WhatIf([SizeGhost("host", pages, sample=sample)], size=32)
    for prompt in prompts:
        whatif.use(b"".join(names(prompt)), asked=len(prompt), kept=len(prompt))
    (found,) = whatif.statistics()
    return found


def prompts_of(seed: int, requests: int) -> list[Prompt]:
    """Conversations that share system prompts, of which some are hot, and go on a few turns."""
    random = np.random.default_rng(seed)
    open_ones: list[Prompt] = []
    found: list[Prompt] = []
    for number in range(requests):
        if open_ones and random.random() < 0.6:
            at = int(len(open_ones) * random.random() ** 2)
            prompt = open_ones.pop(-1 - at)
        else:
            system = int(random.zipf(1.3)) % 50
            prompt = tuple(range(1000 * system, 1000 * system + 8))
        prompt += tuple(range(10**6 + 100 * number, 10**6 + 100 * number + int(random.integers(1, 12))))
        found.append(prompt)
        if len(prompt) < 60:
            open_ones.append(prompt)
    return found


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), max_size=40),
    st.integers(1, 12),
)
def test_unsampled_it_is_exact(prompts: list[Prompt], pages: int) -> None:
    """Where every page is in the sample each size misses exactly what a cache of that size would."""
    found = told(prompts, pages, sample=pages)
    assert found.sample_rate == 1.0
    assert found.asked_pages == sum(map(len, prompts))
    for point in found.points:
        size = round(pages * point.factor)
        assert point.missed_pages == exact_misses(prompts, size)
        assert point.error_bound in (0.0, None)
    assert found.sampled_pages <= 4 * pages


@pytest.mark.parametrize("seed", range(6))
def test_sampled_it_is_within_its_bound(seed: int) -> None:
    """Of a sixteenth of the pages: every size within the error that it tells, which is no wide one."""
    prompts = prompts_of(seed, 1500)
    found = told(prompts, 2048, sample=128)
    assert 0.05 < found.sample_rate < 0.07
    for point in found.points:
        exact = 1 - exact_misses(prompts, point.pages) / found.asked_pages
        assert point.hit_rate is not None
        assert point.error_bound is not None
        assert abs(point.hit_rate - exact) <= point.error_bound < 0.35
        assert abs(point.hit_rate - exact) < 0.08


def test_a_sample_that_nobody_has_met_tells_nothing() -> None:
    """A large tier's sample is thin: before it can have met anything, the error is as large as a rate can be wrong."""
    found = told([(number,) for number in range(40)], 1_000_000, sample=256)
    assert found.sample_rate < 0.001
    assert {point.error_bound for point in found.points} == {1.0}


def test_a_prefix_that_all_share_cannot_mislead() -> None:
    """One page in every request is in the sample or not, by luck: the hit rate is the same to the error told."""
    rates = []
    for system in range(20):
        prompts = [(system, 100 + number) for number in range(3000)]
        point = told(prompts, 4096, sample=1024).points[1]
        assert point.hit_rate is not None
        assert point.error_bound is not None
        assert abs(point.hit_rate - 2999 / 6000) <= point.error_bound
        rates.append(point.hit_rate)
    assert max(rates) - min(rates) < 0.15


def test_pages_that_miss_over_and_over_are_in_the_bound() -> None:
    """A loop that is too long for the cache misses the same pages again and again: the error says so."""
    for offset in range(30):
        loop = [(1000 * offset + number,) for number in range(400)] * 12
        for point in told(loop, 64, sample=8).points[:3]:  # far from the size at which the loop fits
            assert point.hit_rate is not None
            assert point.error_bound is not None
            assert point.hit_rate <= point.error_bound


def test_memory_is_bounded_and_counts_never_fall() -> None:
    """However many pages come, no more than four times the sample is remembered."""
    whatif = WhatIf([SizeGhost("host", 10_000, sample=50), SizeGhost("storage", 100_000, sample=50)], size=32)
    random = np.random.default_rng(3)
    before = [0] * (2 * len(FACTORS))
    for _ in range(40):
        for _ in range(50):
            whatif.use(random.bytes(32 * 100), asked=80, kept=100)
        found = whatif.statistics()
        assert all(ghost.sampled_pages <= 4 * 50 + 4 for ghost in found)
        now = [point.missed_pages for ghost in found for point in ghost.points]
        assert all(new >= old for new, old in zip(now, before, strict=True))
        assert all(point.missed_pages <= ghost.asked_pages for ghost in found for point in ghost.points)
        before = now
    assert [ghost.asked_pages for ghost in found] == [160_000] * 2


def test_what_was_not_committed_does_not_enter() -> None:
    """Pages that a request asked for and neither used nor committed are missed again."""
    whatif = WhatIf([SizeGhost("host", 10)], size=32)
    pages = b"".join(names((1, 2, 3)))
    whatif.use(pages, asked=3, kept=1)
    whatif.use(pages, asked=2, kept=3)
    assert [point.missed_pages for point in whatif.statistics()[0].points] == [4] * 4
    whatif.use(pages, asked=3, kept=0)
    assert [point.missed_pages for point in whatif.statistics()[0].points] == [4] * 4


@pytest.mark.case("STAT-2")
def test_before_anything_was_asked() -> None:
    """No rate is told, and none is NaN."""
    whatif = WhatIf([SizeGhost("host", 1)], size=32)
    (found,) = whatif.statistics()
    assert [(point.hit_rate, point.error_bound, point.missed_pages) for point in found.points] == [(None, None, 0)] * 4
    whatif.use(b"", asked=0, kept=0)
    whatif.use(bytes(32), asked=1, kept=1)
    for point in whatif.statistics()[0].points:
        assert point.hit_rate is not None
        assert isfinite(point.hit_rate)


def test_what_waits_is_worked_out_in_slices() -> None:
    """Requests only note their pages; many of them are worked out on the way, so what waits is bounded."""
    whatif = WhatIf([SizeGhost("host", 10)], size=32)
    for number in range(5000):
        whatif.use(names((number,))[0], asked=1, kept=1)
    assert len(whatif._waiting) <= 1024
    assert whatif.settle(1)
    assert not whatif.settle()
    assert whatif.statistics()[0].points[-1].missed_pages == 5000
