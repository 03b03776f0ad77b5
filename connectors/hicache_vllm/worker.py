"""The workers' side: moves this rank's part of pages between the engine's tensors and the service's memory."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from hicache.errors import HicacheError
from hicache.rpc.client.cache import ConnectedCache
from hicache.rpc.client.group import JoinedRequest
from hicache_vllm.attaching import Attaching
from hicache_vllm.comparing import Comparison
from hicache_vllm.compat import Forward
from hicache_vllm.copier import Copier
from hicache_vllm.counters import Counters
from hicache_vllm.early import EarlyStores, LayerTensors
from hicache_vllm.layouts import runs_of
from hicache_vllm.plans import Audit, Load, Report, StepPlan, Store
from hicache_vllm.tensors import DirectTensors, KVTensors, PagesAtRiskError
from hicache_vllm.waits import LayerWaits

__all__ = ["WorkerSide"]

_log = logging.getLogger("vllm.hicache")

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
        self._attaching = Attaching(cache, self._direct, self._copier)
        self._waits = LayerWaits(self._copier, len(layers))
        by_layer = tensors if isinstance(tensors, LayerTensors) else None
        self._early = EarlyStores(by_layer, len(layers), self._copier, self)
        self._over = True  # the step
        self._received: set[str] = set()
        self._bad: set[int] = set()
        self._report = Report()
        self._kept: set[str] = set()
        self._overwritten: set[int] = set()

    def attach(self, seconds: float) -> None:
        """The engine starts: make the service's memory ready for a device, if it comes within so long."""
        self._attaching.begin(seconds)

    # ---- a step

    def drain(self) -> None:
        """Wait until nothing is copied: the engine is about to give the memory of its blocks away.

        Raises:
            TimeoutError: a copy goes on; whoever gets this must use this worker no more.
        """
        self._end_step(good=False)
        self._early.drop()
        if not self._copier.wait_for(lambda: not self._waiting, FENCE_SECONDS):
            raise TimeoutError(f"a copy of KV blocks has not ended in {FENCE_SECONDS:g} s")

    def fence(self, plan: StepPlan) -> None:
        """Wait until the stores whose blocks this step may overwrite have read them."""
        jobs = set(plan.fence)
        if not jobs:
            return
        self._end_step(good=False)
        self._early.drop(jobs)
        if not self._copier.wait_for(lambda: jobs.isdisjoint(self._waiting), FENCE_SECONDS):
            with self._lock:
                self._overwritten |= jobs & set(self._waiting)

    def begin_stores(self, plan: StepPlan, forward: Forward) -> None:
        """A step begins: begin to read what former ones have computed, and know what goes with this one."""
        self._end_step(good=False)
        self._over = False
        self._attaching.again()
        self._waits.begin_step(forward)
        early = [store for store in plan.stores if store.early]
        for store in (*self._early.take_late(), *(store for store in plan.stores if not store.early)):
            self._begin(store, self._store)
        with self._lock:
            self._waiting.update((store.job, store) for store in early)
        self._early.begin(early, forward)
        for audit in plan.audits:
            self._begin(audit, self._audit)
        self._kept.update(plan.kept)

    def begin_loads(self, plan: StepPlan) -> None:
        """Begin to bring pages. Waits for none of them but where layers will not."""
        self._waits.begin([load for load in plan.loads if load.layerwise])
        for load in plan.loads:
            self._begin(load, self._load)
        self._waits.begun()

    def wait_for_layer(self, layer: str) -> None:
        """Wait until the pages that this step needs have come, for one layer."""
        number = self._layers.get(layer)
        if number is not None:
            self._waits.wait(number)

    def layer_computed(self, layer: str) -> None:
        """A layer of this step is computed, or on its way on the calling thread's stream."""
        number = self._layers.get(layer)
        if number is not None:
            self._early.computed(number)

    def end_step(self) -> None:
        """The step is over: wait until all pages that it needs have come, or will not.

        Has to come before anybody asks which blocks did not.
        """
        self._end_step(good=sys.exc_info()[0] is None)  # vLLM comes here also where its model has raised

    def _end_step(self, *, good: bool) -> None:
        if self._over:
            return
        self._over = True
        loads, missed = self._waits.end_step()
        if missed:
            self._distrust(loads, missed)
        with self._lock:
            good = good and not any(load.job in self._report.lost for load in loads)
        self._early.end(good=good)

    def _distrust(self, loads: list[Load], missed: int) -> None:
        """Layers have not called, so they may have read pages that were not there: those are computed."""
        _log.error(
            "hicache: %d of %d layers were computed without waiting for their pages, which are computed anew; from now "
            "on a step waits for all of its pages before it begins",
            missed,
            len(self._layers),
        )
        for load in loads:
            self._counters.failed("load: unordered", -(-len(load.blocks) // self._per_page))
            with self._lock:
                self._bad.update(load.blocks)
                self._report.lost[load.job] = len(load.blocks)

    def _begin(self, work: Any, run: Callable[[Any], None]) -> None:
        with self._lock:
            self._waiting[work.job] = work
        ready = self._tensors.mark()

        def body() -> None:
            try:
                ready()
                run(work)
            except PagesAtRiskError:
                self._risk(work)
                raise
            finally:
                self._end(work)

        (self._copier.load if isinstance(work, Load) else self._copier.store)(body)

    def _end(self, work: Load | Store | Audit) -> None:
        with self._lock:
            if self._waiting.pop(work.job, None) is None:
                return  # this worker has left
            self._overwritten.discard(work.job)
            self._waits.ended(work.job)
            self._report.done[work.job] += 1
            if isinstance(work, Load) and not work.layerwise:
                self._received.add(work.request)

    def _risk(self, work: Load | Store | Audit) -> None:
        with self._lock:
            self._report.at_risk.add(work.job)

    def take_finished(self, *, idle: bool) -> tuple[set[str], set[str]]:
        """Requests whose blocks are not read any more, and requests whose pages have come or will not.

        Args:
            idle: whether the engine has nothing to compute, so that it may wait a moment for something to end.
        """
        self.end_step()  # with a draft model vLLM asks this before it waits for stores
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
                ordered = partial(self._waits.ordered, load.job) if load.layerwise else _nothing
                return self._direct.fetch(joined, first, load.blocks, inside=skip, begun=ordered)
            for at in range(0, pages, batch):
                count = min(batch, pages - at)
                buffer = np.empty((count, self._cache.host.page_bytes), np.uint8)
                good = joined.read_into(buffer, first=first + at)
                end = min(max((at + good) * self._per_page - skip, 0), len(load.blocks))
                inside = skip if at == 0 else 0
                runs = list(runs_of(load.blocks[done:end], first=inside, per_page=self._per_page))
                came = (lambda layer: self._waits.came(load.job, layer + 1)) if load.layerwise else None
                self._tensors.load(buffer, runs, came)
                done = end
                if good < count:
                    break
        return done

    # ---- stores and audits

    def _store(self, store: Store) -> None:
        try:
            with self.join(store.ticket) as joined:
                pages = self.publish(joined, store, self.whole(joined, store))
        except BaseException:
            if store.early:
                self._stored(store, 0)
            raise
        self._stored(store, pages)

    def join(self, ticket: bytes) -> JoinedRequest:
        """See `early.Ends`."""
        return self._cache.join(ticket)

    def whole(self, joined: JoinedRequest, store: Store) -> int:
        """See `early.Ends`."""
        begun = time.monotonic()
        done = self._write(joined, store)
        self._counters.add("store_seconds", count=time.monotonic() - begun)
        return done

    def publish(self, joined: JoinedRequest, store: Store, pages: int) -> int:
        """See `early.Ends`."""
        with self._lock:
            pages = 0 if store.job in self._overwritten else pages
        if pages:
            joined.commit(upto=(store.first + pages) * self._cache.page_size)
        self._counters.add("store_bytes", count=pages * self._per_page * self._tensors.block_bytes)
        return pages

    def over(self, store: Store, pages: int) -> None:
        """See `early.Ends`."""
        self._stored(store, pages)
        self._counters.add("early_pages", count=pages)
        self._end(store)
        self._copier.notify()

    def risk(self, store: Store) -> None:
        """See `early.Ends`."""
        self._risk(store)
        self._end(store)
        self._copier.notify()

    def _stored(self, store: Store, pages: int) -> None:
        """So many pages are there. Of an early store the others are tried again, as the request goes on."""
        lacks = store.end - store.first - pages
        if lacks and store.early:
            with self._lock:
                self._report.unstored[store.job] = store.first + pages
        elif lacks:
            self._counters.failed("store: lost", lacks)

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


def _nothing(given: object) -> None:
    del given
