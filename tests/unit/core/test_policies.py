"""Eviction policies by name, and others beside them."""

from __future__ import annotations

import pytest

from hicache.core.eviction import POLICIES, first_heat, heated, register_policy
from hicache.errors import ConfigError
from hicache.testing.core import Stage


@pytest.fixture
def biggest_first():
    register_policy("biggest", lambda node: -node.pages)
    yield "biggest"
    del POLICIES["biggest"]


def test_a_policy_of_ones_own_decides(biggest_first):
    stage = Stage(device=8, eviction=biggest_first)
    stage.commit("A")
    stage.commit("BCD")
    stage.core.evict(0, 1)
    assert (stage.match("A").device, stage.match("BCD").device) == (1, 2)
    stage.core.check()


def test_a_name_is_registered_once(biggest_first):
    with pytest.raises(ConfigError, match="exists already"):
        register_policy("lru", lambda node: 0)


def test_frequency_forgets():
    """Two uses long ago weigh less than one now, and more than one long ago; time alone changes no order."""
    twice_long_ago = heated(first_heat(0), 0.001)
    assert first_heat(0) < twice_long_ago < first_heat(20)
    assert heated(first_heat(0), 20) == pytest.approx(first_heat(20), abs=1e-3)


def test_frequency_forgets_as_fast_as_the_tier_changes():
    """What was popular long ago goes, however small or large the tier is."""
    for pages in (8, 64):
        stage = Stage(device=pages, eviction="lfu")
        for _ in range(5):
            stage.commit("A")
        new = [chr(1000 + i) for i in range(6 * pages)]
        for first in range(0, len(new), 2):
            for _ in range(2):
                stage.commit("".join(new[first : first + 2]))
        assert stage.match("A").pages == 0
        stage.core.check()


def test_a_request_that_is_committed_in_parts_is_one_use():
    stage = Stage(device=64, eviction="lfu")
    stage.commit("AB")
    stage.commit("C")
    lease = stage.lease("ABDEFG")
    for upto in range(3, 7):
        stage.core.allocate(lease, 1)
        stage.core.commit(lease, upto, ready=True)
    stage.core.release(lease)
    stage.commit("C")
    heat = {letter: stage.tree().walk(stage.prompt(letter))[0][0].heat for letter in "AC"}
    assert heat["C"] - heat["A"] == pytest.approx(0, abs=0.2)  # two uses each, at almost the same time
