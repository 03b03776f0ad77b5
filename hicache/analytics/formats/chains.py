"""Puts pages that were stored into chains, and tells which of them were one request."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hicache.analytics.formats.events import Change

GROWING: Final = 2.0
"""Seconds within which pages behind a chain belong to the request that stored its end."""
MOST_OPEN: Final = 4096
"""Requests that may be growing at a time; the oldest of more has ended."""

Page = tuple[str, Hashable]
"""Scope and hash."""


@dataclass(slots=True, eq=False)
class Chain:
    """A request under way, as seen by what it stored.

    Attributes:
        begun, grown: seconds of its first and its last page.
        scope: where its hashes mean the same.
        unit: tokens of a page.
        place: where the first event stands.
        tip: its last page.
    """

    begun: float
    grown: float
    scope: str
    unit: int
    place: str
    tip: Page
    _parents: dict[Page, Page | None] = field(repr=False)

    def pages(self) -> list[Hashable]:
        """Hashes from the prompt's begin, as far back as it was told."""
        found: list[Hashable] = []
        page: Page | None = self.tip
        while page is not None and page in self._parents:
            found.append(page[1])
            page = self._parents[page]
        return found[::-1]


class Chains:
    """All that is known of a publisher's pages. Holds 100 to 200 bytes for each page that was ever told of."""

    def __init__(self) -> None:
        self._parents: dict[Page, Page | None] = {}
        self._held: dict[tuple[str, Page], set[str]] = {}  # of a source
        self._open: dict[Page, Chain] = {}
        self._ended: list[tuple[float, int, Chain]] = []
        self._count = self._told = 0  # requests that have ended, at all and when it was looked whose turn it is

    def store(self, change: Change, unit: int, place: str) -> None:
        """Pages came, one behind the other."""
        before: Page | None = None if change.parent is None else (change.scope, change.parent)
        first, tip = before, before
        computed = False
        for name in change.pages:
            page = (change.scope, name)
            if page not in self._parents:
                # A page whose parent was never told of begins a chain, so no chain leads back into itself.
                self._parents[page] = before if before in self._parents else None
            held = self._held.setdefault((change.source, page), set())
            # Held elsewhere, it is a copy; held here already, it was computed once more, as engines do with the last.
            computed = computed or not held or change.medium in held
            held.add(change.medium)
            before = tip = page
        if computed and not change.told and tip is not None:
            self._grow(change, first, tip, unit, place)

    def _grow(self, change: Change, first: Page | None, tip: Page, unit: int, place: str) -> None:
        chain = self._open.pop(first, None) if first is not None else None
        if chain is None or change.time - chain.grown > GROWING or chain.unit != unit:
            if chain is not None:
                self._end(chain)
            chain = Chain(change.time, change.time, change.scope, unit, place, tip, self._parents)
        chain.tip, chain.grown = tip, max(chain.grown, change.time)
        if (other := self._open.pop(tip, None)) is not None:
            self._end(other)
        self._open[tip] = chain
        if len(self._open) > MOST_OPEN:
            self._end(self._open.pop(next(iter(self._open))))

    def remove(self, change: Change) -> None:
        """Pages left a medium."""
        for name in change.pages:
            key = (change.source, (change.scope, name))
            held = self._held.get(key)
            if held is not None:
                held.discard(change.medium)
                if not held:
                    del self._held[key]

    def clear(self, change: Change) -> None:
        """All pages of a scope left."""
        gone = (change.source, change.scope)
        self._held = {key: held for key, held in self._held.items() if (key[0], key[1][0]) != gone}

    def _end(self, chain: Chain) -> None:
        self._count += 1
        heapq.heappush(self._ended, (chain.begun, self._count, chain))

    def ended(self, now: float | None) -> Iterator[Chain]:
        """Requests that have ended, by their begins; None: all have."""
        while self._open:
            tip, chain = next(iter(self._open.items()))
            if now is not None and now - chain.grown <= GROWING:
                break  # those behind have grown later
            del self._open[tip]
            self._end(chain)
        if self._told == self._count:
            return
        least = min((chain.begun for chain in self._open.values()), default=None)
        while self._ended and (least is None or self._ended[0][0] <= least):
            yield heapq.heappop(self._ended)[2]
        self._told = self._count
