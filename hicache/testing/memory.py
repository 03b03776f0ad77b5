"""Memory for tests: copies that end when a test says so, and device pools that stop or fail where it says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.core.layout import KVGeometry
from hicache.errors import CacheClosed
from hicache.memory.base import Bytes, Copy, CopyEngine, CopyStatistics, DevicePool, Done, HostPool, Slots
from hicache.memory.writer import READY, WriterEvent
from hicache.records import PageResult
from hicache.testing.gates import Gate

__all__ = ["FaultyDevicePool", "ManualCopyEngine", "PendingCopy"]


class FaultyDevicePool(DevicePool):
    """A device pool around another one whose copies stop at gates and raise errors that a test chose.

    Args:
        inner: does the work.
        gate: each gather and scatter goes through it before a byte moves; None: nothing stops.
        fault: called with "gather" or "scatter" and each device slot in front of the copy; what it returns is raised.
    """

    def __init__(
        self,
        inner: DevicePool,
        *,
        gate: Gate | None = None,
        fault: Callable[[str, int], BaseException | None] = lambda verb, slot: None,  # noqa: ARG005  names say what comes
    ) -> None:
        self._inner = inner
        self._gate = gate
        self._fault = fault
        self.slots, self.page_bytes, self.layers = inner.slots, inner.page_bytes, inner.layers
        self.synchronous = inner.synchronous

    def check_geometry(self, geometry: KVGeometry, page_size: int) -> None:
        """As the inner pool."""
        self._inner.check_geometry(geometry, page_size)

    def gather(self, slots: Slots, host: HostPool, host_slots: Slots) -> None:
        """Stop, raise, or copy."""
        self._enter("gather", slots)
        self._inner.gather(slots, host, host_slots)

    def scatter(
        self, host: HostPool, host_slots: Slots, slots: Slots, *, layers: tuple[int, int] | None = None
    ) -> None:
        """Stop, raise, or copy."""
        self._enter("scatter", slots)
        self._inner.scatter(host, host_slots, slots, layers=layers)

    def read_page(self, slot: int) -> Bytes:
        """As the inner pool."""
        return self._inner.read_page(slot)

    def write_page(self, slot: int, data: bytes | bytearray | memoryview | npt.NDArray[Any]) -> None:
        """As the inner pool."""
        self._inner.write_page(slot, data)

    def poison(self, slots: Slots) -> None:
        """As the inner pool."""
        self._inner.poison(slots)

    def close(self) -> None:
        """As the inner pool."""
        self._inner.close()

    def _enter(self, verb: str, slots: Slots) -> None:
        if self._gate is not None:
            self._gate.enter()
        for slot in slots.tolist():
            error = self._fault(verb, slot)
            if error is not None:
                raise error


@dataclass(slots=True, eq=False)
class PendingCopy:
    """A copy that waits for the test.

    Attributes:
        copy: what the caller got.
        down: whether from device to host.
        device_slots: one per page.
        host_slots: one per page.
        ready: the writer's event; `READY` on the way up.
    """

    copy: Copy
    down: bool
    device_slots: Slots
    host_slots: Slots
    ready: WriterEvent
    done: Done
    layer_done: Callable[[int], None] | None


class ManualCopyEngine(CopyEngine):
    """A copy engine without threads: nothing moves until the test ends a copy, in any order, well or not.

    Callbacks come in the thread that calls `end`. Copies may be asked for by any thread.

    Args:
        device: source and target of copies.
        host: source and target of copies; None where only events are waited for.

    Attributes:
        pending: copies that were asked for and have not ended, oldest first.
        events: events that something waits for, with the callbacks, oldest first.
    """

    def __init__(self, device: DevicePool, host: HostPool | None) -> None:
        self._device = device
        self._host = host
        self._changed = threading.Condition()
        self._pages = {True: 0, False: 0}
        self._failed = 0
        self._dropped: int | None = None
        self.pending: list[PendingCopy] = []
        self.events: list[tuple[WriterEvent, Callable[[bool], None]]] = []

    def device_to_host(self, device_slots: Slots, host_slots: Slots, *, ready: WriterEvent | None, done: Done) -> Copy:
        """Keep the copy for the test."""
        return self._add(True, device_slots, host_slots, ready or READY, done, None)

    def host_to_device(
        self, host_slots: Slots, device_slots: Slots, *, done: Done, layer_done: Callable[[int], None] | None = None
    ) -> Copy:
        """Keep the copy for the test."""
        return self._add(False, device_slots, host_slots, READY, done, layer_done)

    def when_ready(self, event: WriterEvent, done: Callable[[bool], None]) -> None:
        """Keep the event for the test."""
        self._check_open()
        with self._changed:
            self.events.append((event, done))

    def end(self, at: int = 0, *, results: Sequence[PageResult] | None = None) -> PendingCopy:
        """End one pending copy: move its pages that are to be OK, and call back.

        Args:
            at: which, by its place in `pending`.
            results: one per page; None: all OK.

        Raises:
            AssertionError: its writer's event has not passed.
        """
        with self._changed:
            pending = self.pending.pop(at)
        outcome = list(results) if results is not None else [PageResult.OK] * pending.copy.pages
        assert pending.ready.query(), "this copy may not begin: its writer's event has not passed"
        good = np.array([result is PageResult.OK for result in outcome], bool)
        self._move(pending, good)
        self._finish(pending, outcome)
        return pending

    def end_all(self) -> int:
        """End copies, oldest first, until none is left, those that callbacks ask for included; how many."""
        ended = 0
        while self.pending:
            self.end()
            ended += 1
        return ended

    def pass_events(self) -> int:
        """Call back for the events that have passed; how many."""
        with self._changed:
            watched, self.events = self.events, []
            passed = [event.query() for event, _ in watched]
            self.events = [entry for entry, done in zip(watched, passed, strict=True) if not done]
        for (_, done), has_passed in zip(watched, passed, strict=True):
            if has_passed:
                done(True)
        return passed.count(True)

    def statistics(self) -> CopyStatistics:
        """A snapshot."""
        size = self._device.page_bytes
        return CopyStatistics(
            pages_device_to_host=self._pages[True],
            bytes_device_to_host=self._pages[True] * size,
            pages_host_to_device=self._pages[False],
            bytes_host_to_device=self._pages[False] * size,
            failed_pages=self._failed,
            in_flight=len(self.pending),
            waiting=len(self.events),
        )

    def close(self, timeout: float) -> int:  # noqa: ARG002  only the test moves copies on
        """Drop everything."""
        if self._dropped is None:
            with self._changed:
                dropped, self.pending = self.pending, []
                events, self.events = self.events, []
                self._dropped = sum(pending.copy.pages for pending in dropped)
            for pending in dropped:
                self._finish(pending, [PageResult.FAILED] * pending.copy.pages)
            for _, done in events:
                done(False)
        return self._dropped

    def _add(
        self,
        down: bool,
        device_slots: Slots,
        host_slots: Slots,
        ready: WriterEvent,
        done: Done,
        layer_done: Callable[[int], None] | None,
    ) -> Copy:
        self._check_open()
        device, host = np.array(device_slots, np.int64), np.array(host_slots, np.int64)
        copy = Copy(len(device), self._changed)
        with self._changed:
            self.pending.append(PendingCopy(copy, down, device, host, ready, done, layer_done))
        return copy

    def _move(self, pending: PendingCopy, good: npt.NDArray[np.bool_]) -> None:
        assert self._host is not None
        device, host = pending.device_slots[good], pending.host_slots[good]
        if pending.down:
            self._device.gather(device, self._host, host)
            return
        self._device.scatter(self._host, host, device)
        if good.all():
            pending.copy.advance(self._device.layers)
            for layer in range(self._device.layers if pending.layer_done else 0):
                assert pending.layer_done is not None
                pending.layer_done(layer)

    def _finish(self, pending: PendingCopy, results: list[PageResult]) -> None:
        moved = results.count(PageResult.OK)
        self._pages[pending.down] += moved
        self._failed += len(results) - moved
        pending.done(results)
        pending.copy.finish(results)

    def _check_open(self) -> None:
        if self._dropped is not None:
            raise CacheClosed("the copy engine is closed: no page is copied any more")
