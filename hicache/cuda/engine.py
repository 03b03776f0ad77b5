"""Copies between a GPU and host memory: streams where `ThreadCopyEngine` has threads.

What waits for what, and where:

    a copy down     the writer's event: its stream waits, the host does not. Those whose event has not passed have a
                    stream of their own, so that others go first
    a copy up       the end of what others did with its slots: its stream waits for the engine's, as it stands when the
                    copy is asked for, or for the events that the pool was told
    the engine      a layer of a copy up: its stream waits for that layer's event (`CudaCopy.let_wait`)
    slots' reuse    `done`, which comes behind the copy's last event, so whoever gets a slot then needs no event
    close           all events; host memory is unpinned behind them

Nothing ever waits for the whole device.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hicache.clock import MonotonicClock
from hicache.cuda.choice import Choice, ChosenExecutors, choose
from hicache.cuda.driver import CudaDriver, CudaError, Event, Priority
from hicache.cuda.events import CudaEvent, event_behind
from hicache.cuda.executors import open_executors
from hicache.cuda.lanes import CudaCopy, Job, Lane, Step
from hicache.cuda.options import CudaOptions
from hicache.cuda.pinned import HostPins, PinnedHostPool, PinnedStatistics, host_parts
from hicache.cuda.pool import CudaDevicePool
from hicache.cuda.runs import HostPart
from hicache.errors import CacheClosed, ConfigError, HicacheInternalError
from hicache.memory.base import CopyEngine, CopyStatistics, Done, HostPool, Slots
from hicache.memory.watcher import EventWatcher
from hicache.memory.writer import READY, WriterEvent
from hicache.records import PageResult

__all__ = ["CudaCopyEngine", "CudaCopyStatistics", "chosen"]

_LOG = logging.getLogger(__name__)
_STEP_BYTES: Final = 1 << 20
"""Smallest step of a copy up. Thinner layers go together: each step costs an event and a wake-up of its thread."""
_BATCH_BYTES: Final = 64 << 20
"""Of one step down, so that host slots come free while the rest is under way."""
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


def chosen(driver: CudaDriver, options: CudaOptions, *, pinned: bool) -> ChosenExecutors:
    """Ways of copying for a device: made, proven, measured and chosen now."""
    executors = open_executors(driver, driver.facts(), pinned=pinned, blocks=options.blocks)
    return choose(driver, executors, MonotonicClock(), asked=options.method)


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
        self._host = host  # keeps its memory mapped
        self._parts = host_parts(host) if host is not None else parts
        self._changed = threading.Condition()  # guards all below; also what copies wait on
        self._parked: dict[Job, None] = {}  # their event is none of CUDA's, and has not passed
        self._in_flight = 0
        self._pages = {True: 0, False: 0}  # by `down`
        self._failed = 0
        self._callback_errors = 0
        self._tables: Counter[str] = Counter()
        self._error = ""
        self._unit = device.page_bytes  # bytes of what a device slot holds: a page, or a part of one
        self._closing = False
        self._dropped: int | None = None
        self._watcher = EventWatcher(f"{name}-events")
        self._name = name
        self._pins: HostPins | None = None
        self._own_pins = False
        self._executors: ChosenExecutors | None = None
        self._own_executors = False
        self._choice: Choice | None = None
        self._lanes: dict[str, Lane] = {}
        self._busy = 0  # copies whose bytes may still move
        self._process = os.getpid()
        if self._parts:
            self._prepare(executors)

    def _prepare(self, given: ChosenExecutors | None) -> None:
        device, driver = self._device, self._driver
        self._runs = device.runs(self._parts)
        self._unit = device.page_bytes // self._runs.parts
        self._pin()
        try:
            pinned = self._pinned().pinned
            self._own_executors = given is None or not pinned
            self._executors = given if given is not None and pinned else chosen(driver, device.options, pinned=pinned)
            self._choice = self._executors.choice
            self._lane("up", "high")
            self._lane("down", "low")
        except BaseException:
            for lane in self._lanes.values():
                lane.stop()
            self._release()
            raise

    def _pin(self) -> None:
        if isinstance(self._host, PinnedHostPool):
            self._pins = self._host.pins
            return
        self._own_pins = True
        self._pins = HostPins(self._driver, self._device.options.pinned)
        try:
            for part in self._parts:
                self._pins.pin(part.address, part.slots * part.stride, f"host memory of {part.slots} pages")
        except BaseException:
            self._pins.close()
            raise

    def _lane(self, name: str, priority: Priority) -> Lane:
        lane = Lane(
            self._driver,
            name=f"{self._name}-{name}",
            priority=priority,
            bound=self._device.options.in_flight_bytes,
            put=self._put,
            passed=self._passed,
        )
        self._lanes[name] = lane
        self._device.used_by(lane.stream)
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
    ) -> CudaCopy:
        """Copy pages down, after the event of their writer has passed.

        `parts` is for pools whose slots are parts of a page: which one each is. Results are then one a part.
        """
        job = self._job(device_slots, host_slots, down=True, done=done, parts=parts)
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
        behind: CudaEvent | None = None,
        parts: Slots | None = None,
    ) -> CudaCopy:
        """Copy pages up, layer after layer; thin layers a few at a time, but reported one by one.

        `behind` is an event behind which nobody uses the slots any more, where the caller has one. `parts` as in
        `device_to_host`.
        """
        job = self._job(device_slots, host_slots, down=False, done=done, parts=parts)
        job.layer_done = layer_done
        if behind is not None:
            job.behind = [behind.event]
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
        size = self._unit
        with self._changed:
            down, up = self._pages[True], self._pages[False]
            return CudaCopyStatistics(
                pages_device_to_host=down,
                bytes_device_to_host=down * size,
                pages_host_to_device=up,
                bytes_host_to_device=up * size,
                failed_pages=self._failed,
                in_flight=self._in_flight,
                waiting=waiting,
                callback_errors=self._callback_errors + errors,
                device=self._driver.device,
                pinned=self._pinned(),
                choice=self._choice,
                tables=dict(self._tables),
                error=self._error,
            )

    def close(self, timeout: float) -> int:
        """Drain, drop what is left, stop. Not to be called from a callback of this engine."""
        jobs: list[Job] = []
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: self._in_flight == 0, max(0.0, timeout))
            lanes = list(self._lanes.values())
            if self._dropped is None:
                jobs = [*self._parked, *(job for lane in lanes for job in lane.drop())]
                begun = {job for lane in lanes for job in lane.begun()}
                self._dropped = sum(job.copy.pages for job in (*jobs, *begun))
                self._parked.clear()
            dropped = self._dropped
        for passed in self._watcher.close(_JOIN_SECONDS):
            self._call(passed, False)
        for job in jobs:
            self._settle(job, [PageResult.FAILED] * job.copy.pages)
        for lane in lanes:
            lane.stop()
        with self._changed:
            idle = not self._busy
        if idle:
            self._release()
        return dropped

    # ---- within

    def _job(
        self, device_slots: Slots, host_slots: Slots, *, down: bool, done: Done, parts: Slots | None = None
    ) -> Job:
        if not self._parts:
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
            self._note(error, job.copy.pages)
            job.broken = True
            return []

    def _accept(self, job: Job, lane: str | None) -> None:
        with self._changed:
            if self._closing:
                raise CacheClosed("the copy engine is closed: no page is copied any more")
            found = None if lane is None else self._lanes.get(lane) or self._lane(lane, "low")
            self._in_flight += 1
            self._busy += 1
            if found is None:
                self._parked[job] = None
            else:
                found.add(job)

    def _unpark(self, job: Job, *, passed: bool) -> None:
        with self._changed:
            if self._parked.pop(job, False) is None:  # else it was dropped
                job.broken = not passed
                self._lanes["down"].add(job)

    def _put(self, lane: Lane, job: Job) -> None:
        """Put a copy into its stream, step by step. In the lane's thread."""
        left = np.arange(job.copy.pages)
        if job.broken:
            left = left[:0]
            job.results = [PageResult.FAILED] * job.copy.pages
        try:
            for before in job.behind:
                self._driver.wait(lane.stream, before)
        except CudaError as error:
            left = self._fail(job, left, error)
        steps = list(self._steps(job))
        for number, (pages, layers) in enumerate(steps):
            part = left if layers is not None else left[(left >= pages[0]) & (left < pages[1])]
            event, failed = self._put_step(lane, job, part, layers)
            left = np.setdiff1d(left, failed, assume_unique=True)
            whole = layers is not None and len(left) == job.copy.pages
            size = len(part) * self._unit // (1 if layers is None else self._device.layers)
            if whole and layers is not None and event is not None:
                job.copy.begun([event] * (layers[1] - layers[0]))
            lane.began(Step(job, event, layers if whole else None, size, number == len(steps) - 1))

    def _steps(self, job: Job) -> Iterator[tuple[tuple[int, int], tuple[int, int] | None]]:
        """Ranges of pages, and of layers on the way up."""
        pages = job.copy.pages
        if job.down:
            count = max(1, _BATCH_BYTES // self._unit)
            for first in range(0, max(pages, 1), count):
                yield (first, min(first + count, pages)), None
            return
        layers = self._device.layers
        layer_bytes = max(1, pages * self._unit // layers)
        step = -(-_STEP_BYTES // layer_bytes)
        for first in range(0, layers, step):
            yield (0, pages), (first, min(first + step, layers))

    def _put_step(
        self, lane: Lane, job: Job, pages: Slots, layers: tuple[int, int] | None
    ) -> tuple[Event | None, list[int]]:
        """One step into the stream; the event behind it, and the pages that failed."""
        failed: list[int] = []
        if not len(pages):
            return None, failed
        try:
            self._transfer(lane, job, pages, layers)
        except Exception as error:
            self._note(error, len(pages))
            failed = self._one_by_one(lane, job, pages, layers) if len(pages) > 1 else pages.tolist()
            for at in failed:
                job.results[at] = PageResult.FAILED
        try:
            # Also behind a failure: some of its runs may be on their way, and the slots are not free before.
            event = self._driver.event()
            self._driver.record(event, lane.stream)
        except CudaError as error:
            self._fail(job, pages, error)
            return None, pages.tolist()
        return event, failed

    def _one_by_one(self, lane: Lane, job: Job, pages: Slots, layers: tuple[int, int] | None) -> list[int]:
        """After a step has failed: which of its pages do. The others are copied again, which does no harm."""
        failed: list[int] = []
        for at in range(len(pages)):
            try:
                self._transfer(lane, job, pages[at : at + 1], layers)
            except Exception as error:
                self._note(error, 1)
                failed.append(int(pages[at]))
        return failed

    def _transfer(self, lane: Lane, job: Job, pages: Slots, layers: tuple[int, int] | None) -> None:
        device, host = job.device_slots[pages], job.host_slots[pages]
        parts = None if job.parts is None else job.parts[pages]
        executors = self._executors
        assert executors is not None, "released only when no copy is under way"
        for table in self._runs.tables(device, host, to_device=not job.down, layers=layers, parts=parts):
            method = executors.run(table, lane.stream, to_device=not job.down)
            with self._changed:
                self._tables[f"{method} {'down' if job.down else 'up'}"] += 1

    def _passed(self, step: Step, error: CudaError | None) -> None:
        """A step has passed. In the lane's waiting thread."""
        job = step.job
        if error is not None:
            self._fail(job, np.arange(job.copy.pages), error)
        elif step.layers is not None:
            job.copy.advance(step.layers[1])
            if job.layer_done is not None:
                for layer in range(*step.layers):
                    self._call(job.layer_done, layer)
        if step.last:
            self._settle(job, job.results)

    def _fail(self, job: Job, pages: Slots, error: CudaError) -> Slots:
        self._note(error, len(pages))
        for at in pages.tolist():
            job.results[at] = PageResult.FAILED
        return pages[:0]

    def _note(self, error: Exception, pages: int) -> None:
        with self._changed:
            known, self._error = self._error, str(error)
        if known != str(error):  # a broken device says the same to everybody
            _LOG.warning("copying %d pages failed: %s", pages, error)

    def _settle(self, job: Job, results: list[PageResult]) -> None:
        with self._changed:
            self._busy -= 1
            last = not self._busy and self._dropped is not None
        if last:  # before `done`, behind which the host's memory may be unmapped
            self._release()
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

    def _pinned(self) -> PinnedStatistics:
        return PinnedStatistics() if self._pins is None else self._pins.statistics()

    def _release(self) -> None:
        """Let go of what copies have used, none of which is under way any more. Idempotent."""
        with self._changed:
            executors, self._executors = self._executors, None
        if os.getpid() != self._process:  # a forked child: all of it is the parent's
            return
        if executors is not None and self._own_executors:
            try:
                executors.close()
            except CudaError as error:
                _LOG.warning("what copies have used could not be given back: %s", error)
        if self._own_pins and self._pins is not None:
            self._pins.close()
