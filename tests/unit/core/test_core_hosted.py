"""HOST as the top tier: the engine owns DEVICE, and all verbs work on HOST."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.core.cache import Core
from hicache.core.config import CoreConfig
from hicache.core.residency import SlotTable
from hicache.core.transfers import TransferKind
from hicache.errors import ConfigError, InvalidInput, OutOfSlots
from hicache.events import Stored
from hicache.records import Match, MissReason, PageResult, Tier
from hicache.testing.core import Stage


def hosted(host: int = 8, **settings: object) -> Stage:
    return Stage(device=0, host=host, **settings)


def stored(stage: Stage, letters: str) -> None:
    """Only storage has these pages."""
    stage.commit(letters)
    stage.settle()
    assert stage.core.evict(Tier.HOST, 100) == len(letters)
    assert stage.match(letters) == Match(0, 0, len(letters))


def test_what_is_committed_is_in_host() -> None:
    stage = hosted()
    lease = stage.lease("ABC")
    assert stage.core.allocate(lease, 3).tolist() == lease.own.tolist()
    stage.core.commit(lease, 2, ready=True)
    assert stage.match("ABC") == Match(0, 2, 0)
    stage.core.commit(lease, 3, ready=True)
    counts = stage.core.release(lease)
    assert (counts.asked, counts.missed) == (3, {MissReason.COLD: 3})
    again = stage.lease("ABCD")
    assert (again.match, again.usable, again.usable_slots().tolist()) == (Match(0, 3, 0), 3, lease.own.tolist())
    counts = stage.core.release(again)
    assert (counts.device, counts.host, counts.storage) == (0, 3, 0)
    stage.at_rest()


@pytest.mark.case("STAT-6")
def test_what_another_request_computes_meanwhile_is_no_hit_of_storage() -> None:
    """Two ask for the same prompt at once; the one that loads later gets the other's pages, out of the top tier."""
    stage = hosted()
    first, second = stage.lease("ABC"), stage.lease("ABCD")
    stage.core.allocate(first, 3)
    stage.core.commit(first, 3, ready=True)
    stage.core.load(second)
    assert (second.match, second.usable) == (Match(), 3)
    counts = stage.core.release(second)
    assert (counts.device, counts.host, counts.storage) == (0, 3, 0)
    assert (counts.asked, counts.missed) == (4, {MissReason.COLD: 1})
    stage.core.release(first)


def test_a_write_behind_an_event_becomes_visible_in_host_when_it_has_passed() -> None:
    stage = hosted()
    lease = stage.lease("AB")
    stage.core.allocate(lease, 2)
    write = stage.core.commit(lease, 2, ready=False)
    assert write is not None
    assert (write.kind, write.kind.target, write.kind.is_engines) == (TransferKind.HOST_WRITE, Tier.HOST, True)
    assert not stage.core.actions  # the engine does it
    assert stage.match("AB") == Match()
    stage.end(write)
    assert stage.match("AB") == Match(0, 2, 0)
    stage.core.release(lease)
    stage.at_rest()


def test_private_slots_are_not_free_before_their_writer_has_ended() -> None:
    stage = hosted(4)
    lease = stage.lease("AB")
    stage.core.allocate(lease, 3)
    write = stage.core.commit(lease, 2, ready=False)
    stage.core.release(lease)
    assert stage.core.statistics().host.free == 1
    assert stage.core.statistics().host.quarantined == 1  # the third one: the writer may be in it
    stage.end(write, [PageResult.FAILED] * 2)
    assert stage.core.statistics().host.free == 4
    stage.at_rest()


def test_fetched_pages_are_handed_to_the_request_that_waits() -> None:
    stage = hosted(storage=True, fetch_pages=2)
    stored(stage, "ABCD")
    lease = stage.lease("ABCD")
    assert stage.core.prefetch(lease) == 4
    assert stage.core.load(lease) == 4
    first, second = stage.take(TransferKind.FETCH)
    stage.end(second)
    assert lease.usable == 0  # what is in front is not there
    stage.end(first)
    assert (lease.usable, lease.waiting) == (4, set())
    counts = stage.core.release(lease)
    assert (counts.host, counts.storage, counts.missed) == (0, 4, {})
    stage.at_rest()


def test_behind_the_first_reservation_nothing_is_handed_over() -> None:
    """The request's own slots stand there, so the pages that come are others'."""
    stage = hosted(storage=True)
    stored(stage, "AB")
    lease = stage.lease("AB")
    stage.core.prefetch(lease)
    own = stage.core.allocate(lease, 2)
    for fetch in stage.take(TransferKind.FETCH):
        stage.end(fetch)
    assert (lease.start, lease.usable) == (0, 0)
    stage.core.commit(lease, 2, ready=True)
    assert set(own.tolist()).isdisjoint(stage.lease("AB").usable_slots().tolist())
    assert stage.core.release(lease).missed == {MissReason.LATE: 2}


def test_a_load_takes_over_what_others_have_brought_or_are_writing() -> None:
    stage = hosted()
    late = stage.lease("ABC")
    stage.commit("AB")
    writer = stage.lease("ABC")
    stage.core.allocate(writer, 1)
    write = stage.core.commit(writer, 3, ready=False)
    assert late.usable == 0
    assert stage.core.load(late) == 3
    assert (late.usable, late.waiting) == (2, {write.id})
    assert stage.core.evict(Tier.HOST, 8) == 0  # it has pinned them
    stage.end(write)
    assert late.usable == 3
    stage.core.release(late)
    stage.core.release(writer)
    stage.at_rest()


def test_a_lack_of_slots_is_told_in_numbers_of_host() -> None:
    stage = hosted(4)
    lease = stage.commit("AB", close=False)
    other = stage.lease("XYZ")
    with pytest.raises(OutOfSlots) as refused:
        stage.core.allocate(other, 3)
    error = refused.value
    assert (error.asked, error.free, error.evictable, error.capacity) == (3, 2, 0, 4)
    stage.core.release(lease)
    assert len(stage.core.allocate(other, 3)) == 3
    assert stage.core.statistics().host.evicted == 1
    assert stage.core.statistics().device.capacity == 0


def test_what_is_committed_goes_to_storage_and_heals_there() -> None:
    stage = hosted(storage=True, touch_seconds=1.0)
    lease = stage.commit("AB", close=False)
    (put,) = stage.take(TransferKind.PUT)
    stage.end(put)
    assert stage.core.touch(lease, 0.0) == 0
    assert stage.core.touch(lease, 2.0) == 2
    (touch,) = stage.take(TransferKind.TOUCH)
    stage.end(touch, [PageResult.SOURCE_GONE, PageResult.OK])  # deepest first: B is gone
    (again,) = stage.take(TransferKind.PUT)
    assert [page.depth for page in again.pages] == [1]
    stage.end(again)
    stage.core.release(lease)
    stage.at_rest()


def test_pages_of_a_cleared_tree_stay_with_the_lease_that_holds_them() -> None:
    stage = hosted(4)
    lease = stage.commit("ABC", close=False)
    stage.core.clear(stage.tree())
    stage.core.sweep()
    assert stage.core.statistics().host.quarantined == 3
    stage.core.release(lease)
    assert stage.core.statistics().host.free == 4
    stage.at_rest()


def test_words_rise_when_slots_are_taken_and_only_then() -> None:
    words = np.zeros(4, np.uint64)
    stage = hosted(4)
    stage.core = Core(CoreConfig(device_pages=0, host_pages=4), words)
    lease = stage.commit("AB", close=False)
    mine = lease.own
    assert words[mine].tolist() == [1, 1]
    assert words.sum() == 2
    stage.core.release(lease)
    stage.core.evict(Tier.HOST, 4)
    assert words.sum() == 2  # a slot that is free has the page still; whoever takes it next raises the word
    stage.commit("WXYZ")
    assert words[mine].tolist() == [2, 2]


@pytest.mark.parametrize("words", [np.zeros(3, np.uint64), np.zeros(4, np.int64), np.zeros((4, 1), np.uint64)])
def test_words_of_another_form_are_refused(words: np.ndarray) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match="words must be a uint64 array of 4 slots"):
        SlotTable(Tier.HOST, 4, words)


def test_a_core_needs_one_tier() -> None:
    with pytest.raises(ConfigError, match="at least one tier"):
        CoreConfig(device_pages=0)
    with pytest.raises(ConfigError, match="device_pages=-1 is negative"):
        CoreConfig(device_pages=-1, host_pages=4)


def test_pages_without_slots_cannot_be_committed() -> None:
    stage = hosted()
    lease = stage.lease("A")
    with pytest.raises(InvalidInput, match="page 1 is behind the last one"):
        stage.core.commit(lease, 1, ready=True)


def test_events_of_storage_tell_no_tokens_of_what_is_still_filling() -> None:
    """The row beside a slot that fills is that of the page before."""
    stage = hosted(storage=True, events=True)
    asked: list[list[int]] = []

    def tokens(slots: np.ndarray) -> bytes:  # type: ignore[type-arg]
        asked.append(slots.tolist())
        assert (stage.core.registry.tables[Tier.HOST].state[slots] == 3).all()  # RESIDENT
        return b"tokens"

    stage.core.registry.tokens = tokens
    stored(stage, "AB")
    stage.core.detach_storage()  # forget what storage has
    while stage.core.forget_storage():
        pass
    stage.core.attach_storage()
    stage.core.events.clear()
    first = stage.lease("AB")
    stage.core.believe(first, 2)
    stage.core.prefetch(first)
    assert stage.core.log.open
    second = stage.lease("AB")
    stage.core.believe(second, 2)
    for fetch in stage.take(TransferKind.FETCH):
        stage.end(fetch)
    told = {event.tier: event.tokens for event in stage.core.events if isinstance(event, Stored)}
    assert told == {Tier.STORAGE: b"", Tier.HOST: b"tokens"}
