"""The workers' side: moves this rank's part of pages between the engine's tensors and the service's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from hicache.errors import HicacheError
from hicache.rpc.client.cache import ConnectedCache
from hicache.rpc.client.group import JoinedRequest
from hicache_vllm.copier import Copier
from hicache_vllm.counters import Counters
from hicache_vllm.layouts import Run, runs_of
from hicache_vllm.plans import Load, Report, StepPlan, Store
from hicache_vllm.tensors import KVTensors

__all__ = ["WorkerSide"]

BATCH_BYTES: Final = 4 * 2**20
"""Pages that are copied at once: small enough for the processor's caches, large enough that Python costs nothing."""

FENCE_SECONDS: Final = 30.0
"""For which a step waits until the blocks that it overwrites are read; a copy of them takes milliseconds."""

IDLE_SECONDS: Final = 0.01
"""For which a step without tokens waits for a copy to end."""


class WorkerSide:
    """One rank. Called by the engine's thread; copies run in a thread of its own.

    Args:
        cache: client of the service, of this rank.
        tensors: the engine's KV tensors.
        per_page: blocks a page.
        counters: gets what is counted.
    """

    def __init__(self, cache: ConnectedCache, tensors: KVTensors, *, per_page: int, counters: Counters) -> None:
        self._cache = cache
        self._tensors = tensors
        self._per_page = per_page
        self._batch = max(1, BATCH_BYTES // cache.host.page_bytes)
        self._counters = counters
        self._copier = Copier()
        self._lock = threading.Lock()
        self._waiting: dict[int, Load | Store] = {}
        self._received: set[str] = set()
        self._bad: set[int] = set()
        self._report = Report()
        self._kept: list[str] = []

    # ---- a step

    def fence(self, plan: StepPlan) -> None:
        """Wait until the stores whose blocks this step may overwrite have read them."""
        jobs = set(plan.fence)
        if jobs and not self._copier.wait_for(lambda: jobs.isdisjoint(self._waiting), FENCE_SECONDS):
            self._counters.failed("fence")

    def begin_stores(self, plan: StepPlan) -> None:
        """Begin to read what former steps have computed."""
        for store in plan.stores:
            self._begin(store, self._store)
        self._kept.extend(plan.kept)

    def begin_loads(self, plan: StepPlan) -> None:
        """Begin to bring pages."""
        for load in plan.loads:
            self._begin(load, self._load)
        for load in plan.loads:
            if load.layerwise:
                self._copier.wait_for(lambda job=load.job: job not in self._waiting, None)  # type: ignore[misc]

    def _begin(self, work: Any, run: Callable[[Any], None]) -> None:
        with self._lock:
            self._waiting[work.job] = work
        ready = self._tensors.mark()

        def body() -> None:
            try:
                ready()
                run(work)
            finally:
                self._end(work)

        (self._copier.load if isinstance(work, Load) else self._copier.store)(body)

    def _end(self, work: Load | Store) -> None:
        with self._lock:
            del self._waiting[work.job]
            self._report.done[work.job] += 1
            if isinstance(work, Load) and not work.layerwise:
                self._received.add(work.request)

    def take_finished(self, *, idle: bool) -> tuple[set[str], set[str]]:
        """Requests whose blocks are not read any more, and requests whose pages have come or will not.

        Args:
            idle: whether the engine has nothing to compute, so that it may wait a moment for something to end.
        """
        if idle and self._waiting:
            before = len(self._waiting)
            self._copier.wait_for(lambda: len(self._waiting) < before, IDLE_SECONDS)
        with self._lock:
            received, self._received = self._received, set()
            busy = {work.request for work in self._waiting.values() if isinstance(work, Store)}
            sent = {name for name in self._kept if name not in busy}
            self._kept = [name for name in self._kept if name in busy]
        return sent, received

    def take_bad_blocks(self) -> set[int]:
        """Blocks that did not come."""
        with self._lock:
            bad, self._bad = self._bad, set()
        return bad

    def take_report(self) -> Report:
        """What has ended since this was asked last."""
        with self._lock:
            report, self._report = self._report, Report()
        return report

    # ---- copies

    def _load(self, load: Load) -> None:
        begun = time.monotonic()
        done = 0
        try:
            done = self._bring(load)
        except HicacheError as error:
            self._count_failed(type(error).__name__, load, done)
            raise
        finally:
            with self._lock:
                self._bad.update(load.blocks[done:])
        if done < len(load.blocks):
            self._count_failed("lost" if load.ticket is None or not done else "overwritten", load, done)
        self._counters.add("load_seconds", count=time.monotonic() - begun)
        self._counters.add("load_bytes", count=done * self._tensors.block_bytes)

    def _count_failed(self, reason: str, load: Load, done: int) -> None:
        self._counters.failed(f"load: {reason}", -(-(len(load.blocks) - done) // self._per_page))

    def _bring(self, load: Load) -> int:
        """Copy pages into blocks; how many blocks, from the first on, are right."""
        if load.ticket is None:
            return 0
        first, skip = divmod(load.first, self._per_page)
        pages = -(-(skip + len(load.blocks)) // self._per_page)
        with self._cache.join(load.ticket) as joined:
            for at in range(0, pages, self._batch):
                count = min(self._batch, pages - at)
                buffer = np.empty((count, self._cache.host.page_bytes), np.uint8)
                good = joined.read_into(buffer, first=first + at)
                begin, end = max(at * self._per_page - skip, 0), (at + good) * self._per_page - skip
                blocks = load.blocks[begin : max(end, begin)]
                inside = skip if at == 0 else 0
                self._tensors.load(buffer, list(runs_of(blocks, first=inside, per_page=self._per_page)))
                if good < count:
                    return begin + len(blocks)
        return len(load.blocks)

    def _store(self, store: Store) -> None:
        begun = time.monotonic()
        pages = store.end - store.first
        with self._cache.join(store.ticket) as joined:
            done = self._write(joined, store)
            if done:
                joined.commit(upto=(store.first + done) * self._cache.page_size, wait=False)
        if done < pages:
            self._counters.failed("store: lost", pages - done)
        self._counters.add("store_seconds", count=time.monotonic() - begun)
        self._counters.add("store_bytes", count=done * self._per_page * self._tensors.block_bytes)

    def _write(self, joined: JoinedRequest, store: Store) -> int:
        pages = store.end - store.first
        for at in range(0, pages, self._batch):
            count = min(self._batch, pages - at)
            blocks = store.blocks[at * self._per_page : (at + count) * self._per_page]
            runs: Sequence[Run] = list(runs_of(blocks, first=0, per_page=self._per_page))
            buffer = self._tensors.store(count, runs)
            written = joined.write_from(buffer, first=store.first + at)
            if written < count:
                return at + written
        return pages

    def close(self) -> None:
        """End the thread; what was not copied is not."""
        self._copier.close()
