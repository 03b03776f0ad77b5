"""Storage work on its own threads, so that the tiers above never wait behind it.

Reads and writes have their own queues and threads. Results go to the `done` of each transfer, exactly once, also when
the work raised, the queue was closed, or the transfer was cancelled before anybody began it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from hicache.core.transfers import Transfer, TransferKind
from hicache.records import PageResult
from hicache.runtime.absent import AbsentPages
from hicache.runtime.lanes import Lane
from hicache.runtime.objects import PageObjects
from hicache.runtime.options import Options
from hicache.runtime.port import DETACHED, StoragePort
from hicache.runtime.queues import Job, QueueStatistics, nothing

_log = logging.getLogger("hicache.runtime")

Results = Sequence[PageResult]
Done = Callable[[int, Results], None]
"""Takes a transfer's id and its results, from a worker thread."""

FIRST_PROBE = 8
LONGEST_PROBE = 256

QUEUE_FULL: Final = "queue_full"
PREFETCH_REFUSED: Final = "prefetch_queue_full"
HUNG: Final = "storage_hung"

_READS: Final = 0
_WRITES: Final = 1


@dataclass(frozen=True, slots=True)
class Probe:
    """A question how much of a prompt is in storage.

    Attributes:
        namespace, generation: whose pages.
        page_hashes: the pages asked for, in chain order.
        found: called from a read thread with (leading pages there, whether that is the final word), more than once.
        failed: called instead of the final word, with the leading pages there, when storage does not tell more.
        wanted: whether anybody still waits for the answer.
    """

    namespace: bytes
    generation: int
    page_hashes: list[bytes]
    found: Callable[[int, bool], None]
    failed: Callable[[int], None]
    wanted: Callable[[], bool]


class StorageWork(Protocol):
    """What the executor and the loader ask of storage. Its methods never block."""

    @property
    def attached(self) -> bool:
        """Whether there is a storage that may be used."""
        ...

    @property
    def attachment(self) -> int:
        """How many storages have been attached so far."""
        ...

    def fetch(self, transfer: Transfer, done: Done) -> bool:
        """Read a transfer's pages into HOST; False if that was turned away, then `done` is not called."""
        ...

    def put(self, transfer: Transfer, done: Done) -> bool:
        """Write a transfer's pages; likewise."""
        ...

    def touch(self, transfer: Transfer, done: Done) -> bool:
        """Mark a transfer's pages as used; likewise."""
        ...

    def probe(self, probe: Probe) -> bool:
        """Ask what is there; False if that was turned away."""
        ...

    def refusal(self, kind: TransferKind) -> str:
        """Why a transfer of this kind is turned away now."""
        ...


class StorageIO:
    """Runs FETCH, PUT and TOUCH transfers and probes. Thread-safe; its methods never block.

    Args:
        port: where the backend is attached; not closed here.
        objects: pages as objects of it.
        options: threads and bounds.
        absent: memory of pages that are not there.
        page_bytes: bytes of a page.
        now: a monotonic clock in seconds.

    Attributes:
        lanes: reads and writes, each with its queue and threads.
        reads, writes: the two queues.
        attached: whether a backend is there and may be used. Changed under the reducer's lock.
        attachment: how many backends have been attached so far: answers of an earlier one say nothing of this one.
        begun: called after a job was queued, from any thread.
        ended: called from a worker thread after each job, once it is counted no more: later than the job's `done`.
        manifest: gives the manifest of a derived namespace; called once each, in a write thread.
    """

    def __init__(
        self,
        port: StoragePort,
        *,
        objects: PageObjects,
        options: Options,
        absent: AbsentPages,
        page_bytes: int,
        now: Callable[[], float],
    ) -> None:
        self._port = port
        self._objects = objects
        self._absent = absent
        self._page_bytes = page_bytes
        self.attached = port.backend is not None
        self.attachment = int(self.attached)
        self.begun: Callable[[], None] = nothing
        self.ended: Callable[[], None] = nothing
        self.manifest: Callable[[bytes], bytes | None] = _no_manifest
        self._manifests: set[bytes] = set()
        self._manifest_lock = threading.Lock()
        lane = partial(
            Lane,
            calls=port.calls,
            now=now,
            call_timeout=options.call_timeout,
            most_hung=options.max_hung,
            probe_seconds=options.probe_seconds,
            ended=self._job_ended,
        )
        background = options.background
        self.lanes = (
            lane("read", options.read_bound, threads=options.read_threads if background else 0),
            lane("write", options.write_bound, threads=options.write_threads if background else 0),
        )
        self.reads, self.writes = (entry.queue for entry in self.lanes)

    def fetch(self, transfer: Transfer, done: Done) -> bool:
        """Read a transfer's pages into HOST; False if that was turned away, then `done` is not called."""
        return self._offer(_READS, self._job(transfer, self._read, done))

    def put(self, transfer: Transfer, done: Done) -> bool:
        """Write a transfer's pages to storage; False if that was turned away, then `done` is not called."""
        return self._offer(_WRITES, self._job(transfer, self._write, done))

    def touch(self, transfer: Transfer, done: Done) -> bool:
        """Mark a transfer's pages as used; False if that was turned away, then `done` is not called."""
        return self._offer(_WRITES, self._job(transfer, self._objects.touch, done, cost=0))

    def probe(self, probe: Probe) -> bool:
        """Ask what is there; False if the queue is full. It goes in front of reads, which are much longer."""
        return self.call(lambda: self._ask(probe), fail=lambda: probe.failed(0))

    def call(self, work: Callable[[], None], *, fail: Callable[[], None]) -> bool:
        """Run something short on a read thread, in front of the reads; False if the queue is full."""
        return self._offer(_READS, Job(0, work, fail), first=True)

    def call_writing(self, work: Callable[[], None], *, fail: Callable[[], None]) -> bool:
        """Run something short on a write thread; False if the queue is full."""
        return self._offer(_WRITES, Job(0, work, fail))

    def refusal(self, kind: TransferKind) -> str:
        """Why a transfer of this kind is turned away now."""
        if not self.attached:
            return DETACHED
        reads = kind is TransferKind.FETCH
        if self.lanes[_READS if reads else _WRITES].stopped:
            return HUNG
        return PREFETCH_REFUSED if reads else QUEUE_FULL

    def look(self) -> float | None:
        """Give up what hangs. Returns seconds until there may be more to give up; None when nothing is under way."""
        waits = [left for lane in self.lanes if (left := lane.look()) is not None]
        return min(waits, default=None)

    @property
    def idle(self) -> bool:
        """Whether no storage work waits, runs or hangs."""
        return all(lane.idle for lane in self.lanes)

    def free_to_ask(self) -> bool:
        """Whether a question would be answered at once, as a read thread has nothing to do."""
        reads = self.reads.statistics()
        return self.attached and not self.lanes[_READS].stopped and not reads.waiting and not reads.running

    def changed(self, *, attached: bool) -> None:
        """A backend was attached or detached: what was known of the one before does not count any more."""
        self.attached = attached
        self.attachment += attached
        self._absent.clear()
        with self._manifest_lock:
            self._manifests.clear()

    def drop(self) -> None:
        """Fail what nobody has begun."""
        for lane in self.lanes:
            lane.drop()

    def abandon(self) -> None:
        """Give up every thread inside the backend now."""
        for lane in self.lanes:
            lane.abandon()

    def statistics(self) -> tuple[QueueStatistics, QueueStatistics]:
        """Snapshots of the read and the write queue."""
        reads, writes = self.lanes
        return reads.statistics(), writes.statistics()

    def close(self, join: Callable[[threading.Thread], None]) -> int:
        """Fail what nobody has begun, end the threads. Returns how many threads are still inside the backend."""
        return sum(lane.close(join) for lane in self.lanes)

    def _job_ended(self) -> None:
        self.ended()

    def _offer(self, lane: int, job: Job, *, first: bool = False) -> bool:
        if not self.attached or not self.lanes[lane].offer(job, first=first):
            return False
        self.begun()
        return True

    def _job(
        self, transfer: Transfer, work: Callable[[Transfer], Results], done: Done, *, cost: int | None = None
    ) -> Job:
        def fail() -> None:
            done(transfer.id, [PageResult.FAILED] * transfer.count)

        cost = transfer.count * self._page_bytes if cost is None else cost
        return Job(cost, lambda: done(transfer.id, work(transfer)), fail)

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
            try:
                there = self._objects.contains(probe.namespace, probe.generation, asked)
            except Exception as error:  # says nothing about any page
                _log.debug("storage could not be asked for %d pages: %r", len(asked), error)
                probe.failed(found)
                return
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
        if namespace in self._manifests:
            return
        with self._manifest_lock:
            if namespace in self._manifests:
                return
            self._manifests.add(namespace)
        try:
            document = self.manifest(namespace)
            if document is not None:
                self._port.write_manifest(namespace, document)
        except Exception:
            self._manifests.discard(namespace)
            _log.warning("the manifest of namespace %s could not be written", namespace.hex(), exc_info=True)


def _no_manifest(namespace: bytes) -> None:
    del namespace
