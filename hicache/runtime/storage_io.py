"""Storage work on its own threads, so that the tiers above never wait behind it.

Reads and writes have their own queues and threads. Results go to the `done` of each transfer, exactly once, also when
the work raised, the queue was closed, or the transfer was cancelled before anybody began it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache.core.transfers import Transfer
from hicache.records import PageResult
from hicache.runtime.absent import AbsentPages
from hicache.runtime.objects import PageObjects
from hicache.runtime.options import Options
from hicache.runtime.queues import BoundedQueue, Job, QueueStatistics, Workers
from hicache.storage.base import Manifests, StorageBackend

_log = logging.getLogger("hicache.runtime")

Results = Sequence[PageResult]
Done = Callable[[int, Results], None]
"""Takes a transfer's id and its results, from a worker thread."""

FIRST_PROBE = 8
LONGEST_PROBE = 256


@dataclass(frozen=True, slots=True)
class Probe:
    """A question how much of a prompt is in storage.

    Attributes:
        namespace, generation: whose pages.
        page_hashes: the pages asked for, in chain order.
        found: called from a read thread with (leading pages there, whether that is the final word), more than once.
        wanted: whether anybody still waits for the answer.
    """

    namespace: bytes
    generation: int
    page_hashes: list[bytes]
    found: Callable[[int, bool], None]
    wanted: Callable[[], bool]


class StorageIO:
    """Runs FETCH and PUT transfers and probes. Thread-safe; its methods never block.

    Args:
        backend: the guarded backend; not closed here.
        objects: pages as objects of it.
        options: threads and bounds.
        absent: memory of pages that are not there.
        page_bytes: bytes of a page.

    Attributes:
        reads, writes: the two queues.
        manifest: gives the manifest of a derived namespace; called once each, in a write thread.
    """

    def __init__(
        self,
        backend: StorageBackend,
        *,
        objects: PageObjects,
        options: Options,
        absent: AbsentPages,
        page_bytes: int,
    ) -> None:
        self._backend = backend
        self._objects = objects
        self._absent = absent
        self._page_bytes = page_bytes
        self.manifest: Callable[[bytes], bytes | None] = _no_manifest
        self._manifests: set[bytes] = set()
        self._manifest_lock = threading.Lock()
        self.reads = BoundedQueue(options.read_bound)
        self.writes = BoundedQueue(options.write_bound)
        background = options.background
        self._workers = (
            Workers("read", self.reads, threads=options.read_threads if background else 0),
            Workers("write", self.writes, threads=options.write_threads if background else 0),
        )

    def fetch(self, transfer: Transfer, done: Done) -> bool:
        """Read a transfer's pages into HOST; False if the queue is full, then `done` is not called."""
        return self.reads.offer(self._job(transfer, self._read, done))

    def put(self, transfer: Transfer, done: Done) -> bool:
        """Write a transfer's pages to storage; False if the queue is full, then `done` is not called."""
        return self.writes.offer(self._job(transfer, self._write, done))

    def probe(self, probe: Probe) -> bool:
        """Ask what is there; False if the queue is full. It goes in front of reads, which are much longer."""
        return self.call(lambda: self._ask(probe), fail=lambda: probe.found(0, True))

    def call(self, work: Callable[[], None], *, fail: Callable[[], None]) -> bool:
        """Run something short on a read thread, in front of the reads; False if the queue is full."""
        return self.reads.offer(Job(0, work, fail), first=True)

    def statistics(self) -> tuple[QueueStatistics, QueueStatistics]:
        """Snapshots of the read and the write queue."""
        return self.reads.statistics(), self.writes.statistics()

    def close(self, join: Callable[[threading.Thread], None]) -> int:
        """Fail what nobody has begun, end the threads. Returns how many threads are still inside the backend."""
        for queue in (self.reads, self.writes):
            for job in queue.close():
                job.fail()
        return sum(workers.join(join) for workers in self._workers)

    def _job(self, transfer: Transfer, work: Callable[[Transfer], Results], done: Done) -> Job:
        def fail() -> None:
            done(transfer.id, [PageResult.FAILED] * transfer.count)

        return Job(transfer.count * self._page_bytes, lambda: done(transfer.id, work(transfer)), fail)

    def _read(self, transfer: Transfer) -> Results:
        results = self._objects.read(transfer)
        tree = transfer.tree
        for page, result in zip(transfer.pages, results, strict=True):
            if result in (PageResult.SOURCE_BAD, PageResult.SOURCE_GONE):
                self._absent.note(tree.namespace, tree.generation, page.hash)
        return results

    def _write(self, transfer: Transfer) -> Results:
        results = self._objects.write(transfer)
        tree = transfer.tree
        for page, result in zip(transfer.pages, results, strict=True):
            if result is PageResult.OK:
                self._absent.forget(tree.namespace, tree.generation, page.hash)
        if PageResult.OK in results:
            self._describe(tree.namespace)
        return results

    def _ask(self, probe: Probe) -> None:
        """Growing batches: a prompt that is not there costs one small question, a long one few large ones."""
        found, size = 0, FIRST_PROBE
        pages = self._absent.leading(probe.namespace, probe.generation, probe.page_hashes)
        while found < pages and probe.wanted():
            asked = probe.page_hashes[found : min(found + size, pages)]
            there = self._objects.contains(probe.namespace, probe.generation, asked)
            found += there
            if there < len(asked):
                self._absent.note(probe.namespace, probe.generation, probe.page_hashes[found])
                break
            if found < pages:
                probe.found(found, False)
            size = min(2 * size, LONGEST_PROBE)
        probe.found(found, True)

    def _describe(self, namespace: bytes) -> None:
        """The namespace's manifest, once. It only helps people: its failure fails nothing, and the next put retries."""
        backend = self._backend
        if namespace in self._manifests or not isinstance(backend, Manifests):
            return
        with self._manifest_lock:
            if namespace in self._manifests:
                return
            self._manifests.add(namespace)
        try:
            document = self.manifest(namespace)
            if document is not None:
                backend.write_manifest(namespace, document)
        except Exception:
            self._manifests.discard(namespace)
            _log.warning("the manifest of namespace %s could not be written", namespace.hex(), exc_info=True)


def _no_manifest(namespace: bytes) -> None:
    del namespace
