"""Bringing a prompt's pages up: ask storage what it has, prefetch it into HOST, load that into DEVICE, in time.

A request's deadline bounds all of it together, counted from the request's start. What came in time is used, the rest
is withdrawn. The engine's thread waits here only; everything else goes on by itself, so `request` returns at once.
"""

from __future__ import annotations

from hicache.clock import Clock
from hicache.core.transfers import Lease, TransferKind
from hicache.errors import CacheClosed
from hicache.runtime.options import Options
from hicache.runtime.reducer import Reducer
from hicache.runtime.storage_io import Probe, StorageIO


class Prefetch:
    """What is known of one request's pages in storage. It outlives the request if a probe is still under way.

    Attributes:
        lease: the request's lease.
        base: page index up to which DEVICE and HOST had the prompt at its start.
        probing: whether an answer is still awaited.
    """

    __slots__ = ("base", "lease", "probing")

    def __init__(self, lease: Lease, base: int) -> None:
        self.lease = lease
        self.base = base
        self.probing = False

    def wanted(self) -> bool:
        """Whether anybody still waits for the probe."""
        return self.probing and not self.lease.closed


class Loader:
    """Prefetches and loads for all requests of one cache. Thread-safe through the reducer's lock.

    Attributes:
        probes_refused: probes that the storage queue turned away.
    """

    def __init__(
        self, reducer: Reducer, *, storage: StorageIO | None, options: Options, clock: Clock, page_size: int
    ) -> None:
        self._reducer = reducer
        self._storage = storage
        self._options = options
        self._now = clock.now
        self._page_size = page_size
        self.probes_refused = 0

    def start(self, lease: Lease) -> Prefetch | None:
        """Begin to prefetch what storage is believed to have, and ask about the rest. The lock is held.

        The prompt's hashes must have been computed before.
        """
        storage, match = self._storage, lease.match
        base = match.device + match.host
        if storage is None or lease.limit <= base or not self._worth(lease.limit - base):
            return None
        prefetch = Prefetch(lease, base)
        if match.storage and self._worth(match.storage):
            self._reducer.core.prefetch(lease)
        if match.pages < lease.limit:
            self._probe(storage, prefetch, match.pages)
        return prefetch

    def load(self, lease: Lease, prefetch: Prefetch | None, *, started: float, deadline: float | None) -> None:
        """Bring up what comes in time, then withdraw the rest. Afterwards `lease.device` pages are usable.

        Args:
            lease: an open lease without private slots.
            prefetch: what `start` returned.
            started: when the request began.
            deadline: seconds from then, or None.

        Raises:
            CacheClosed: the cache was closed while this waited.
        """
        reducer = self._reducer
        limit = self._now() + self._options.longest_wait
        end = limit if deadline is None else min(started + deadline, limit)
        patience = min(end, started + self._patience(lease, prefetch))
        with reducer.lock:
            reducer.settle()
            seen: object = None
            while True:
                if lease.closed:
                    raise CacheClosed("the request was closed while it loaded")
                fetching, loading = self._awaited(lease)
                probing = prefetch is not None and prefetch.probing
                if seen != (fetching, probing, lease.match):
                    # At the start, and whenever the way into HOST has changed: it may hold more now.
                    seen = (fetching, probing, lease.match)
                    reducer.core.load(lease)
                    reducer.settle()
                    continue
                now = self._now()
                late = now >= patience
                coming = bool(fetching) or probing
                if now >= end or not (loading or (coming and not late)):
                    break
                reducer.wait((end if late or not coming else patience) - now)
            if prefetch is not None:
                prefetch.probing = False
            if lease.waiting:
                reducer.core.withdraw_interest(lease)
                reducer.settle()

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
            elif transfer.kind is not TransferKind.WRITE:
                fetching.add(number)
        return fetching, loading

    def _patience(self, lease: Lease, prefetch: Prefetch | None) -> float:
        """Seconds from the request's start for which storage is waited for."""
        mode = self._options.prefetch
        if prefetch is None or mode == "best_effort":
            return 0.0
        if mode == "wait_complete":
            return float("inf")
        return self._options.prefetch_timeout.seconds((lease.limit - prefetch.base) * self._page_size)

    def _worth(self, pages: int) -> bool:
        return pages * self._page_size >= self._options.prefetch_threshold

    def _probe(self, storage: StorageIO, prefetch: Prefetch, first: int) -> None:
        lease = prefetch.lease
        probe = Probe(
            namespace=lease.tree.namespace,
            generation=lease.tree.generation,
            page_hashes=lease.prompt.hashes(first, lease.limit),
            found=lambda pages, final: self._reducer.post(self._found, prefetch, first + pages, final),
            wanted=prefetch.wanted,
        )
        prefetch.probing = True
        prefetch.probing = storage.probe(probe)
        self.probes_refused += not prefetch.probing

    def _found(self, prefetch: Prefetch, upto: int, final: bool) -> None:
        """Storage has the prompt up to there. Under the lock."""
        lease = prefetch.lease
        if not lease.closed and prefetch.probing:
            self._reducer.core.believe(lease, upto)
            if upto > prefetch.base and self._worth(upto - prefetch.base):
                self._reducer.core.prefetch(lease, upto)
        if final:
            prefetch.probing = False
        self._reducer.notify()
