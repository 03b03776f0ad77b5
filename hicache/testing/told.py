"""Residency as the event stream tells it, to be held against the residency that there is."""

from __future__ import annotations

from hicache.events import Cleared, Event, Stored
from hicache.records import Tier
from hicache.testing.choices import tag


class ToldResidency:
    """Replays events: nothing is stored twice, and nothing is removed that was not stored."""

    def __init__(self) -> None:
        self._visible: dict[tuple[bytes, Tier], list[int]] = {}

    def pages(self, namespace: bytes, tier: Tier) -> list[int]:
        """Tags of the pages that are visible in a tier, as far as events told."""
        return self._visible.get((namespace, tier), [])

    def leading(self, namespace: bytes, tier: Tier, page_hashes: list[bytes]) -> int:
        """How many leading pages of a prompt are visible in a tier, as far as events told."""
        visible = set(self.pages(namespace, tier))
        return next((i for i, page_hash in enumerate(page_hashes) if tag(page_hash) not in visible), len(page_hashes))

    def everything(self) -> dict[tuple[bytes, Tier], list[int]]:
        """Pages by namespace and tier, sorted, those without any left out."""
        return {key: sorted(pages) for key, pages in self._visible.items() if pages}

    def replay(self, events: list[Event]) -> None:
        """Apply events, and take them out of the list."""
        for event in events:
            if isinstance(event, Cleared):
                for tier in Tier:
                    self._visible.pop((event.namespace, tier), None)
                continue
            pages = self._visible.setdefault((event.namespace, event.tier), [])
            for page_hash in event.page_hashes:
                if isinstance(event, Stored):
                    assert tag(page_hash) not in pages, "stored twice"
                    pages.append(tag(page_hash))
                else:
                    assert tag(page_hash) in pages, "removed before it was stored"
                    pages.remove(tag(page_hash))
        events.clear()
