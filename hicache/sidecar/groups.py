"""Worker groups: the sessions of one model instance, and who of them may still touch shared memory.

A mapping cannot be taken from a process. So what a session held is given to others only when every process that might
be copying has said that it is not, or is really gone; until then its slots stay where they are, in quarantine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from hicache.errors import GeometryError

if TYPE_CHECKING:
    from hicache.rpc.service import Notice
    from hicache.sidecar.pool import Pool
    from hicache.sidecar.processes import Peer

Rank = tuple[int, int]
"""(place among the ranks that share the heads, pipeline stage)"""


class Life(Protocol):
    """A process that may touch shared memory, as its lifeline shows it."""

    @property
    def peer(self) -> Peer:
        """Which process it is."""
        ...

    @property
    def pidfd(self) -> int | None:
        """A descriptor of it, which stays the lifeline's; None where the kernel gives none."""
        ...

    @property
    def gone(self) -> bool:
        """Whether it can touch nothing any more."""
        ...

    def when_gone(self, call: Callable[[], None]) -> None:
        """Call this once it is gone; at once if it is."""
        ...


class Member:
    """One session's place in a group.

    Attributes:
        session: number of the session, for messages.
        rank: its rank.
        worker: whether it writes pages of its rank.
        life: its process, if it maps the pool's memory; None for a session that streams or only schedules.
        arenas: indices of the arenas whose bytes it writes.
        tell: sends it a notice.
        ended: its session is over.
        goodbye: it ended in order, so it touches nothing any more.
    """

    __slots__ = ("arenas", "ended", "goodbye", "life", "rank", "session", "tell", "worker")

    def __init__(
        self,
        session: int,
        rank: Rank,
        *,
        worker: bool,
        life: Life | None,
        arenas: Iterable[int],
        tell: Callable[[Notice], None],
    ) -> None:
        self.session = session
        self.rank = rank
        self.worker = worker
        self.life = life
        self.arenas = tuple(arenas)
        self.tell = tell
        self.ended = False
        self.goodbye = False

    @property
    def touches(self) -> bool:
        """Whether it may be reading or writing slots right now."""
        return self.life is not None and not self.goodbye and not self.life.gone


class Group:
    """The ranks of one model instance.

    Attributes:
        name: as the sessions gave it; "" for a session on its own.
        pool: where its pages are.
        members: sessions that are alive, and those that ended but may still touch slots.
    """

    def __init__(self, name: str, pool: Pool) -> None:
        self.name = name
        self.pool = pool
        self.members: list[Member] = []

    def check(self, rank: Rank, *, worker: bool) -> None:
        """See that a rank may join.

        Raises:
            GeometryError: a living session has that rank.
        """
        if not worker:
            return
        for member in self.members:
            if member.worker and member.rank == rank and not member.ended:
                raise GeometryError(
                    f"rank {rank[0]} of stage {rank[1]} of group {self.name!r:.60} is taken by session "
                    f"{member.session}: end that one first, or give this instance a group name of its own"
                )

    def join(self, member: Member) -> None:
        """Add a session that `check` has let in."""
        self.members.append(member)

    def forget(self) -> None:
        """Drop members that are over and touch nothing any more."""
        self.members = [member for member in self.members if not member.ended or member.touches]

    def touching(self) -> set[Member]:
        """All that may be reading or writing slots right now."""
        return {member for member in self.members if member.touches}

    @property
    def lost(self) -> set[Member]:
        """Members that ended without a goodbye and may still touch slots."""
        return {member for member in self.members if member.ended and member.touches}

    @property
    def empty(self) -> bool:
        """Whether nobody is left."""
        return not self.members
