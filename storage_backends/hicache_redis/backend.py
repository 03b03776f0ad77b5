"""The Redis backend: one key an object, batches straight between sockets and slots."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self

from hicache.errors import CacheClosed, InvalidInput, StorageUnavailable
from hicache.storage import codec
from hicache.storage.base import (
    MAX_MANIFEST,
    ListedObject,
    ObjectKey,
    ObjectResult,
    ObjectStatus,
    StorageBackend,
    StorageStatistics,
    StorageUrl,
    StoredObject,
)
from hicache.storage.codec import Verdict

from .channel import Deadline
from .cluster import make_topology
from .detour import Detour
from .health import Health
from .labels import Labels
from .listing import Lister, raw_loop
from .names import Names
from .pool import NodePool
from .settings import RedisSettings
from .sweep import Sweeper
from .topology import Topology
from .transfers import OK, Reads, Writes, ask, command, fetch, store
from .trouble import Trouble, told

__all__ = ["RedisBackend"]

_WORKERS: Final = 16
_GRACE: Final = 1.0


class RedisBackend(StorageBackend):
    """Objects in Redis or Valkey. Thread-safe; calls work in the caller's thread, and one more a node of a cluster.

    Every call ends by its deadline, with what came in time. A node that does not answer is left alone for up to two
    seconds at a time and then tried by one caller; its keys are FAILED meanwhile. The words for reasons are in
    `trouble`.

    Args:
        settings: where and how.
        now: a monotonic clock in seconds.

    Raises:
        ConfigError: the server is there and cannot be used like this; the text says why and what to do.
    """

    def __init__(self, settings: RedisSettings, *, now: Callable[[], float] = time.monotonic) -> None:
        self.settings: Final = settings
        self._now = now
        self._names = Names(settings.prefix)
        self._topology: Topology = make_topology(settings, now=now)
        self._labels = Labels(self._names, self._topology, shown=settings.shown, now=now)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._detour = Detour(self._topology, ttl=settings.ttl)
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False
        self._pid = os.getpid()
        self._sweeper = Sweeper(self._names, self._topology, deadline=self._deadline)
        self._lister = Lister(self._names, self._topology, deadline=self._deadline, shown=settings.shown)
        self.health: Final = Health(settings, self._topology, now=now)
        try:
            self.health.open(self._deadline())
        except BaseException:
            self._topology.close()
            raise

    @classmethod
    def from_url(cls, url: StorageUrl) -> Self:
        """Open by URL; the package's README has the forms and parameters."""
        return cls(RedisSettings.from_url(url))

    # --- verbs --------------------------------------------------------------------------------------------------

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """See `StorageBackend`. A buffer of another length than the stored payload is FAILED ("size")."""
        deadline = self._begin()
        names = self._names.objects(keys)
        batch = Reads(names, keys, buffers, [None] * len(keys))
        reason = self._each_node(names, deadline, lambda pool, at: self._get_from(pool, at, batch, deadline))
        results = [result or _failed(reason) for result in batch.results]
        moved = sum(b.nbytes for b, result in zip(buffers, results, strict=True) if result.status is ObjectStatus.OK)
        self._count("gets", "hits", "bytes_read", results, moved)
        return results

    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        """See `StorageBackend`. What is there with the same header, checksum of the payload included, is not sent.

        FAILED reasons: those of `trouble`, "newer" (the name holds an object of a newer version), "cleared" (the
        generation has ended).
        """
        deadline = self._begin()
        names = self._names.objects([stored.key for stored in objects])
        batch = Writes(names, objects, [None] * len(objects), disbelieved=self._detour.disbelieved(names))
        self._refuse(batch, deadline)
        reason = self._each_node(names, deadline, lambda pool, at: self._put_to(pool, at, batch, deadline))
        results = [result or _failed(reason) for result in batch.results]
        self._detour.believe(name for name, result in zip(names, results, strict=True) if result is OK)
        skipped = set(batch.skipped)
        good = (i for i, result in enumerate(results) if result.status is ObjectStatus.OK and i not in skipped)
        self._count("puts", "stored", "bytes_written", results, sum(objects[i].payload.nbytes for i in good))
        return results

    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        """See `StorageBackend`. All keys of a node in one round trip; those of a node in trouble are False.

        Raises:
            StorageUnavailable: no node could be asked.
        """
        del stop_at_first_miss  # one round trip costs the same for all
        return self._flags(keys, b"EXISTS")

    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`. With a TTL it begins anew. The server's recency has a resolution of one second.

        Keys of a node in trouble are True: nobody knows that they are absent.

        Raises:
            StorageUnavailable: no node could be asked.
        """
        if self.settings.ttl:
            return self._flags(keys, b"EXPIRE", b"%d" % self.settings.ttl, unknown=True)
        return self._flags(keys, b"TOUCH", unknown=True)

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`.

        Raises:
            StorageUnavailable: no node could be asked.
        """
        return self._flags(keys, b"UNLINK")

    def generation(self, namespace: bytes) -> int:
        """See `StorageBackend`.

        Raises:
            StorageUnavailable: it cannot be read.
        """
        return self._labels.generation(namespace, self._begin())

    def clear(self, namespace: bytes, generation: int) -> None:
        """See `StorageBackend`. Older objects are removed in the background.

        Raises:
            StorageUnavailable: the new generation could not be written.
        """
        floor = self._labels.raise_to(namespace, generation, self._begin())
        self._sweeper.sweep(namespace, floor)

    def wait_swept(self, timeout: float) -> bool:
        """Wait until the remains of cleared generations are gone; False if it took longer than `timeout` seconds."""
        return self._sweeper.wait_idle(timeout)

    def write_manifest(self, namespace: bytes, document: bytes) -> None:
        """See `Manifests`.

        Raises:
            InvalidInput: longer than 64 KiB.
            StorageUnavailable: it could not be written.
        """
        if len(document) > MAX_MANIFEST:
            raise InvalidInput(f"manifest of {len(document)} bytes is above {MAX_MANIFEST}: leave out what is long")
        self._labels.write_manifest(namespace, document, self._begin())

    def read_manifests(self) -> dict[bytes, bytes]:
        """See `Manifests`.

        Raises:
            StorageUnavailable: a node cannot be read.
        """
        return self._labels.read_manifests(self._begin())

    def list_objects(self) -> Iterator[ListedObject]:
        """See `Listing`.

        Raises:
            StorageUnavailable: a node cannot be read.
        """
        self._begin()
        return self._lister.objects()

    def check_object(self, key: ObjectKey) -> Verdict | None:
        """See `Listing`. Counts as a use for the server's recency.

        Raises:
            StorageUnavailable: it cannot be read.
        """
        self._begin()
        return self._lister.check(key)

    def raw_loop(self, payloads: Sequence[memoryview], buffers: Sequence[memoryview]) -> tuple[float, float]:
        """See `RawMedium`.

        Raises:
            StorageUnavailable: it broke off.
        """
        try:
            return raw_loop(self._names, self._topology, payloads, buffers, self._begin())
        except Trouble as trouble:
            raise StorageUnavailable(f"{self.settings.shown}: the raw loop broke off: {trouble.reason}") from trouble

    def statistics(self) -> StorageStatistics:
        """See `StorageBackend`. Does not wait for the server.

        What the server holds is not this backend's alone, so `objects` and `bytes_used` are 0; `capacity` is its
        `maxmemory`, and `evicted` counts the keys of anybody, some seconds old.
        """
        if not self._closed and self.health.claim_look():
            self._threads().submit(self.health.look_again, self._deadline())
        with self._lock:
            return StorageStatistics(
                puts=self._counts["puts"],
                gets=self._counts["gets"],
                hits=self._counts["hits"],
                bytes_written=self._counts["bytes_written"],
                bytes_read=self._counts["bytes_read"],
                capacity=self.health.capacity(),
                evicted=self.health.evicted(),
                by_reason=dict(self._reasons),
                ttl=self.settings.ttl,
            )

    def resting(self) -> bool:
        """See `Resting`."""
        return self._topology.resting()

    def close(self) -> None:
        """See `StorageBackend`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            executor, self._executor = self._executor, None
        self._sweeper.close(self.settings.deadline + _GRACE)
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)
        self._topology.close()

    # --- one node -----------------------------------------------------------------------------------------------

    def _get_from(self, pool: NodePool, at: Sequence[int], batch: Reads, deadline: Deadline) -> None:
        try:
            with pool.channel(deadline) as channel:
                fetch(channel, batch, at, self.settings.window)
        except Trouble as trouble:
            self._topology.noticed(pool, trouble.reason)
            _fail_rest(batch.results, at, trouble.reason, keep=batch.errors)
        for index in at:
            if index in batch.errors or index in batch.doubtful:
                batch.results[index] = self._detour.get(batch, index, pool, deadline)

    def _put_to(self, pool: NodePool, at: Sequence[int], batch: Writes, deadline: Deadline) -> None:
        wanted = [index for index in at if batch.results[index] is None]
        try:
            with pool.channel(deadline) as channel:
                store(channel, batch, wanted, window=self.settings.window, ttl=self.settings.ttl)
        except Trouble as trouble:
            self._topology.noticed(pool, trouble.reason)
            _fail_rest(batch.results, wanted, trouble.reason, keep=batch.errors)
        for index in wanted:
            if index in batch.errors:
                batch.results[index] = self._detour.put(batch, index, pool, deadline)

    def _flags(self, keys: Sequence[ObjectKey], verb: bytes, *arguments: bytes, unknown: bool = False) -> list[bool]:
        """One command a key that answers a number; True where it is above zero, `unknown` where there is no answer."""
        deadline = self._begin()
        names = self._names.objects(keys)
        answers: list[int | str | None] = [None] * len(keys)

        def work(pool: NodePool, at: Sequence[int]) -> None:
            requests = [command(verb, names[index], *arguments) for index in at]
            try:
                with pool.channel(deadline) as channel:
                    for index, answer in zip(at, ask(channel, requests), strict=True):
                        answers[index] = answer
            except Trouble as trouble:
                self._topology.noticed(pool, trouble.reason)
                for index in at:
                    answers[index] = trouble.reason
            for index in at:
                word = answers[index]
                if isinstance(word, str) and word in self._topology.redirects:
                    answers[index] = self._detour.ask(pool, names[index], deadline, (verb, *arguments), word)

        reason = self._each_node(names, deadline, work)
        words = [reason if answer is None else answer for answer in answers if not isinstance(answer, int)]
        with self._lock:
            self._reasons.update(str(word) for word in words)
        if keys and len(words) == len(keys):
            raise StorageUnavailable(f"{self.settings.shown} cannot be asked: {told(str(words[0]))}")
        return [answer > 0 if isinstance(answer, int) else unknown for answer in answers]

    # --- all nodes ----------------------------------------------------------------------------------------------

    def _each_node(
        self, names: Sequence[bytes], deadline: Deadline, work: Callable[[NodePool, list[int]], None]
    ) -> str:
        """Do the work on each node that has some of the keys, at the same time; "" or why no node is known."""
        if not names:
            return ""
        try:
            groups = self._topology.group(names, deadline)
        except Trouble as trouble:
            return trouble.reason
        (first, mine), *others = groups
        futures = [self._threads().submit(work, pool, at) for pool, at in others]
        work(first, mine)
        for future in futures:
            future.result()
        return ""

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                if self._closed:
                    raise CacheClosed(f"{self.settings.shown} is closed")
                self._executor = ThreadPoolExecutor(_WORKERS, thread_name_prefix="hicache-redis")
            return self._executor

    # --- small things -------------------------------------------------------------------------------------------

    def _refuse(self, batch: Writes, deadline: Deadline) -> None:
        """Answer for objects that nobody would ever read."""
        floors = {stored.key.namespace: 0 for stored in batch.objects}
        for namespace in floors:
            floors[namespace] = self._labels.floor(namespace, deadline)
        for index, stored in enumerate(batch.objects):
            reason = _header_trouble(stored)
            if len(stored.header) + stored.payload.nbytes > self.health.largest_value:
                reason = reason or "too_large"
            if not reason and stored.key.generation < floors[stored.key.namespace]:
                reason = "cleared"
            if reason:
                batch.results[index] = _failed(reason)

    def _begin(self) -> Deadline:
        if self._closed or self._pid != os.getpid():
            raise CacheClosed(f"{self.settings.shown} is closed" + ("" if self._closed else " in a forked process"))
        return self._deadline()

    def _deadline(self) -> Deadline:
        return Deadline(self._now, self.settings.deadline)

    def _count(self, asked: str, good: str, moved: str, results: list[ObjectResult], amount: int) -> None:
        with self._lock:
            self._counts[asked] += len(results)
            self._counts[moved] += amount
            for result in results:
                if result.status is ObjectStatus.OK:
                    self._counts[good] += 1
                else:
                    self._reasons[result.reason] += 1


def _failed(reason: str) -> ObjectResult:
    return ObjectResult(ObjectStatus.FAILED, reason)


def _fail_rest(results: list[ObjectResult | None], at: Sequence[int], reason: str, *, keep: dict[int, str]) -> None:
    for index in at:
        if results[index] is None and index not in keep:
            results[index] = _failed(reason)


def _header_trouble(stored: StoredObject) -> str:
    """Why the object cannot be stored under its key; empty if it can."""
    try:
        header = codec.decode_header(stored.header, likely=stored.key)
    except codec.HeaderError as error:
        return f"header:{error.reason}"
    if (
        header.key != stored.key
        or header.payload_length != stored.payload.nbytes
        or header.length != len(stored.header)
    ):
        return "header:identity"
    return ""
