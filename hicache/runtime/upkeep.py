"""What is done to a cache beside requests: clearing, flushing, exchanging its storage, looking at it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from hicache.core.cache import Core
from hicache.core.identity import Adapter
from hicache.core.transfers import Lease
from hicache.errors import CacheClosed, ConfigError, StorageUnavailable
from hicache.runtime.accesslog.writer import AccessLogWriter
from hicache.runtime.arguments import number_of_seconds, whole
from hicache.runtime.attaching import DetachReport, attach, check_attachable, detach, open_backend
from hicache.runtime.clearing import clear_memory, clear_storage
from hicache.runtime.closing import drain
from hicache.runtime.events import Subscription
from hicache.runtime.parts import Parts
from hicache.runtime.reducer import Reducer, Ringer
from hicache.runtime.scopes import Scope
from hicache.runtime.statistics import CacheStatistics, Ledger, snapshot
from hicache.storage.base import StorageBackend

FORKED = "this process is a fork of the one that opened the cache: open one here, after the fork"
FIRST_USE = 1.0  # seconds for which the first request of a namespace waits for storage to tell its generation


class Upkeep:
    """The part of a cache that is not about requests. Its attributes belong to `LeasingCache`."""

    parts: Parts
    _core: Core
    _reducer: Reducer
    _pump: Ringer | None
    _ledger: Ledger
    _leases: dict[Lease, int]
    _own_log: AccessLogWriter | None
    _now: Callable[[], float]
    _attaching: threading.Lock
    _refusal: str | None

    def check_open(self) -> None:
        """Raise `CacheClosed` unless the cache is open in this process."""
        if self._refusal is not None:
            raise CacheClosed(self._refusal)

    def report_prefill(self, tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens in so many seconds.

        A moving average of what is reported takes the place of the option `prefill_tokens_per_second`: from the first
        report on, pages are brought up only where that takes less time than computing them.

        Raises:
            ConfigError: not a number above 0 of both.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        with self._reducer.lock:
            self.parts.loader.planner.report(tokens, seconds)

    def clear(
        self,
        *,
        adapter: Adapter | None = None,
        tenant: str | None = None,
        salt: str | None = None,
        deadline: float = 5.0,
    ) -> None:
        """Forget all pages of one namespace, in every tier, as after a change of weights.

        In memory it is done when this returns or raises; requests that are open keep what they have and publish
        nothing any more. In storage the namespace's generation is raised.

        Args:
            adapter: whose pages, as in `request`; with all three None those of requests that have none of them.
            tenant: as in `request`.
            salt: as in `request`.
            deadline: seconds to wait for storage.

        Raises:
            StorageError: storage did not confirm: after a restart old pages may be found again. Call it again.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        deadline = number_of_seconds("deadline", deadline)
        started = self._now()
        scope = self._scope(adapter, tenant, salt, started, deadline)
        if scope is None:
            raise StorageUnavailable("clear: the namespace's generation is not known, as storage does not answer")
        generation = clear_memory(self.parts, scope, self._pump)
        clear_storage(self.parts, scope, generation, end=started + deadline)

    def detach_storage(self, deadline: float = 5.0, *, force: bool = False) -> DetachReport:
        """Take the storage away; the tiers above go on. Requests may be open, and new ones begin meanwhile.

        What is on its way to storage or from it is waited for, and pages that are being copied to HOST still get
        there; nothing new is begun. Other pages that were not written yet are kept as without storage: call `flush`
        before, to write them. Afterwards
        nothing is believed of what storage has, and `attach_storage` may give another one, or the same.

        Args:
            deadline: seconds to wait for what is under way.
            force: fail what is under way instead of refusing. What is inside a call that does not come back keeps
                its slots until it does, and is reported.

        Returns:
            What was failed, and what is stuck.

        Raises:
            StorageError: something was still under way at the deadline, and `force` was not given: it stays attached.
            ConfigError: no storage is attached.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        end = self._now() + number_of_seconds("deadline", deadline)
        with self._attaching:
            return detach(self.parts, self._pump, end=end, force=force)

    def attach_storage(self, storage: str | StorageBackend) -> None:
        """Give a cache without storage one, while it is in use. What it holds above is written there by and by.

        Needs a cache that was opened with storage, or with `attachable=True`. How often its objects are touched was
        fixed then. Each namespace in use gets the higher of the generations that storage and this cache have.

        Args:
            storage: a URL, or an open backend, which stays the caller's to close.

        Raises:
            ConfigError: a storage is attached already, the cache cannot have one, or a bad URL.
            StorageError: storage cannot be reached.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        with self._attaching:
            check_attachable(self.parts)
            backend = open_backend(storage, self.parts.options, self.parts.clock)
            owned = isinstance(storage, str)
            try:
                attach(self.parts, backend, owned=owned)
            except BaseException:
                if owned:
                    backend.close()
                raise
        self._start_canary()

    def flush(self, deadline: float = 60.0) -> bool:
        """Write all pages down that a lower tier should have, root first, and wait for it.

        Args:
            deadline: seconds to wait.

        Returns:
            Whether nothing is left; False when time was up, or HOST or storage could not take any more.

        Raises:
            CacheClosed: the cache is closed, or was closed meanwhile.
        """
        self.check_open()
        return drain(self.parts, end=self._now() + number_of_seconds("deadline", deadline))

    def events(self, *, limit: int = 65_536) -> Subscription:
        """Listen to residency changes from now on. Replayed from the opening on they equal residency.

        Args:
            limit: events that may wait to be read, 1 or more; what is above it is lost, and a `Gap` says so.

        Returns:
            A stream of `Stored`, `Removed`, `Cleared` and `Gap`, in order; close it when done.

        Raises:
            ConfigError: the cache was opened without `events=True`, or a limit that is none.
        """
        self.check_open()
        limit = whole("limit", limit, least=1)
        if not self.parts.options.events:
            raise ConfigError("no events are produced: open the cache with events=True")
        return self.parts.publisher.subscribe(limit=limit)

    def statistics(self) -> CacheStatistics:
        """A snapshot. May be called at any time, also after `close`."""
        if self._refusal is FORKED:
            raise CacheClosed(FORKED)
        with self._reducer.lock:
            self._reducer.settle()
            log = None if self._own_log is None else self._own_log.statistics()
            return snapshot(self.parts, self._ledger, open_requests=len(self._leases), access_log=log)

    def check(self) -> None:
        """Check every invariant of tiers and tree, slowly.

        Raises:
            HicacheInternalError: one is broken, or an internal error was caught before.
        """
        self.check_open()
        with self._reducer.lock:
            self._reducer.settle()
            self._core.check()

    def dump_recording(self, path: str | os.PathLike[str]) -> None:
        """Write what the flight recorder has into one file, for `hicache replay`. The file is replaced.

        Raises:
            ConfigError: the cache was opened without `flight_recorder`, or the file cannot be written.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        if self.parts.flight is None:
            raise ConfigError("nothing was recorded: open the cache with flight_recorder=True or a folder")
        self.parts.flight.dump(Path(path))

    @property
    def _attached(self) -> bool:
        return self.parts.storage is not None and self.parts.storage.attached

    def _start_canary(self) -> None:
        options, canary = self.parts.options, self.parts.canary
        if self._attached and options.canary and options.background and canary is not None:
            canary.start()

    def _scope(
        self, adapter: Adapter | None, tenant: str | None, salt: str | None, started: float, deadline: float | None
    ) -> Scope | None:
        patience = FIRST_USE if deadline is None else min(deadline, FIRST_USE)
        return self.parts.scopes.find(adapter, tenant, salt, deadline=started + patience)
