"""What became of a copy engine's copies: who is told, what is counted, and whether bytes may still move."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from hicache.cuda.driver import CudaError
from hicache.cuda.lanes import Job, Step
from hicache.memory.base import Slots
from hicache.records import PageResult

__all__ = ["Endings"]

_LOG = logging.getLogger(__name__)


class Endings:
    """Copies from when they were taken to their end. Thread-safe.

    A copy is *stranded* when the device tells nothing of it any more: its pages have failed, but its bytes may move
    for as long as the process lives, so its `done` is never called.

    Args:
        device: number of the GPU, for messages.
        layers: of a page.
        probe: a call that fails where the device has.
        release: called when no byte moves any more, once `closed` is set and in front of the last `done`: behind that
            the host's memory may be unmapped.

    Attributes:
        changed: guards all of it; also what copies wait on.
        in_flight: copies that have not ended.
        busy: copies whose bytes may still move.
        stranded: copies of which nobody can tell.
        moved: pages that came rightly, by whether they went down.
        failed: pages that did not.
        callback_errors: exceptions of callbacks.
        error: what went wrong last, in words.
        lost: why nothing is copied any more, in words; empty where all is well.
        closed: whether nothing new comes.
        when_stranded: called whenever a copy was.
    """

    def __init__(self, device: int, *, layers: int, probe: Callable[[], object], release: Callable[[], None]) -> None:
        self._device = device
        self._layers = layers
        self._probe = probe
        self._release = release
        self.changed = threading.Condition()
        self.in_flight = 0
        self.busy = 0
        self.stranded: dict[Job, None] = {}
        self.moved = {True: 0, False: 0}
        self.failed = 0
        self.callback_errors = 0
        self.error = ""
        self.lost = ""
        self.closed = False
        self.when_stranded: Callable[[], None] | None = None

    def fail(self, job: Job, pages: Slots, error: Exception) -> None:
        """Pages of a copy have failed on an error."""
        self.note(error, len(pages))
        job.fail(pages)

    def note(self, error: Exception, pages: int) -> None:
        """Remember what went wrong, with so many pages; a broken device says the same to everybody."""
        with self.changed:
            known, self.error = self.error, str(error)
        if known != str(error):
            _LOG.warning("copying %d pages failed: %s", pages, error)
        if isinstance(error, CudaError) and not self.lost:
            try:
                self._probe()
            except CudaError:
                self._lose(error)

    def passed(self, step: Step, error: Exception | None, over: bool) -> None:
        """A step has passed; see `Lane`."""
        job = step.job
        if error is not None:
            self.fail(job, np.arange(job.copy.pages), error)
        elif step.layers is not None:
            job.copy.advance(step.layers[1])
            if job.layer_done is not None:
                for layer in range(*step.layers):
                    self.call(job.layer_done, layer)
        if not over:
            with self.changed:
                self.stranded[job] = None
            self._lose(error)
        if step.last:
            (self._strand if job in self.stranded else self.settle)(job, job.results)

    def settle(self, job: Job, results: list[PageResult]) -> None:
        """A copy has ended."""
        with self.changed:
            self.busy -= 1
            last = not self.busy and self.closed
        if last:
            self._release()
        self.call(job.done, results)
        moved = results.count(PageResult.OK)
        whole = job.only is None or job.only[1] == self._layers  # a page in parts counts with its last one
        with self.changed:
            self.moved[job.down] += moved if whole else 0
            self.failed += len(results) - moved
            self.in_flight -= 1
            job.copy.finish(results)

    def call(self, callback: Callable[[Any], None], argument: object) -> None:
        """Call back, whatever comes of it."""
        try:
            callback(argument)
        except BaseException:  # whatever a callback does, the thread lives and the copy has ended
            _LOG.exception("a callback of a copy raised")
            with self.changed:
                self.callback_errors += 1

    def _lose(self, error: Exception | None) -> None:
        """The device has failed, and not only a call."""
        with self.changed:
            known, self.lost = self.lost, self.lost or f"CUDA device {self._device} has failed ({error})"
        if not known:
            _LOG.error("%s: nothing is copied to it or from it until the process is started anew", self.lost)

    def _strand(self, job: Job, results: list[PageResult]) -> None:
        with self.changed:
            self.failed += len(results)
            self.in_flight -= 1
            job.copy.strand(results)
        if self.when_stranded is not None:
            self.call(lambda told: told(), self.when_stranded)
