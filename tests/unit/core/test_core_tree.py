"""The tree's form: where nodes part, grow, merge and end."""

from __future__ import annotations

import pytest

from hicache.core.config import EdgePolicy
from hicache.errors import InvalidInput
from hicache.testing.core import Stage


def test_the_worked_example():
    """ABCDE, ABCDF, ABG give root-[AB]-[CD]-{[E],[F]} and [AB]-[G]."""
    stage = Stage()
    for letters in ("ABCDE", "ABCDF", "ABG"):
        stage.commit(letters)
    assert stage.shape() == {"AB": {"CD": {"E": {}, "F": {}}, "G": {}}}
    stage.core.check()


@pytest.mark.case("KEY-2")
def test_equal_pages_after_different_pasts_are_different_pages():
    stage = Stage()
    stage.commit("AX")
    stage.commit("BX")
    tree = stage.tree()
    a, b = (tree.walk(stage.prompt(letters)) for letters in ("AX", "BX"))
    assert tree.hashes(a[-1][0], 1, 2) != tree.hashes(b[-1][0], 1, 2)
    assert tree.held(a, 0)[0][1] != tree.held(b, 0)[0][1]
    stage.lease("BX")
    assert stage.core.evict(0, 99) == 2
    assert (stage.match("AX").pages, stage.match("BX").pages) == (0, 2)


@pytest.mark.case("KEY-3")
def test_namespaces_share_no_page():
    stage = Stage(host=64)
    stage.commit("ABC", "n")
    stage.settle()
    assert stage.match("ABC", "m").pages == 0
    assert stage.match("ABC", "n").pages == 3


@pytest.mark.case("PAGE-2")
@pytest.mark.parametrize("letters", ["", "A", "AB"])
def test_short_and_empty_prompts_leave_no_empty_node(letters):
    stage = Stage()
    stage.commit(letters)
    assert stage.match(letters).pages == len(letters)
    assert stage.core.evict(0, 99) == len(letters)
    assert stage.shape() == {}
    assert stage.core.statistics().nodes == 1  # the root
    stage.core.check()


def test_a_request_extends_its_own_leaf_in_place():
    stage = Stage()
    lease = stage.commit("AB", close=False)
    for letters in ("ABC", "ABCD"):
        stage.core.extend(lease, stage.prompt(letters))
        stage.core.allocate(lease, 1)
        stage.core.commit(lease, len(letters), ready=True)
    assert stage.shape() == {"ABCD": {}}
    stage.core.release(lease)
    stage.commit("ABCDE")  # another request's pages have a recency and hits of their own
    assert stage.shape() == {"ABCD": {"E": {}}}


def test_a_lease_that_ends_inside_a_node_parts_it_so_that_the_cold_rest_stays_cold():
    stage = Stage(device=4)
    stage.commit("ABCD")
    stage.core.release(stage.lease("AB"))
    assert stage.shape() == {"AB": {"CD": {}}}
    stage.commit("XY")
    assert stage.match("ABCD").pages == 2


def test_a_node_and_its_only_child_merge_when_used_alike():
    stage = Stage()
    stage.commit("ABCD")
    tree = stage.tree()
    node = tree.walk(stage.prompt("ABCD"))[0][0]
    tree.split(node, 2)
    assert stage.shape() == {"AB": {"CD": {}}}
    assert tree.merge(node)
    assert stage.shape() == {"ABCD": {}}
    stage.core.check()


def chat(stage: Stage, turns: int) -> str:
    """A conversation that grows by two pages a turn; returns its pages."""
    letters = ""
    for turn in range(turns):
        letters += chr(0x4E00 + 2 * turn) + chr(0x4E01 + 2 * turn)
        stage.commit(letters)
    return letters


def test_a_long_chat_does_not_become_a_long_chain():
    stage = Stage(device=512)
    letters = chat(stage, 200)
    assert stage.core.statistics().nodes < 8
    assert stage.match(letters).pages == 400
    stage.core.check()
    stage.core.release(stage.lease(letters[:100]))
    assert stage.core.evict(0, 300) == 300
    assert stage.match(letters).pages == 100


@pytest.mark.parametrize(
    "settings", [{"eviction": "lfu"}, {"host": 8, "device_to_host": EdgePolicy(999)}], ids=["heat", "admission"]
)
def test_uses_that_a_policy_tells_apart_keep_nodes_apart(settings):
    stage = Stage(device=512, **settings)
    chat(stage, 20)
    assert stage.core.statistics().nodes == 21


@pytest.mark.case("PAGE-7")
def test_fresh_pages_do_not_take_over_the_uses_of_those_in_front():
    stage = Stage(device=64, host=64, device_to_host=EdgePolicy(2))
    chat(stage, 10)
    stage.settle()
    tree = stage.tree()
    prompt = stage.prompt("".join(chr(0x4E00 + i) for i in range(20)))
    host = tree.resident_pages(tree.walk(prompt), 1)
    assert host == 18  # all but the last turn, which was used once


def test_spans_are_bounded():
    stage = Stage(span_bytes=4)
    stage.commit("ABCDE")
    assert stage.shape() == {"AB": {"CD": {"E": {}}}}
    assert stage.match("ABCDE").pages == 5


@pytest.mark.case("STAT-1")
def test_matching_changes_nothing():
    stage = Stage()
    stage.commit("ABCD")
    before = (stage.shape(), stage.core.registry.tick, stage.core.statistics())
    for letters in ("ABX", "ABCD", "Z"):
        assert stage.match(letters).device == {"ABX": 2, "ABCD": 4, "Z": 0}[letters]
    assert (stage.shape(), stage.core.registry.tick, stage.core.statistics()) == before
    node = stage.tree().walk(stage.prompt("ABCD"))[0][0]
    assert node.hits == 1
    counts = stage.core.release(stage.lease("ABCD"))
    assert (counts.asked, counts.device, node.hits) == (4, 4, 2)


def test_hashes_are_computed_once_and_kept_through_splits():
    stage = Stage()
    stage.commit("ABCD")
    tree = stage.tree()
    whole = tree.hashes(tree.walk(stage.prompt("ABCD"))[0][0], 0, 4)
    assert whole == stage.prompt("ABCD").hashes(0, 4)
    stage.core.release(stage.lease("ABX"))
    path = tree.walk(stage.prompt("ABCD"))
    assert [h for node, pages in path for h in tree.hashes(node, 0, pages)] == whole


@pytest.mark.case("PAGE-1")
def test_a_prompt_that_came_whole_from_the_cache_can_be_committed_without_slots():
    stage = Stage()
    stage.commit("ABCD")
    lease = stage.lease("ABCD")
    assert stage.core.commit(lease, 4, ready=True) is None
    with pytest.raises(InvalidInput, match="page 5"):
        stage.core.commit(lease, 5, ready=True)
    stage.core.release(lease)
    stage.at_rest()


def test_a_namespace_is_forgotten_only_when_nothing_of_it_is_left():
    stage = Stage(device=8, host=8, storage=True)
    stage.commit("ABC")
    tree = stage.tree()
    assert not stage.core.drop(tree)  # pages, and a write-back under way
    stage.settle()
    for tier in (0, 1):
        stage.core.evict(tier, 99)
    assert not stage.core.drop(tree)  # believed to be in storage
    stage.core.detach_storage()
    while stage.core.forget_storage():
        pass
    lease = stage.lease("ABC")
    assert not stage.core.drop(tree)
    stage.core.release(lease)
    assert stage.core.drop(tree)
    assert stage.core.trees == []
    stage.core.check()
    assert not stage.core.drop(tree)
    late = stage.core.lease(tree, stage.prompt("ABC"))  # by who has found it just before
    assert late.match.pages == 0
    stage.core.allocate(late, 3)
    stage.core.commit(late, 3, ready=True)
    stage.core.release(late)
    assert stage.tree() is not tree
    stage.at_rest()
