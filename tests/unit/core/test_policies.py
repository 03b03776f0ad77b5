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
    twice_long_ago = heated(first_heat(0), 1)
    assert first_heat(0) < twice_long_ago < first_heat(100_000)
    assert heated(first_heat(0), 100_000) == pytest.approx(first_heat(100_000), abs=1e-3)
