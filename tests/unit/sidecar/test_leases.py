"""Leases of the service: who may use them, and when their slots are really free."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from hicache.core.reasons import RequestCounts
from hicache.errors import (
    GeometryError,
    HashMismatch,
    InvalidInput,
    LeaseExpired,
    LimitExceeded,
    NotFound,
    PermissionDenied,
)
from hicache.rpc.service import Notice, Revoked
from hicache.sidecar.groups import Group, Member
from hicache.sidecar.leases import HeldLease, LeaseBook
from hicache.testing.clock import ManualClock

PAGE = 4
WIDTH = 4 * PAGE


class Life:
    """A process that a test ends."""

    def __init__(self) -> None:
        self.gone = False
        self._calls: list[Any] = []

    def when_gone(self, call: Any) -> None:
        self._calls.append(call)

    def end(self) -> None:
        self.gone = True
        for call in self._calls:
            call()


class Request:
    """As much of a pool's request as the book uses."""

    page_size = PAGE

    def __init__(self, usable: int = 2, own: int = 0) -> None:
        self.usable = np.arange(usable)
        self.own = np.arange(own) + 100
        self.first = usable
        self.committed: list[tuple[int, int, bytes | None, bytes]] = []
        self.closed: list[bool] = []

    def commit(self, upto: int, *, first: int, tokens: bytes | None, extras: bytes = b"") -> None:
        if tokens is not None and b"\xff\xff" in tokens:
            raise HashMismatch("not these tokens")
        self.committed.append((upto, first, tokens, extras))

    def close(self, *, aborted: bool) -> RequestCounts:
        self.closed.append(aborted)
        return RequestCounts(asked=2, host=2, aborted=aborted)

    def counts_now(self, *, aborted: bool) -> RequestCounts:
        return RequestCounts(asked=2, host=2, aborted=aborted)


class World:
    """A book, a group and its members."""

    def __init__(self, *, seconds: float = 10.0, quarantined: int = 1000, arenas: int = 1) -> None:
        self.clock = ManualClock()
        self.freed: list[int] = []
        self.book = LeaseBook(
            self.clock.now,
            seconds=seconds,
            most_quarantined=quarantined,
            freed=lambda lease: self.freed.append(lease.number),
        )
        self.group = Group("g", cast("Any", None))
        self.arenas = arenas
        self.notices: dict[Member, list[Notice]] = {}

    def member(
        self, rank: int = 0, *, mapped: bool = True, arenas: tuple[int, ...] = (0,), worker: bool = True
    ) -> Member:
        told: list[Notice] = []
        life = Life() if mapped else None
        member = Member(len(self.notices) + 1, (rank, 0), worker=worker, life=life, arenas=arenas, tell=told.append)
        self.notices[member] = told
        self.group.join(member)
        return member

    def lease(self, owner: Member, *, usable: int = 2, own: int = 0) -> tuple[HeldLease, Request]:
        request = Request(usable, own)
        lease = self.book.open(self.group, owner, cast("Any", request))
        if own:
            lease.reserved(self.arenas)
        return lease, request

    def leave(self, member: Member, *, goodbye: bool = False) -> None:
        member.ended = True
        member.goodbye = goodbye
        self.book.left(member)
        self.group.forget()

    def die(self, member: Member) -> None:
        assert isinstance(member.life, Life)
        member.life.end()
        self.book.gone(member)
        self.group.forget()


def tokens(pages: int, first: int = 0) -> bytes:
    return np.arange(first * PAGE, (first + pages) * PAGE, dtype="<u4").tobytes()


def test_released_lease_is_free_at_once() -> None:
    """A release by the owner frees the slots and counts the request."""
    world = World()
    owner = world.member()
    lease, request = world.lease(owner)
    counts = world.book.release(lease.number, [owner], aborted=False)
    assert counts.host == 2
    assert request.closed == [False]
    assert world.freed == [lease.number]
    with pytest.raises(NotFound):
        world.book.find(lease.number, [owner])


def test_others_leases_are_not_known() -> None:
    """A session outside the group learns nothing of a lease, not even that it exists."""
    world, other = World(), World()
    lease, _ = world.lease(world.member())
    stranger = other.member()
    with pytest.raises(NotFound):
        world.book.find(lease.number, [stranger])
    with pytest.raises(NotFound):
        world.book.release(lease.number, [stranger], aborted=True)
    world.book.acknowledged([lease.number, 7], [stranger])
    assert world.freed == []


def test_only_the_owner_releases_and_reserves() -> None:
    """Other ranks read and commit, but what ends or grows a lease is its owner's."""
    world = World()
    owner, worker = world.member(0), world.member(1)
    lease, _ = world.lease(owner)
    assert world.book.find(lease.number, [worker])[0] is lease
    with pytest.raises(PermissionDenied):
        world.book.find(lease.number, [worker], own=True)
    with pytest.raises(PermissionDenied):
        world.book.release(lease.number, [worker], aborted=False)


def test_owner_that_vanishes_keeps_its_slots_until_its_process_is_gone() -> None:
    """A stream that ends without goodbye proves nothing: the process may still be copying."""
    world = World()
    owner = world.member()
    lease, request = world.lease(owner)
    world.leave(owner)
    assert request.closed == []
    assert world.book.statistics().quarantined_slots == 2
    world.die(owner)
    assert request.closed == [True]
    assert world.freed == [lease.number]


def test_goodbye_frees_at_once() -> None:
    """A client that says goodbye touches nothing any more."""
    world = World()
    owner = world.member()
    _, request = world.lease(owner)
    world.leave(owner, goodbye=True)
    assert request.closed == [True]


def test_streaming_session_needs_no_proof_of_death() -> None:
    """A client that maps nothing cannot touch slots."""
    world = World()
    owner = world.member(mapped=False)
    _, request = world.lease(owner)
    world.leave(owner)
    assert request.closed == [True]


def test_other_ranks_must_let_go_when_the_owner_is_lost() -> None:
    """Ranks that live are told, and the slots stay until they have acknowledged."""
    world = World()
    owner, worker = world.member(0), world.member(1)
    lease, request = world.lease(owner)
    world.leave(owner)
    world.die(owner)
    assert request.closed == []
    assert [notice.leases for notice in world.notices[worker] if isinstance(notice, Revoked)] == [(lease.number,)]
    with pytest.raises(LeaseExpired):
        world.book.find(lease.number, [worker])
    world.book.acknowledged([lease.number], [worker])
    assert request.closed == [True]


def test_release_waits_for_a_lost_rank() -> None:
    """The owner speaks for the ranks that live, not for one whose process may still run."""
    world = World()
    owner, worker = world.member(0), world.member(1)
    lease, request = world.lease(owner)
    world.leave(worker)
    assert world.book.find(lease.number, [owner])[0] is lease  # nothing was reserved: reading goes on
    counts = world.book.release(lease.number, [owner], aborted=False)
    assert counts.host == 2
    assert request.closed == []
    world.die(worker)
    assert request.closed == [False]


def test_page_is_visible_when_every_arena_has_it() -> None:
    """With two ranks a page is published by whoever commits its last part."""
    world = World(arenas=2)
    first, second = world.member(0, arenas=(0,)), world.member(1, arenas=(1,))
    lease, request = world.lease(first, usable=1, own=3)
    told = tokens(3, 1)
    assert world.book.commit(lease, first, 4, tokens=told, first_page=1, extras=b"") == 1
    assert request.committed == []
    assert world.book.commit(lease, second, 3, tokens=b"", first_page=0, extras=b"") == 3
    assert request.committed == [(3, 1, told[: 2 * WIDTH], bytes(32))]
    assert world.book.commit(lease, second, 4, tokens=b"", first_page=0, extras=b"") == 4
    assert request.committed[1:] == [(4, 3, told[2 * WIDTH :], bytes(16))]


def test_pages_wait_for_their_tokens() -> None:
    """Tokens may come from any rank, once; until then nothing is published."""
    world = World()
    owner = world.member()
    lease, request = world.lease(owner, usable=0, own=2)
    assert world.book.commit(lease, owner, 2, tokens=b"", first_page=0, extras=b"") == 0
    assert world.book.commit(lease, owner, 1, tokens=tokens(1), first_page=0, extras=bytes(16)) == 1
    assert world.book.commit(lease, owner, 2, tokens=tokens(2), first_page=0, extras=b"") == 2
    assert [(upto, first) for upto, first, _, _ in request.committed] == [(1, 0), (2, 1)]


@pytest.mark.parametrize(
    ("upto", "told", "first", "extras"),
    [
        (5, b"", 0, b""),  # no slots there
        (2, tokens(1), 0, b""),  # one page of tokens for two pages
        (2, tokens(1) + b"\0", 1, b""),  # no whole page
        (3, tokens(1), 2, b""),  # a hole in front
        (2, tokens(2), 0, bytes(16)),  # extras of one page for two
        (2, b"", 0, bytes(32)),  # extras without tokens
    ],
)
def test_bad_commits_change_nothing(upto: int, told: bytes, first: int, extras: bytes) -> None:
    """What does not fit is refused, and a good commit still works afterwards."""
    world = World()
    owner = world.member()
    lease, request = world.lease(owner, usable=0, own=3)
    with pytest.raises(InvalidInput):
        world.book.commit(lease, owner, upto, tokens=told, first_page=first, extras=extras)
    assert request.committed == []
    assert world.book.commit(lease, owner, 3, tokens=tokens(3), first_page=0, extras=b"") == 3


def test_pages_can_be_committed_by_hash_alone() -> None:
    """Without tokens pages are published when every rank has them, but never half with tokens and half without."""
    world = World(arenas=2)
    first, second = world.member(0, arenas=(0,)), world.member(1, arenas=(1,))
    nothing = {"tokens": b"", "first_page": 0, "extras": b""}
    lease, request = world.lease(first, usable=1, own=3)
    assert world.book.commit(lease, first, 4, **nothing, by_hash=True) == 1
    assert world.book.commit(lease, second, 3, **nothing) == 3
    assert world.book.commit(lease, second, 4, **nothing, by_hash=True) == 4
    assert request.committed == [(3, 1, None, b""), (4, 3, None, b"")]
    with pytest.raises(InvalidInput, match="taken by hash: leave out tokens"):
        world.book.commit(lease, first, 4, tokens=tokens(3), first_page=1, extras=b"")
    told, _ = world.lease(first, usable=0, own=2)
    assert world.book.commit(told, first, 1, tokens=tokens(1), first_page=0, extras=b"") == 0
    for wrong in ({}, {"tokens": tokens(1)}, {"extras": bytes(16)}):
        with pytest.raises(InvalidInput, match="tell all tokens"):
            world.book.commit(told, first, 2, **(nothing | wrong), by_hash=True)
    assert world.book.commit(told, second, 1, **nothing) == 1


def test_wrong_tokens_can_be_told_again() -> None:
    """A mismatch publishes nothing, and the right tokens do afterwards."""
    world = World()
    owner = world.member()
    lease, request = world.lease(owner, usable=0, own=2)
    with pytest.raises(HashMismatch):
        world.book.commit(lease, owner, 2, tokens=b"\xff" * 2 * WIDTH, first_page=0, extras=b"")
    assert world.book.commit(lease, owner, 2, tokens=tokens(2), first_page=0, extras=b"") == 2
    assert len(request.committed) == 1


def test_lost_writer_ends_what_it_has_not_written() -> None:
    """A rank that dies in the middle aborts reservations that wait for it, and no others."""
    world = World(arenas=2)
    owner, worker = world.member(0, arenas=(0,)), world.member(1, arenas=(1,))
    waiting, _ = world.lease(owner, usable=0, own=2)
    done, _ = world.lease(owner, usable=0, own=1)
    world.book.commit(done, worker, 1, tokens=tokens(1), first_page=0, extras=b"")
    world.leave(worker)
    with pytest.raises(LeaseExpired, match="was lost"):
        world.book.find(waiting.number, [owner])
    assert world.book.find(done.number, [owner])[0] is done


@pytest.mark.case("LEAK-2")
def test_unused_lease_expires_but_keeps_its_slots() -> None:
    """An expired lease is refused and revoked; its slots wait for the client."""
    world = World(seconds=10.0)
    owner = world.member()
    lease, request = world.lease(owner)
    world.clock.advance(9.0)
    world.book.find(lease.number, [owner])  # a use
    world.clock.advance(9.0)
    world.book.expire()
    assert world.book.find(lease.number, [owner])
    world.clock.advance(10.5)
    world.book.expire()
    with pytest.raises(LeaseExpired, match="10 seconds"):
        world.book.find(lease.number, [owner])
    assert request.closed == []
    world.book.release(lease.number, [owner], aborted=False)
    assert request.closed == [True]  # it was lost, whatever its owner thinks of it


def test_renewed_lease_lives_on() -> None:
    """Whoever says that a lease is in use keeps it; others, and what has ended already, change nothing."""
    world, other = World(seconds=10.0), World()
    owner = world.member()
    kept, _ = world.lease(owner)
    lost, _ = world.lease(owner)
    for _ in range(3):
        world.clock.advance(6.0)
        world.book.renew([kept.number, 7], [owner])
        world.book.renew([lost.number], [other.member()])
        world.book.expire()
    assert world.book.find(kept.number, [owner])[0] is kept
    with pytest.raises(LeaseExpired):
        world.book.find(lost.number, [owner])
    world.book.renew([lost.number], [owner])
    with pytest.raises(LeaseExpired):
        world.book.find(lost.number, [owner])


@pytest.mark.case("LEAK-2")
def test_quarantine_is_bounded() -> None:
    """A session whose expired leases keep too much gets no more, until it lets go."""
    world = World(seconds=1.0, quarantined=3)
    owner = world.member()
    lease, _ = world.lease(owner, usable=4)
    world.clock.advance(2.0)
    world.book.expire()
    with pytest.raises(LimitExceeded, match="4 slots"):
        world.book.check_room(owner, 10)
    world.book.acknowledged([lease.number], [owner])
    world.book.check_room(owner, 10)
    with pytest.raises(LimitExceeded, match="limit is 0"):
        world.book.check_room(owner, 0)


def test_ranks_are_taken_once() -> None:
    """Two living workers of one rank are a mistake; one that has ended leaves its place."""
    world = World()
    first = world.member(0)
    with pytest.raises(GeometryError, match="taken by session 1"):
        world.group.check((0, 0), worker=True)
    world.group.check((0, 0), worker=False)
    world.group.check((1, 0), worker=True)
    world.leave(first)
    world.group.check((0, 0), worker=True)


def test_numbers_of_two_lives_differ() -> None:
    """Lease numbers begin at a random place, so that those of another boot are unknown."""
    first, second = World(), World()
    assert first.lease(first.member())[0].number != second.lease(second.member())[0].number
