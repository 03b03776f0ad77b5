"""Which layers of a step wait for which loads, and whether they did."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hicache_vllm.compat import Forward
from hicache_vllm.copier import Copier
from hicache_vllm.plans import Load
from hicache_vllm.tensors import Wait

__all__ = ["LayerWaits"]


class LayerWaits:
    """Loads that a step waits for. The engine's threads wait; the copier's tell how far loads are.

    Layers are trusted to wait only where vLLM calls for each of them. Elsewhere the whole step waits before it begins,
    and if ever a layer has not called where it had to, that is noticed when the step is over.

    Args:
        copier: wakes up who waits.
        layers: how many.
    """

    def __init__(self, copier: Copier, layers: int) -> None:
        self._copier = copier
        self._layers = layers
        self._lock = threading.Lock()
        self._done: dict[int, int] = {}  # layers that have come, or are on their way, of each load that has not ended
        self._orders: dict[int, Wait] = {}  # of these: lets the engine's stream wait, where a device orders copies
        self._step: list[Load] = []
        self._called: set[int] = set()
        self._forward = Forward()
        self._trusted = True

    def begin_step(self, forward: Forward) -> None:
        """A step begins."""
        self._forward = forward

    def begin(self, loads: Sequence[Load]) -> None:
        """This step waits for these loads, which are about to begin."""
        self._step, self._called = list(loads), set()
        with self._lock:
            self._done.update((load.job, 0) for load in loads)

    def begun(self) -> None:
        """They have begun: wait for all of them, where layers will not."""
        if self._step and not (self._forward.hooked and self._trusted):
            self._wait(self._layers - 1)

    def wait(self, layer: int) -> None:
        """A layer is about to be computed, on the calling thread's stream."""
        if self._forward.hooked:
            self._wait(layer)
            self._called.add(layer)

    def _wait(self, layer: int) -> None:
        if self._done:
            self._copier.wait_for(lambda: all(done > layer for done in list(self._done.values())), None)
            for wait in list(self._orders.values()):
                wait(layer)

    def came(self, job: int, layers: int) -> None:
        """So many layers of a load are there."""
        with self._lock:
            self._done[job] = layers
        self._copier.notify()

    def ordered(self, job: int, wait: Wait) -> None:
        """All layers of a load are on their way, and a stream can wait for each."""
        with self._lock:
            self._orders[job] = wait
            self._done[job] = self._layers
        self._copier.notify()

    def ended(self, job: int) -> None:
        """A load has ended, well or not."""
        with self._lock:
            self._done.pop(job, None)
            self._orders.pop(job, None)

    def end_step(self) -> tuple[list[Load], int]:
        """The step is over: wait until its loads have ended.

        Returns:
            Them, and how many layers were computed without having waited for them.
        """
        loads, self._step = self._step, []
        if not loads:
            return loads, 0
        self._copier.wait_for(lambda: not self._done, None)
        missed = self._layers - len(self._called) if self._forward.hooked and self._trusted else 0
        self._trusted = self._trusted and not missed
        return loads, missed
