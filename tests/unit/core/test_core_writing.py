"""Commits, write-backs, puts and touches, step by step."""

from __future__ import annotations

import pytest

from hicache.core.config import EdgePolicy
from hicache.core.transfers import TransferKind
from hicache.errors import ConfigError, OutOfSlots
from hicache.records import Match, MissReason, PageResult
from hicache.testing.core import Stage

OK, FAILED, BAD = PageResult.OK, PageResult.FAILED, PageResult.SOURCE_BAD
DEVICE, HOST = 0, 1


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
    stage.at_rest()


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
    stage.at_rest()


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
    stage.at_rest()


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
    stage.at_rest()


@pytest.mark.case("FAIL-6")
def test_a_refused_put_is_tried_again_at_the_next_use():
    stage = Stage(device=8, host=8, storage=True)
    stage.commit("ABC")
    stage.end(stage.take(TransferKind.WRITE_BACK)[0])
    stage.end(stage.take(TransferKind.PUT)[0], FAILED)
    stage.at_rest()
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
    coalesced = stage.core.commit(second, 3, ready=False)  # the same pages, which are on their way already
    assert coalesced is not None
    assert coalesced.count == 0
    assert stage.match("ABC") == Match()
    stage.end(writer)
    assert stage.match("ABC") == Match(3)
    assert len(stage.take(TransferKind.WRITE_BACK)) == 1
    stage.core.release(second)
    assert stage.core.statistics().device.quarantined == 3  # its engine still writes there
    stage.end(coalesced)
    assert stage.core.statistics().device.quarantined == 0
    stage.core.release(first)
    stage.core.check()


def test_a_private_slot_is_not_free_before_its_writer_has_ended():
    """The unaligned tail, pages that others had first, pages of a namespace that was cleared: all are being written."""
    stage = Stage(device=8)
    lease = stage.lease("AB")
    stage.core.allocate(lease, 3)  # two pages and a tail
    first = stage.core.commit(lease, 1, ready=False)
    stage.core.clear(stage.tree())
    second = stage.core.commit(lease, 2, ready=False)
    assert first is not None
    assert second is not None
    stage.core.release(lease)
    stage.core.sweep()
    assert stage.core.statistics().device.free == 5
    stage.core.check()
    stage.end(second)
    assert stage.core.statistics().device.free == 5  # the first writer may be in all of them
    stage.end(first)
    stage.at_rest()
    assert stage.core.statistics().device.free == 8


def test_what_is_committed_later_is_guarded_by_its_own_writer():
    stage = Stage(device=8)
    lease = stage.lease("ABC")
    stage.core.allocate(lease, 3)
    first = stage.core.commit(lease, 1, ready=False)
    stage.core.commit(lease, 3, ready=True)
    assert stage.match("ABC") == Match()
    assert first is not None
    stage.end(first)
    assert stage.match("ABC") == Match(3)
    stage.core.release(lease)
    stage.at_rest()
    assert stage.core.evict(DEVICE, 99) == 3


def test_an_allocation_that_fails_leaves_the_request_as_it_was():
    stage = Stage(device=4, host=8)
    stage.commit("ABCD")
    stage.settle()
    stage.core.evict(DEVICE, 99)
    lease = stage.lease("ABCDEF")
    with pytest.raises(OutOfSlots):
        stage.core.allocate(lease, 6)
    assert stage.core.load(lease) == 4  # it may still load, and allocate less
    stage.settle()
    assert lease.usable == 4
    stage.core.release(lease)


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
    stage.at_rest()


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
    stage.at_rest()


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
    stage.at_rest()


# ---- touching what storage would evict


def test_a_path_is_touched_leaf_to_root_and_not_again_before_its_time():
    stage = Stage.filled(touch_seconds=60.0)
    lease = stage.lease("ABCD")
    assert stage.core.touch(lease, 0.0) == 0  # it was put a moment ago
    assert stage.core.touch(lease, 59.0) == 0
    assert stage.core.touch(lease, 60.0) == 4
    (touch,) = stage.take(TransferKind.TOUCH)
    assert [page.depth for page in touch.pages] == [3, 2, 1, 0]
    stage.end(touch)
    assert stage.core.touch(lease, 119.0) == 0
    assert stage.core.touch(lease, 120.0) == 4
    stage.settle()
    stage.core.release(lease)
    stage.at_rest()


def test_a_longer_path_is_touched_as_a_whole_when_its_head_is_due_and_not_because_its_tail_is_new():
    stage = Stage.filled(touch_seconds=60.0)
    lease = stage.lease("ABCD")
    stage.core.touch(lease, 0.0)
    stage.core.release(lease)
    stage.commit("ABCDEF")
    stage.settle()
    longer = stage.lease("ABCDEF")
    assert stage.core.touch(longer, 59.0) == 0
    assert stage.core.touch(longer, 60.0) == 6
    stage.settle()
    stage.core.release(longer)
    stage.at_rest()


@pytest.mark.parametrize("above", ["DEVICE and HOST", "DEVICE only"])
def test_pages_that_storage_lost_are_put_again_from_above(above):
    stage = Stage.filled(touch_seconds=60.0)
    if above == "DEVICE only":
        stage.core.evict(HOST, 99)
    lease = stage.lease("ABCD")
    stage.core.touch(lease, 0.0)
    stage.core.touch(lease, 60.0)
    stage.end(stage.take(TransferKind.TOUCH)[0], [OK, BAD, OK, OK])  # deepest first: C is gone
    tree = stage.tree()
    assert tree.believed_pages(tree.walk(stage.prompt("ABCD"))) == 2
    put = [t for t in stage.settle() if t.kind is TransferKind.PUT]
    assert {page.depth for transfer in put for page in transfer.pages} >= {2}
    assert tree.believed_pages(tree.walk(stage.prompt("ABCD"))) == 4
    stage.core.release(lease)
    stage.at_rest()


def test_a_page_lost_everywhere_is_forgotten_by_a_touch():
    stage = Stage.filled(touch_seconds=60.0)
    lease = stage.lease("AB")
    for tier in (DEVICE, HOST):
        stage.core.evict(tier, 99)
    deep = stage.lease("ABCD")
    stage.core.touch(deep, 0.0)
    stage.core.touch(deep, 60.0)
    stage.end(stage.take(TransferKind.TOUCH)[0], [BAD, BAD, OK, OK])
    assert stage.match("ABCD").pages == 2
    stage.core.release(deep)
    stage.core.release(lease)
    assert stage.commit("ABCD").counts.missed == {MissReason.EVICTED: 2}
    stage.settle()
    stage.at_rest()


def test_no_more_is_planned_than_storage_can_take() -> None:
    """What is beyond comes when its pages are used again; draining, which is paced by its caller, takes all."""
    stage = Stage(device=16, host=16, storage=True, fetch_pages=2, write_pages=3)
    stage.commit("ABCDEFGH")
    (copies,) = stage.take(TransferKind.WRITE_BACK)
    stage.end(copies)
    first = stage.take(TransferKind.PUT)
    assert [transfer.count for transfer in first] == [2, 1]
    stage.commit("ABCDEFGHI")
    stage.end(*stage.take(TransferKind.WRITE_BACK))
    assert stage.take() == []  # as many as may be are on their way
    stage.end(first[0])
    stage.commit("ABCDEFGHI")
    assert [(transfer.first, transfer.count) for transfer in stage.take(TransferKind.PUT)] == [(3, 2)]
    stage.end(first[1], PageResult.FAILED)
    stage.commit("ABCDEFGHI")
    assert [(transfer.first, transfer.count) for transfer in stage.take(TransferKind.PUT)] == [(2, 1)]
    assert stage.core.drain(100) == 4
    assert sum(transfer.count for transfer in stage.take(TransferKind.PUT)) == 4
    stage.core.check()


def test_a_bound_on_writes_of_no_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="write_pages=0 is not 1 or more; None is no bound"):
        Stage(host=8, storage=True, write_pages=0)
