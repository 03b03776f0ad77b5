"""Leases of the service: who holds which request of a pool, and when its slots may really be reused.

    OPEN     its group may read, write and commit
    ENDED    nothing new may be done with it; slots stay pinned while a process may still touch them (quarantine)
    (freed)  it is not in the book any more, and its slots are the pool's

Behind each lease stands one request of the pool's core. As long as that is not closed the core keeps every pin and
every private slot of it, so quarantine needs no bookkeeping of its own, and accounting stays exact.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache.core.reasons import RequestCounts
from hicache.errors import HashMismatch, InvalidInput, LeaseExpired, LimitExceeded, NotFound, PermissionDenied
from hicache.rpc.service import Revoked

if TYPE_CHECKING:
    from hicache.runtime.hosting import HostedRequest
    from hicache.sidecar.groups import Group, Member

_log = logging.getLogger("hicache.sidecar")

_EXTRAS = 16


@dataclass(frozen=True, slots=True)
class LeaseStatistics:
    """A snapshot of the book.

    Attributes:
        open: leases that may be used.
        ended: leases in quarantine.
        quarantined_slots: slots that those keep.
        opened, expired, revoked: since the start.
    """

    open: int
    ended: int
    quarantined_slots: int
    opened: int
    expired: int
    revoked: int


class HeldLease:
    """One lease. Changed by the book only.

    Attributes:
        number: its id.
        group: whose sessions may use it.
        owner: the session that made it; it alone may wait for it, reserve and release.
        request: the pool's request behind it.
        frontier: per arena, the page index up to which some rank has committed its bytes.
        told: page index up to which tokens are known, from `request.first` on.
        tokens, extras: of the pages from `request.first` to `told`; extras are empty while none had any.
        by_hash: whether its pages are taken by their hashes, so that their tokens stay unknown.
        visible: page index up to which pages were published, or would have been.
        used: when it was last used.
        ended: why nothing new may be done with it, or None.
        awaits: members that must let go before its slots are free.
        aborted: how it will be counted.
        counts: once it is freed.
    """

    __slots__ = (
        "aborted",
        "awaits",
        "by_hash",
        "counts",
        "ended",
        "extras",
        "frontier",
        "group",
        "number",
        "owner",
        "request",
        "tokens",
        "told",
        "used",
        "visible",
    )

    def __init__(self, number: int, group: Group, owner: Member, request: HostedRequest, now: float) -> None:
        self.number = number
        self.group = group
        self.owner = owner
        self.request = request
        self.frontier: list[int] = []
        self.told = self.visible = 0
        self.tokens = bytearray()
        self.extras = bytearray()
        self.by_hash = False
        self.used = now
        self.ended: str | None = None
        self.awaits: set[Member] = set()
        self.aborted = False
        self.counts: RequestCounts | None = None

    @property
    def slots(self) -> int:
        """Slots that it keeps."""
        return len(self.request.usable) + len(self.request.own)

    def reserved(self, arenas: int) -> None:
        """It has private slots from now on."""
        if not self.frontier:
            first = self.request.first
            self.frontier = [first] * arenas
            self.told = self.visible = first

    @property
    def end(self) -> int:
        """Page index behind its last private slot."""
        return self.request.first + len(self.request.own)


class LeaseBook:
    """All leases of one service. Used on the loop's thread only.

    Args:
        now: the loop's clock.
        seconds: how long a lease lives without being used; 0 for ever.
        most_quarantined: slots that the ended leases of one session may keep; above it the session gets no new ones.
        freed: called after a lease's slots were given back.
    """

    def __init__(
        self,
        now: Callable[[], float],
        *,
        seconds: float,
        most_quarantined: int,
        freed: Callable[[HeldLease], None],
    ) -> None:
        self._now = now
        self._seconds = seconds
        self._most = most_quarantined
        self._freed = freed
        self._leases: dict[int, HeldLease] = {}
        # Numbers of two lives of a service must not be mistaken for each other: they begin at a random place.
        self._number = secrets.randbits(62) | 1
        self._opened = self._expired = self._revoked = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[HeldLease]:
        return iter(list(self._leases.values()))

    @property
    def newest(self) -> int:
        """Id that every lease made from now on is above."""
        return self._number

    # ---- making and finding

    def check_room(self, owner: Member, most_leases: int) -> None:
        """See that a session may have one more.

        Raises:
            LimitExceeded: it has too many, or too many slots in quarantine.
        """
        own = [lease for lease in self._leases.values() if lease.owner is owner]
        if len(own) >= most_leases:
            raise LimitExceeded(f"lease: the session holds {len(own)} leases, the limit is {most_leases}: release some")
        kept = sum(lease.slots for lease in own if lease.ended is not None)
        if kept > self._most:
            raise LimitExceeded(
                f"lease: expired leases of this session keep {kept} slots, the limit is {self._most}: "
                "acknowledge their revocation, or release them"
            )

    def open(self, group: Group, owner: Member, request: HostedRequest) -> HeldLease:
        """Enter a request of the group's pool."""
        self._number += 1
        self._opened += 1
        lease = HeldLease(self._number, group, owner, request, self._now())
        self._leases[lease.number] = lease
        return lease

    def find(self, number: int, members: Iterable[Member], *, own: bool = False) -> tuple[HeldLease, Member]:
        """A lease that a session may use now, and the session's place in its group.

        Args:
            number: its id.
            members: the session's places.
            own: whether only the session that made it may do what is asked.

        Raises:
            NotFound: no such lease, one of an earlier life of the service, or another group's.
            LeaseExpired: nothing new may be done with it.
            PermissionDenied: another session of the group made it.
        """
        lease, member = self._known(number, members)
        if lease.ended is not None:
            raise LeaseExpired(f"lease {number} has ended: {lease.ended}")
        if own and lease.owner is not member:
            raise PermissionDenied(
                f"lease {number} belongs to session {lease.owner.session} of the group: only that one may do this"
            )
        lease.used = self._now()
        return lease, member

    def _known(self, number: int, members: Iterable[Member]) -> tuple[HeldLease, Member]:
        lease = self._leases.get(number)
        if lease is not None:
            for member in members:
                if member in lease.group.members:
                    return lease, member
        raise NotFound(
            f"lease {number} is not known here: it was released, belongs to others, or is from before a restart"
        )

    # ---- committing

    def commit(
        self,
        lease: HeldLease,
        member: Member,
        upto: int,
        *,
        tokens: bytes,
        first_page: int,
        extras: bytes,
        by_hash: bool = False,
    ) -> int:
        """A rank has written its part of the pages up to an index. Returns the index up to which all parts are there.

        Raises:
            InvalidInput: pages without slots, tokens of another number of pages or with a hole in front, or tokens
                for some of a lease's pages and hashes alone for others.
            HashMismatch: tokens that are not those of the page hashes; nothing was published.
        """
        if upto > lease.end or not lease.frontier:
            raise InvalidInput(
                f"commit: page {upto} is behind the last reserved page of lease {lease.number}, "
                f"{lease.end if lease.frontier else 0}"
            )
        if by_hash:
            self._believe(lease, upto, tokens, extras)
        else:
            self._tell(lease, upto, tokens, first_page, extras)
        for arena in member.arenas:
            lease.frontier[arena] = max(lease.frontier[arena], upto)
        visible = min(*lease.frontier, lease.told)
        if visible > lease.visible:
            self._publish(lease, visible)
        return lease.visible

    def _publish(self, lease: HeldLease, visible: int) -> None:
        width = 4 * lease.request.page_size
        first = lease.request.first
        begin, end = lease.visible - first, visible - first
        if lease.by_hash:
            lease.request.commit(visible, first=lease.visible, tokens=None)
            lease.visible = visible
            return
        try:
            lease.request.commit(
                visible,
                first=lease.visible,
                tokens=bytes(lease.tokens[begin * width : end * width]),
                extras=bytes(lease.extras[begin * _EXTRAS : end * _EXTRAS]),
            )
        except HashMismatch:
            # The tokens were wrong, the bytes may be right: they can be told again.
            del lease.tokens[begin * width :], lease.extras[begin * _EXTRAS :]
            lease.told = lease.visible
            raise
        lease.visible = visible

    def _believe(self, lease: HeldLease, upto: int, tokens: bytes, extras: bytes) -> None:
        if tokens or extras or lease.tokens:
            raise InvalidInput(
                f"commit: tokens of lease {lease.number} are told, so its pages are not taken by hash: tell all tokens"
            )
        lease.by_hash = True
        lease.told = max(lease.told, upto)

    def _tell(self, lease: HeldLease, upto: int, tokens: bytes, first_page: int, extras: bytes) -> None:
        if tokens and lease.by_hash:
            raise InvalidInput(f"commit: pages of lease {lease.number} are taken by hash: leave out tokens")
        if not tokens:
            if extras:
                raise InvalidInput("commit: extras without tokens: give both for the same pages")
            return
        width = 4 * lease.request.page_size
        pages = len(tokens) // width
        if pages * width != len(tokens) or first_page + pages != upto:
            raise InvalidInput(
                f"commit: {len(tokens)} bytes of tokens are not the pages {first_page} to {upto} of {width} bytes each"
            )
        if extras and len(extras) != pages * _EXTRAS:
            raise InvalidInput(f"commit: {len(extras)} bytes of extras, {pages} pages need {_EXTRAS} each")
        if first_page > lease.told:
            raise InvalidInput(f"commit: tokens begin at page {first_page}, but those from {lease.told} on are missing")
        known = lease.told - first_page
        if known >= pages:
            return
        lease.tokens += tokens[known * width :]
        lease.extras += extras[known * _EXTRAS :] if extras else bytes((pages - known) * _EXTRAS)
        lease.told = upto

    # ---- ending

    def release(self, number: int, members: Iterable[Member], *, aborted: bool) -> RequestCounts:
        """Its owner says that nobody of the group touches its slots any more.

        Ranks that have not committed their part of its whole pages may be in the middle of writing it, whatever the
        owner says: they are told to stop, and the slots stay until they have.

        Raises:
            NotFound, PermissionDenied: as `find`.
        """
        lease, member = self._known(number, members)
        if lease.owner is not member:
            raise PermissionDenied(
                f"lease {number} belongs to session {lease.owner.session} of the group: only that one may release it"
            )
        if lease.ended is None:
            lease.ended = "it was released"
            lease.aborted = aborted
            # The owner speaks for the living that are done; for those that were lost only their end does.
            writing = self._writing(lease)
            lease.awaits = lease.group.lost | writing
            for other in writing:
                other.tell(Revoked((lease.number,), lease.ended))
        else:
            lease.awaits.discard(member)
        return self._free_if_let_go(lease) or lease.request.counts_now(aborted=lease.aborted)

    def _writing(self, lease: HeldLease) -> set[Member]:
        """Living ranks, but for its owner, that have not committed all of their part."""
        if not lease.frontier:
            return set()
        end = min(lease.end, lease.request.pages)
        return {
            member
            for member in lease.group.members
            if member.touches and not member.ended and member is not lease.owner
            if any(lease.frontier[arena] < end for arena in member.arenas)
        }

    def _end(self, lease: HeldLease, reason: str) -> None:
        """End a lease against its owner's will. All that may touch it must let go first; those that live are told."""
        lease.ended = reason
        lease.aborted = True
        lease.awaits = lease.group.touching()
        self._revoked += 1
        _log.warning("a lease was revoked: %s", reason, extra={"lease": lease.number, "session": lease.owner.session})
        for member in lease.group.members:
            if not member.ended and (member.touches or member is lease.owner):
                member.tell(Revoked((lease.number,), reason))
        self._free_if_let_go(lease)

    def acknowledged(self, numbers: Iterable[int], members: Iterable[Member]) -> None:
        """A session does not touch the slots of these ended leases any more. Others' numbers are left alone."""
        members = tuple(members)
        for number in numbers:
            lease = self._leases.get(number)
            if lease is not None and lease.ended is not None:
                lease.awaits.difference_update(members)
                self._free_if_let_go(lease)

    def renew(self, numbers: Iterable[int], members: Iterable[Member]) -> None:
        """Leases of a session's groups are in use, though nothing is asked of them. Others' are left alone."""
        members = tuple(members)
        for number in numbers:
            lease = self._leases.get(number)
            if lease is not None and any(member in lease.group.members for member in members):
                lease.used = self._now()

    def left(self, member: Member) -> None:
        """A session has ended (`member.ended`, and `member.goodbye` if in order)."""
        for lease in self:
            if member not in lease.group.members:
                continue
            if lease.ended is None:
                if lease.owner is member:
                    self._end(lease, f"session {member.session}, which made it, has ended")
                elif any(lease.frontier[arena] < lease.end for arena in member.arenas if lease.frontier):
                    self._end(lease, f"rank {member.rank[0]} of stage {member.rank[1]} was lost")
            if not member.touches:
                lease.awaits.discard(member)
                self._free_if_let_go(lease)

    def gone(self, member: Member) -> None:
        """A session's process can touch nothing any more."""
        for lease in self:
            if member in lease.awaits:
                lease.awaits.discard(member)
                self._free_if_let_go(lease)

    def expire(self) -> None:
        """End leases that nobody has used for too long."""
        if not self._seconds:
            return
        before = self._now() - self._seconds
        for lease in self:
            if lease.ended is None and lease.used < before:
                self._expired += 1
                self._end(lease, f"it was not used for {self._seconds:g} seconds")

    def _free_if_let_go(self, lease: HeldLease) -> RequestCounts | None:
        if lease.counts is None and lease.ended is not None and not lease.awaits:
            del self._leases[lease.number]
            lease.counts = lease.request.close(aborted=lease.aborted)
            self._freed(lease)
        return lease.counts

    def statistics(self) -> LeaseStatistics:
        """A snapshot."""
        ended = [lease for lease in self._leases.values() if lease.ended is not None]
        return LeaseStatistics(
            open=len(self._leases) - len(ended),
            ended=len(ended),
            quarantined_slots=sum(lease.slots for lease in ended),
            opened=self._opened,
            expired=self._expired,
            revoked=self._revoked,
        )
