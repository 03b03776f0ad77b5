"""Pages of one rank in a storage backend: looked up, read into and written from views of the engine's memory.

Every byte goes through a buffer of ours. The engine's order of axes is not the stored one; and a storage call that was
given up may still write somewhere, which must never be a slot that the engine has used for something else meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from hicache.core.partition import ShardPart
from hicache.errors import DeadlineExceeded
from hicache.storage.base import Manifests, ObjectKey, ObjectResult, ObjectStatus, StorageBackend, StoredObject
from hicache.storage.codec import encode_header
from hicache_sglang.calls import Complaints, TimedCalls
from hicache_sglang.counters import Counters
from hicache_sglang.identity import Identity
from hicache_sglang.pool import Bytes

__all__ = ["PageChain", "PageName", "PageStore", "StoragePages"]

BATCH_BYTES: Final = 2**25
"""About the bytes of one storage call, and of a buffer."""

KEPT_BUFFERS: Final = 4
"""Buffers kept for the next call: SGLang has one thread that reads and one that writes."""

GENERATION_SECONDS: Final = 10.0
"""After so long it is asked again whether somebody cleared the namespace."""

WRONG_LENGTH: Final = "size"
"""What backends say of an object that is longer or shorter than the buffer for it."""


@dataclass(frozen=True, slots=True)
class PageName:
    """A page as the engine names it.

    Attributes:
        hash: sha256 chain hash, 32 bytes.
        parent: hash of the page before; None for a first page, or where it is not known.
        depth: index in its chain; 0 where it is not known.
    """

    hash: bytes
    parent: bytes | None = None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class PageChain:
    """Consecutive pages, as the engine names them in one call.

    Attributes:
        names: of the pages.
        before: hashes of the pages in front of them, from the first of the prompt on, glued together; empty where
            there are none, or none are told.
    """

    names: Sequence[PageName]
    before: bytes = b""

    def __len__(self) -> int:
        return len(self.names)


class PageStore(Protocol):
    """Where the plug-in keeps pages. Several threads call at once; trouble is a miss, only `clear` raises."""

    def found(self, chain: PageChain) -> int:
        """How many pages, from the first on and without a hole, are there."""
        ...

    def read(self, chain: PageChain, pages: Sequence[Bytes | None]) -> list[bool]:
        """Fill canonical views; each result tells whether its view has the page. Others may have been left as is."""
        ...

    def write(self, chain: PageChain, pages: Sequence[Bytes | None]) -> list[bool]:
        """Store canonical views."""
        ...

    def clear(self) -> None:
        """Forget all pages of this namespace."""
        ...

    def close(self) -> None:
        """Let go of the storage. Idempotent."""
        ...


class StoragePages:
    """A `PageStore` over a storage backend. Thread-safe; owns and closes the backend, unless it is shared.

    Args:
        backend: keeps the contract to the letter (`open_storage`).
        identity: names this rank's pages.
        calls: run every call of the backend.
        counters: told of every page.
        complaints: told of trouble.
        shared: whether the backend is another's too, who closes it.
        now: a monotonic clock in seconds.

    Raises:
        StorageError, DeadlineExceeded: the storage does not say which generation is current.
    """

    def __init__(
        self,
        backend: StorageBackend,
        identity: Identity,
        *,
        calls: TimedCalls,
        counters: Counters,
        complaints: Complaints,
        shared: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._namespace = identity.namespace.digest
        self._parts = identity.plan.parts
        self._page_bytes = identity.plan.page_bytes
        self._calls = calls
        self._counters = counters
        self._complaints = complaints
        self._shared = shared
        self._now = now
        self._batch = max(1, BATCH_BYTES // self._page_bytes)
        self._lock = threading.Lock()
        self._buffers: list[Bytes] = []
        self._generation = calls.run(lambda: backend.generation(self._namespace))
        self._asked_at = now()

    @property
    def generation(self) -> int:
        """The namespace's generation, as far as known."""
        return self._generation

    def found(self, chain: PageChain) -> int:
        """See `PageStore`. The first shard of this rank tells for the page: it is put last."""
        answers = self._contains(chain, stop=True)
        count = next((i for i, there in enumerate(answers) if not there), len(answers))
        self._counters.looked_up(len(chain), count)
        return count

    def there(self, chain: PageChain) -> list[bool]:
        """Of each page whether it is there, behind holes too."""
        answers = self._contains(chain, stop=False) or [False] * len(chain)
        self._counters.looked_up(len(chain), sum(answers))
        return answers

    def _contains(self, chain: PageChain, *, stop: bool) -> list[bool]:
        try:
            self._refresh()
            keys = [self._key(name, self._parts[0]) for name in chain.names]
            return list(self._calls.run(lambda: self._backend.contains(keys, stop_at_first_miss=stop)))
        except Exception as error:
            self._trouble("lookup", error, len(chain))
            return []

    def read(self, chain: PageChain, pages: Sequence[Bytes | None]) -> list[bool]:
        """See `PageStore`. Ends at the first page that fails: the engine uses nothing behind it."""
        started, names = self._now(), chain.names
        results = [False] * len(names)
        for first, end in self._batches(names):
            try:
                self._read_batch(names, pages, range(first, end), results)
            except Exception as error:  # whatever a backend raises, these pages are a miss
                self._trouble("read", error, end - first)
            if not all(results[first:end]):
                break
        self._counters.read(len(names), sum(results), self._page_bytes, self._now() - started)
        return results

    def write(self, chain: PageChain, pages: Sequence[Bytes | None]) -> list[bool]:
        """See `PageStore`. Pages are independent: one that fails stops no other; trouble ends it."""
        started, names = self._now(), chain.names
        results = [False] * len(names)
        for first, end in self._batches(names):
            try:
                self._refresh()
                self._write_batch(names, pages, range(first, end), results)
            except Exception as error:
                self._trouble("write", error, end - first)
                break
        self._counters.wrote(len(names), sum(results), self._page_bytes, self._now() - started)
        return results

    def write_manifest(self, document: bytes) -> None:
        """Leave what the namespace is beside its pages, where the storage keeps such documents."""
        backend = self._backend
        if isinstance(backend, Manifests):
            self._calls.run(lambda: backend.write_manifest(self._namespace, document))

    def clear(self) -> None:
        """See `PageStore`. All ranks that clear together come to one generation."""
        wanted = self._generation + 1
        self._calls.run(lambda: self._backend.clear(self._namespace, wanted))
        self._generation = max(wanted, self._calls.run(lambda: self._backend.generation(self._namespace)))

    def close(self) -> None:
        """See `PageStore`. A storage that hangs is left behind after the time of one call."""
        if self._shared:
            return
        try:
            self._calls.run(self._backend.close)
        except DeadlineExceeded:
            return

    # ---- one batch

    def _read_batch(
        self, names: Sequence[PageName], pages: Sequence[Bytes | None], batch: range, results: list[bool]
    ) -> None:
        buffer = self._take()
        keys, views = [], []
        for row, i in enumerate(batch):
            for part in self._parts:
                keys.append(self._key(names[i], part))
                views.append(_part(buffer[row], part))
        answers = self._calls.run(lambda: self._backend.get_into(keys, views))
        size = len(self._parts)
        for row, i in enumerate(batch):
            reason = self._judge(names[i], answers[row * size : (row + 1) * size])
            page = pages[i]
            if page is None:
                reason = reason or "place"
            if reason or page is None:
                self._counters.failed("read", reason)
                continue
            np.copyto(page, buffer[row].reshape(page.shape))
            results[i] = True
        self._give(buffer)

    def _write_batch(
        self, names: Sequence[PageName], pages: Sequence[Bytes | None], batch: range, results: list[bool]
    ) -> None:
        buffer = self._take()
        objects: dict[int, list[StoredObject]] = {}
        for row, i in enumerate(batch):
            page = pages[i]
            if page is None:
                self._counters.failed("write", "place")
                continue
            np.copyto(buffer[row].reshape(page.shape), page)
            objects[i] = [self._object(names[i], part, buffer[row]) for part in reversed(self._parts)]
        # What tells for a page goes last, and only where its siblings are there.
        rest = iter(self._put([stored for whole in objects.values() for stored in whole[:-1]]))
        siblings = {i: [next(rest) for _ in whole[:-1]] for i, whole in objects.items()}
        ready = [i for i, stored in siblings.items() if all(stored)]
        for i, done in zip(ready, self._put([objects[i][-1] for i in ready]), strict=True):
            results[i] = done
        self._give(buffer)

    def _put(self, objects: list[StoredObject]) -> list[bool]:
        if not objects:
            return []
        answers = self._calls.run(lambda: self._backend.put(objects))
        for answer in answers:
            if answer.status is not ObjectStatus.OK:
                self._counters.failed("write", answer.reason or answer.status.value)
                self._complaints.say("storage write failed", answer.reason or answer.status.value)
        return [answer.status is ObjectStatus.OK for answer in answers]

    def _object(self, name: PageName, part: ShardPart, page: Bytes) -> StoredObject:
        key = self._key(name, part)
        payload = _part(page, part)
        # SGLang gives hashes and no tokens. They are sha256 chains, which name tokens and past well enough.
        header = encode_header(key, parent_hash=name.parent, depth=name.depth, tokens=b"", payload=payload)
        return StoredObject(key, header, payload)

    def _judge(self, name: PageName, answers: Sequence[ObjectResult]) -> str:
        """Why a page is no hit; empty where it is."""
        for answer in answers:
            if answer.status is not ObjectStatus.OK:
                self._withdraw(name, answers)
                return answer.reason or answer.status.value
            parent = None if answer.header is None else answer.header.parent_hash
            if parent is not None and name.parent is not None and parent != name.parent:
                return "parent"
        return ""

    def _withdraw(self, name: PageName, answers: Sequence[ObjectResult]) -> None:
        """Remove what would only be found again, and never be a page.

        That is an object of another length than its geometry has, which a put would leave as it is, and the first
        shard of a page whose others are gone.
        """
        bad = [part for part, answer in zip(self._parts, answers, strict=True) if answer.reason == WRONG_LENGTH]
        gone = any(answer.status in (ObjectStatus.MISSING, ObjectStatus.CORRUPT) for answer in answers[1:])
        if (gone or bad) and answers[0].status is ObjectStatus.OK:
            bad.append(self._parts[0])
        if bad:
            keys = [self._key(name, part) for part in bad]
            self._calls.run(lambda: self._backend.delete(keys))

    # ---- tools

    def _trouble(self, kind: str, error: Exception, pages: int) -> None:
        self._counters.failed(kind, type(error).__name__, pages)
        self._complaints.say(f"storage {kind} failed", error)

    def _key(self, name: PageName, part: ShardPart) -> ObjectKey:
        return ObjectKey(self._namespace, self._generation, name.hash, part.shard)

    def _batches(self, names: Sequence[PageName]) -> Iterator[tuple[int, int]]:
        for first in range(0, len(names), self._batch):
            yield first, min(first + self._batch, len(names))

    def _refresh(self) -> None:
        """Ask now and then which generation is current: another process may have cleared."""
        if self._now() - self._asked_at < GENERATION_SECONDS:
            return
        self._asked_at = self._now()
        found = self._calls.run(lambda: self._backend.generation(self._namespace))
        self._generation = max(self._generation, found)

    def _take(self) -> Bytes:
        with self._lock:
            if self._buffers:
                return self._buffers.pop()
        return np.empty((self._batch, self._page_bytes), dtype=np.uint8)

    def _give(self, buffer: Bytes) -> None:
        """Keep a buffer. One whose call was given up never comes here: that call may still write into it."""
        with self._lock:
            if len(self._buffers) < KEPT_BUFFERS:
                self._buffers.append(buffer)


def _part(page: Bytes, part: ShardPart) -> memoryview:
    return page[part.offset : part.offset + part.length].data
