"""Pools and copies without bytes, for simulation: the cache decides as always, and nothing is moved.

Copies end inside the call that asks for them (`NullCopyEngine.inline`), so a simulation needs no threads and repeats
itself exactly.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.core.layout import KVGeometry
from hicache.errors import CacheClosed, GeometryError, HicacheInternalError
from hicache.memory.base import Bytes, Copy, CopyEngine, CopyStatistics, DevicePool, Done, HostPool, Slots
from hicache.memory.watcher import look
from hicache.memory.writer import READY, WriterEvent
from hicache.records import PageResult
from hicache.units import whole_number

__all__ = ["NullCopyEngine", "NullDevicePool", "NullHostPool"]

_LOG = logging.getLogger(__name__)


class NullHostPool(HostPool):
    """A host pool whose pages have no bytes.

    Args:
        slots: number of slots.
    """

    page_bytes = 0

    def __init__(self, slots: int) -> None:
        self.slots = slots

    @property
    def pages(self) -> Bytes:
        """An empty array (slots, 0)."""
        return np.empty((self.slots, 0), np.uint8)

    def page(self, slot: int) -> Bytes:
        """An empty array."""
        _check(slot, self.slots)
        return np.empty(0, np.uint8)

    def buffer(self, slot: int, offset: int = 0, length: int | None = None) -> memoryview:
        """An empty buffer."""
        if offset or length:
            raise GeometryError("pages of a simulation have no bytes")
        return self.page(slot).data

    def poison(self, slots: Slots) -> None:
        """Nothing to fill."""

    def close(self) -> None:
        """Nothing to give back."""


class NullDevicePool(DevicePool):
    """A device pool whose pages have no bytes; it holds pages of any geometry.

    Args:
        slots: number of slots, or None for a device without end.
    """

    page_bytes = 0
    layers = 1
    synchronous = True

    def __init__(self, slots: int | None) -> None:
        self.slots = slots

    def check_geometry(self, geometry: KVGeometry, page_size: int) -> None:
        """Pages without bytes are alike."""

    def gather(self, slots: Slots, host: HostPool, host_slots: Slots) -> None:
        """Nothing to move."""

    def scatter(
        self, host: HostPool, host_slots: Slots, slots: Slots, *, layers: tuple[int, int] | None = None
    ) -> None:
        """Nothing to move."""

    def read_page(self, slot: int) -> Bytes:
        """An empty array."""
        _check(slot, self.slots)
        return np.empty(0, np.uint8)

    def write_page(self, slot: int, data: bytes | bytearray | memoryview | npt.NDArray[Any]) -> None:
        """Take a page of no bytes."""
        _check(slot, self.slots)
        given: object = data
        if not isinstance(given, (bytes, bytearray, memoryview, np.ndarray)) or len(given):
            raise GeometryError(f"pages of a simulation have no bytes: give b'', not {data!r:.40}")

    def poison(self, slots: Slots) -> None:
        """Nothing to fill."""

    def close(self) -> None:
        """Nothing to let go."""


class NullCopyEngine(CopyEngine):
    """Copies end at once: `done` is called in the caller's thread, and the copy that is returned has its results.

    A copy or callback whose event has not passed is kept until `run` finds that it has. Not thread-safe: it belongs
    to whoever drives the simulation.

    Args:
        device: a pool without bytes.
        host: another one; None where the cache has no host tier.
    """

    inline = True

    def __init__(self, device: NullDevicePool, host: NullHostPool | None) -> None:
        self._page_bytes = device.page_bytes
        self._host = host
        self._condition = threading.Condition()
        self._waiting: list[tuple[WriterEvent, Callable[[bool], None]]] = []
        self._down = self._up = self._failed = self._in_flight = self._callback_errors = 0
        self._dropped: int | None = None

    def device_to_host(self, device_slots: Slots, host_slots: Slots, *, ready: WriterEvent | None, done: Done) -> Copy:
        """End at once, or in `run` where the event has not passed."""
        copy = self._copy(device_slots, host_slots)
        self._await(ready or READY, lambda passed: self._end(copy, done, down=True, passed=passed))
        return copy

    def host_to_device(
        self, host_slots: Slots, device_slots: Slots, *, done: Done, layer_done: Callable[[int], None] | None = None
    ) -> Copy:
        """End at once; the page has one layer."""
        copy = self._copy(device_slots, host_slots)
        copy.layers_done = 1
        if layer_done is not None:
            self._call(layer_done, 0)
        self._end(copy, done, down=False, passed=True)
        return copy

    def when_ready(self, event: WriterEvent, done: Callable[[bool], None]) -> None:
        """Call `done` at once, or in `run` where the event has not passed."""
        self._open()
        self._await(event, lambda passed: self._call(done, passed))

    def run(self) -> int:
        """End what waited for events that have passed by now, in the order asked; how many those were."""
        waiting, self._waiting = self._waiting, []
        for event, settled in waiting:
            self._await(event, settled)
        return len(waiting) - len(self._waiting)

    def statistics(self) -> CopyStatistics:
        """A snapshot; there are no bytes to count."""
        return CopyStatistics(
            pages_device_to_host=self._down,
            bytes_device_to_host=self._down * self._page_bytes,
            pages_host_to_device=self._up,
            bytes_host_to_device=self._up * self._page_bytes,
            failed_pages=self._failed,
            in_flight=self._in_flight,
            waiting=len(self._waiting),
            callback_errors=self._callback_errors,
        )

    def close(self, timeout: float) -> int:  # noqa: ARG002  nothing here takes time
        """Drop what waits for events that have not passed."""
        if self._dropped is None:
            self._dropped = 0
            self.run()
            before, waiting = self._failed, self._waiting
            self._waiting = []
            for _, settled in waiting:
                settled(False)
            self._dropped = self._failed - before
        return self._dropped

    def _copy(self, device_slots: Slots, host_slots: Slots) -> Copy:
        self._open()
        if self._host is None:
            raise HicacheInternalError("there is no host pool to copy to or from")
        if len(device_slots) != len(host_slots):
            raise HicacheInternalError(
                f"{len(device_slots)} device slots do not pair with {len(host_slots)} host slots"
            )
        self._in_flight += 1
        return Copy(len(device_slots), self._condition)

    def _await(self, event: WriterEvent, settled: Callable[[bool], None]) -> None:
        passed = look(event)
        if passed is None:
            self._waiting.append((event, settled))
        else:
            settled(passed)

    def _end(self, copy: Copy, done: Done, *, down: bool, passed: bool) -> None:
        self._in_flight -= 1
        if not passed:
            self._failed += copy.pages
        elif down:
            self._down += copy.pages
        else:
            self._up += copy.pages
        results = [PageResult.OK if passed else PageResult.FAILED] * copy.pages
        self._call(done, results)
        copy.finish(results)

    def _call(self, callback: Callable[[Any], None], argument: object) -> None:
        try:
            callback(argument)
        except Exception:
            _LOG.exception("a callback of a copy raised")
            self._callback_errors += 1

    def _open(self) -> None:
        if self._dropped is not None:
            raise CacheClosed("the copy engine is closed: no page is copied any more")


def _check(slot: int, slots: int | None) -> None:
    number = whole_number(slot)
    if number is None or number < 0 or (slots is not None and number >= slots):
        raise GeometryError(f"slot {slot!r:.40} does not exist: the pool has {slots}")
