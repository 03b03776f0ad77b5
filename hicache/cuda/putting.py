"""Copies on their way into a stream: step by step, each with an event behind it, whatever fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from hicache.cuda.endings import Endings
from hicache.cuda.hostside import HostSide
from hicache.cuda.lanes import Job, Lane, Step
from hicache.memory.base import Slots

__all__ = ["Putting"]

_STEP_BYTES: Final = 1 << 20
"""Smallest step of a copy up. Thinner layers go together: each step costs an event and a wake-up of its thread."""
_BATCH_BYTES: Final = 64 << 20
"""Of one step down, so that host slots come free while the rest is under way."""


class Putting:
    """Puts copies into the streams of lanes. Its methods are called by the lanes' threads.

    Args:
        side: host memory, and what copies it.
        ends: told of what fails; nothing is put into the streams of a device that it knows to be lost.
        layers: of a page.
        unit: bytes of what a device slot holds: a page, or a part of one.
    """

    def __init__(self, side: HostSide, ends: Endings, *, layers: int, unit: int) -> None:
        self._side = side
        self._ends = ends
        self._layers = layers
        self._unit = unit

    def put(self, lane: Lane, job: Job) -> None:
        """Put a copy into its stream, step by step; raises nothing."""
        try:
            self._put(lane, job)
        except Exception as error:  # whatever of it is in the stream by now
            self._ends.fail(job, np.arange(job.copy.pages), error)
            lane.began(Step(job, None, None, 0, last=True, loose=True))

    def _put(self, lane: Lane, job: Job) -> None:
        left = self._begin(lane, job)
        steps = list(self._steps(job))
        for number, (pages, layers) in enumerate(steps):
            part = left if layers is not None else left[(left >= pages[0]) & (left < pages[1])]
            step, failed = self._put_step(lane, job, part, layers)
            step.last = number == len(steps) - 1
            if len(failed):
                left = np.setdiff1d(left, failed, assume_unique=True)
            if layers is None or len(left) < job.copy.pages:
                step.layers = None  # of no layer can be said that it is complete in every page
            elif step.event is not None:
                job.copy.begun([step.event] * (layers[1] - layers[0]))
            lane.began(step)

    def _begin(self, lane: Lane, job: Job) -> Slots:
        """Let the stream wait for what the copy waits for. Returns the pages that are to be copied."""
        left = np.arange(job.copy.pages)
        if job.broken:
            job.fail(left)
            return left[:0]
        try:
            lane.wait(job.behind)
        except Exception as error:
            self._ends.fail(job, left, error)
            return left[:0]
        return left

    def _steps(self, job: Job) -> Iterator[tuple[tuple[int, int], tuple[int, int] | None]]:
        """Ranges of pages, and of layers on the way up."""
        pages = job.copy.pages
        if job.down:
            count = max(1, _BATCH_BYTES // self._unit)
            for first in range(0, max(pages, 1), count):
                yield (first, min(first + count, pages)), None
            return
        layer_bytes = max(1, pages * self._unit // self._layers)
        step = -(-_STEP_BYTES // layer_bytes)
        for first in range(0, self._layers, step):
            yield (0, pages), (first, min(first + step, self._layers))

    def _put_step(self, lane: Lane, job: Job, pages: Slots, layers: tuple[int, int] | None) -> tuple[Step, Slots]:
        """One step into the stream, and an event behind it; the step, and which of its pages failed."""
        first, end = layers or job.only or (0, self._layers)
        step = Step(job, None, layers, len(pages) * self._unit * (end - first) // self._layers)
        failed = pages[:0]
        if not len(pages):
            return step, failed
        if self._ends.lost:
            job.fail(pages)
            return step, pages
        try:
            self._transfer(lane, job, pages, layers)
        except Exception as error:
            self._ends.note(error, len(pages))
            failed = self._one_by_one(lane, job, pages, layers) if len(pages) > 1 else pages
            job.fail(failed)
        try:
            # Also behind a failure: some of its runs may be on their way, and the slots are not free before.
            step.event = lane.fence()
        except Exception as error:
            self._ends.fail(job, pages, error)
            step.loose, failed = True, pages
        return step, failed

    def _one_by_one(self, lane: Lane, job: Job, pages: Slots, layers: tuple[int, int] | None) -> Slots:
        """After a step has failed: which of its pages do. The others are copied again, which does no harm."""
        failed = np.zeros(len(pages), np.bool_)
        for at in range(len(pages)):
            if self._ends.lost:
                failed[at:] = True
                break
            try:
                self._transfer(lane, job, pages[at : at + 1], layers)
            except Exception as error:
                self._ends.note(error, 1)
                failed[at] = True
        return pages[failed]

    def _transfer(self, lane: Lane, job: Job, pages: Slots, layers: tuple[int, int] | None) -> None:
        device, host = job.device_slots[pages], job.host_slots[pages]
        parts = None if job.parts is None else job.parts[pages]
        layers = job.only if layers is None else layers
        for table in self._side.runs.tables(device, host, to_device=not job.down, layers=layers, parts=parts):
            self._side.run(table, lane.stream, to_device=not job.down)
