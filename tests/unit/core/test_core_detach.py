"""A storage that goes away under the core, and another one that comes."""

from __future__ import annotations

import pytest

from hicache.core.transfers import TransferKind
from hicache.errors import InvalidInput
from hicache.records import Match, MissReason, PageResult, Tier
from hicache.testing.core import Stage

DEVICE, HOST = 0, 1
pytestmark = pytest.mark.case("THR-5")


def _forget(stage: Stage) -> int:
    slices = 1
    while stage.core.forget_storage(1):
        stage.core.check()
        slices += 1
    return slices


def test_nothing_is_found_fetched_put_or_touched_without_a_storage():
    stage = Stage.filled(touch_seconds=60.0)
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    assert stage.match("ABCD") == Match(0, 0, 4)
    stage.core.detach_storage()
    assert stage.match("ABCD") == Match()
    lease = stage.lease("ABCD")
    assert lease.match == Match()
    stage.core.believe(lease, 4)
    stage.core.prefetch(lease, 4)
    stage.core.touch(lease, 0.0)
    stage.core.touch(lease, 100.0)
    stage.core.release(lease)
    stage.commit("ABCD")
    assert [transfer.kind for transfer in stage.settle()] == [TransferKind.WRITE_BACK]
    assert stage.core.drain() == 0
    stage.at_rest()


def test_beliefs_go_in_slices_and_everything_is_put_again_into_the_next_storage():
    stage = Stage.filled(events=True)
    stage.commit("AXYZ")
    stage.settle()
    stage.core.events.clear()
    stage.core.detach_storage()
    with pytest.raises(InvalidInput, match="forgotten"):
        stage.core.attach_storage()
    assert _forget(stage) > 3
    gone = [event for event in stage.core.events if event.tier is Tier.STORAGE]
    assert sum(len(event.page_hashes) for event in gone) == 7
    stage.core.attach_storage()
    assert stage.match("ABCD") == Match(4, 0, 0)
    stage.core.drain()
    puts = stage.take(TransferKind.PUT)
    assert sum(put.count for put in puts) == 7
    for put in puts:
        stage.end(put)
    stage.at_rest()


def test_pages_that_only_the_old_storage_had_are_forgotten():
    stage = Stage.filled()
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    stage.core.detach_storage()
    _forget(stage)
    assert stage.shape() == {}
    assert stage.core.statistics().stub_pages == 0
    stage.at_rest()


def test_a_put_that_ends_after_the_detach_says_nothing_about_the_next_storage():
    stage = Stage(device=8, host=8, storage=True)
    stage.commit("ABC")
    stage.end(stage.take(TransferKind.WRITE_BACK)[0])
    (old,) = stage.take(TransferKind.PUT)
    stage.core.detach_storage()
    assert old.orphaned
    _forget(stage)
    stage.core.attach_storage()
    stage.core.drain()
    (new,) = stage.take(TransferKind.PUT)
    assert new.pages == old.pages
    stage.end(old)
    stage.core.check()
    tree = stage.tree()
    assert tree.believed_pages(tree.walk(stage.prompt("ABC"))) == 0
    assert tree.putting == {page.hash for page in new.pages}  # the new one is still under way
    stage.end(new)
    assert tree.believed_pages(tree.walk(stage.prompt("ABC"))) == 3
    stage.at_rest()


def test_nobody_waits_for_a_fetch_of_a_storage_that_is_gone_and_its_slots_stay_until_it_ends():
    stage = Stage.filled()
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    lease = stage.lease("ABCD")
    stage.core.prefetch(lease)
    (fetch,) = stage.take(TransferKind.FETCH)
    stage.core.detach_storage()
    assert fetch.cancelled
    assert not lease.waiting
    assert stage.core.statistics().host.quarantined == 4
    assert stage.core.release(lease).missed == {MissReason.FAILED: 4}
    stage.core.check()
    stage.end(fetch)
    assert stage.core.statistics().host.free == 8
    _forget(stage)
    stage.at_rest()


def test_a_fetch_that_others_fill_behind_may_bring_its_pages_but_no_belief():
    stage = Stage.filled(fetch_pages=2)
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    lease = stage.lease("AB")
    stage.core.prefetch(lease)
    (fetch,) = stage.take(TransferKind.FETCH)
    other = stage.lease("ABCD")
    stage.core.allocate(other, 4)
    stage.core.commit(other, 4, ready=True)
    (behind,) = stage.take(TransferKind.WRITE_BACK)
    stage.core.detach_storage()
    assert not fetch.cancelled
    assert not lease.waiting
    stage.end(fetch)
    stage.end(behind)
    tree = stage.tree()
    assert tree.believed_pages(tree.walk(stage.prompt("ABCD"))) == 0 or stage.core.registry.forgetting is not None
    stage.core.release(lease)
    stage.core.release(other)
    _forget(stage)
    assert tree.believed_pages(tree.walk(stage.prompt("ABCD"))) == 0
    assert stage.match("ABCD") == Match(4)
    stage.at_rest()


def test_a_touch_of_the_old_storage_takes_no_belief_from_the_new_one():
    stage = Stage.filled(touch_seconds=60.0)
    lease = stage.lease("ABCD")
    stage.core.touch(lease, 0.0)
    stage.core.touch(lease, 60.0)
    (touch,) = stage.take(TransferKind.TOUCH)
    stage.core.detach_storage()
    _forget(stage)
    stage.core.attach_storage()
    stage.core.drain()
    stage.settle()
    stage.end(touch, PageResult.SOURCE_GONE)
    tree = stage.tree()
    assert tree.believed_pages(tree.walk(stage.prompt("ABCD"))) == 4
    stage.core.release(lease)
    stage.at_rest()


def test_detaching_twice_is_harmless_and_a_core_without_storage_gets_none():
    stage = Stage.filled()
    stage.core.detach_storage()
    _forget(stage)
    stage.core.detach_storage()
    stage.core.attach_storage()
    with pytest.raises(InvalidInput, match="without a storage tier"):
        Stage(device=8, host=8).core.attach_storage()


def test_a_generation_that_others_raised_becomes_the_tree_s():
    stage = Stage.filled()
    tree = stage.core.clear(stage.tree(), 5)
    assert tree.generation == 5
    assert stage.match("ABCD") == Match()
    for generation in (5, 4):
        with pytest.raises(InvalidInput, match="not above 5"):
            stage.core.clear(tree, generation)
    assert stage.core.clear(tree).generation == 6
    while stage.core.sweep():
        pass
    stage.at_rest()
