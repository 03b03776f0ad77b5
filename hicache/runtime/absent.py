"""A short memory of pages that storage did not have, so that nobody asks for them again and again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from hicache.clock import Clock

LIMIT: Final = 65_536


class AbsentPages:
    """Pages found missing, each for a short time: others may write them. Thread-safe; bounded.

    Args:
        clock: its time.
        seconds: how long a page counts as absent; 0 remembers nothing.
    """

    def __init__(self, clock: Clock, *, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._lock = threading.Lock()
        self._until: OrderedDict[tuple[bytes, int, bytes], float] = OrderedDict()

    def note(self, namespace: bytes, generation: int, page_hash: bytes) -> None:
        """Storage did not have the page just now."""
        if self._seconds <= 0:
            return
        key = (namespace, generation, page_hash)
        with self._lock:
            self._until[key] = self._clock.now() + self._seconds
            self._until.move_to_end(key)
            if len(self._until) > LIMIT:
                self._until.popitem(last=False)

    def forget(self, namespace: bytes, generation: int, page_hash: bytes) -> None:
        """The page was stored."""
        with self._lock:
            self._until.pop((namespace, generation, page_hash), None)

    def clear(self) -> None:
        """Another storage is there."""
        with self._lock:
            self._until.clear()

    def leading(self, namespace: bytes, generation: int, page_hashes: list[bytes]) -> int:
        """How many leading pages are not known to be absent."""
        if not self._until:
            return len(page_hashes)
        now = self._clock.now()
        with self._lock:
            for i, page_hash in enumerate(page_hashes):
                until = self._until.get((namespace, generation, page_hash))
                if until is not None and until > now:
                    return i
        return len(page_hashes)
