"""The host's side of a copy engine: its memory, pinned while copies may run, and the ways of copying chosen for it."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter

from hicache.clock import MonotonicClock
from hicache.cuda.choice import ChosenExecutors, choose
from hicache.cuda.driver import CudaDriver, CudaError, Stream
from hicache.cuda.executors import open_executors
from hicache.cuda.options import CudaOptions
from hicache.cuda.pinned import HostPins, PinnedHostPool, PinnedStatistics, host_parts
from hicache.cuda.pool import CudaDevicePool
from hicache.cuda.runs import HostPart, RunTable
from hicache.memory.base import HostPool

__all__ = ["HostSide", "chosen"]

_LOG = logging.getLogger(__name__)


def chosen(driver: CudaDriver, options: CudaOptions, *, pinned: bool) -> ChosenExecutors:
    """Ways of copying for a device: made, proven, measured and chosen now."""
    executors = open_executors(driver, driver.facts(), pinned=pinned, blocks=options.blocks)
    return choose(driver, executors, MonotonicClock(), asked=options.method)


class HostSide:
    """Host memory that is copied from and to, and what copies it. Any thread may use it.

    Memory that is not pinned yet is pinned here, and unpinned by `release`. Kernels are compiled and the ways of
    copying are measured here, never later.

    Args:
        device: the pool at the other side.
        host: the host pool, which stays mapped as long as this; None where `parts` are somebody else's.
        parts: where pages lie, where there is no host pool.
        executors: chosen before, for pinned memory; they stay their owner's. None chooses here.

    Attributes:
        runs: what the copy of a page moves.
        choice: which way of copying is used for what, and why.

    Raises:
        ConfigError: host memory that cannot be pinned and must be.
        GeometryError: pages that are none of the device's.
    """

    def __init__(
        self,
        device: CudaDevicePool,
        host: HostPool | None,
        *,
        parts: tuple[HostPart, ...] = (),
        executors: ChosenExecutors | None = None,
    ) -> None:
        self._host = host
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._tables: Counter[str] = Counter()
        parts = host_parts(host) if host is not None else parts
        self.runs = device.runs(parts)
        self._pins, self._own_pins = _pinned(device, host, parts)
        try:
            pinned = self._pins.statistics().pinned
            self._own_executors = executors is None or not pinned
            if executors is None or not pinned:
                executors = chosen(device.driver, device.options, pinned=pinned)
        except BaseException:
            if self._own_pins:
                self._pins.close()
            raise
        self._executors: ChosenExecutors | None = executors
        self.choice = executors.choice

    def run(self, table: RunTable, stream: Stream, *, to_device: bool) -> None:
        """Put the copies of a table into a stream.

        Raises:
            CudaError: a call failed. Some of the copies may be in the stream.
        """
        executors = self._executors
        assert executors is not None, "released only when no copy is under way"
        method = executors.run(table, stream, to_device=to_device)
        with self._lock:
            self._tables[f"{method} {'up' if to_device else 'down'}"] += 1

    def tables(self) -> dict[str, int]:
        """Run tables carried out so far, by method and direction ("batch up")."""
        with self._lock:
            return dict(self._tables)

    def pinned(self) -> PinnedStatistics:
        """How the memory is pinned."""
        return self._pins.statistics()

    def release(self) -> None:
        """Let go of what copies have used, none of which is under way any more. Idempotent."""
        with self._lock:
            executors, self._executors = self._executors, None
        if os.getpid() != self._process:  # a forked child: all of it is the parent's
            return
        if executors is not None and self._own_executors:
            try:
                executors.close()
            except CudaError as error:  # the device is gone, and its memory with it
                _LOG.warning("what copies have used could not be given back: %s", error)
        if self._own_pins:
            self._pins.close()


def _pinned(device: CudaDevicePool, host: HostPool | None, parts: tuple[HostPart, ...]) -> tuple[HostPins, bool]:
    """How the memory is pinned, and whether that is to be undone here."""
    if isinstance(host, PinnedHostPool):
        return host.pins, False
    pins = HostPins(device.driver, device.options.pinned)
    try:
        for part in parts:
            size, what = part.slots * part.stride, f"host memory of {part.slots} pages"
            pins.pin(part.address, size, what, writes=part.writes)
    except BaseException:
        pins.close()
        raise
    return pins, True
