"""Drives instances with a trace, and adds up."""

from __future__ import annotations

import time as wall
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hicache.analytics.analysis.columns import Columns, Ints
from hicache.analytics.analysis.ideal import time_range
from hicache.analytics.analysis.spread import spread
from hicache.analytics.analysis.turns import sessions_of
from hicache.analytics.result import rate
from hicache.analytics.simulate.clock import SimulatedTime
from hicache.analytics.simulate.flight import OTHER_INSTANCE, Flight
from hicache.analytics.simulate.instance import Instance
from hicache.analytics.simulate.pages import PromptPages
from hicache.analytics.simulate.result import InstanceResult, SimulationResult, TierTraffic
from hicache.analytics.simulate.routing import held, router
from hicache.analytics.simulate.settings import SimulationSettings
from hicache.analytics.simulate.store import SimulatedStore
from hicache.core.prompt import Prompt
from hicache.core.reasons import RequestCounts
from hicache.core.residency import SLOT_BYTES
from hicache.errors import HicacheInternalError
from hicache.memory.limits import check_memory
from hicache.records import MissReason, Tier

SHOW_EVERY: Final = 64
MANY_PAGES: Final = 2**23
"""Of pools, above which their tables alone are checked against the memory that there is."""

Show = Callable[[int, int], None]


class Simulation:
    """One simulation under way. Not thread-safe."""

    def __init__(self, columns: Columns, settings: SimulationSettings) -> None:
        """Prepare.

        Raises:
            ConfigError: settings that do not go with the trace, or tables that do not fit into the memory.
        """
        pages = ((settings.device or 0) + settings.host) * settings.instances
        if pages > MANY_PAGES:
            check_memory(pages * SLOT_BYTES, "tables of device and host pools together")
        self._columns, self._settings = columns, settings
        self._costs = settings.effective_costs
        self._time = SimulatedTime()
        self._pages = PromptPages(columns, settings.page_size)
        self._store = None if settings.storage == 0 else SimulatedStore(settings.storage)
        self.instances = [
            Instance(number, settings, self._store, self._time, step=self._pages.step, width=self._pages.width)
            for number in range(settings.instances)
        ]
        count = columns.requests
        # As lists, since each is looked at once a request.
        self._tokens: list[int] = columns.input_tokens.tolist()
        self._known: list[int] = columns.covered(columns.length).tolist()
        self._asked, self._device, self._host, self._storage = (np.zeros(count, np.int64) for _ in range(4))
        self._first_token = np.zeros(count)
        self._where = np.zeros(count, np.int64)
        self._missed: Counter[str] = Counter()
        self._refused = 0
        self._ended = 0

    def run(self, *, stopped: Callable[[], bool] | None = None, progress: Show | None = None) -> SimulationResult:
        """Simulate to the end of the trace, or until `stopped`."""
        began = wall.perf_counter()
        columns, settings, instances = self._columns, self._settings, self.instances
        sessions = np.zeros(columns.requests, np.int64)
        if settings.routing == "sticky":
            _, sessions = sessions_of(columns, np.zeros(columns.requests, np.int64))
        choose = router(settings.routing, instances, sessions)
        alone = instances[0] if len(instances) == 1 else None
        begin, _ = time_range(columns)
        times = np.maximum.accumulate((columns.time - begin) / settings.speed).tolist()
        seen = 0
        for request, at in enumerate(times):
            if request % SHOW_EVERY == 0:
                if stopped is not None and stopped():
                    break
                if progress is not None:
                    progress(request, columns.requests)
            self._time.pass_to(at)
            prompt = Prompt(self._pages.symbols(request), self._pages.width, instances[0].hasher)
            if alone is not None:
                self._start(request, alone, prompt, 0)
            else:
                pages = held(instances, prompt)
                number = choose(request, pages)
                elsewhere = max(have for other, have in enumerate(pages) if other != number)
                self._start(request, instances[number], prompt, elsewhere)
            seen += 1
        self._time.pass_all()
        return self._result(seen, wall.perf_counter() - began)

    def _start(self, request: int, instance: Instance, prompt: Prompt, elsewhere: int) -> None:
        self._where[request] = instance.number
        flight = Flight(request, instance, self._time, compute=self._compute, ended=self._end)
        flight.begin(prompt, elsewhere)

    def _compute(self, flight: Flight, usable: int) -> float:
        """Seconds of the prefill, which is what is left between loading and the first token."""
        request = flight.request
        left = max(self._tokens[request] - min(usable * self._pages.step, self._known[request]), 0)
        seconds = left / self._costs.prefill_rate
        self._first_token[request] = self._time.now() - flight.began + seconds
        return 0.0 if self._settings.instant else seconds

    def _end(self, flight: Flight, counts: RequestCounts, elsewhere: int) -> None:
        request = flight.request
        self._ended += 1
        self._asked[request] = counts.asked
        self._device[request], self._host[request] = counts.device, counts.host
        self._storage[request] = counts.storage
        if flight.refused:
            self._refused += 1
            self._missed[MissReason.OVER_BUDGET] += sum(counts.missed.values()) + elsewhere
            tokens = self._columns.input_tokens[request]
            self._first_token[request] = self._time.now() - flight.began + tokens / self._costs.prefill_rate
            return
        for reason, pages in counts.missed.items():
            self._missed[reason] += pages
        self._missed[OTHER_INSTANCE] += elsewhere

    # ---- adding up

    def _result(self, seen: int, seconds: float) -> SimulationResult:
        store = self._store
        pages = self._told_of_pages()
        tokens = self._told_of_tokens(seen)
        return SimulationResult(
            settings=self._settings,
            requests=seen,
            page_tokens=self._pages.step,
            page_bytes=self._pages.step * self._costs.token_bytes,
            **pages,
            **tokens,
            **self._told_of_times(seen, tokens["tokens_asked"], tokens["tokens_hit"]),
            misses_by_reason=self._reasons(),
            requests_refused=self._refused,
            shed_by_reason=dict(sum((instance.executor.shed for instance in self.instances), Counter[str]())),
            traffic=self._traffic(pages["pages_missed"]),
            pages_put=0 if store is None else store.written,
            pages_put_never_read=0 if store is None else store.unread(),
            **self._told_of_evictions(),
            simulated_seconds=self._time.now(),
            instances=tuple(self._instance(instance) for instance in self.instances),
            interrupted=seen < self._columns.requests,
            seconds=seconds,
            requests_per_second=rate(seen, seconds),
            problems=tuple(self._problems()),
        )

    @property
    def _hits(self) -> Ints:
        hits: Ints = self._device + self._host + self._storage
        return hits

    def _told_of_pages(self) -> dict[str, Any]:
        device, host, storage = (int(part.sum()) for part in (self._device, self._host, self._storage))
        asked, asking = int(self._asked.sum()), self._asked > 0
        rates = self._hits[asking] / self._asked[asking]
        return {
            "pages_asked": asked,
            "pages_device": device,
            "pages_host": host,
            "pages_storage": storage,
            "pages_missed": sum(self._missed.values()),
            "hit_rate_pages": rate(device + host + storage, asked),
            "hit_rate_pages_device": rate(device, asked),
            "hit_rate_pages_host": rate(host, asked),
            "hit_rate_pages_storage": rate(storage, asked),
            "hit_rate_requests": float(rates.mean()) if len(rates) else 0.0,
        }

    def _told_of_tokens(self, seen: int) -> dict[str, Any]:
        prompts = self._columns.input_tokens
        asked = int(prompts[:seen].sum())
        hit, whole = (int(np.minimum(self._pages.covered(pages), prompts).sum()) for pages in (self._hits, self._asked))
        return {
            "tokens_asked": asked,
            "tokens_hit": hit,
            "tokens_missed": whole - hit,
            "tokens_unaligned_tail": asked - whole,
            "hit_rate_tokens": rate(hit, asked),
        }

    def _told_of_times(self, seen: int, asked: int, hit: int) -> dict[str, Any]:
        prefill, price = self._costs.prefill_rate, self._costs.gpu_hour_price
        return {
            "first_token_seconds": spread(self._first_token[:seen]),
            "first_token_seconds_without": spread(self._columns.input_tokens[:seen] / prefill),
            "gpu_seconds": (asked - hit) / prefill,
            "gpu_seconds_saved": hit / prefill,
            "money_saved": None if price is None else hit / prefill / 3600 * price,
        }

    def _told_of_evictions(self) -> dict[str, Any]:
        cores = [instance.core.registry for instance in self.instances]
        device, host = (sum(core.evicted[tier] for core in cores) for tier in (Tier.DEVICE, Tier.HOST))
        stored = 0 if self._store is None else self._store.evicted
        dirty = [sum(core.dropped_dirty[tier] for core in cores) for tier in (Tier.DEVICE, Tier.HOST)]
        return {
            "pages_evicted": {"device": device, "host": host, "storage": stored},
            "pages_lost": {
                "device": dirty[0] if self._settings.host else device,
                "host": host if self._store is None else dirty[1],
                "storage": stored,
            },
        }

    def _reasons(self) -> dict[str, int]:
        return {name: self._missed[name] for name in (*(reason.value for reason in MissReason), OTHER_INSTANCE)}

    def _traffic(self, computed: int) -> tuple[TierTraffic, ...]:
        """Bytes into and out of tiers. What was computed is what was missed; it is written to the device."""
        page = self._pages.step * self._costs.token_bytes
        down, up, read, write = (
            sum(getattr(instance, link).bytes for instance in self.instances)
            for link in ("down", "up", "read", "write")
        )
        fresh = computed * page
        return (
            TierTraffic("device", up + fresh, down, rate(up + fresh, fresh)),
            TierTraffic("host", down + read, up + write, rate(down + read, fresh)),
            TierTraffic("storage", write, read, rate(write, fresh)),
        )

    def _instance(self, instance: Instance) -> InstanceResult:
        here = self._where == instance.number
        asked = int(self._asked[here].sum())
        hits = int((self._device + self._host + self._storage)[here].sum())
        return InstanceResult(instance.number, instance.requests, asked, rate(hits, asked))

    def _problems(self) -> list[str]:
        found = []
        asked, hits, missed = int(self._asked.sum()), int(self._hits.sum()), sum(self._missed.values())
        if hits + missed != asked:
            found.append(f"{asked} pages asked, but {hits} came and {missed} were missed")
        for instance in self.instances:
            if instance.open:
                found.append(f"instance {instance.number}: {instance.open} requests did not end")
            if instance.reducer.internal_errors:
                found.append(
                    f"instance {instance.number}: {instance.reducer.internal_errors} internal errors; see the log"
                )
        return found

    def check(self) -> None:
        """Check every invariant of every instance.

        Raises:
            HicacheInternalError: one is broken.
        """
        for instance in self.instances:
            instance.check()
        if self._ended != sum(instance.requests for instance in self.instances):
            raise HicacheInternalError("a request did not end")
