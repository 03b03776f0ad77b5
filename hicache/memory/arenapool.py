"""A host pool whose slots lie in several arenas."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from hicache.core.arenas import ArenaPlan
from hicache.errors import CacheClosed, GeometryError
from hicache.memory.arena import Arena, arena_size
from hicache.memory.base import POISON, Bytes, HostPool, Slots
from hicache.memory.placement import check_place
from hicache.memory.rankpages import RankMemory, RankPages
from hicache.units import whole_number

__all__ = ["ArenaHostPool"]


class ArenaHostPool(HostPool):
    """A host pool over the arenas of one plan. Any thread may read and write slots; who may is the caller's business.

    Offsets are those of the whole canonical page. Every shard lies in one run, so storage reads and writes it in
    place; the whole page does only where one arena holds it all.

    Args:
        plan: which bytes lie where.
        arenas: one for each of the plan's, in order, all with the same number of slots; the pool closes them.

    Attributes:
        slots: number of slots.
        page_bytes: bytes of a whole page.
        plan, arenas: as given.

    Raises:
        GeometryError: arenas that do not fit the plan.
    """

    def __init__(self, plan: ArenaPlan, arenas: Sequence[Arena]) -> None:
        if [arena.stride for arena in arenas] != [shape.stride for shape in plan.arenas]:
            raise GeometryError("the arenas of a pool must have the strides of its plan, in order")
        if len({arena.slots for arena in arenas}) != 1:
            raise GeometryError("the arenas of a pool must have the same number of slots")
        self.plan = plan
        self.arenas = tuple(arenas)
        self.slots = arenas[0].slots
        self.page_bytes = plan.page_bytes
        self._rows: list[Bytes] | None = [arena.rows for arena in arenas]
        self._runs = sorted(
            ((run, shape.index) for shape in plan.arenas for run in shape.runs), key=lambda pair: pair[0].page_offset
        )
        self._starts = [run.page_offset for run, _ in self._runs]

    @classmethod
    def create(
        cls,
        plan: ArenaPlan,
        slots: int,
        *,
        numa_nodes: Sequence[int] = (),
        huge_pages: bool = False,
        root: Path = Path("/"),
    ) -> ArenaHostPool:
        """Make the arenas and the pool over them.

        Args:
            plan: which bytes lie where.
            slots: number of slots.
            numa_nodes: arena after arena is taken from the next of them, and from the first again behind the last;
                empty: wherever.
            huge_pages: take the memory from the machine's huge pages of 2 MiB.
            root: folder under which `proc` and `sys` are looked up for the limits.

        Raises:
            ConfigError: more than there is, looked at for all arenas together before the first is made, or a placement
                that is not possible; nothing is left.
        """
        sizes = [arena_size(slots, shape.stride, huge_pages=huge_pages) for shape in plan.arenas]
        what = f"a host pool of {slots} pages of {plan.page_bytes} bytes"
        check_place(sum(sizes), what, nodes=tuple(numa_nodes), huge_pages=huge_pages, root=root)
        arenas: list[Arena] = []
        try:
            for shape in plan.arenas:
                node = numa_nodes[shape.index % len(numa_nodes)] if numa_nodes else None
                arenas.append(Arena(slots, shape.stride, numa_node=node, huge_pages=huge_pages, root=root))
            return cls(plan, arenas)
        except BaseException:
            for arena in arenas:
                arena.close()
            raise

    @property
    def size(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.size for arena in self.arenas)

    @property
    def pages(self) -> Bytes:
        """All pages, (slots, page_bytes), where one arena holds them whole.

        Raises:
            GeometryError: pages lie in several places.
            CacheClosed: the pool is closed.
        """
        rows = self._open()
        if len(self._runs) > 1:
            raise GeometryError("a page of this pool lies in several arenas: read it by rank_pages or buffer")
        return rows[0][:, : self.page_bytes]

    def page(self, slot: int) -> Bytes:
        """One page, (page_bytes,), not a copy, where one arena holds it whole; raises as `pages` does."""
        page: Bytes = self.pages[self._checked(slot)]
        return page

    def buffer(self, slot: int, offset: int = 0, length: int | None = None) -> memoryview:
        """Bytes of one page from `offset` on, writable, not a copy; they must lie in one run, as every shard does."""
        rows = self._open()
        end = self.page_bytes if length is None else offset + length
        if not 0 <= offset <= end <= self.page_bytes:
            raise GeometryError(f"bytes {offset} to {end} are not inside a page of {self.page_bytes} bytes")
        run, arena = self._runs[bisect_right(self._starts, offset) - 1]
        if end > run.page_offset + run.length:
            raise GeometryError(f"bytes {offset} to {end} of a page do not lie in one place: take them shard by shard")
        at = run.slot_offset - run.page_offset
        return rows[arena][self._checked(slot), at + offset : at + end].data

    def rank_pages(self, tp_rank: int = 0, pp_rank: int = 0) -> RankPages:
        """The pages of one rank in its own canonical form; as everywhere it writes only what it is to write.

        Raises:
            GeometryError: no such rank.
            CacheClosed: the pool is closed.
        """
        rows, rank = self._open(), self.plan.rank(tp_rank, pp_rank)
        return RankPages(
            rank.page_bytes, [RankMemory(rows[seen.index], seen.runs, seen.writes) for seen in rank.arenas]
        )

    def poison(self, slots: Slots) -> None:
        """Fill slots with `POISON`."""
        for slot in slots.tolist():
            for rows in self._open():
                rows[self._checked(slot)].fill(POISON)

    def close(self) -> None:
        """Give the memory back. While somebody still holds a view, it stays mapped until the last view is gone."""
        self._rows = None
        for arena in self.arenas:
            arena.close()

    def _open(self) -> list[Bytes]:
        if self._rows is None:
            raise CacheClosed("this host pool is closed: its pages are gone")
        return self._rows

    def _checked(self, slot: int) -> int:
        number = slot if type(slot) is int else whole_number(slot)
        if number is None or not 0 <= number < self.slots:
            raise GeometryError(f"host slot {slot!r:.40} does not exist: the pool has {self.slots}")
        return number
