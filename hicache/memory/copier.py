"""Copies on threads: for pools that the CPU sees, with the GIL released while bytes move."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hicache.errors import CacheClosed, ConfigError, HicacheInternalError
from hicache.memory.base import Copy, CopyEngine, CopyStatistics, DevicePool, Done, HostPool, Slots
from hicache.memory.watcher import EventWatcher
from hicache.memory.writer import READY, WriterEvent
from hicache.records import PageResult

__all__ = ["ThreadCopyEngine"]

_LOG = logging.getLogger(__name__)
_BATCH_BYTES = 32 << 20
"""Moved by one call into a pool: far above its fixed cost, and soon enough back to look at what failed."""
_STEP_BYTES = 256 << 10
"""Smallest step of a page on its way up. Thinner layers go together: a call has a fixed cost."""
_JOIN_SECONDS = 1.0
"""What `close` gives threads that have nothing left to do."""


@dataclass(slots=True, eq=False)
class _Job:
    """One copy. Its slots are the caller's, pinned until `done` is called."""

    copy: Copy
    down: bool
    device_slots: Slots
    host_slots: Slots
    done: Done
    layer_done: Callable[[int], None] | None = None
    broken: bool = False


class ThreadCopyEngine(CopyEngine):
    """Copy threads over two pools, a lane per direction.

    Args:
        device: an engine's pages.
        host: pages in canonical layout; None where the cache has no host tier: then only events are waited for, and
            there are no copy threads.
        threads: copy threads, shared out to the two lanes, the way up first; a single one serves both and takes what
            goes up first, as a request waits for that. One thread fills a memory channel's share; two keep the
            directions from waiting for each other.
        name: beginning of the threads' names.

    Raises:
        ConfigError: not at least one thread, or pools of different page sizes.
    """

    def __init__(
        self, device: DevicePool, host: HostPool | None, *, threads: int = 2, name: str = "hicache-copy"
    ) -> None:
        if type(threads) is not int or threads < 1:
            raise ConfigError(f"threads of a copy engine must be a positive integer, not {threads!r:.40}")
        if host is not None and device.page_bytes != host.page_bytes:
            raise ConfigError(
                f"device pages have {device.page_bytes} bytes, host pages {host.page_bytes}: make both alike"
            )
        self._device = device
        self._host = host
        self._changed = threading.Condition()  # guards all below; also what copies wait on
        self._up: deque[_Job] = deque()
        self._down: deque[_Job] = deque()
        self._parked: dict[_Job, None] = {}  # their event has not passed
        self._moving: dict[_Job, None] = {}
        self._in_flight = 0
        self._pages = {True: 0, False: 0}  # by `down`
        self._failed = 0
        self._callback_errors = 0
        self._closing = self._stopped = False
        self._dropped: int | None = None
        self._watcher = EventWatcher(f"{name}-events")
        self._threads = [
            threading.Thread(target=self._work, args=(lanes,), name=f"{name}-{at}", daemon=True)
            for at, lanes in enumerate(_shared_out(threads, self._up, self._down) if host is not None else ())
        ]
        for thread in self._threads:
            thread.start()

    def device_to_host(self, device_slots: Slots, host_slots: Slots, *, ready: WriterEvent | None, done: Done) -> Copy:
        """Copy pages down, after the event of their writer has passed."""
        job = self._job(device_slots, host_slots, down=True, done=done)
        if ready is None or ready is READY:
            self._accept(job, self._down)
            return job.copy
        self._accept(job, None)
        try:
            self._watcher.watch(ready, lambda passed: self._unpark(job, passed=passed))
        except CacheClosed:
            _LOG.debug("closed while a copy was handed in: it has been dropped with the others")
        return job.copy

    def host_to_device(
        self, host_slots: Slots, device_slots: Slots, *, done: Done, layer_done: Callable[[int], None] | None = None
    ) -> Copy:
        """Copy pages up, layer after layer; thin layers a few at a time, but reported one by one."""
        job = self._job(device_slots, host_slots, down=False, done=done)
        job.layer_done = layer_done
        self._accept(job, self._up)
        return job.copy

    def when_ready(self, event: WriterEvent, done: Callable[[bool], None]) -> None:
        """Call `done` once the event has passed, from the thread that watches events."""
        self._watcher.watch(event, done)

    def statistics(self) -> CopyStatistics:
        """A snapshot."""
        waiting, errors = self._watcher.waiting, self._watcher.errors
        with self._changed:
            down, up = self._pages[True], self._pages[False]
            return CopyStatistics(
                pages_device_to_host=down,
                bytes_device_to_host=down * self._device.page_bytes,
                pages_host_to_device=up,
                bytes_host_to_device=up * self._device.page_bytes,
                failed_pages=self._failed,
                in_flight=self._in_flight,
                waiting=waiting,
                callback_errors=self._callback_errors + errors,
            )

    def close(self, timeout: float) -> int:
        """Drain, drop what is left, stop. Not to be called from a callback of this engine."""
        jobs: list[_Job] = []
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: self._in_flight == 0, max(0.0, timeout))
            if self._dropped is None:
                jobs = [*self._parked, *self._up, *self._down]
                self._dropped = sum(job.copy.pages for job in (*jobs, *self._moving))
            for waiting in (self._parked, self._up, self._down):
                waiting.clear()
            self._stopped = True
            self._changed.notify_all()
            dropped, busy = self._dropped, bool(self._moving)
        for passed in self._watcher.close(_JOIN_SECONDS):
            self._call(passed, False)
        for job in jobs:
            self._settle(job, [PageResult.FAILED] * job.copy.pages)
        if not busy:
            for thread in self._threads:
                thread.join(_JOIN_SECONDS)
        return dropped

    def _job(self, device_slots: Slots, host_slots: Slots, *, down: bool, done: Done) -> _Job:
        if self._host is None:
            raise HicacheInternalError("there is no host pool to copy to or from")
        # Copies of the arrays, as they are read later, by another thread.
        device, host = np.array(device_slots, np.int64), np.array(host_slots, np.int64)
        if device.ndim != 1 or device.shape != host.shape:
            raise HicacheInternalError(f"slots do not pair: {device.shape} on the device, {host.shape} on the host")
        return _Job(Copy(len(device), self._changed), down, device, host, done)

    def _accept(self, job: _Job, lane: deque[_Job] | None) -> None:
        with self._changed:
            if self._closing:
                raise CacheClosed("the copy engine is closed: no page is copied any more")
            self._in_flight += 1
            if lane is None:
                self._parked[job] = None
            else:
                lane.append(job)
                self._changed.notify_all()

    def _unpark(self, job: _Job, *, passed: bool) -> None:
        with self._changed:
            if self._parked.pop(job, False) is None:  # else it was dropped
                job.broken = not passed
                self._down.append(job)
                self._changed.notify_all()

    def _work(self, lanes: tuple[deque[_Job], ...]) -> None:
        while (job := self._next(lanes)) is not None:
            try:
                results = self._copy(job)
            except BaseException:  # one copy's trouble is its own; the thread serves all others
                _LOG.exception("a copy of %d pages failed", job.copy.pages)
                results = [PageResult.FAILED] * job.copy.pages
            with self._changed:
                self._moving.pop(job)
            self._settle(job, results)

    def _next(self, lanes: tuple[deque[_Job], ...]) -> _Job | None:
        """The next copy of the first lane that has one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or any(lanes))
            for lane in lanes:
                if lane:
                    job = lane.popleft()
                    self._moving[job] = None
                    return job
            return None

    def _copy(self, job: _Job) -> list[PageResult]:
        if job.broken:
            return [PageResult.FAILED] * job.copy.pages
        results, left = [PageResult.OK] * job.copy.pages, np.arange(job.copy.pages)
        for layers in self._steps(job):
            failed = self._move(job, left, layers)
            for at in failed:
                results[at] = PageResult.FAILED
            if failed:
                left = np.setdiff1d(left, failed)
            if layers is not None and len(left) == job.copy.pages:
                self._layers_done(job, layers)
        return results

    def _steps(self, job: _Job) -> Iterator[tuple[int, int] | None]:
        if job.down:
            yield None
            return
        layers = self._device.layers
        layer_bytes = max(1, self._device.page_bytes // layers)
        step = -(-_STEP_BYTES // layer_bytes)
        for first in range(0, layers, step):
            yield first, min(first + step, layers)

    def _move(self, job: _Job, left: Slots, layers: tuple[int, int] | None) -> list[int]:
        """Move a step of the pages `left` (indexes into the copy); those that failed."""
        failed: list[int] = []
        count = max(1, _BATCH_BYTES // self._device.page_bytes)
        for start in range(0, len(left), count):
            batch = left[start : start + count]
            try:
                self._transfer(job, batch, layers)
            except BaseException:
                _LOG.warning("copying %d pages failed", len(batch), exc_info=True)
                failed.extend(self._one_by_one(job, batch, layers) if len(batch) > 1 else batch.tolist())
        return failed

    def _one_by_one(self, job: _Job, batch: Slots, layers: tuple[int, int] | None) -> list[int]:
        """After a batch has failed: which of its pages do. The others are written again, which does no harm."""
        failed: list[int] = []
        for at in range(len(batch)):
            try:
                self._transfer(job, batch[at : at + 1], layers)
            except BaseException:
                failed.append(int(batch[at]))
        return failed

    def _transfer(self, job: _Job, batch: Slots, layers: tuple[int, int] | None) -> None:
        pool = self._host
        assert pool is not None, "a copy without a host pool is refused when it is asked for"
        if job.down:
            self._device.gather(job.device_slots[batch], pool, job.host_slots[batch])
        else:
            self._device.scatter(pool, job.host_slots[batch], job.device_slots[batch], layers=layers)

    def _layers_done(self, job: _Job, layers: tuple[int, int]) -> None:
        job.copy.advance(layers[1])
        if job.layer_done is not None:
            for layer in range(*layers):
                self._call(job.layer_done, layer)

    def _settle(self, job: _Job, results: list[PageResult]) -> None:
        self._call(job.done, results)
        moved = results.count(PageResult.OK)
        with self._changed:
            self._pages[job.down] += moved
            self._failed += len(results) - moved
            self._in_flight -= 1
            job.copy.finish(results)

    def _call(self, callback: Callable[[Any], None], argument: object) -> None:
        try:
            callback(argument)
        except BaseException:  # whatever a callback does, the thread lives and the copy has ended
            _LOG.exception("a callback of a copy raised")
            with self._changed:
                self._callback_errors += 1


def _shared_out(threads: int, up: deque[_Job], down: deque[_Job]) -> list[tuple[deque[_Job], ...]]:
    """The lanes that each thread serves, in the order it looks."""
    alone: tuple[deque[_Job], ...] = (up,)
    if threads == 1:
        return [(up, down)]
    return [alone] * (threads - threads // 2) + [(down,)] * (threads // 2)
