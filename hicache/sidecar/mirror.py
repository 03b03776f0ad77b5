"""What engines say that they hold in their own memory. Advisory: nothing is pinned or evicted because of it."""

from __future__ import annotations

from typing import Final

from hicache.events import Event, Removed, Stored
from hicache.records import Tier
from hicache.sidecar.groups import Group

HASH_BYTES: Final = 32
MOST_PAGES: Final = 1_000_000
"""Pages remembered of one group; what is reported beyond them is not."""


class DeviceMirror:
    """DEVICE residency of the groups of one pool, as they report it. On the loop's thread only.

    A page counts as stored in DEVICE when the first group reports it, and as removed when the last one has lost it, so
    the events of the service are those of the pool as a whole.

    Attributes:
        refused: pages that were not remembered because a group had too many.
    """

    def __init__(self) -> None:
        self._groups: dict[Group, dict[bytes, dict[bytes, int]]] = {}  # depths of pages
        self._generations: dict[bytes, int] = {}
        self._holders: dict[tuple[bytes, bytes], int] = {}
        self.refused = 0

    @property
    def pages(self) -> int:
        """Pages that some engine holds."""
        return len(self._holders)

    def leading(self, group: Group, namespace: bytes, page_hashes: bytes) -> int:
        """How many of a prompt's leading pages the group's engine has reported."""
        held = self._groups.get(group, {}).get(namespace)
        if not held:
            return 0
        for page, first in enumerate(range(0, len(page_hashes), HASH_BYTES)):
            if page_hashes[first : first + HASH_BYTES] not in held:
                return page
        return len(page_hashes) // HASH_BYTES

    def longest(self, namespace: bytes, page_hashes: bytes) -> int:
        """How many of a prompt's leading pages the engine has reported that has most of them."""
        return max((self.leading(group, namespace, page_hashes) for group in self._groups), default=0)

    def report(
        self,
        group: Group,
        namespace: bytes,
        generation: int,
        *,
        stored: bytes,
        parent_hash: bytes | None,
        first_page: int,
        removed: bytes,
        cleared: bool,
    ) -> list[Event]:
        """Take a report over. Returns what changed for the pool as a whole, removals first."""
        if self._generations.setdefault(namespace, generation) != generation:
            self._cleared(namespace)
            self._generations[namespace] = generation
        held = self._groups.setdefault(group, {}).setdefault(namespace, {})
        events: list[Event] = []
        gone = _deepest_first(held) if cleared else [page for page in _split(removed) if page in held]
        events += self._remove(namespace, held, gone, "cleared" if cleared else "evicted")
        pages = _split(stored)
        room = MOST_PAGES - len(held)
        if len(pages) > room:
            self.refused += len(pages) - room
            pages = pages[:room]
        fresh: list[bytes] = []
        for depth, page in enumerate(pages, first_page):
            if page in held:
                continue
            held[page] = depth
            key = (namespace, page)
            self._holders[key] = self._holders.get(key, 0) + 1
            if self._holders[key] == 1:
                fresh.append(page)
        events += self._stored(namespace, pages, set(fresh), parent_hash, first_page)
        return events

    def forget(self, group: Group) -> list[Event]:
        """A group is over: its engine's memory is gone."""
        events: list[Event] = []
        for namespace, held in self._groups.pop(group, {}).items():
            events += self._remove(namespace, held, _deepest_first(held), "engine_gone")
        return events

    def _cleared(self, namespace: bytes) -> None:
        """The namespace was cleared in every tier, of which there was an event."""
        for namespaces in self._groups.values():
            for page in namespaces.pop(namespace, ()):
                self._holders.pop((namespace, page), None)

    def _remove(self, namespace: bytes, held: dict[bytes, int], pages: list[bytes], reason: str) -> list[Event]:
        gone = []
        for page in pages:
            if held.pop(page, None) is None:
                continue  # named twice
            key = (namespace, page)
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                gone.append(page)
        return [Removed(namespace, self._generations[namespace], Tier.DEVICE, tuple(gone), reason)] if gone else []

    def _stored(
        self, namespace: bytes, pages: list[bytes], fresh: set[bytes], parent_hash: bytes | None, first_page: int
    ) -> list[Event]:
        """One event for each run of pages that are new."""
        events: list[Event] = []
        run: list[bytes] = []
        before = parent_hash
        for depth, page in enumerate([*pages, b""], first_page):
            if page in fresh:
                run.append(page)
                continue
            if run:
                start = depth - len(run)
                at = start - first_page
                parent = pages[at - 1] if at else before
                events.append(
                    Stored(
                        namespace, self._generations[namespace], Tier.DEVICE, tuple(run), parent, start, b"".join(run)
                    )
                )
                run = []
        return events


def _deepest_first(held: dict[bytes, int]) -> list[bytes]:
    return sorted(held, key=held.__getitem__, reverse=True)


def _split(page_hashes: bytes) -> list[bytes]:
    return [page_hashes[first : first + HASH_BYTES] for first in range(0, len(page_hashes), HASH_BYTES)]
