"""Requests, transfers and tiers, step by step."""

from __future__ import annotations

import pytest

from hicache.core.config import EdgePolicy
from hicache.core.residency import SlotState
from hicache.core.transfers import TransferKind
from hicache.errors import ConfigError, HicacheInternalError, InvalidInput, OutOfSlots
from hicache.events import Removed, Stored
from hicache.records import Match, MissReason, PageResult, Tier
from hicache.testing.core import Stage

OK, FAILED, BAD = PageResult.OK, PageResult.FAILED, PageResult.SOURCE_BAD
DEVICE, HOST = 0, 1


def full_stage(**settings):
    """Three tiers, everything of ABCD written through to storage."""
    stage = Stage(device=8, host=8, storage=True, **settings)
    stage.commit("ABCD")
    stage.settle()
    assert stage.tree().believed_pages(stage.tree().walk(stage.prompt("ABCD"))) == 4
    return stage


def at_rest(stage):
    """Nothing pinned, filling, private or quarantined."""
    stage.core.check()
    for tier in (stage.core.statistics().device, stage.core.statistics().host):
        assert tier.pinned == tier.private == tier.filling == tier.quarantined == 0
    assert stage.core.statistics().transfers == 0


# ---- writing


def test_write_through_goes_down_at_commit():
    stage = Stage(device=8, host=8, storage=True)
    stage.commit("ABC")
    (back,) = stage.take(TransferKind.WRITE_BACK)
    assert back.count == 3
    assert stage.match("ABC") == Match(3, 0, 0)
    stage.end(back)
    (put,) = stage.take(TransferKind.PUT)
    assert [page.depth for page in put.pages] == [0, 1, 2]
    assert put.pages[0].parent is None
    assert put.pages[1].parent == put.pages[0].hash
    assert put.pages[1].symbol == "B".encode("utf-16-le")
    stage.end(put)
    at_rest(stage)


def test_selective_write_through_goes_down_at_the_second_use():
    selective = EdgePolicy(2)
    stage = Stage(device=8, host=8, storage=True, device_to_host=selective, host_to_storage=selective)
    stage.commit("ABC")
    assert not stage.take()
    stage.commit("ABX")
    (back,) = stage.take(TransferKind.WRITE_BACK)
    assert back.count == 2  # C and X have been used once
    stage.end(back)
    (put,) = stage.take(TransferKind.PUT)
    assert put.count == 2
    stage.end(put)
    at_rest(stage)


@pytest.mark.case("PAGE-4", "PAGE-6")
def test_write_back_writes_ancestors_first():
    """A reserve of the coldest leaves is written with all in front of them, so what is below starts at page 0."""
    policy = EdgePolicy(None, on_eviction=True)
    stage = Stage(device=8, host=16, storage=True, device_to_host=policy, host_to_storage=policy, reserve=0.5)
    for letters in ("ABCD", "ABEF"):
        stage.commit(letters)
    assert not stage.take()
    stage.core.flush()
    back = stage.take(TransferKind.WRITE_BACK)
    assert back
    assert back[0].first == 0
    for transfer in back:
        stage.end(transfer)
    stage.settle()
    while stage.core.drain():
        stage.settle()
    tree = stage.tree()
    for letters in ("ABCD", "ABEF"):
        path = tree.walk(stage.prompt(letters))
        assert tree.resident_pages(path, HOST) == tree.believed_pages(path) == 4
    at_rest(stage)


@pytest.mark.case("PAGE-6")
def test_backing_up_a_child_of_a_fresh_split_takes_its_parent_along():
    policy = EdgePolicy(None, on_eviction=True)
    stage = Stage(device=8, host=8, device_to_host=policy, reserve=1.0)
    stage.commit("ABCD")
    stage.core.release(stage.lease("AB"))  # parts the node behind B, nothing is backed up yet
    assert stage.shape() == {"AB": {"CD": {}}}
    stage.core.flush()
    stage.settle()
    assert stage.core.evict(DEVICE, 99) == 4
    assert stage.match("ABCD") == Match(0, 4, 0)


@pytest.mark.case("PAGE-3", "PAGE-7")
@pytest.mark.parametrize("cut", [1, 3, 7, 20])
def test_what_is_stored_does_not_depend_on_how_a_prompt_was_cut(cut):
    letters = "ABCDEFGHIJKLMNOPQRST"
    stage = Stage(device=64, host=64, storage=True)
    lease = stage.lease(letters)
    stage.core.allocate(lease, len(letters))
    puts = []
    for upto in [*range(cut, len(letters), cut), len(letters)]:
        stage.core.commit(lease, upto, ready=True)
        puts += [t for t in stage.settle() if t.kind is TransferKind.PUT]
    stage.core.release(lease)
    assert [page.depth for put in puts for page in put.pages] == list(range(20))
    assert stage.tree().walk(stage.prompt(letters))[0][0].hits == 1
    assert stage.shape() == {letters: {}}
    at_rest(stage)


@pytest.mark.case("FAIL-6")
def test_a_refused_put_is_tried_again_at_the_next_use():
    stage = Stage(device=8, host=8, storage=True)
    stage.commit("ABC")
    stage.end(stage.take(TransferKind.WRITE_BACK)[0])
    stage.end(stage.take(TransferKind.PUT)[0], FAILED)
    at_rest(stage)
    assert stage.tree().putting == set()
    stage.core.release(stage.lease("ABC"))
    (put,) = stage.take(TransferKind.PUT)
    assert put.count == 3
    stage.end(put, [OK, FAILED, OK])
    assert stage.tree().believed_pages(stage.tree().walk(stage.prompt("ABC"))) == 1
    stage.core.release(stage.lease("ABC"))
    (put,) = stage.take(TransferKind.PUT)
    assert [page.depth for page in put.pages] == [1]  # the third was stored, out of order
    stage.end(put)
    assert stage.tree().believed_pages(stage.tree().walk(stage.prompt("ABC"))) == 3


@pytest.mark.case("RACE-2", "RACE-6")
def test_a_page_has_one_writer_and_no_reader_while_it_is_on_its_way():
    stage = Stage(device=16, host=8, storage=True)
    first, second = stage.lease("ABC"), stage.lease("ABC")
    for lease in (first, second):
        stage.core.allocate(lease, 3)
    writer = stage.core.commit(first, 3, ready=False)
    assert writer is not None
    assert stage.match("ABC") == Match()
    assert stage.core.commit(second, 3, ready=False) is None  # coalesced: the same pages, on their way already
    assert stage.match("ABC") == Match()
    stage.end(writer)
    assert stage.match("ABC") == Match(3)
    assert len(stage.take(TransferKind.WRITE_BACK)) == 1
    stage.core.release(second)
    stage.core.release(first)
    stage.core.check()


def test_pages_behind_another_request_s_unwritten_pages_wait_for_them():
    stage = Stage(device=16)
    first, second = stage.lease("AB"), stage.lease("ABC")
    stage.core.allocate(first, 2)
    stage.core.allocate(second, 3)
    writer = stage.core.commit(first, 2, ready=False)
    stage.core.commit(second, 3, ready=True)
    stage.core.release(second)
    assert stage.match("ABC") == Match()
    stage.core.check()
    assert writer is not None
    stage.end(writer)
    assert stage.match("ABC") == Match(3)
    stage.core.release(first)
    at_rest(stage)


def test_a_writer_that_fails_publishes_nothing():
    stage = Stage(device=8)
    lease = stage.lease("ABC")
    stage.core.allocate(lease, 3)
    writer = stage.core.commit(lease, 3, ready=False)
    assert writer is not None
    stage.end(writer, [OK, FAILED, OK])
    assert stage.match("ABC") == Match(1)
    assert stage.core.statistics().device.quarantined == 2  # the request may still read them
    stage.core.release(lease)
    at_rest(stage)


def test_a_commit_whose_prefix_was_withdrawn_publishes_nothing():
    """Hanging its pages anywhere else would put them under the hash of another past."""
    stage = Stage(device=8)
    lease = stage.commit("AB", close=False)
    stage.core.extend(lease, stage.prompt("ABCD"))
    stage.core.allocate(lease, 2)
    tree = stage.tree()
    stage.core._copies.cut(DEVICE, tree.walk(stage.prompt("AB"))[0][0], 1, MissReason.FAILED)
    assert stage.core.commit(lease, 4, ready=True) is None
    assert stage.match("ABCD") == Match(1)
    stage.core.check()
    stage.core.release(lease)
    at_rest(stage)


# ---- loading


@pytest.mark.case("RACE-1", "RACE-7")
def test_sources_and_targets_stay_until_the_copy_has_ended():
    stage = full_stage()
    stage.core.evict(DEVICE, 99)
    lease = stage.lease("ABCD")
    assert lease.match == Match(0, 4, 0)
    assert stage.core.load(lease) == 4
    (load,) = stage.take(TransferKind.LOAD)
    stage.core.release(lease)  # the request goes, its copy does not
    assert load.cancelled
    assert stage.core.evict(HOST, 99) == 0
    assert stage.core.statistics().device.quarantined == 4
    with pytest.raises(OutOfSlots):
        stage.core.allocate(stage.lease("WXYZSTUV"), 8)
    stage.end(load)
    assert stage.core.statistics().device.free == 8
    assert stage.core.evict(HOST, 99) == 4


@pytest.mark.case("RACE-3")
def test_what_a_lease_was_promised_stays():
    stage = Stage(device=8)
    stage.commit("ABCD")
    lease = stage.lease("ABCD")
    assert stage.core.evict(DEVICE, 99) == 0
    with pytest.raises(OutOfSlots):
        stage.core.allocate(stage.lease("STUVW"), 5)
    assert stage.match("ABCD") == Match(4)
    assert len(lease.device_slots()) == 4
    stage.core.release(lease)
    assert stage.core.evict(DEVICE, 99) == 4


def test_loads_of_one_page_are_shared():
    stage = full_stage()
    stage.core.evict(DEVICE, 99)
    first, second = stage.lease("ABCD"), stage.lease("ABCD")
    stage.core.load(first)
    stage.core.load(second)
    (load,) = stage.take(TransferKind.LOAD)
    assert first.waiting == second.waiting == {load.id}
    stage.core.release(first)
    assert not load.cancelled  # the other one wants it
    stage.end(load)
    assert (second.device, second.waiting) == (4, set())
    stage.core.release(second)
    stage.core.check()


@pytest.mark.case("FAIL-2", "FAIL-5")
def test_a_fetch_publishes_the_leading_run_that_arrived():
    stage = full_stage(fetch_pages=8)
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    assert stage.match("ABCD") == Match(0, 0, 4)
    lease = stage.lease("ABCD")
    assert stage.core.prefetch(lease) == 4
    (fetch,) = stage.take(TransferKind.FETCH)
    free = stage.core.statistics().host.free
    stage.end(fetch, [OK, OK, BAD, OK])
    assert stage.match("ABCD") == Match(0, 2, 0)
    assert stage.core.statistics().host.free == free + 2
    stage.core.load(lease)
    stage.end(stage.take(TransferKind.LOAD)[0])
    counts = stage.core.release(lease)
    assert (counts.asked, counts.storage, counts.missed) == (4, 2, {MissReason.FAILED: 2})
    at_rest(stage)


@pytest.mark.case("FAIL-3")
def test_a_bad_source_is_believed_no_more_until_it_is_put_again():
    stage = full_stage(fetch_pages=8)
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    lease = stage.lease("ABCD")
    stage.core.prefetch(lease)
    stage.end(stage.take()[0], [OK, OK, BAD, BAD])
    assert stage.match("ABCD") == Match(0, 2, 0)
    stage.core.release(lease)
    stage.settle()
    again = stage.commit("ABCD")  # recomputes C and D, which go down again
    assert again.counts is not None
    stage.settle()
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    assert stage.match("ABCD") == Match(0, 0, 4)


def test_a_timeout_is_no_evidence_against_the_source():
    stage = full_stage(fetch_pages=8)
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    lease = stage.lease("ABCD")
    stage.core.prefetch(lease)
    stage.end(stage.take()[0], [OK, FAILED, OK, OK])
    stage.core.release(lease)
    assert stage.match("ABCD") == Match(0, 1, 3)


def test_a_corrupt_host_copy_is_withdrawn_when_a_load_finds_it():
    stage = full_stage()
    stage.core.evict(DEVICE, 99)
    lease = stage.lease("ABCD")
    stage.core.load(lease)
    stage.end(stage.take(TransferKind.LOAD)[0], [OK, BAD, OK, OK])
    stage.core.check()
    assert (lease.device, stage.match("ABCD")) == (1, Match(1, 0, 3))
    stage.core.release(lease)
    stage.settle()
    at_rest(stage)


def test_a_gap_in_host_is_filled_from_device_before_the_fetch_behind_it():
    stage = full_stage()
    tree = stage.tree()
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    lease = stage.lease("AB")
    stage.core.prefetch(lease)
    stage.settle()
    stage.core.load(lease)
    stage.settle()
    stage.core.release(lease)
    stage.core.evict(HOST, 99)
    assert stage.match("ABCD") == Match(2, 0, 2)
    lease = stage.lease("ABCD")
    assert stage.core.prefetch(lease) == 4
    gap, fetch = stage.take()
    assert (gap.kind, gap.first, gap.count) == (TransferKind.WRITE_BACK, 0, 2)
    assert (fetch.kind, fetch.first, fetch.count) == (TransferKind.FETCH, 2, 2)
    stage.end(fetch)
    assert tree.resident_pages(tree.walk(stage.prompt("ABCD")), HOST) == 0  # not before what is in front of it
    stage.end(gap)
    assert tree.resident_pages(tree.walk(stage.prompt("ABCD")), HOST) == 4
    stage.core.release(lease)
    stage.settle()
    at_rest(stage)


def test_a_gap_that_fails_takes_the_fetch_behind_it_along():
    stage = full_stage()
    stage.core.evict(HOST, 99)
    stage.core.evict(DEVICE, 2)
    lease = stage.lease("ABCD")
    assert lease.match == Match(2, 0, 2)
    stage.core.prefetch(lease)
    gap, fetch = stage.take()
    stage.end(gap, FAILED)
    assert stage.core.statistics().host.quarantined == 4  # the fetch still writes, behind a pinned prefix
    stage.end(fetch)
    assert stage.core.statistics().host.free == 8
    stage.core.release(lease)
    stage.settle()
    stage.core.check()


@pytest.mark.case("LEAK-1")
def test_cancelled_transfers_give_back_everything_when_their_io_has_ended():
    stage = full_stage(fetch_pages=2)
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    free = stage.core.statistics().host.free
    lease = stage.lease("ABCD")
    stage.core.prefetch(lease)
    first, second = stage.take(TransferKind.FETCH)
    stage.end(first)
    stage.core.withdraw_interest(lease)
    assert second.cancelled
    assert stage.core.statistics().host.quarantined == 2
    stage.end(second, FAILED)
    counts = stage.core.release(lease)
    assert counts.missed == {MissReason.LATE: 4}
    assert stage.core.statistics().host.free == free - 2  # what came in time stays
    at_rest(stage)


def test_a_cancelled_write_back_keeps_source_and_target_until_its_io_has_ended():
    stage = Stage(device=8, host=8, storage=True)
    stage.commit("ABCD")
    (back,) = stage.take(TransferKind.WRITE_BACK)
    stage.core.log.cancel(back)
    assert back.cancelled
    assert stage.core.statistics().host.quarantined == 4
    assert stage.core.evict(DEVICE, 99) == 0
    with pytest.raises(OutOfSlots):
        stage.core.allocate(stage.lease("STUVW"), 5)
    stage.end(back)
    assert stage.core.statistics().host.free == 8
    assert stage.core.evict(DEVICE, 99) == 4
    at_rest(stage)


@pytest.mark.case("EVICT-4")
def test_fetches_get_no_slots_from_a_host_full_of_pins_and_say_so():
    stage = Stage(device=8, host=4, storage=True)
    stage.commit("ABCD")
    stage.settle()
    held = stage.lease("ABCD")
    lease = stage.lease("WXYZ")
    stage.core.believe(lease, 4)
    assert lease.match == Match(0, 0, 4)
    assert stage.core.prefetch(lease) == 0
    assert not stage.take()
    assert stage.core.release(lease).missed == {MissReason.OVER_BUDGET: 4}
    stage.core.release(held)
    lease = stage.lease("WXYZ")
    assert stage.core.prefetch(lease) == 4
    stage.settle()
    stage.core.release(lease)
    stage.settle()
    stage.core.check()


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
    at_rest(stage)


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
    at_rest(stage)


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
    at_rest(stage)


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
    at_rest(stage)


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
    at_rest(stage)


# ---- touching what storage would evict


def touched_stage():
    """ABCD in all tiers, and its pages due for a touch."""
    return full_stage(touch_seconds=60.0)


def test_a_path_is_touched_leaf_to_root_and_not_again_before_its_time():
    stage = touched_stage()
    lease = stage.lease("ABCD")
    assert stage.core.touch(lease, 0.0) == 4
    (touch,) = stage.take(TransferKind.TOUCH)
    assert [page.depth for page in touch.pages] == [3, 2, 1, 0]
    stage.end(touch)
    assert stage.core.touch(lease, 59.0) == 0
    assert stage.core.touch(lease, 60.0) == 4
    stage.settle()
    stage.core.release(lease)
    at_rest(stage)


@pytest.mark.parametrize("above", ["DEVICE and HOST", "DEVICE only"])
def test_pages_that_storage_lost_are_put_again_from_above(above):
    stage = touched_stage()
    if above == "DEVICE only":
        stage.core.evict(HOST, 99)
    lease = stage.lease("ABCD")
    stage.core.touch(lease, 0.0)
    stage.end(stage.take(TransferKind.TOUCH)[0], [OK, BAD, OK, OK])  # deepest first: C is gone
    tree = stage.tree()
    assert tree.believed_pages(tree.walk(stage.prompt("ABCD"))) == 2
    put = [t for t in stage.settle() if t.kind is TransferKind.PUT]
    assert {page.depth for transfer in put for page in transfer.pages} >= {2}
    assert tree.believed_pages(tree.walk(stage.prompt("ABCD"))) == 4
    stage.core.release(lease)
    at_rest(stage)


def test_a_page_lost_everywhere_is_forgotten_by_a_touch():
    stage = touched_stage()
    lease = stage.lease("AB")
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    deep = stage.lease("ABCD")
    stage.core.touch(deep, 0.0)
    stage.end(stage.take(TransferKind.TOUCH)[0], [BAD, BAD, OK, OK])
    assert stage.match("ABCD").pages == 2
    stage.core.release(deep)
    stage.core.release(lease)
    assert stage.commit("ABCD").counts.missed == {MissReason.EVICTED: 2}
    stage.settle()
    at_rest(stage)
