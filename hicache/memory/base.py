"""Contracts of memory: pools give bytes to slots, a copy engine moves pages between two pools.

A slot is an integer; which page it holds, whether it may be read, and when it may be reused is the core's business.
Pools check only that a slot exists. Whoever asks for a copy must keep its slots pinned until `done` is called: that
is the only sign that nothing touches them any more.

What a CUDA pool and engine change is below these contracts: a device pool whose bytes a CPU cannot see brings its own
copy engine, with streams where `ThreadCopyEngine` has threads and CUDA events as writer events, and pinned host memory.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.core.layout import KVGeometry
from hicache.memory.writer import WriterEvent
from hicache.records import PageResult

__all__ = ["POISON", "Bytes", "Copy", "CopyEngine", "CopyStatistics", "DevicePool", "Done", "HostPool", "Slots"]

POISON = 0xEE
"""Fills freed slots in tests, so that reading what nobody wrote shows."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
Slots: TypeAlias = npt.NDArray[np.int64]
Done: TypeAlias = Callable[[Sequence[PageResult]], None]


class HostPool(ABC):
    """Pages in canonical layout, in memory that the CPU sees.

    Attributes:
        slots: number of slots.
        page_bytes: bytes of one page.
    """

    slots: int
    page_bytes: int

    @property
    @abstractmethod
    def pages(self) -> Bytes:
        """All pages as a writable array (slots, page_bytes), rows contiguous but not always next to each other.

        Raises:
            CacheClosed: the pool is closed.
        """

    @abstractmethod
    def page(self, slot: int) -> Bytes:
        """One page as a writable array (page_bytes,), not a copy. It must not be used after `close`.

        Raises:
            GeometryError: no such slot.
            CacheClosed: the pool is closed.
        """

    @abstractmethod
    def buffer(self, slot: int, offset: int = 0, length: int | None = None) -> memoryview:
        """Writable bytes of one page from `offset` on, for storage I/O; not a copy.

        Raises:
            GeometryError: no such slot, or a range that leaves the page.
            CacheClosed: the pool is closed.
        """

    @abstractmethod
    def poison(self, slots: Slots) -> None:
        """Fill freed slots with `POISON`. For tests."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Idempotent. No copy may be running."""


class DevicePool(ABC):
    """Pages in an engine's layout. The engine may own the memory; then the pool only looks at it.

    Attributes:
        slots: number of slots; None where there is no end, as in simulation.
        page_bytes: bytes of one page.
        layers: layers of one page, the steps in which it can be loaded.
        synchronous: whether writes are done when the call that made them returns, so that they need no event.
    """

    slots: int | None
    page_bytes: int
    layers: int
    synchronous: bool

    @abstractmethod
    def check_geometry(self, geometry: KVGeometry, page_size: int) -> None:
        """See that slots hold pages of this geometry.

        Raises:
            GeometryError: they hold others; the text has both.
        """

    @abstractmethod
    def gather(self, slots: Slots, host: HostPool, host_slots: Slots) -> None:
        """Copy pages to canonical form in host slots. Releases the GIL while bytes move.

        Raises:
            GeometryError: a slot that does not exist, or a host pool of another page size; nothing was copied.
        """

    @abstractmethod
    def scatter(
        self, host: HostPool, host_slots: Slots, slots: Slots, *, layers: tuple[int, int] | None = None
    ) -> None:
        """Copy canonical pages from host slots, all of them or the layers [first, end). As `gather` otherwise."""

    @abstractmethod
    def read_page(self, slot: int) -> Bytes:
        """A copy of one page in canonical form, (page_bytes,).

        Raises:
            GeometryError: no such slot.
        """

    @abstractmethod
    def write_page(self, slot: int, data: bytes | bytearray | memoryview | npt.NDArray[Any]) -> None:
        """Write one page from canonical bytes.

        Raises:
            GeometryError: no such slot, or another number of bytes.
        """

    def copy_engine(self, host: HostPool | None) -> CopyEngine | None:
        """The engine that must copy this pool's pages, which is closed with the cache.

        None where copy threads of the cache can do it, as the CPU sees the bytes.
        """
        del host
        return None

    def host_pool(self, geometry: KVGeometry, page_size: int, slots: int) -> HostPool | None:
        """A host pool that this pool's copies are fastest with, which the caller closes.

        None where any memory does.

        Raises:
            ConfigError: there is not so much memory, or none of the kind that is needed.
        """
        del geometry, page_size, slots
        return None

    @abstractmethod
    def poison(self, slots: Slots) -> None:
        """Fill freed slots with `POISON`. For tests."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory; an engine's tensors stay as they are. Idempotent. No copy may be running."""


@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """A snapshot of one copy engine. Counts are since it was made.

    Attributes:
        pages_device_to_host, bytes_device_to_host: moved without failure.
        pages_host_to_device, bytes_host_to_device: moved without failure.
        failed_pages: pages whose copy failed, or was dropped by `close`.
        in_flight: copies that were asked for and have not ended, waiting ones included.
        waiting: copies and callbacks whose writer's event has not passed.
        callback_errors: exceptions that callbacks raised; the copies went on.
        stranded_pages: pages of copies that are stranded (see `Copy`); they are among those that failed.
        lost: why no page is copied any more, in words; empty where all is well.
    """

    pages_device_to_host: int = 0
    bytes_device_to_host: int = 0
    pages_host_to_device: int = 0
    bytes_host_to_device: int = 0
    failed_pages: int = 0
    in_flight: int = 0
    waiting: int = 0
    callback_errors: int = 0
    stranded_pages: int = 0
    lost: str = ""


class Copy:
    """One asynchronous copy of pages. Any thread may look or wait; only its engine moves it on.

    It is *stranded* when its device has failed under it, and nobody can tell whether its bytes still move. Then its
    pages have failed, but `done` is never called: its slots, and the memory behind them, stay its own.

    Attributes:
        pages: number of pages.
        layers_done: leading layers that are complete in every page. A copy that failed in part stays where it was.
        results: one per page, in the order asked, once the copy has ended or is stranded; None before.
        stranded: whether it is.
    """

    __slots__ = ("_changed", "layers_done", "pages", "results", "stranded")

    def __init__(self, pages: int, changed: threading.Condition) -> None:
        self._changed = changed
        self.pages = pages
        self.layers_done = 0
        self.results: tuple[PageResult, ...] | None = None
        self.stranded = False

    @property
    def finished(self) -> bool:
        """Whether it has ended and `done` has returned, or it is stranded."""
        return self.results is not None

    def wait(self, timeout: float | None) -> bool:
        """Block until the copy has ended and `done` has returned, at most `timeout` seconds; whether it has.

        A stranded copy is not waited for.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self.results is not None, timeout)

    def wait_layer(self, layer: int, timeout: float | None) -> bool:
        """Block until a layer is complete in every page; False at the time-out, or when the copy ended without."""
        with self._changed:
            self._changed.wait_for(lambda: self.layers_done > layer or self.results is not None, timeout)
            return self.layers_done > layer

    def advance(self, layers: int) -> None:
        """For engines: the first `layers` layers are complete in every page."""
        with self._changed:
            self.layers_done = layers
            self._changed.notify_all()

    def finish(self, results: Sequence[PageResult]) -> None:
        """For engines: the copy has ended, `done` has returned."""
        with self._changed:
            self.results = tuple(results)
            self._changed.notify_all()

    def strand(self, results: Sequence[PageResult]) -> None:
        """For engines: nobody can tell how it ends."""
        with self._changed:
            self.stranded = True
            self.finish(results)


class CopyEngine(ABC):
    """Moves pages between one device pool and one host pool, without making the caller wait.

    Callbacks come from the engine's threads, never under a lock of the engine, `done` exactly once per copy with one
    result per page, or never for one that is stranded. What they raise is counted and does no harm. They must not wait
    for copies of this engine. Copies of one direction begin in the order asked, except that one whose event has not
    passed lets others go first. All methods may be called from any thread.

    Attributes:
        inline: True where copies end inside the call: `done` is called in the caller's thread before it returns.
            Such an engine needs no locks around it and has no threads.
    """

    inline: bool = False

    @property
    def lost(self) -> str:
        """Why no page is copied any more, in words: the device has failed for good. Empty where all is well.

        Copies that are asked for then fail at once.
        """
        return ""

    def when_stranded(self, told: Callable[[], None]) -> None:  # noqa: B027  in main memory nothing is ever stranded
        """Call back, from any thread, whenever copies were stranded."""

    @abstractmethod
    def device_to_host(self, device_slots: Slots, host_slots: Slots, *, ready: WriterEvent | None, done: Done) -> Copy:
        """Copy pages down, after the event of their writer has passed.

        Args:
            device_slots: where to read, int64; one slot per page.
            host_slots: where to write, as many.
            ready: passes when the pages are written; None or `READY` where they are.
            done: called at the end.

        Raises:
            HicacheInternalError: not one host slot per device slot.
            CacheClosed: the engine is closed.
        """

    @abstractmethod
    def host_to_device(
        self, host_slots: Slots, device_slots: Slots, *, done: Done, layer_done: Callable[[int], None] | None = None
    ) -> Copy:
        """Copy pages up, layer after layer, so that an engine can compute the first while the last is on its way.

        Args:
            host_slots: where to read, int64; one slot per page.
            device_slots: where to write, as many.
            done: called at the end.
            layer_done: called for each layer in order when it is complete in every page; not for layers behind a
                failure.

        Raises:
            HicacheInternalError: not one device slot per host slot.
            CacheClosed: the engine is closed.
        """

    @abstractmethod
    def when_ready(self, event: WriterEvent, done: Callable[[bool], None]) -> None:
        """Call `done(True)` once the event has passed; `done(False)` if it breaks, or the engine closes before.

        Raises:
            CacheClosed: the engine is closed.
        """

    @abstractmethod
    def statistics(self) -> CopyStatistics:
        """A snapshot."""

    @abstractmethod
    def close(self, timeout: float) -> int:
        """Refuse new copies, let what is on its way end, drop the rest after `timeout` seconds, stop the threads.

        Dropped copies get their `done` with FAILED for each page. A copy that is moving bytes at the deadline cannot
        be dropped: it is counted, and calls `done` when it ends; pools must stay open until then.

        Returns:
            Pages not copied by the deadline. The same number again when called again.
        """
