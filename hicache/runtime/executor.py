"""Carries out what the core asks for, and tells it how that ended."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial

from hicache.core.residency import Slots
from hicache.core.transfers import Transfer, TransferKind
from hicache.memory.base import Copy, CopyEngine
from hicache.memory.watcher import look
from hicache.memory.writer import WriterEvent
from hicache.records import PageResult
from hicache.runtime.planner import Planner
from hicache.runtime.queues import Bound
from hicache.runtime.quota import StorageQuota
from hicache.runtime.reducer import Reducer
from hicache.runtime.storage_io import StorageWork

_log = logging.getLogger("hicache.runtime")

COPY_QUEUE_FULL = "copy_queue_full"
QUOTA = "storage_quota"


class Executor:
    """Starts transfers, each in the queue of its kind, and completes each exactly once. Used under the reducer's lock.

    Who owns a transfer's slots: from `start` until the core's `complete` the transfer does, whatever becomes of the
    request behind it; so an operation that never comes back keeps its slots, and only those.

    Attributes:
        running: transfers begun and not completed, by id.
        loads: copies into DEVICE that have not ended, by their transfer's id.
        shed: pages turned away at a queue's bound, by reason.
        planner: learns from transfers how long they take; set once.
        quota: what may be put to storage; None: anything.
    """

    def __init__(
        self,
        reducer: Reducer,
        *,
        copies: CopyEngine | None,
        storage: StorageWork | None,
        page_bytes: int,
        copy_bound: Bound,
    ) -> None:
        self._reducer = reducer
        self._copies = copies
        self._storage = storage
        self._page_bytes = page_bytes
        self._copy_bound = copy_bound
        self._copying: dict[int, Copy] = {}  # write-backs under way
        self._writing: dict[int, WriterEvent] = {}  # what each engine's write waits for
        self.running: dict[int, Transfer] = {}
        self.loads: dict[int, Copy] = {}
        self.shed: Counter[str] = Counter()
        self.planner: Planner | None = None
        self.quota: StorageQuota | None = None
        reducer.dispatch = self.start
        if copies is not None:
            copies.when_stranded(partial(reducer.post, self._give_up))

    def start(self, transfer: Transfer) -> None:
        """Put a transfer into its queue. If that cannot take it, it fails at once."""
        self.running[transfer.id] = transfer
        try:
            shed = self._start(transfer)
        except Exception:
            _log.exception("%r could not be started", transfer)
            shed = "error"
        if shed:
            self.shed[shed] += transfer.count
            self.done(transfer.id, [PageResult.FAILED] * transfer.count)
        elif self.planner is not None:
            self.planner.begun(transfer)

    def written(self, transfer: Transfer, event: WriterEvent) -> None:
        """Complete a WRITE once the writer's event has passed."""
        self.running[transfer.id] = self._reducer.transfers[transfer.id] = transfer
        self._writing[transfer.id] = event
        passed = partial(self._reducer.post, self._event_passed, transfer.id)
        try:
            self._engine.when_ready(event, passed)
        except Exception:
            _log.exception("%r could not be waited for", transfer)
            passed(False)

    @property
    def writing(self) -> bool:
        """Whether engines' writes are waited for."""
        return bool(self._writing)

    def catch_up(self) -> None:
        """Complete what engines have written by now: nobody need wait for the thread that watches their events."""
        for number, event in list(self._writing.items()):
            passed = look(event)
            if passed is not None:
                self._event_passed(number, passed)

    def done(self, number: int, results: Sequence[PageResult]) -> None:
        """A transfer's I/O has ended. Any thread; takes no lock."""
        self._reducer.post(self._finish, number, results)

    @property
    def _engine(self) -> CopyEngine:
        assert self._copies is not None, "pages are copied only where DEVICE is owned"
        return self._copies

    def _start(self, transfer: Transfer) -> str:
        """Returns the reason if the transfer was turned away."""
        kind = transfer.kind
        if kind is TransferKind.LOAD:
            source, target = _slots(transfer)
            copy = self._engine.host_to_device(source, target, done=partial(self.done, transfer.id))
            self.loads[transfer.id] = copy
            return ""
        if kind is TransferKind.WRITE_BACK:
            return self._write_back(transfer)
        assert self._storage is not None
        storage = self._storage
        quota = self.quota if kind is TransferKind.PUT else None
        if quota is not None and not quota.begin(transfer):
            return QUOTA
        begin = {TransferKind.FETCH: storage.fetch, TransferKind.PUT: storage.put, TransferKind.TOUCH: storage.touch}
        if begin[kind](transfer, self.done):
            return ""
        if quota is not None:
            quota.turned_away(transfer)
        return storage.refusal(kind)

    def _write_back(self, transfer: Transfer) -> str:
        copying = self._copying
        bound = self._copy_bound
        pages = sum(copy.pages for copy in copying.values()) + transfer.count
        if copying and (len(copying) >= bound.requests or pages * self._page_bytes > bound.bytes):
            return COPY_QUEUE_FULL
        source, target = _slots(transfer)
        copying[transfer.id] = self._engine.device_to_host(
            source, target, ready=None, done=partial(self.done, transfer.id)
        )
        return ""

    def _give_up(self) -> None:
        """Stranded copies have failed for whoever waits. They keep their slots, and run until the process ends."""
        for copies in (self.loads, self._copying):
            for number in [number for number, copy in copies.items() if copy.stranded]:
                transfer = self.running[number]
                del copies[number]
                self._reducer.transfers.pop(number, None)
                if self.planner is not None:
                    self.planner.ended(transfer, [PageResult.FAILED] * transfer.count)
                self._reducer.core.give_up(number)
        self._reducer.notify()

    def _event_passed(self, number: int, passed: bool) -> None:
        if self._writing.pop(number, None) is not None:  # else it was seen before
            result = PageResult.OK if passed else PageResult.FAILED
            self._finish(number, [result] * self.running[number].count)

    def _finish(self, number: int, results: Sequence[PageResult]) -> None:
        transfer = self.running.pop(number)
        self._copying.pop(number, None)
        self.loads.pop(number, None)
        results = list(results)
        if len(results) != transfer.count:
            # A copier that answers for another number of pages has answered for none.
            results = [PageResult.FAILED] * transfer.count
        if self.planner is not None:
            self.planner.ended(transfer, results)
        if self.quota is not None:
            self.quota.ended(transfer, results)
        self._reducer.core.complete(number, results)


def _slots(transfer: Transfer) -> tuple[Slots, Slots]:
    assert transfer.source_slots is not None
    assert transfer.target_slots is not None
    return transfer.source_slots, transfer.target_slots
