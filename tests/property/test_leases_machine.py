"""The lease book under random histories: slots are free exactly when nobody can touch them any more."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from hicache.core.reasons import RequestCounts
from hicache.errors import LeaseExpired, LimitExceeded, NotFound, PermissionDenied
from hicache.sidecar.groups import Group, Member
from hicache.sidecar.leases import HeldLease, LeaseBook
from hicache.testing.clock import ManualClock

PAGE = 2
ARENAS = 3


class Life:
    """A process."""

    def __init__(self) -> None:
        self.gone = False

    def when_gone(self, call: Any) -> None:
        raise AssertionError("the machine tells the book itself")


class Request:
    """A pool's request, which knows whether its slots were given back."""

    page_size = PAGE

    def __init__(self, usable: int, own: int, *, tail: bool) -> None:
        self.usable, self.own, self.first = np.arange(usable), np.arange(own), usable
        self.pages = usable + own - (own > 0 and tail)  # the last slot may be for no whole page
        self.published = usable
        self.closed = 0

    def commit(self, upto: int, *, first: int, tokens: bytes, extras: bytes) -> None:
        assert self.closed == 0
        assert first == self.published
        assert len(tokens) == (upto - first) * 4 * PAGE
        assert len(extras) == (upto - first) * 16
        assert tokens == _tokens(first, upto)
        self.published = upto

    def close(self, *, aborted: bool) -> RequestCounts:
        self.closed += 1
        return RequestCounts(aborted=aborted)

    def counts_now(self, *, aborted: bool) -> RequestCounts:
        return RequestCounts(aborted=aborted)


def _tokens(first: int, end: int) -> bytes:
    return np.arange(first * PAGE, end * PAGE, dtype="<u4").tobytes()


class LeaseMachine(RuleBasedStateMachine):
    """The model keeps, for each lease, who may still be touching its slots."""

    members = Bundle("members")
    leases = Bundle("leases")

    @initialize()
    def begin(self) -> None:
        """An empty book with two groups."""
        self.clock = ManualClock()
        self.book = LeaseBook(self.clock.now, seconds=50.0, most_quarantined=20, freed=lambda _: None)
        self.groups = [Group(name, cast("Any", None)) for name in "ab"]
        self.touchers: dict[int, set[Member]] = {}
        self.held: dict[int, HeldLease] = {}
        self.requests: dict[int, Request] = {}
        self.committed: dict[int, list[int]] = {}
        self.told: dict[int, int] = {}
        self.all: list[Member] = []
        self.told_of: dict[Member, set[int]] = {}

    @rule(target=members, group=st.integers(0, 1), rank=st.integers(0, ARENAS - 1), mapped=st.booleans())
    def join(self, group: int, rank: int, mapped: bool) -> Member:
        """A session joins, as a rank that writes one arena."""
        told: set[int] = set()
        member = Member(
            len(self.all) + 1,
            (rank, 0),
            worker=True,
            life=Life() if mapped else None,
            arenas=(rank,),
            tell=lambda notice: told.update(getattr(notice, "leases", ())),
        )
        self.told_of[member] = told
        self.groups[group].join(member)
        self.all.append(member)
        for number, lease in self.held.items():
            if lease.group is self.groups[group] and lease.ended is None and self._touches(member):
                self.touchers[number].add(member)  # numbers are valid in the whole group
        return member

    @rule(target=leases, owner=members, usable=st.integers(0, 3), own=st.integers(0, 4), tail=st.booleans())
    def lease(self, owner: Member, usable: int, own: int, tail: bool) -> int:
        """A session leases and reserves; every mapped member of its group may touch the slots from now on."""
        if owner.ended:
            return 0
        group = self._group(owner)
        try:
            self.book.check_room(owner, 6)
        except LimitExceeded:
            return 0
        request = Request(usable, own, tail=tail)
        lease = self.book.open(group, owner, cast("Any", request))
        if own:
            lease.reserved(ARENAS)
        number = lease.number
        self.held[number], self.requests[number] = lease, request
        self.committed[number] = [usable] * ARENAS
        self.told[number] = usable
        self.touchers[number] = {member for member in group.members if self._touches(member)}
        return number

    @rule(number=leases, member=members, share=st.floats(0, 1), tell=st.booleans())
    def commit(self, number: int, member: Member, share: float, tell: bool) -> None:
        """A rank commits its part of some pages; the page is visible when all parts and its tokens are there."""
        try:
            lease, place = self.book.find(number, [member] if not member.ended else [])
        except (NotFound, LeaseExpired):
            return
        request = self.requests[number]
        if not len(request.own):
            return
        first = request.first
        upto = first + round(share * len(request.own))
        told = self.told[number]
        tokens = _tokens(told, upto) if tell and upto > told else b""
        visible = self.book.commit(lease, place, upto, tokens=tokens, first_page=told if tokens else 0, extras=b"")
        if tokens:
            self.told[number] = upto
        arena = member.rank[0]
        self.committed[number][arena] = max(self.committed[number][arena], upto)
        assert visible == request.published == min(*self.committed[number], self.told[number])

    @rule(number=leases, member=members)
    def release(self, number: int, member: Member) -> None:
        """The owner releases: it speaks for itself, and for all that live and have committed their part."""
        lease = self.held.get(number)
        ended = lease is not None and lease.ended is not None
        try:
            self.book.release(number, [member] if not member.ended else [], aborted=False)
        except (NotFound, PermissionDenied):
            return
        assert lease is not None
        assert lease.owner is member
        if ended:
            self.touchers[number].discard(member)
        else:
            unfinished = {other for other in self.touchers[number] if self._writing(number, other)}
            self.touchers[number] = {other for other in unfinished if other.ended or other is not member}
            assert all(number in self.told_of[other] for other in unfinished if not other.ended and other is not member)

    @rule(number=leases, member=members)
    def acknowledge(self, number: int, member: Member) -> None:
        """A session that was told lets go; a number that it was not told of changes nothing."""
        if member.ended or number not in self.told_of[member]:
            return
        self.book.acknowledged([number], [member])
        if number in self.touchers:
            self.touchers[number].discard(member)

    @rule(member=members, goodbye=st.booleans())
    def leave(self, member: Member, goodbye: bool) -> None:
        """A stream ends, in order or not."""
        if member.ended:
            return
        member.ended, member.goodbye = True, goodbye
        if goodbye:
            self._let_go(member)
        group = self._group(member)
        self.book.left(member)
        group.forget()

    @rule(member=consumes(members))
    def die(self, member: Member) -> None:
        """A process is gone; if its stream was open, that ends too."""
        if isinstance(member.life, Life):
            member.life.gone = True
        self._let_go(member)
        group = self._group(member)
        if not member.ended:
            member.ended = True
            self.book.left(member)
        else:
            self.book.gone(member)
        group.forget()

    @rule(seconds=st.floats(1, 60))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.clock.advance(seconds)
        self.book.expire()

    @invariant()
    def slots_are_kept_while_anyone_may_touch_them(self) -> None:
        """A closed lease has no toucher left; an ended one without any is closed; nothing is closed twice."""
        open_now = {lease.number: lease for lease in getattr(self, "book", ())}
        for number, request in getattr(self, "requests", {}).items():
            assert request.closed <= 1
            assert (number in open_now) == (request.closed == 0)
            if request.closed:
                assert not self.touchers[number], "slots were freed under a process that may touch them"
            elif open_now[number].ended is not None:
                assert self.touchers[number], "nobody can touch the slots, and yet they are not free"

    def teardown(self) -> None:
        """When every process is gone nothing is held."""
        for member in getattr(self, "all", []):
            if isinstance(member.life, Life):
                member.life.gone = True
            if not member.ended:
                member.ended = True
                self.book.left(member)
            else:
                self.book.gone(member)
        assert not len(getattr(self, "book", ()))

    def _writing(self, number: int, member: Member) -> bool:
        request = self.requests[number]
        unfinished = self.committed[number][member.rank[0]] < request.pages
        return member.ended or (len(request.own) > 0 and unfinished)

    def _group(self, member: Member) -> Group:
        return next((group for group in self.groups if member in group.members), self.groups[0])

    def _touches(self, member: Member) -> bool:
        return isinstance(member.life, Life) and not member.life.gone and not member.goodbye

    def _let_go(self, member: Member) -> None:
        for touchers in self.touchers.values():
            touchers.discard(member)


TestLeaseMachine = LeaseMachine.TestCase
