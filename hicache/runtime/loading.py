"""Bringing a prompt's pages up: ask storage what it has, prefetch it into HOST, load that into DEVICE, in time.

A request's deadline bounds all of it together, counted from the request's start. What came in time is used, the rest
is withdrawn. The engine's thread waits here only; everything else goes on by itself, so `request` returns at once.
Where the engine's prefill rate is known, only what is worth its time is brought up, and nothing is waited for longer
than computing it would take.
"""

from __future__ import annotations

from collections.abc import Callable

from hicache.clock import Clock
from hicache.core.transfers import Lease, TransferKind
from hicache.errors import CacheClosed
from hicache.records import MissReason
from hicache.runtime.options import Options
from hicache.runtime.planner import LoadDecision, Planner
from hicache.runtime.reducer import Reducer
from hicache.runtime.storage_io import Probe, StorageWork


class Prefetch:
    """What is known of one request's pages in storage. It outlives the request if a probe is still under way.

    Attributes:
        lease: the request's lease.
        base: page index up to which DEVICE and HOST had the prompt at its start.
        probing: whether an answer is still awaited.
        waits: whether `load` waits for that answer.
        planned: pages behind `base` that are being brought up for the request.
        explores: whether pages are brought up only to see how long that takes.
        decision: what was decided last, if anything was.
        over: `load` is over; what is found from now on comes too late.
        attachment: of the storage that was asked.
    """

    __slots__ = ("attachment", "base", "decision", "explores", "lease", "over", "planned", "probing", "waits")

    def __init__(self, lease: Lease, base: int) -> None:
        self.lease = lease
        self.base = base
        self.probing = False
        self.waits = True
        self.planned = 0
        self.explores = False
        self.decision: LoadDecision | None = None
        self.over = False
        self.attachment = 0

    def wanted(self) -> bool:
        """Whether anybody still waits for the probe."""
        return self.probing and not self.lease.closed


class Loading:
    """One request's load, step by step. Used under the reducer's lock.

    Attributes:
        lease: the request's lease.
        prefetch: what is known of its pages in storage.
        end: when it is given up.
        patience: until when storage is waited for.
        finished: whether nothing is waited for any more.
        decision: once finished, what was decided to be brought up, if anything was.
        seen: what was under way when the core was asked last.
        copies_only: whether, when it was looked at last, nothing but copies into DEVICE was waited for.
    """

    __slots__ = ("_loader", "copies_only", "decision", "end", "finished", "lease", "patience", "prefetch", "seen")

    def __init__(self, loader: Loader, lease: Lease, prefetch: Prefetch | None, *, end: float, patience: float) -> None:
        self._loader = loader
        self.lease = lease
        self.prefetch = prefetch
        self.end = end
        self.patience = patience
        self.finished = False
        self.decision: LoadDecision | None = None
        self.seen: object = None
        self.copies_only = False

    def step(self) -> float | None:
        """Go on as far as it goes now.

        Returns:
            Seconds after which to call again, or earlier when something has changed; None: it has finished.

        Raises:
            CacheClosed: the request was closed meanwhile.
        """
        if self.finished:
            return None
        seconds = self._loader.go_on(self)
        if seconds is None:
            self.cancel()
        return seconds

    def cancel(self) -> None:
        """Finish now, with what is there."""
        if not self.finished:
            self.finished = True
            self.decision = self._loader.finish(self.lease, self.prefetch)


class Loader:
    """Prefetches and loads for all requests of one cache. Thread-safe through the reducer's lock.

    Attributes:
        planner: decides what is worth its time.
        probes_refused: probes that the storage queue turned away.
        loaded: told of each lease whose load is over, under the lock; None: nobody is.
    """

    def __init__(
        self,
        reducer: Reducer,
        *,
        storage: StorageWork | None,
        options: Options,
        clock: Clock,
        page_size: int,
        planner: Planner,
    ) -> None:
        self._reducer = reducer
        self._storage = storage
        self._options = options
        self._now = clock.now
        self._page_size = page_size
        self._copies_up = reducer.core.config.device_pages != 0
        self.planner = planner
        self.probes_refused = 0
        self.loaded: Callable[[Lease], None] | None = None

    def start(self, lease: Lease) -> Prefetch | None:
        """Begin to prefetch what storage is believed to have, and ask about the rest. The lock is held.

        The prompt's hashes must have been computed before.
        """
        storage, match = self._storage, lease.match
        if storage is not None and not storage.attached:
            return None
        base = match.device + match.host
        if storage is None or lease.limit <= base or not self._worth(lease.limit - base):
            return None
        prefetch = Prefetch(lease, base)
        self._fetch(prefetch)
        if match.pages < lease.limit and self._asks(prefetch):
            self._probe(storage, prefetch, match.pages)
        return prefetch

    def load(
        self, lease: Lease, prefetch: Prefetch | None, *, started: float, deadline: float | None
    ) -> LoadDecision | None:
        """Bring up what comes in time, then withdraw the rest. Afterwards `lease.usable` pages are usable.

        Args:
            lease: an open lease without private slots.
            prefetch: what `start` returned.
            started: when the request began.
            deadline: seconds from then, or None.

        Returns:
            What was decided, if the prefill rate is known and anything was there.

        Raises:
            CacheClosed: the cache was closed while this waited.
        """
        reducer = self._reducer
        with reducer.lock:
            loading = self.begin(
                lease, prefetch, started=started, until=None if deadline is None else started + deadline
            )
            while (seconds := loading.step()) is not None:
                reducer.wait(seconds)
            return loading.decision

    def begin(
        self, lease: Lease, prefetch: Prefetch | None, *, started: float, until: float | None, patient: bool = False
    ) -> Loading:
        """`load`, to be gone on with step by step. The lock is held.

        Args:
            lease: as in `load`.
            prefetch: as in `load`.
            started: as in `load`.
            until: when to give up, or None.
            patient: nobody waits for it, so storage gets all of the time.
        """
        limit = self._now() + self._options.longest_wait
        end = limit if until is None else min(until, limit)
        patience = end if patient else min(end, started + self._patience(lease, prefetch))
        return Loading(self, lease, prefetch, end=end, patience=patience)

    def go_on(self, loading: Loading) -> float | None:
        """Whatever can be done for it now. Seconds for which to wait for a change at most; None: there is no need."""
        reducer, lease, prefetch = self._reducer, loading.lease, loading.prefetch
        reducer.settle()
        while True:
            if lease.closed:
                raise CacheClosed("the request was closed while it loaded")
            fetching, copying = self._awaited(lease)
            probing = prefetch is not None and prefetch.probing and prefetch.waits
            if loading.seen != (fetching, probing, lease.match):
                # At the start, and whenever the way into HOST has changed: it may hold more now.
                loading.seen = (fetching, probing, lease.match)
                reducer.core.load(lease, self._upto(lease, prefetch))
                reducer.settle()
                continue
            now = self._now()
            late = now >= loading.patience
            coming = (bool(fetching) and not _only_explores(prefetch)) or probing
            if now >= loading.end or not (copying or (coming and not late)):
                return None
            loading.copies_only = copying and (late or not coming)
            return (loading.end if late or not coming else loading.patience) - now

    def finish(self, lease: Lease, prefetch: Prefetch | None) -> LoadDecision | None:
        """Nobody waits any longer: withdraw what is not there. Returns what was decided, if anything was."""
        reducer, planner = self._reducer, self.planner
        if self.loaded is not None:
            self.loaded(lease)
        decision = self._decision(lease, prefetch) if planner.decides else None
        if decision is not None:
            planner.count(decision)
            reducer.core.decline(lease, self._top(lease) + decision.planned)
        explores = False
        if prefetch is not None:
            prefetch.over = True
            if not prefetch.waits:  # what is found from now on was not worth waiting for
                reducer.core.decline(lease, prefetch.base + prefetch.planned)
            if prefetch.probing and prefetch.waits and self._options.prefetch != "best_effort":
                reducer.core.unanswered(lease, lease.match.pages, MissReason.LATE)
            prefetch.probing = prefetch.probing and not prefetch.waits
            explores = prefetch.explores
        if decision is not None and decision.planned_host < decision.host:
            pages = planner.explore(TransferKind.LOAD, decision.host)
            if pages:
                explores = True
                reducer.core.load(lease, lease.usable + pages)
        if lease.waiting and explores and lease.start is None:
            # What still comes is not for this request: its own pages begin here, as it will be told.
            reducer.core.allocate(lease, 0)
        elif lease.waiting and not explores:
            reducer.core.withdraw_interest(lease)
        reducer.settle()
        return decision

    def _awaited(self, lease: Lease) -> tuple[set[int], bool]:
        """Transfers into HOST that the lease waits for, and whether it waits for any into DEVICE.

        Other requests' own computation of the same pages is not waited for: nobody knows how long that takes.
        """
        transfers = self._reducer.transfers
        fetching, loading = set(), False
        for number in lease.waiting:
            transfer = transfers.get(number)
            if transfer is None:
                continue
            if transfer.kind is TransferKind.LOAD:
                loading = True
            elif not transfer.kind.is_engines:
                fetching.add(number)
        return fetching, loading

    def _patience(self, lease: Lease, prefetch: Prefetch | None) -> float:
        """Seconds from the request's start for which storage is waited for."""
        mode = self._options.prefetch
        if prefetch is None or mode == "best_effort":
            return 0.0
        pages = lease.limit - prefetch.base
        seconds = float("inf")
        if mode != "wait_complete":
            seconds = self._options.prefetch_timeout.seconds(pages * self._page_size)
        return min(seconds, self.planner.compute_seconds(pages)) if self.planner.decides else seconds

    def _worth(self, pages: int) -> bool:
        return pages * self._page_size >= self._options.prefetch_threshold

    # ---- load or recompute

    def _fetch(self, prefetch: Prefetch) -> None:
        """Begin to bring up what storage has of a request's pages, as far as it is worth it."""
        core, lease = self._reducer.core, prefetch.lease
        host, pages = self._below(lease), lease.match.storage
        if not pages or not self._worth(pages):
            return
        if not self.planner.decides:
            prefetch.planned = pages
            core.prefetch(lease)
            return
        if not prefetch.over:
            queued = sum(transfer.count for transfer in core.actions if transfer.kind is TransferKind.FETCH)
            decision = self.planner.plan(host, pages, coming=prefetch.planned, queued=queued)
            prefetch.decision = decision
            if decision.planned_storage > prefetch.planned:
                prefetch.planned = decision.planned_storage
                core.prefetch(lease, prefetch.base + prefetch.planned)
        if not prefetch.planned and not prefetch.explores:
            look = self.planner.explore(TransferKind.FETCH, pages)
            if look:
                prefetch.explores = True
                core.prefetch(lease, prefetch.base + look)

    def _asks(self, prefetch: Prefetch) -> bool:
        """Whether to ask storage about the pages that nothing is known of; also decides whether that is waited for."""
        planner, match = self.planner, prefetch.lease.match
        if not planner.decides:
            return True
        unknown = prefetch.lease.limit - match.pages
        host = self._below(prefetch.lease)
        could_pay = planner.could_pay(host, match.storage, unknown)
        prefetch.waits = could_pay and planner.probe_pays(host, match.storage, unknown)
        return could_pay or planner.may_explore(TransferKind.FETCH)

    def _decision(self, lease: Lease, prefetch: Prefetch | None) -> LoadDecision | None:
        if prefetch is not None and prefetch.decision is not None:
            return prefetch.decision
        host = self._below(lease)
        return self.planner.plan(host, 0) if host else None

    def _upto(self, lease: Lease, prefetch: Prefetch | None) -> int | None:
        """Page index up to which HOST's pages are loaded; None: all that it has, other requests' fetches too."""
        decision = self._decision(lease, prefetch) if self.planner.decides else None
        if decision is None or decision.planned_host == decision.host:
            return None
        return self._top(lease) + decision.planned_host

    def _below(self, lease: Lease) -> int:
        """Pages that HOST had and that must be copied up to be used; none where HOST is the top tier."""
        return lease.match.host if self._copies_up else 0

    def _top(self, lease: Lease) -> int:
        """Pages that the top tier had."""
        return lease.match.device + lease.match.host - self._below(lease)

    # ---- asking

    def _current(self, prefetch: Prefetch) -> bool:
        """Whether the storage that was asked is the one that is attached now."""
        storage = self._storage
        return storage is not None and storage.attached and storage.attachment == prefetch.attachment

    def _probe(self, storage: StorageWork, prefetch: Prefetch, first: int) -> None:
        lease = prefetch.lease
        asked = self._now()
        probe = Probe(
            namespace=lease.tree.namespace,
            generation=lease.tree.generation,
            page_hashes=lease.prompt.hashes(first, lease.limit),
            found=lambda pages, final: self._reducer.post(self._found, prefetch, first, pages, final, asked),
            failed=lambda pages: self._reducer.post(self._not_told, prefetch, first + pages),
            wanted=prefetch.wanted,
        )
        prefetch.probing = True
        prefetch.attachment = storage.attachment
        prefetch.probing = storage.probe(probe)
        if not prefetch.probing:
            self.probes_refused += 1
            self._reducer.core.unanswered(lease, first, MissReason.FAILED)

    def _found(self, prefetch: Prefetch, first: int, pages: int, final: bool, asked: float) -> None:
        """Storage has so many pages of the prompt from page `first` on. Under the lock."""
        lease = prefetch.lease
        if final and prefetch.probing:
            self.planner.probed(seconds=self._now() - asked, asked=lease.limit - first, found=pages)
        if not lease.closed and prefetch.probing and self._current(prefetch):
            self._reducer.core.believe(lease, first + pages)
            self._fetch(prefetch)
        if final:
            prefetch.probing = False
        self._reducer.notify()

    def _not_told(self, prefetch: Prefetch, page: int) -> None:
        """Storage does not tell what it has from page index `page` on; what is in front is there. Under the lock."""
        lease = prefetch.lease
        if not lease.closed and prefetch.probing:
            if self._current(prefetch):
                self._reducer.core.believe(lease, page)
                self._fetch(prefetch)
            self._reducer.core.unanswered(lease, page, MissReason.FAILED)
        prefetch.probing = False
        self._reducer.notify()


def _only_explores(prefetch: Prefetch | None) -> bool:
    return prefetch is not None and prefetch.explores and not prefetch.planned
