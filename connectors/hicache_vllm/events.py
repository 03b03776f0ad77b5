"""Which pages of this model come and go in the service, for vLLM's own publisher of KV events."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from hicache.errors import HicacheError
from hicache.events import Cleared, Event, Removed, Stored
from hicache.records import Tier
from hicache.rpc.service import EventBatch

__all__ = ["Gone", "Kept", "PageFeed"]

_log = logging.getLogger("vllm.hicache")

MEDIA: Final = {Tier.HOST: "CPU", Tier.STORAGE: "FS"}
"""What vLLM calls the tiers below its own."""

MOST_WAITING: Final = 10_000
"""Changes that nobody has taken; the oldest go, as in any publisher's queue."""

AGAIN_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Kept:
    """Pages are in a tier now: hashes in the order of their prompt, that of the page before, and their tokens."""

    medium: str
    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    adapter: str | None
    salt: str | None


@dataclass(frozen=True, slots=True)
class Gone:
    """Pages have left a tier, deepest first."""

    medium: str
    hashes: tuple[bytes, ...]


Change: TypeAlias = Kept | Gone
Whose: TypeAlias = Callable[[bytes], tuple[str | None, str | None] | None]
Watch: TypeAlias = Callable[[], Iterable[EventBatch]]


class PageFeed:
    """Follows the service's events in a thread of its own; what is missed while it is away is made up for.

    Args:
        watch: begins to watch, with a snapshot; called again when that has ended.
        whose: name of the adapter and salt of a namespace's digest; None: not this engine's.
        wait: for so many seconds, or until it is told to end; returns whether it is.
    """

    def __init__(self, watch: Watch, whose: Whose, *, wait: Callable[[float], bool] | None = None) -> None:
        self._watch = watch
        self._whose = whose
        self._stop = threading.Event()
        self._wait = wait or self._stop.wait
        self._changes: deque[Change] = deque(maxlen=MOST_WAITING)
        self._known: dict[tuple[str, bytes], bytes] = {}
        self._snapshot: dict[tuple[str, bytes], bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="hicache-vllm-events", daemon=True)
        self._thread.start()

    def take(self) -> list[Change]:
        """What has changed since this was asked last. Any thread may ask."""
        found = []
        while self._changes:
            found.append(self._changes.popleft())
        return found

    def close(self) -> None:
        """End, with the next event or not at all: the thread does not keep the process."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                for batch in self._watch():
                    if self._stop.is_set():
                        return
                    self.apply(batch)
            except HicacheError as error:
                _log.debug("hicache: events are not told: %s", error)
            except Exception:
                _log.exception("hicache: events are not told any more")
                return
            if self._wait(AGAIN_SECONDS):
                return

    def apply(self, batch: EventBatch) -> None:
        """Take a batch in; for the thread, and for tests."""
        if batch.snapshot and self._snapshot is None:
            self._snapshot = {}
        for event in batch.events:
            self._one(event)
        if batch.snapshot_end and self._snapshot is not None:
            known, self._snapshot = self._snapshot, None
            self._remove([key for key in self._known if key not in known])

    def _one(self, event: Event) -> None:
        if isinstance(event, Cleared):
            self._remove([key for key, namespace in self._known.items() if namespace == event.namespace])
            return
        medium = MEDIA.get(event.tier)
        whose = None if medium is None else self._whose(event.namespace)
        if medium is None or whose is None:
            return
        if isinstance(event, Removed):
            self._remove([(medium, page) for page in event.page_hashes if (medium, page) in self._known])
            return
        keys = [(medium, page) for page in event.page_hashes]
        if self._snapshot is not None:
            self._snapshot.update(dict.fromkeys(keys, event.namespace))
        if all(key in self._known for key in keys):
            return
        self._known.update(dict.fromkeys(keys, event.namespace))
        self._changes.append(_kept(event, medium, *whose))

    def _remove(self, keys: list[tuple[str, bytes]]) -> None:
        for medium in dict.fromkeys(medium for medium, _ in keys):
            self._changes.append(Gone(medium, tuple(page for one, page in keys if one == medium)))
        for key in keys:
            del self._known[key]


def _kept(event: Stored, medium: str, adapter: str | None, salt: str | None) -> Kept:
    tokens = tuple(np.frombuffer(event.tokens, "<u4").tolist())
    return Kept(medium, event.page_hashes, event.parent_hash, tokens, adapter, salt)
