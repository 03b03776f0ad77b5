"""The workers' side: moves this rank's part of pages between the engine's tensors and the service's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from hicache.errors import HicacheError
from hicache.rpc.client.cache import ConnectedCache
from hicache.rpc.client.group import JoinedRequest
from hicache_vllm.comparing import Comparison
from hicache_vllm.copier import Copier
from hicache_vllm.counters import Counters
from hicache_vllm.layouts import runs_of
from hicache_vllm.plans import Audit, Load, Report, StepPlan, Store
from hicache_vllm.tensors import DirectTensors, KVTensors, Wait

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
        layers: index of each layer by vLLM's name of it.
        per_page: blocks a page.
        comparison: for audits; None where pages cannot be compared.
        counters: gets what is counted.
    """

    def __init__(
        self,
        cache: ConnectedCache,
        tensors: KVTensors,
        *,
        layers: Mapping[str, int],
        per_page: int,
        comparison: Comparison | None,
        counters: Counters,
    ) -> None:
        self._cache = cache
        self._tensors = tensors
        self._layers = layers
        self._per_page = per_page
        self._comparison = comparison
        self._batch = max(1, BATCH_BYTES // cache.host.page_bytes)
        self._counters = counters
        self._direct = tensors if isinstance(tensors, DirectTensors) else None
        self._copier = Copier(apart=self._direct is not None)
        self._lock = threading.Lock()
        self._waiting: dict[int, Load | Store | Audit] = {}
        self._layerwise: dict[int, int] = {}
        self._orders: dict[int, Wait] = {}  # of the former: lets the engine's stream wait, where a device orders copies
        self._received: set[str] = set()
        self._bad: set[int] = set()
        self._report = Report()
        self._kept: set[str] = set()
        self._overwritten: set[int] = set()

    # ---- a step

    def drain(self) -> None:
        """Wait until nothing is copied: the engine is about to give the memory of its blocks away.

        Raises:
            TimeoutError: a copy goes on; whoever gets this must use this worker no more.
        """
        if not self._copier.wait_for(lambda: not self._waiting, FENCE_SECONDS):
            raise TimeoutError(f"a copy of KV blocks has not ended in {FENCE_SECONDS:g} s")

    def fence(self, plan: StepPlan) -> None:
        """Wait until the stores whose blocks this step may overwrite have read them."""
        jobs = set(plan.fence)
        if jobs and not self._copier.wait_for(lambda: jobs.isdisjoint(self._waiting), FENCE_SECONDS):
            with self._lock:
                self._overwritten |= jobs & set(self._waiting)

    def begin_stores(self, plan: StepPlan) -> None:
        """Begin to read what former steps have computed."""
        for store in plan.stores:
            self._begin(store, self._store)
        for audit in plan.audits:
            self._begin(audit, self._audit)
        self._kept.update(plan.kept)

    def begin_loads(self, plan: StepPlan) -> None:
        """Begin to bring pages; does not wait for them."""
        for load in plan.loads:
            if load.layerwise:
                with self._lock:
                    self._layerwise[load.job] = 0
            self._begin(load, self._load)

    def wait_for_layer(self, layer: str) -> None:
        """Wait until the pages that this step needs have come, for one layer."""
        number = self._layers.get(layer)
        if self._layerwise and number is not None:
            self._copier.wait_for(lambda: all(done > number for done in list(self._layerwise.values())), None)
            for wait in list(self._orders.values()):
                wait(number)

    def wait_for_layers(self) -> None:
        """Wait until all pages that this step needs have come, or will not."""
        if self._layerwise:
            self._copier.wait_for(lambda: not self._layerwise, None)

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

    def _end(self, work: Load | Store | Audit) -> None:
        with self._lock:
            if self._waiting.pop(work.job, None) is None:
                return  # this worker has left
            self._overwritten.discard(work.job)
            self._layerwise.pop(work.job, None)
            self._orders.pop(work.job, None)
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
            busy = {work.request for work in self._waiting.values() if not isinstance(work, Load)}
            sent = self._kept - busy
            self._kept &= busy
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

    def close(self) -> None:
        """End the thread; what was not copied is not."""
        self._copier.close()
        if self._direct is not None:
            self._direct.close()

    def leave(self) -> tuple[list[Load], list[int], set[str]]:
        """End for good: loads that have not come, jobs of stores that were not done, and requests to be reported."""
        self.close()
        with self._lock:
            loads = [work for work in self._waiting.values() if isinstance(work, Load)]
            stores = [work.job for work in self._waiting.values() if not isinstance(work, Load)]
            self._waiting.clear()
            return loads, stores, set(self._kept)

    # ---- loads

    def _load(self, load: Load) -> None:
        begun = time.monotonic()
        done, reason = 0, "lost"
        try:
            done = 0 if load.ticket is None else self._bring(load, load.ticket)
        except HicacheError as error:
            reason = type(error).__name__
            raise
        finally:
            if done < len(load.blocks):
                self._counters.failed(f"load: {reason}", -(-(len(load.blocks) - done) // self._per_page))
                with self._lock:
                    self._bad.update(load.blocks[done:])
                    self._report.lost[load.job] = len(load.blocks) - done
            self._counters.add("load_seconds", count=time.monotonic() - begun)
            self._counters.add("load_bytes", count=done * self._tensors.block_bytes)

    def _bring(self, load: Load, ticket: bytes) -> int:
        """Copy pages into blocks; how many blocks, from the first on, are right."""
        first, skip = divmod(load.first, self._per_page)
        pages = -(-(skip + len(load.blocks)) // self._per_page)
        batch = pages if load.layerwise else self._batch
        done = 0
        with self._cache.join(ticket) as joined:
            if self._direct is not None:
                return self._direct.fetch(
                    joined, first, load.blocks, inside=skip, begun=lambda wait: self._begun(load, wait)
                )
            for at in range(0, pages, batch):
                count = min(batch, pages - at)
                buffer = np.empty((count, self._cache.host.page_bytes), np.uint8)
                good = joined.read_into(buffer, first=first + at)
                end = min(max((at + good) * self._per_page - skip, 0), len(load.blocks))
                inside = skip if at == 0 else 0
                runs = list(runs_of(load.blocks[done:end], first=inside, per_page=self._per_page))
                self._tensors.load(
                    buffer, runs, (lambda layer: self._came(load.job, layer)) if load.layerwise else None
                )
                done = end
                if good < count:
                    break
        return done

    def _begun(self, load: Load, wait: Wait) -> None:
        """All layers are on their way, and the engine's stream can wait for each."""
        with self._lock:
            if load.layerwise:
                self._orders[load.job] = wait
                self._layerwise[load.job] = len(self._layers)
        self._copier.notify()

    def _came(self, job: int, layer: int) -> None:
        with self._lock:
            self._layerwise[job] = layer + 1
        self._copier.notify()

    # ---- stores and audits

    def _store(self, store: Store) -> None:
        begun = time.monotonic()
        pages = store.end - store.first
        with self._cache.join(store.ticket) as joined:
            done = self._write(joined, store)
            with self._lock:
                done = 0 if store.job in self._overwritten else done
            if done:
                joined.commit(upto=(store.first + done) * self._cache.page_size)
        if done < pages:
            self._counters.failed("store: lost", pages - done)
        self._counters.add("store_seconds", count=time.monotonic() - begun)
        self._counters.add("store_bytes", count=done * self._per_page * self._tensors.block_bytes)

    def _write(self, joined: JoinedRequest, store: Store) -> int:
        pages = store.end - store.first
        if self._direct is not None:
            return self._direct.put(joined, store.first, store.blocks)
        for at in range(0, pages, self._batch):
            count = min(self._batch, pages - at)
            blocks = store.blocks[at * self._per_page : (at + count) * self._per_page]
            buffer = self._tensors.store(count, list(runs_of(blocks, first=0, per_page=self._per_page)))
            written = joined.write_from(buffer, first=store.first + at)
            if written < count:
                return at + written
        return pages

    def _audit(self, audit: Audit) -> None:
        outcome = "failed"
        try:
            cached = np.empty((1, self._cache.host.page_bytes), np.uint8)
            with self._cache.join(audit.ticket) as joined:
                there = joined.read_into(cached, first=audit.page)
            if there and self._comparison is not None:
                computed = self._tensors.store(1, list(runs_of(audit.blocks, first=0, per_page=self._per_page)))
                outcome = self._comparison.outcome(cached[0], computed[0])
            else:
                outcome = "lost"
        finally:
            with self._lock:
                self._report.audited[outcome] += 1
