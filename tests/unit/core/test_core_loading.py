"""Loads, fetches, gaps and cancels, step by step."""

from __future__ import annotations

import pytest

from hicache.core.config import EdgePolicy
from hicache.core.transfers import TransferKind
from hicache.errors import OutOfSlots
from hicache.records import Match, MissReason, PageResult
from hicache.testing.core import Stage

OK, FAILED, BAD, GONE = PageResult
DEVICE, HOST = 0, 1


@pytest.mark.case("RACE-1", "RACE-7")
def test_sources_and_targets_stay_until_the_copy_has_ended():
    stage = Stage.filled()
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
    assert len(lease.usable_slots()) == 4
    stage.core.release(lease)
    assert stage.core.evict(DEVICE, 99) == 4


def test_loads_of_one_page_are_shared():
    stage = Stage.filled()
    stage.core.evict(DEVICE, 99)
    first, second = stage.lease("ABCD"), stage.lease("ABCD")
    stage.core.load(first)
    stage.core.load(second)
    (load,) = stage.take(TransferKind.LOAD)
    assert first.waiting == second.waiting == {load.id}
    stage.core.release(first)
    assert not load.cancelled  # the other one wants it
    stage.end(load)
    assert (second.usable, second.waiting) == (4, set())
    stage.core.release(second)
    stage.core.check()


@pytest.mark.case("FAIL-2", "FAIL-5")
def test_a_fetch_publishes_the_leading_run_that_arrived():
    stage = Stage.filled(fetch_pages=8)
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
    stage.at_rest()


def test_a_page_that_storage_has_evicted_is_a_miss_of_that_reason():
    stage = Stage.filled(fetch_pages=8)
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    lease = stage.lease("ABCD")
    stage.core.prefetch(lease)
    stage.end(stage.take()[0], [OK, OK, GONE, GONE])
    stage.core.load(lease)
    stage.settle()
    assert stage.core.release(lease).missed == {MissReason.EVICTED: 2}
    assert stage.match("ABCD") == Match(2, 0, 0)


@pytest.mark.case("FAIL-3")
def test_a_bad_source_is_believed_no_more_until_it_is_put_again():
    stage = Stage.filled(fetch_pages=8)
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
    stage = Stage.filled(fetch_pages=8)
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    lease = stage.lease("ABCD")
    stage.core.prefetch(lease)
    stage.end(stage.take()[0], [OK, FAILED, OK, OK])
    stage.core.release(lease)
    assert stage.match("ABCD") == Match(0, 1, 3)


def test_a_corrupt_host_copy_is_withdrawn_when_a_load_finds_it():
    stage = Stage.filled()
    stage.core.evict(DEVICE, 99)
    lease = stage.lease("ABCD")
    stage.core.load(lease)
    stage.end(stage.take(TransferKind.LOAD)[0], [OK, BAD, OK, OK])
    stage.core.check()
    assert (lease.usable, stage.match("ABCD")) == (1, Match(1, 0, 3))
    stage.core.release(lease)
    stage.settle()
    stage.at_rest()


def test_a_gap_in_host_is_filled_from_device_before_the_fetch_behind_it():
    stage = Stage.filled()
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
    stage.at_rest()


def test_a_gap_that_fails_takes_the_fetch_behind_it_along():
    stage = Stage.filled()
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
    stage = Stage.filled(fetch_pages=2)
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
    stage.at_rest()


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
    stage.at_rest()


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


def test_pages_that_were_declined_are_over_budget():
    stage = Stage.filled()
    stage.core.evict(DEVICE, 99)
    lease = stage.lease("ABCDE")
    assert lease.match == Match(0, 4, 0)
    stage.core.load(lease, 2)
    (load,) = stage.take(TransferKind.LOAD)
    stage.end(load)
    stage.core.decline(lease, 3)
    stage.core.decline(lease, 2)  # the lowest counts
    stage.core.decline(lease, 4)
    counts = stage.core.release(lease)
    assert (counts.host, counts.missed) == (2, {MissReason.OVER_BUDGET: 2, MissReason.COLD: 1})


def test_pages_that_storage_did_not_tell_of_have_that_as_their_reason():
    stage = Stage.filled()
    lease = stage.lease("ABCDEFGH")
    stage.core.unanswered(lease, 6, MissReason.FAILED)
    assert stage.core.release(lease).missed == {MissReason.COLD: 2, MissReason.FAILED: 2}
    lease = stage.lease("ABCDEFGH")
    stage.core.unanswered(lease, 2, MissReason.LATE)
    assert stage.core.release(lease).missed == {MissReason.LATE: 4}, "what was there was there"


def test_a_belief_that_was_forgotten_is_no_reason_for_a_miss():
    stage = Stage(host=64, storage=True, stub_pages=0, ghost_pages=20)
    lease = stage.lease("ABCD")
    stage.core.believe(lease, 4)  # and forgotten at once: there is no room for pages that only storage has
    stage.core.release(lease)
    lease = stage.lease("ABCD")
    assert lease.match == Match()
    stage.core.unanswered(lease, 0, MissReason.FAILED)
    assert stage.core.release(lease).missed == {MissReason.FAILED: 4}


def test_pages_that_a_fetch_makes_clean_are_filed_as_clean():
    """Computed while they were fetched, and disbelieved meanwhile: it is the fetch that gives them a copy below."""
    stage = Stage.filled(fetch_pages=8)
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    lease = stage.lease("ABCD")
    stage.core.prefetch(lease)
    (fetch,) = stage.take(TransferKind.FETCH)
    stage.commit("ABCD")
    stage.core._copies.set_belief(stage.tree().walk(stage.prompt("ABCD"))[0][0], 0)
    node = stage.tree().walk(stage.prompt("ABCD"))[0][0]
    assert node.filed_dirty[DEVICE]
    stage.end(fetch)
    assert not node.filed_dirty[DEVICE]
    stage.core.release(lease)
    stage.settle()
    stage.at_rest()


def test_pages_fetched_behind_what_storage_is_not_known_to_have_are_clean_too():
    stage = Stage(device=16, host=16, storage=True, host_to_storage=EdgePolicy(None))
    stage.commit("ABX")
    stage.settle()
    lease = stage.lease("ABCD")
    stage.core.believe(lease, 4)
    assert stage.core.prefetch(lease) == 4
    (fetch,) = stage.take(TransferKind.FETCH)
    stage.commit("ABCD")  # computed meanwhile
    _, (node, _) = stage.tree().walk(stage.prompt("ABCD"))
    assert node.filed_dirty[DEVICE]
    stage.end(fetch)
    assert (node.believed, node.resident[HOST]) == (0, 2)
    assert not node.filed_dirty[DEVICE]
    stage.core.release(lease)
    stage.settle()
    stage.at_rest()
