"""Eviction, clears, misuse, and what misses and events say."""

from __future__ import annotations

import gc

import pytest

from hicache.core.node import Node
from hicache.core.residency import SlotState
from hicache.core.transfers import TransferKind
from hicache.errors import ConfigError, HicacheInternalError, InvalidInput, OutOfSlots
from hicache.events import Removed, Stored
from hicache.records import Match, MissReason, PageResult, Tier
from hicache.testing.core import Stage

OK, FAILED, BAD = PageResult.OK, PageResult.FAILED, PageResult.SOURCE_BAD
DEVICE, HOST = 0, 1


# ---- eviction


@pytest.mark.case("EVICT-1")
def test_a_page_whose_backup_found_no_room_is_dirty_and_goes_only_as_a_whole():
    stage = Stage(device=4, host=4, storage=True)
    stage.commit("ABCD")
    stage.settle()
    pinned = stage.lease("ABCD")
    stage.core.release(stage.lease("AB"))
    assert stage.core.statistics().host.evicted == 0
    with pytest.raises(OutOfSlots):
        stage.core.allocate(stage.lease("WX"), 1)
    stage.core.release(pinned)
    stage.commit("WX")
    (back,) = stage.take(TransferKind.WRITE_BACK)
    stage.end(back, FAILED)
    assert stage.match("WX") == Match(2)
    assert stage.core.evict(DEVICE, 99) == 4
    assert stage.match("WX") == Match()
    assert stage.core.statistics().device.dropped_dirty == 2
    stage.core.check()


@pytest.mark.case("EVICT-2")
@pytest.mark.parametrize("asked", [0, 3, 100])
def test_eviction_frees_what_was_asked_and_no_more(asked):
    stage = Stage(device=100)
    for i in range(100):
        stage.commit(chr(0x4E00 + i))
    assert stage.core.evict(DEVICE, asked) == asked
    assert stage.core.statistics().device.resident == 100 - asked
    assert stage.core.evict(DEVICE, 1000) == 100 - asked


@pytest.mark.case("EVICT-3")
def test_eviction_takes_leaves_first():
    stage = Stage(device=16)
    stage.commit("ABCDEFGHIJ")
    stage.core.evict(DEVICE, 4)
    assert stage.match("ABCDEFGHIJ") == Match(6)
    stage = Stage(device=16)
    stage.commit("ABB")
    stage.commit("ACC")
    stage.core.evict(DEVICE, 2)
    assert (stage.match("ABB").device, stage.match("ACC").device) == (1, 3)


@pytest.mark.case("EVICT-5")
def test_what_cannot_fit_evicts_nothing():
    stage = Stage(device=10)
    stage.commit("ABCD")
    pinned = stage.lease("ABCD")
    stage.commit("UVWXYZ")
    for wanted in (7, 11):
        with pytest.raises(OutOfSlots) as error:
            stage.core.allocate(stage.lease("0" * wanted), wanted)
        assert (error.value.asked, error.value.free, error.value.evictable, error.value.capacity) == (wanted, 0, 6, 10)
    assert stage.match("UVWXYZ") == Match(6)
    stage.core.release(pinned)
    with pytest.raises(OutOfSlots):
        stage.core.allocate(stage.lease("0" * 11), 11)
    assert stage.core.statistics().device.evicted == 0


def test_clean_pages_go_before_dirty_ones():
    stage = Stage(device=4, host=4)
    stage.commit("AB")
    stage.settle()
    stage.commit("CD")  # newer, and not backed up yet
    lease = stage.lease("EF")
    (back,) = stage.take(TransferKind.WRITE_BACK)
    stage.end(back, FAILED)
    stage.core.release(stage.lease("AB"))  # now CD is the older one, but dirty
    stage.core.allocate(lease, 2)
    assert (stage.match("AB").device, stage.match("CD").device) == (0, 2)


@pytest.mark.parametrize(("policy", "survivor"), [("lru", "C"), ("lfu", "A"), ("slru", "A"), ("priority", "B")])
def test_policies(policy, survivor):
    """A is used often and B is important, but C was used last."""
    stage = Stage(device=3, eviction=policy)
    for _ in range(4):
        stage.commit("A")
    stage.commit("B", priority=5)
    stage.commit("C")
    stage.core.evict(DEVICE, 2)
    assert [letter for letter in "ABC" if stage.match(letter).pages] == [survivor]


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'mru': one of lfu, lru, priority, slru"):
        Stage(eviction="mru")


# ---- clear


@pytest.mark.case("RACE-4")
def test_clear_with_transfers_in_flight_frees_each_slot_once():
    stage = Stage(device=16, host=16, storage=True)
    for letters in ("ABCD", "ABEF"):
        stage.commit(letters)
    transfers = stage.take(TransferKind.WRITE_BACK)
    lease = stage.lease("ABCD")
    old = stage.tree()
    new = stage.core.clear(old)
    assert (new.generation, old.live, stage.match("ABCD")) == (1, False, Match())
    assert stage.core.commit(lease, 0, ready=True) is None
    stage.core.check()
    for transfer in transfers:
        stage.end(transfer)
    stage.core.check()
    stage.core.release(lease)
    while stage.core.sweep(1):
        stage.core.check()
    assert not stage.take()
    assert stage.core.statistics().device.free == stage.core.statistics().host.free == 16
    stage.at_rest()


def test_allocation_sweeps_what_was_cleared_before_it_evicts():
    stage = Stage(device=6)
    stage.commit("ABCD")
    stage.core.clear(stage.tree())
    stage.commit("WX", "m")
    assert stage.core.available(DEVICE) == 6
    lease = stage.lease("STUV", "m")
    stage.core.allocate(lease, 4)
    assert stage.match("WX", "m") == Match(2)
    stage.core.release(lease)
    stage.at_rest()


def test_late_completions_of_an_older_generation_publish_nothing():
    stage = Stage(device=8, host=8, storage=True)
    lease = stage.lease("AB")
    stage.core.allocate(lease, 2)
    writer = stage.core.commit(lease, 2, ready=False)
    stage.core.clear(stage.tree())
    assert writer is not None
    stage.end(writer)
    assert stage.match("AB") == Match()
    assert not stage.take()
    stage.core.release(lease)
    stage.core.sweep()
    stage.at_rest()


def test_only_a_tree_that_holds_nothing_and_serves_nobody_can_be_dropped():
    stage = Stage(device=8)
    lease = stage.lease("AB")
    assert not stage.core.drop(lease.tree)
    stage.core.release(lease)
    stage.commit("AB")
    assert not stage.core.drop(stage.tree())
    stage.core.evict(DEVICE, 99)
    before = stage.core.statistics().nodes
    assert stage.core.drop(lease.tree)
    assert not stage.core.drop(lease.tree)
    assert stage.core.statistics().nodes == before - 1
    stage.at_rest()
    assert stage.tree() is not lease.tree
    stage.commit("AB")
    assert stage.match("AB") == Match(2)


# ---- misuse


def test_completing_twice_or_with_a_wrong_number_of_results_is_our_bug_and_changes_nothing():
    stage = Stage(device=8, host=8)
    stage.commit("AB")
    (back,) = stage.take()
    with pytest.raises(HicacheInternalError, match="3 results for 2 pages"):
        stage.end(back, [OK, OK, OK])
    stage.end(back)
    with pytest.raises(HicacheInternalError, match="not under way"):
        stage.end(back)
    stage.at_rest()


def test_committing_pages_without_slots_is_refused():
    stage = Stage()
    lease = stage.lease("ABC")
    stage.core.allocate(lease, 2)
    with pytest.raises(InvalidInput, match="2 slots were allocated from page 0 on"):
        stage.core.commit(lease, 3, ready=True)
    stage.core.release(lease)
    with pytest.raises(InvalidInput, match="closed"):
        stage.core.commit(lease, 1, ready=True)
    with pytest.raises(InvalidInput, match="closed"):
        stage.core.allocate(lease, 1)


@pytest.mark.parametrize("priority", ["x", None, 1.5, float("nan"), True, 2**31])
def test_a_priority_that_cannot_be_compared_is_refused_before_anything_is_taken(priority):
    stage = Stage(device=8)
    with pytest.raises(InvalidInput, match="priority"):
        stage.lease("AB", priority=priority)
    stage.at_rest()


def test_a_longer_prompt_must_begin_with_the_old_one():
    stage = Stage()
    lease = stage.lease("AB")
    with pytest.raises(InvalidInput, match="does not begin"):
        stage.core.extend(lease, stage.prompt("AXC"))


def test_storage_without_a_host_tier_is_refused():
    with pytest.raises(ConfigError, match="host tier, which has 0 pages"):
        Stage(host=0, storage=True)


# ---- misses and events


def test_misses_say_why():
    stage = Stage(device=4)
    assert stage.commit("AB").counts.missed == {MissReason.COLD: 2}
    assert stage.commit("AB", "m").counts.missed == {MissReason.OTHER_NAMESPACE: 2}
    stage.commit("WXYZ", "m")
    assert stage.commit("AB").counts.missed == {MissReason.EVICTED: 2}
    stage.core.clear(stage.tree())
    stage.core.sweep()
    assert stage.commit("AB").counts.missed == {MissReason.EXPIRED: 2}


@pytest.mark.case("STAT-3", "STAT-4")
def test_events_name_their_tier_and_removals_go_child_first():
    stage = Stage(device=8, host=8, storage=True, events=True)
    stage.commit("ABC")
    stage.settle()
    stage.core.evict(DEVICE, 2)
    stage.core.evict(HOST, 99)
    stored = [(e.tier, len(e.page_hashes)) for e in stage.core.events if isinstance(e, Stored)]
    assert stored == [(Tier.DEVICE, 3), (Tier.HOST, 3), (Tier.STORAGE, 3)]
    hashes = stage.prompt("ABC").hashes(0, 3)
    removed = [(e.tier, e.page_hashes) for e in stage.core.events if isinstance(e, Removed)]
    assert removed == [(Tier.DEVICE, (hashes[2], hashes[1])), (Tier.HOST, tuple(reversed(hashes)))]


def test_stub_pages_are_bounded():
    stage = Stage(device=4, host=4, storage=True, stub_pages=3)
    for letters in ("ABCD", "WXYZ"):
        stage.commit(letters)
        stage.settle()
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    stage.commit("M")
    stage.settle()
    assert stage.core.statistics().stub_pages <= 3
    stage.core.check()


@pytest.mark.case("PAGE-5")
@pytest.mark.parametrize("tier", [HOST, Tier.STORAGE])
def test_a_match_may_end_inside_a_node_in_any_tier(tier):
    stage = Stage(device=16, host=16, storage=True)
    stage.commit("ABCDEFGHIJ")
    stage.settle()
    stage.core.evict(DEVICE, 99)
    if tier == Tier.STORAGE:
        stage.core.evict(HOST, 99)
    assert stage.match("ABCDXY").pages == 4
    lease = stage.lease("ABCDXY")
    assert lease.match.pages == 4
    stage.core.release(lease)
    stage.settle()
    assert stage.match("ABCDEFGHIJ").pages == 10


def test_states_are_what_the_counters_say():
    stage = Stage(device=8)
    lease = stage.lease("ABC")
    slots = stage.core.allocate(lease, 3)
    table = stage.core.registry.tables[DEVICE]
    assert (table.state[slots] == SlotState.PRIVATE).all()
    assert stage.core.statistics().device.private == 3
    stage.core.release(lease, aborted=True)
    stage.at_rest()


# ---- memory


def _nodes_alive(namespace: str) -> int:
    gc.collect()
    name = namespace.encode() * 16
    return sum(type(found) is Node and found.tree.namespace == name for found in gc.get_objects())


@pytest.mark.case("LEAK-1")
def test_cleared_trees_do_not_stay_in_memory():
    stage = Stage(device=4096, ghost_pages=0)
    for _ in range(20):
        for i in range(100):
            stage.commit("A" + chr(0x4E00 + i), "l")
        stage.core.clear(stage.tree("l"))
        while stage.core.sweep():
            pass
    assert stage.core.statistics().nodes == 1
    assert _nodes_alive("l") < 500


def test_slices_of_a_sweep_are_short_for_short_nodes_too():
    stage = Stage(device=4096)
    for i in range(1000):
        stage.commit(chr(0x4E00 + i))
    stage.core.clear(stage.tree())
    left = stage.core.sweep()
    assert 900 <= left < 1000
    stage.core.check()
    while stage.core.sweep():
        pass
    stage.at_rest()


def test_a_stub_that_was_fetched_meanwhile_can_be_forgotten_later():
    stage = Stage(device=4, host=8, storage=True)
    stage.core.believe(stage.lease("A"), 1)
    fetched = stage.lease("A")
    stage.core.prefetch(fetched)
    stage.settle()  # no stub any more, but its entry in the heap of stubs is still there
    for i in range(200):
        lease = stage.lease(chr(0x4E00 + i))
        stage.core.believe(lease, 1)
        stage.core.prefetch(lease)
        (fetch,) = stage.take(TransferKind.FETCH)
        stage.end(fetch, BAD)  # storage has not got it: the node dies, and its entry is stale
        stage.core.release(lease)
    stage.core.release(fetched)
    assert stage.core.evict(HOST, 8) == 1
    assert stage.core.statistics().stub_pages == 1
    node = stage.core.registry.coldest_stub()
    assert node is not None
    assert node.stubs == 1
