"""Copies between a GPU and host memory: streams where `ThreadCopyEngine` has threads.

What waits for what, and where:

    a copy down     the writer's event: its stream waits, the host does not. Those whose event has not passed have a
                    stream of their own, so that others go first
    a copy up       the end of what others did with its slots: its stream waits for the engine's, as it stands when the
                    copy is asked for, or for the events that the pool was told
    the engine      a layer of a copy up: its stream waits for that layer's event (`CudaCopy.let_wait`)
    slots' reuse    `done`, which comes behind the copy's last event, so whoever gets a slot then needs no event
    close           all events; host memory is unpinned behind them

Nothing ever waits for the whole device. Of a device that has failed no event passes, and nobody can tell whether its
copies still move bytes: those under way are stranded. Their pages have failed, but `done` is never called, so that
nobody else gets their slots, and the host's memory stays where it is, pinned, until the process ends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hicache.cuda.choice import Choice, ChosenExecutors
from hicache.cuda.driver import CudaError, Event, Priority
from hicache.cuda.endings import Endings
from hicache.cuda.events import CudaEvent, event_behind
from hicache.cuda.hostside import HostSide, chosen
from hicache.cuda.kept import KEPT, keep
from hicache.cuda.lanes import CudaCopy, Job, Lane
from hicache.cuda.pinned import PinnedStatistics
from hicache.cuda.pool import CudaDevicePool
from hicache.cuda.putting import Putting
from hicache.cuda.runs import HostPart
from hicache.errors import CacheClosed, ConfigError, HicacheInternalError
from hicache.memory.base import CopyEngine, CopyStatistics, Done, HostPool, Slots
from hicache.memory.watcher import EventWatcher
from hicache.memory.writer import READY, WriterEvent
from hicache.records import PageResult
from hicache.units import format_size

__all__ = ["CudaCopyEngine", "CudaCopyStatistics", "chosen"]

_LOG = logging.getLogger(__name__)
_JOIN_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class CudaCopyStatistics(CopyStatistics):
    """A snapshot of a CUDA copy engine.

    Attributes:
        device: number of the GPU.
        pinned: how its host memory is pinned.
        choice: which way of copying is used for what, and why; None without host memory.
        tables: run tables carried out, by method and direction ("batch up").
        error: what the device said last, if anything; empty where all is well.
    """

    device: int = 0
    pinned: PinnedStatistics = field(default_factory=PinnedStatistics)
    choice: Choice | None = None
    tables: dict[str, int] = field(default_factory=dict)
    error: str = ""


class CudaCopyEngine(CopyEngine):
    """Copies between one CUDA pool and one host pool.

    Host memory that is not pinned yet is pinned here, and unpinned by `close`. Kernels are compiled and the ways of
    copying are measured here, never later.

    Args:
        device: the pool.
        host: pages in canonical layout, in this process; None where there is none: then only events are waited for.
        parts: where those pages lie, where `host` is no pool of this process's own: a client's arenas.
        executors: chosen before, for pinned memory; they stay their owner's. None chooses here.
        name: beginning of the threads' names.

    Raises:
        ConfigError: pools of different page sizes; host memory that cannot be pinned and must be.
        GeometryError: pages that are none of the device's.
    """

    def __init__(
        self,
        device: CudaDevicePool,
        host: HostPool | None,
        *,
        parts: tuple[HostPart, ...] = (),
        executors: ChosenExecutors | None = None,
        name: str = "hicache-cuda",
    ) -> None:
        if host is not None and device.page_bytes != host.page_bytes:
            raise ConfigError(
                f"device pages have {device.page_bytes} bytes, host pages {host.page_bytes}: make both alike"
            )
        self._device = device
        self._driver = device.driver
        self._name = name
        self._process = os.getpid()
        self._ends = Endings(device.device, layers=device.layers, probe=device.driver.memory, release=self._release)
        self._changed = self._ends.changed  # guards all below, too
        self._parked: dict[Job, None] = {}  # their event is none of CUDA's, and has not passed
        self._closing = False
        self._dropped: int | None = None
        self._lanes: dict[str, Lane] = {}
        self._watcher = EventWatcher(f"{name}-events")
        self._unit = device.page_bytes  # bytes of what a device slot holds: a page, or a part of one
        self._side: HostSide | None = None
        if host is not None or parts:
            self._side = HostSide(device, host, parts=parts, executors=executors)
            self._unit = device.page_bytes // self._side.runs.parts
            self._putting = Putting(self._side, self._ends, layers=device.layers, unit=self._unit)
            self._open_lanes(self._side)

    def _open_lanes(self, side: HostSide) -> None:
        try:
            self._lane("up", "high")
            self._lane("down", "low")
        except BaseException:
            for lane in self._lanes.values():
                lane.stop()
            side.release()
            raise

    def _lane(self, name: str, priority: Priority) -> Lane:
        lane = Lane(
            self._driver,
            name=f"{self._name}-{name}",
            priority=priority,
            bound=self._device.options.in_flight_bytes,
            put=self._putting.put,
            passed=self._ends.passed,
        )
        try:
            self._device.used_by(lane.stream)
        except BaseException:
            lane.stop()
            raise
        self._lanes[name] = lane
        return lane

    # ---- asked for

    def device_to_host(
        self,
        device_slots: Slots,
        host_slots: Slots,
        *,
        ready: WriterEvent | None,
        done: Done,
        parts: Slots | None = None,
        layers: tuple[int, int] | None = None,
    ) -> CudaCopy:
        """Copy pages down, after the event of their writer has passed.

        `parts` is for pools whose slots are parts of a page: which one each is. Results are then one a part. `layers`
        is a range [first, end) of each page, the others of which are copied by other calls.
        """
        job = self._job(device_slots, host_slots, down=True, done=done, parts=parts)
        job.only = layers
        event = None if ready is None or ready is READY else event_behind(self._driver, ready)
        if event is not None:
            job.behind = self._asked(job, lambda: [] if self._driver.query(event) else [event])
            self._accept(job, "late" if job.behind else "down")
        elif ready is None or ready is READY:
            self._accept(job, "down")
        else:
            self._accept(job, None)
            try:
                self._watcher.watch(ready, lambda passed: self._unpark(job, passed=passed))
            except CacheClosed:
                _LOG.debug("closed while a copy was handed in: it has been dropped with the others")
        return job.copy

    def host_to_device(
        self,
        host_slots: Slots,
        device_slots: Slots,
        *,
        done: Done,
        layer_done: Callable[[int], None] | None = None,
        behind: Sequence[CudaEvent] | None = None,
        parts: Slots | None = None,
    ) -> CudaCopy:
        """Copy pages up, layer after layer; thin layers a few at a time, but reported one by one.

        `behind` are events behind which nobody uses the slots any more, where the caller has them. `parts` as in
        `device_to_host`.
        """
        job = self._job(device_slots, host_slots, down=False, done=done, parts=parts)
        job.layer_done = layer_done
        if behind is not None:
            job.behind = [event.event for event in behind]
        else:
            job.behind = self._asked(job, lambda: self._device.ends_of_use(job.device_slots))
        self._accept(job, "up")
        return job.copy

    def when_ready(self, event: WriterEvent, done: Callable[[bool], None]) -> None:
        """Call `done` once the event has passed, from the thread that watches events."""
        self._watcher.watch(event, done)

    def statistics(self) -> CudaCopyStatistics:
        """A snapshot."""
        waiting, errors = self._watcher.waiting, self._watcher.errors
        ends, side, size = self._ends, self._side, self._unit
        with self._changed:
            down, up = ends.moved[True], ends.moved[False]
            return CudaCopyStatistics(
                pages_device_to_host=down,
                bytes_device_to_host=down * size,
                pages_host_to_device=up,
                bytes_host_to_device=up * size,
                failed_pages=ends.failed,
                in_flight=ends.in_flight,
                waiting=waiting,
                callback_errors=ends.callback_errors + errors,
                stranded_pages=sum(job.copy.pages for job in ends.stranded),
                lost=ends.lost,
                device=self._driver.device,
                pinned=PinnedStatistics() if side is None else side.pinned(),
                choice=None if side is None else side.choice,
                tables={} if side is None else side.tables(),
                error=ends.error,
            )

    @property
    def lost(self) -> str:
        """Why no page is copied any more; see `CopyEngine`."""
        return self._ends.lost

    def when_stranded(self, told: Callable[[], None]) -> None:
        """Call back whenever a copy was stranded; see `CopyEngine`."""
        self._ends.when_stranded = told

    @property
    def over(self) -> bool:
        """Whether no bytes of any copy may move any more."""
        with self._changed:
            return not self._ends.busy

    def close(self, timeout: float) -> int:
        """Drain, drop what is left, stop. Not to be called from a callback of this engine.

        In a forked child it does nothing: threads, streams and pinned memory are the parent's.
        """
        if os.getpid() != self._process:
            return 0
        jobs: list[Job] = []
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: self._ends.in_flight == 0, max(0.0, timeout))
            lanes = list(self._lanes.values())
            if self._dropped is None:
                jobs = [*self._parked, *(job for lane in lanes for job in lane.drop())]
                begun = {job for lane in lanes for job in lane.begun()} | set(self._ends.stranded)
                self._dropped = sum(job.copy.pages for job in (*jobs, *begun))
                self._parked.clear()
                self._ends.closed = True
            dropped = self._dropped
        for passed in self._watcher.close(_JOIN_SECONDS):
            self._ends.call(passed, False)
        for job in jobs:
            self._ends.settle(job, [PageResult.FAILED] * job.copy.pages)
        for lane in lanes:
            lane.stop()
        if self.over:
            self._release()
        elif self._ends.stranded and not any(kept is self for kept in KEPT):
            size = 0 if self._side is None else self._side.pinned().bytes
            keep(self, f"{format_size(size)} of host memory, {self.lost}")
        return dropped

    # ---- within

    def _job(
        self, device_slots: Slots, host_slots: Slots, *, down: bool, done: Done, parts: Slots | None = None
    ) -> Job:
        if self._side is None:
            raise HicacheInternalError("there is no host pool to copy to or from")
        # Copies of the arrays, as they are read later, by another thread.
        device, host = np.array(device_slots, np.int64), np.array(host_slots, np.int64)
        if device.ndim != 1 or device.shape != host.shape:
            raise HicacheInternalError(f"slots do not pair: {device.shape} on the device, {host.shape} on the host")
        copy = CudaCopy(len(device), self._changed, self._driver)
        of_pages = None if parts is None else np.array(parts, np.int64)
        return Job(copy, down, device, host, done, parts=of_pages, results=[PageResult.OK] * len(device))

    def _asked(self, job: Job, ask: Callable[[], list[Event]]) -> list[Event]:
        """Events of the device; where it has failed none, and the copy will fail."""
        try:
            return ask()
        except CudaError as error:
            self._ends.note(error, job.copy.pages)
            job.broken = True
            return []

    def _accept(self, job: Job, lane: str | None) -> None:
        with self._changed:
            if self._closing:
                raise CacheClosed("the copy engine is closed: no page is copied any more")
            found = None if lane is None else self._lanes.get(lane) or self._late_lane()
            self._ends.in_flight += 1
            self._ends.busy += 1
            if found is None:
                self._parked[job] = None
            else:
                found.add(job)

    def _unpark(self, job: Job, *, passed: bool) -> None:
        with self._changed:
            if self._parked.pop(job, False) is None:  # else it was dropped
                job.broken = not passed
                self._lanes["down"].add(job)

    def _late_lane(self) -> Lane:
        """For copies down whose event has not passed, made with the first of them."""
        try:
            return self._lane("late", "low")
        except Exception as error:  # then they wait in the stream of the others, which wait for them
            self._ends.note(error, 0)
            return self._lanes["down"]

    def _release(self) -> None:
        if self._side is not None:
            self._side.release()
