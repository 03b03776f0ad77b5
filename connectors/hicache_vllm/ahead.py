"""Slots that a prompt has before its pages are computed, so that they can be stored by the very step that does it.

The lease is the one of the prompt's lookup: it is asked for slots of what it did not find, in the same background task,
so that nobody waits for them.
"""

from __future__ import annotations

from hicache_vllm.lookups import Lookup

__all__ = ["Ahead"]


class Ahead:
    """Slots of one prompt's pages that the cache lacks. Used on the scheduler's thread only.

    Args:
        lookup: that has them; is held until nothing is stored by it any more.

    Attributes:
        lookup: as given.
    """

    def __init__(self, lookup: Lookup) -> None:
        self.lookup = lookup
        self._next = lookup.pages
        self._end = lookup.pages + lookup.reserved
        self._jobs: set[int] = set()
        self._held = True
        lookup.hold()

    def has(self, pages: int) -> bool:
        """Whether there are slots for pages that were not given to the workers, in front of the index `pages`."""
        return self._held and self._next < min(pages, self._end) and not self.lookup.lost

    def take(self, job: int, pages: int) -> tuple[int, int, bytes]:
        """Of those all that lie in front of `pages`: first and end index, and the ticket; empty where it is lost."""
        first, self._next = self._next, min(pages, self._end)
        self._jobs.add(job)
        return first, self._next, self.lookup.ticket() or b""

    def ended(self, job: int) -> None:
        """A store of them is over."""
        self._jobs.discard(job)
        if self._next >= self._end:
            self._held = False
        self._let_go()

    def drop(self) -> None:
        """Nothing more is stored by it. Idempotent."""
        self._held = False
        self._let_go()

    def _let_go(self) -> None:
        if not self._held and not self._jobs and self._end:
            self._end = 0
            self.lookup.release()
