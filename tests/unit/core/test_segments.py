"""Segmented LRU: what is protected is bounded, and goes back to probation in the order of its use."""

from __future__ import annotations

from collections import OrderedDict
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.core.config import CoreConfig
from hicache.core.registry import DEVICE, HOST
from hicache.errors import ConfigError
from hicache.testing.core import Stage

SHARES = st.sampled_from([0.0, 0.2, 0.5, 1.0])


class Segments:
    """The policy of the textbooks, over single pages."""

    def __init__(self, capacity: int, share: float) -> None:
        self.capacity = capacity
        self.bound = ceil(capacity * share)
        self.probation: OrderedDict[str, None] = OrderedDict()
        self.protected: OrderedDict[str, None] = OrderedDict()

    def use(self, page: str) -> None:
        if page in self.protected or page in self.probation:
            (self.protected if page in self.protected else self.probation).pop(page)
            self.protected[page] = None
            while len(self.protected) > self.bound:
                self.probation[self.protected.popitem(last=False)[0]] = None
            return
        if len(self.probation) + len(self.protected) == self.capacity:
            (self.probation or self.protected).popitem(last=False)
        self.probation[page] = None

    def pages(self) -> set[str]:
        return {*self.probation, *self.protected}


@given(capacity=st.integers(1, 9), share=SHARES, uses=st.lists(st.sampled_from("ABCDEFGHIJKLMN"), max_size=80))
def test_single_pages_go_as_in_the_textbook(capacity, share, uses):
    model = Segments(capacity, share)
    stage = Stage(device=capacity, eviction="slru", protected_share=share)
    for page in uses:
        stage.commit(page)
        model.use(page)
        assert {letter for letter in "ABCDEFGHIJKLMN" if stage.match(letter).pages} == model.pages()
    stage.at_rest()


@settings(max_examples=80)
@given(share=SHARES, uses=st.lists(st.text("AB", min_size=1, max_size=6), max_size=40), cleared=st.integers(0, 40))
def test_what_is_protected_is_within_its_share_of_each_tier(share, uses, cleared):
    """After each request, in DEVICE and HOST, with prompts that share prefixes, and a clear between them."""
    stage = Stage(device=10, host=16, eviction="slru", protected_share=share)
    for number, letters in enumerate(uses):
        if number == cleared:
            stage.core.clear(stage.tree())
        stage.commit(letters)
        stage.settle()
        for segment, pages in zip(stage.core.registry.protected, (10, 16), strict=True):
            assert segment.pages <= ceil(pages * share)
        stage.core.check()
    while stage.core.sweep(1):
        stage.core.check()
    stage.at_rest()


def test_what_was_popular_long_ago_makes_room():
    stage = Stage(device=10, eviction="slru", protected_share=0.4)
    for letter in "ABCDEFGHIJ" * 3:
        stage.commit(letter)
    for letter in "KLMNOPQRST":
        for _ in range(3):
            stage.commit(letter)
    assert not any(stage.match(letter).pages for letter in "ABCDEFGHIJ")
    assert all(stage.match(letter).pages for letter in "QRST")


def test_a_tier_has_segments_of_its_own():
    """What has lost its protection in a small DEVICE keeps it in a larger HOST."""
    stage = Stage(device=4, host=20, eviction="slru", protected_share=0.5)
    for letter in "AABBCC":
        stage.commit(letter)
        stage.settle()
    device, host = stage.core.registry.protected
    assert (device.pages, host.pages) == (2, 3)
    node = stage.tree().walk(stage.prompt("A"))[0][0]
    assert node.demoted[DEVICE] > node.stamp > node.demoted[HOST]


def test_without_limit_everything_may_be_protected():
    stage = Stage(device=None, eviction="slru", protected_share=0.1)
    for letter in "ABCABC":
        stage.commit(letter)
    assert stage.core.registry.protected[DEVICE].pages == 3


def test_entries_of_nodes_that_went_are_forgotten():
    stage = Stage(device=1000, eviction="slru", protected_share=1.0)
    for number in range(600):
        for _ in range(2):
            stage.commit(chr(1000 + number))
        stage.core.evict(DEVICE, 1)
    segment = stage.core.registry.protected[DEVICE]
    assert segment.pages == 0
    assert len(segment._heap) < 100


def test_a_share_is_a_share():
    with pytest.raises(ConfigError, match=r"protected_share=1.5 is not a share between 0 and 1"):
        CoreConfig(device_pages=1, protected_share=1.5)
