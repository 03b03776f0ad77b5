"""One cache of the simulation: the production core and runtime over pools without bytes, in simulated time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from hicache.analytics.simulate.clock import Link, SimulatedTime
from hicache.analytics.simulate.store import SimulatedStorage, SimulatedStore
from hicache.core.cache import Core
from hicache.core.config import CoreConfig
from hicache.core.prompt import SymbolsAreHashes
from hicache.core.residency import Slots
from hicache.errors import HicacheInternalError
from hicache.events import Event
from hicache.memory.base import Copy, Done
from hicache.memory.null import NullCopyEngine, NullDevicePool, NullHostPool
from hicache.memory.writer import WriterEvent
from hicache.runtime.executor import Executor
from hicache.runtime.loading import Loader
from hicache.runtime.planner import Planner
from hicache.runtime.reducer import Reducer

if TYPE_CHECKING:
    from hicache.analytics.simulate.flight import Flight
    from hicache.analytics.simulate.settings import SimulationSettings

NAMESPACE: Final = bytes(16)
"""All prompts of a trace are of one namespace: what may not be shared has other pages."""
INSTANT_FETCH: Final = 32
"""Pages of a transfer from storage where none takes time: smaller ones would only be more work."""
TOUCH_SECONDS: Final = 60.0
"""As the runtime chooses where a backend has no time to live."""


class SimulatedCopies(NullCopyEngine):
    """Copies that end when their link is through with them; `settle` is called then."""

    inline = False

    def __init__(
        self,
        device: NullDevicePool,
        host: NullHostPool,
        time: SimulatedTime,
        *,
        page_bytes: int,
        down: Link,
        up: Link,
        settle: Callable[[], None],
    ) -> None:
        super().__init__(device, host)
        self._time = time
        self._real_bytes = page_bytes
        self._settle = settle
        self._links = {True: down, False: up}

    def device_to_host(self, device_slots: Slots, host_slots: Slots, *, ready: WriterEvent | None, done: Done) -> Copy:
        """Begin a copy down."""
        del ready  # computed pages are committed when they are written
        return self._begin(self._copy(device_slots, host_slots), done, down=True)

    def host_to_device(self, host_slots: Slots, device_slots: Slots, *, done: Done, layer_done: object = None) -> Copy:
        """Begin a copy up."""
        del layer_done
        return self._begin(self._copy(device_slots, host_slots), done, down=False)

    def _begin(self, copy: Copy, done: Done, *, down: bool) -> Copy:
        link = self._links[down]
        end = link.send(copy.pages * self._real_bytes)
        if not link.takes_time:
            self._end(copy, done, down=down, passed=True)
            return copy

        def ended() -> None:
            self._end(copy, done, down=down, passed=True)
            self._settle()

        self._time.at(end, ended)
        return copy


class Instance:
    """A cache, its links, and the requests that wait for it.

    Attributes:
        number: from 0.
        core, reducer, loader: of the production cache.
        storage: None where there is none.
        tree: of all prompts.
        down, up, read, write: its links.
        loading: requests that wait for pages to come up.
        waiting: requests that wait for slots.
        open: requests begun and not ended.
        requests: begun so far.
    """

    def __init__(
        self,
        number: int,
        settings: SimulationSettings,
        store: SimulatedStore | None,
        time: SimulatedTime,
        *,
        step: int,
        width: int,
    ) -> None:
        options, costs = settings.options(), settings.effective_costs
        page_bytes = step * costs.token_bytes
        self.number = number
        self.core = Core(
            CoreConfig(
                device_pages=settings.device,
                host_pages=settings.host,
                storage=store is not None,
                eviction=options.eviction,
                protected_share=options.protected_share,
                device_to_host=options.device_to_host,
                host_to_storage=options.host_to_storage,
                fetch_pages=INSTANT_FETCH if settings.instant else options.fetch_pages(page_bytes),
                write_pages=None if settings.instant else options.write_pages(page_bytes),
                reserve=options.reserve,
                stub_pages=options.stub_pages,
                ghost_pages=options.ghost_pages,
                touch_seconds=None if store is None else TOUCH_SECONDS,
            )
        )
        flushes = options.device_to_host.on_eviction or options.host_to_storage.on_eviction
        self.reducer = Reducer(self.core, wait=_never, publish=_nobody_listens, flushes=flushes)
        self.reducer.on_change = self._changed
        self.down, self.up = Link(time, costs.device_link), Link(time, costs.device_link)
        self.read, self.write = Link(time, costs.storage_read), Link(time, costs.storage_write)
        self.storage = None
        if store is not None:
            self.storage = SimulatedStorage(
                store,
                time,
                options,
                page_bytes=page_bytes,
                read=self.read,
                write=self.write,
                latency=costs.storage_latency,
                settle=self.settle,
            )
        copies = SimulatedCopies(
            NullDevicePool(settings.device),
            NullHostPool(settings.host),
            time,
            page_bytes=page_bytes,
            down=self.down,
            up=self.up,
            settle=self.settle,
        )
        self.executor = Executor(
            self.reducer,
            copies=copies,
            storage=self.storage,
            page_bytes=page_bytes,
            copy_bound=options.copies(page_bytes),
        )
        planner = Planner(
            page_size=step,
            fetch_pages=self.core.config.fetch_pages,
            rate=options.prefill_tokens_per_second,
            now=time.now,
        )
        self.executor.planner = planner
        self.loader = Loader(
            self.reducer, storage=self.storage, options=options, clock=time, page_size=step, planner=planner
        )
        # A page of a trace stands for all before it, too: its number is its name, as page hashes are in a sidecar.
        hasher = SymbolsAreHashes(width)
        self.tree = self.core.tree(NAMESPACE, width=width, hasher=hasher)
        self.hasher = hasher
        self.loading: dict[Flight, None] = {}
        self.waiting: dict[Flight, None] = {}
        self.open = 0
        self.requests = 0
        self._news = False
        self._telling = False

    def _changed(self) -> None:
        self._news = True

    def settle(self, *, freed: bool = False) -> None:
        """Apply what has happened, and let those go on who waited for it."""
        reducer = self.reducer
        if not reducer.idle or self.core.actions or self.core.finished:
            reducer.settle()
        self._news = self._news or freed
        if self._telling:  # whoever is told now settles again himself; the loop below goes on
            return
        self._telling = True
        while self._news and (self.loading or self.waiting):
            self._news = False
            for flight in list(self.loading):
                flight.go_on()
            for flight in list(self.waiting):
                flight.take_slots()
        self._news = False
        self._telling = False

    def check(self) -> None:
        """Check every invariant of the core.

        Raises:
            HicacheInternalError: one is broken.
        """
        self.core.check()
        if self.reducer.internal_errors:
            raise HicacheInternalError(f"{self.reducer.internal_errors} internal errors of the cache; see the log")


def _nobody_listens(events: Sequence[Event]) -> None:
    del events


def _never(condition: threading.Condition, timeout: float | None) -> None:
    raise AssertionError(f"in simulated time nobody waits for {condition}, {timeout}")
