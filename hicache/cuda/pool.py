"""Device pools in the memory of a GPU: over an engine's own tensors, or allocated here."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from hicache.core.arenas import ArenaPlan
from hicache.core.layout import KVGeometry
from hicache.cuda.allocation import allocate, shape_of, strides_of
from hicache.cuda.direct import DirectCopies
from hicache.cuda.driver import CudaDriver, CudaError, Event, Stream
from hicache.cuda.events import CudaEvent
from hicache.cuda.options import DEFAULTS, CudaOptions
from hicache.cuda.pinned import PinnedHostPool, host_parts
from hicache.cuda.regions import Region, TensorMemory, regions_of
from hicache.cuda.runs import HostPart, PageRuns, RunTable
from hicache.cuda.streams import EngineStreams, tell_allocator
from hicache.cuda.tensors import as_tensors, check_device, device_of, regions_checked
from hicache.errors import CacheClosed, ConfigError, GeometryError
from hicache.memory.base import POISON, Bytes, CopyEngine, DevicePool, HostPool, Slots
from hicache.memory.layout import PageLayout
from hicache.units import whole_number

if TYPE_CHECKING:
    from hicache.cuda.engine import CudaCopyEngine

__all__ = ["CudaDevicePool", "open_device"]

_LOG = logging.getLogger(__name__)
_FIRST: Final[Slots] = np.zeros(1, np.int64)


class CudaDevicePool(DevicePool):
    """A device pool in the memory of one GPU. Make it with `attach` or `allocate`.

    Its slots are read and written by whoever may, on the engine's stream; copies wait for that stream and it for them
    where one needs the other. `commit` needs an event: `record()` makes one behind what the engine has begun.

    Args:
        regions: where pages lie.
        page: sizes of a page.
        layout: by its name, for messages.
        driver: of the device.
        stream: on which the engine computes; None is the calling thread's current one.
        options: how pages are copied.
        keep: kept alive until `close`.
        owned: address of memory to be given back by `close`; 0 where it is another's.
        shape: of that memory, in bytes, by the axes of its layout.

    Attributes:
        page, layout, driver, options: as given.
        device: number of the GPU.
    """

    synchronous = False

    def __init__(
        self,
        regions: list[Region],
        *,
        page: PageLayout,
        layout: str,
        driver: CudaDriver,
        stream: Any = None,
        options: CudaOptions,
        keep: object = None,
        owned: int = 0,
        shape: tuple[int, ...] = (),
    ) -> None:
        self.page = page
        self.layout = layout
        self.driver = driver
        self.device = driver.device
        self.options = options
        self.page_bytes = page.page_bytes
        self.layers = page.layers
        self.slots: int = regions[0].slots
        self._regions = regions
        self._streams = EngineStreams(driver, stream, options.reuse)
        self._keep = keep
        self._owned = owned
        self._shape = shape
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._direct = DirectCopies(driver)
        self._runs: dict[tuple[HostPart, ...], PageRuns] = {}

    @classmethod
    def attach(
        cls,
        tensors: Any,
        geometry: KVGeometry,
        *,
        page_size: int,
        layout: str,
        stream: Any = None,
        options: CudaOptions = DEFAULTS,
        driver: CudaDriver | None = None,
    ) -> CudaDevicePool:
        """A pool over an engine's own tensors on a GPU, which are used where they are: nothing is copied or allocated.

        Args:
            tensors: torch tensors on CUDA, or arrays with `__cuda_array_interface__`, all on one device: one for all
                layers, or a list in the order that the layout says.
            geometry: what they hold; the same as the namespace's.
            page_size: tokens a page; the same as the namespace's.
            layout: a key of `hicache.cuda.regions.DEVICE_LAYOUTS`, which name the order of the axes.
            stream: on which the engine computes: a stream of torch or cupy, or a handle; None is the current one of
                the calling thread. `computes_on` adds others.
            options: how pages are copied.
            driver: of the device; None opens it through cupy.

        Returns:
            The pool, for `hicache.open(namespace, device=pool, ...)`. It keeps the tensors alive until `close`, and
            they stay the engine's: never freed, never resized.

        Raises:
            GeometryError: an unknown layout, tensors of several devices, or one of a wrong shape, dtype or stride.
            ConfigError: no cupy, no driver, one that is too old, or no such device.
        """
        page = PageLayout.of(geometry, page_size)
        found, one = as_tensors(tensors, page)
        if driver is None:
            driver = open_device(device_of(tensors))
        check_device(found, driver)
        regions = regions_checked(found, page, layout, one=one)
        return cls(regions, page=page, layout=layout, driver=driver, stream=stream, options=options, keep=tensors)

    @classmethod
    def allocate(
        cls,
        geometry: KVGeometry,
        *,
        page_size: int,
        slots: int,
        layout: str | None = None,
        device: int | None = None,
        stream: Any = None,
        options: CudaOptions = DEFAULTS,
        driver: CudaDriver | None = None,
    ) -> CudaDevicePool:
        """A pool with memory of its own on a GPU.

        Args:
            geometry: what its pages hold.
            page_size: tokens a page.
            slots: pages that it has room for, 1 or more.
            layout: "layer_first" or "page_first", or "opaque" for pages without layers and heads; None is the first
                of them that can hold the pages.
            device: number of the GPU; None is the current one.
            stream: as in `attach`.
            options: how pages are copied.
            driver: of the device; None opens it through cupy.

        Returns:
            The pool. It belongs to the caller, who closes it after the caches that use it.

        Raises:
            ConfigError: a number of slots that is not positive, or more than the device has free; no cupy, ...
            GeometryError: a layout that cannot hold these pages.
        """
        page = PageLayout.of(geometry, page_size)
        count = whole_number(slots)
        if count is None or count < 1:
            raise ConfigError(f"slots of a device pool must be a positive integer, not {slots!r:.40}")
        name = layout or ("opaque" if page.kind == "opaque" else "layer_first")
        driver = driver or open_device(device)
        size = count * page.page_bytes
        shape = shape_of(page, name, count)
        address = allocate(driver, size, f"a device pool of {count} pages")
        try:
            regions = regions_of(TensorMemory(address, shape, strides_of(shape), 1), name, page)
            return cls(
                regions,
                page=page,
                layout=name,
                driver=driver,
                stream=stream,
                options=options,
                owned=address,
                shape=shape,
            )
        except BaseException:
            driver.free(address)
            raise

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Memory that was allocated here, for torch and cupy: bytes, by the axes of its layout; valid until `close`.

        Raises:
            AttributeError: the memory is an engine's, or was given back.
        """
        if not self._owned:
            raise AttributeError("this pool has no memory of its own: use the tensors that it was made with")
        return {"data": (self._owned, False), "shape": self._shape, "typestr": "|u1", "strides": None, "version": 3}

    # ---- order

    def computes_on(self, stream: Any) -> None:
        """Name another stream on which the engine uses slots; copies wait for it too."""
        self._streams.add(stream)

    def record(self, stream: Any = None) -> CudaEvent:
        """An event behind all that a stream holds now, to be given to `commit`.

        Args:
            stream: the one that writes; None is the one that the pool was attached with.
        """
        return self._streams.record(stream)

    def used_until(self, slots: Slots | Iterable[int], event: CudaEvent) -> None:
        """For `reuse="told"`: kernels use these slots until the event; nothing is written into them before."""
        self._streams.used_until(slots, event)

    def ends_of_use(self, slots: Slots) -> list[Event]:
        """Events behind which others no longer use these slots. Called when a copy into them is asked for."""
        return self._streams.ends_of_use(slots)

    def used_by(self, stream: Stream) -> None:
        """Tell torch's allocator that a stream of ours uses the tensors; see `tell_allocator`."""
        tell_allocator(self._keep, stream)

    # ---- DevicePool

    def check_geometry(self, geometry: KVGeometry, page_size: int) -> None:
        """See that slots hold pages of this geometry."""
        self.page.check_holds(geometry, page_size)

    def host_pool(self, geometry: KVGeometry, page_size: int, slots: int) -> HostPool:
        """Pinned memory on the node of the GPU; see `CudaOptions`."""
        node = self.options.numa_node
        return PinnedHostPool.open(
            ArenaPlan.of(geometry, page_size),
            slots,
            driver=self.driver,
            pinning=self.options.pinned,
            numa_node=self.driver.facts().numa_node if node == "gpu" else node,
            numa_required=node != "gpu",
        )

    def copy_engine(self, host: HostPool | None) -> CopyEngine:
        """A `CudaCopyEngine`, its kernels compiled and its way of copying chosen."""
        return self.cuda_engine(host)

    def cuda_engine(self, host: HostPool | None) -> CudaCopyEngine:
        """As `copy_engine`."""
        from hicache.cuda.engine import CudaCopyEngine

        return CudaCopyEngine(self, host)

    def runs(self, parts: tuple[HostPart, ...]) -> PageRuns:
        """What copies between this pool and a host's memory move.

        Raises:
            GeometryError: the host's pages are others.
            CacheClosed: the pool is closed.
        """
        with self._lock:
            if self._closed:
                raise CacheClosed("this device pool is closed: its tensors were given back")
            found = self._runs.get(parts)
            if found is None:
                found = self._runs[parts] = PageRuns(self.page, self._regions, parts)
            return found

    def gather(self, slots: Slots, host: HostPool, host_slots: Slots) -> None:
        """Copy pages to canonical form in host slots; waits for the engine's streams, and until it is done."""
        self._copy(slots, host, host_slots, to_device=False, layers=None)

    def scatter(
        self, host: HostPool, host_slots: Slots, slots: Slots, *, layers: tuple[int, int] | None = None
    ) -> None:
        """Copy canonical pages from host slots, all of them or the layers [first, end). As `gather` otherwise."""
        self._copy(slots, host, host_slots, to_device=True, layers=layers)

    def read_page(self, slot: int) -> Bytes:
        """A copy of one page in canonical form, (page_bytes,)."""
        page = np.empty(self.page_bytes, np.uint8)
        self._move(self._page_runs(page).tables(self._one(slot), _FIRST, to_device=False), page)
        return page

    def write_page(self, slot: int, data: bytes | bytearray | memoryview | npt.NDArray[Any]) -> None:
        """Write one page from canonical bytes."""
        slots, page = self._one(slot), _page_of(data)
        if page.size != self.page_bytes:
            raise GeometryError(f"a page has {self.page_bytes} bytes, not {page.size}")
        self._move(self._page_runs(page).tables(slots, _FIRST, to_device=True), page)

    def poison(self, slots: Slots) -> None:
        """Fill slots with `POISON`."""
        page = np.full(self.page_bytes, POISON, np.uint8)
        for slot in slots.tolist():
            self.write_page(slot, page)

    def close(self) -> None:
        """Let go of the tensors, and of memory that was allocated here."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._runs.clear()
        self._streams.forget()
        self._keep = None
        if self._owned and os.getpid() == self._process:
            address, self._owned = self._owned, 0
            try:
                self.driver.free(address)
            except CudaError as error:  # the device is gone, and its memory with it
                _LOG.warning("a device pool's memory could not be given back: %s", error)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return (
            f"<hicache.cuda.CudaDevicePool {self.slots} slots of {self.page.describe()}, {self.layout}, "
            f"CUDA device {self.device}{state}>"
        )

    def _copy(
        self, slots: Slots, host: HostPool, host_slots: Slots, *, to_device: bool, layers: tuple[int, int] | None
    ) -> None:
        if host.page_bytes != self.page_bytes:
            raise GeometryError(f"host pages have {host.page_bytes} bytes, device pages {self.page_bytes}")
        tables = self.runs(host_parts(host)).tables(slots, host_slots, to_device=to_device, layers=layers)
        self._move(tables, host)

    def _move(self, tables: Iterable[RunTable], memory: object) -> None:
        self._direct.run(tables, behind=self._streams.marks(), memory=memory)

    def _page_runs(self, page: Bytes) -> PageRuns:
        """For memory of the moment, which is not remembered."""
        if self._closed:
            raise CacheClosed("this device pool is closed: its tensors were given back")
        return PageRuns(self.page, self._regions, (HostPart.whole(page.ctypes.data, 1, self.page_bytes),))

    def _one(self, slot: int) -> Slots:
        number = whole_number(slot)
        if number is None:
            raise GeometryError(f"device slot {slot!r:.40} is no slot number: give an integer, as load and allocate do")
        if not 0 <= number < self.slots:
            raise GeometryError(f"device slot {number} does not exist: the pool has {self.slots}")
        return np.array([number], np.int64)


def open_device(device: int | None) -> CudaDriver:
    """A GPU through cupy; see `hicache.cuda.cupy_driver.open_driver`."""
    from hicache.cuda.cupy_driver import open_driver

    return open_driver(device)


def _page_of(data: bytes | bytearray | memoryview | npt.NDArray[Any]) -> Bytes:
    try:
        if isinstance(data, np.ndarray):
            return np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        return np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise GeometryError(f"a page is given as bytes or a numpy array, not {type(data).__name__} ({error})") from None
