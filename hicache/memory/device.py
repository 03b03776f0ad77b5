"""Device pools over tensors that the CPU sees: an engine's own, or made here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.core.layout import KVGeometry
from hicache.errors import CacheClosed, ConfigError, GeometryError
from hicache.memory.base import POISON, Bytes, DevicePool, HostPool, Slots
from hicache.memory.convert import PageConverter, Segment
from hicache.memory.layout import PageLayout, layout_axes
from hicache.memory.limits import check_memory
from hicache.memory.tensors import check_apart, device_view, view_bytes
from hicache.units import whole_number

__all__ = ["TensorDevicePool"]


class TensorDevicePool(DevicePool):
    """A device pool over torch tensors or numpy arrays, which are used where they are and stay their owner's.

    Tensors have the axes that `LAYOUTS` gives for the layout, without plane and head for latent state. In
    "layer_first" there may also be one tensor per layer, without the layer axis, and slots and tokens may be one axis.
    Views with gaps are fine as long as each row (one token and head) lies in one run. Integer tensors of the right
    element size may carry any dtype. A slot is read and written by any thread; who may is the caller's business.

    Args:
        tensors: one tensor, or one per layer.
        page: sizes of a page.
        layout: a key of `LAYOUTS`.

    Raises:
        GeometryError: an unknown layout, or a tensor of a wrong shape, dtype, stride or device.
    """

    synchronous = True

    def __init__(self, tensors: Any, *, page: PageLayout, layout: str) -> None:
        layout_axes(layout, page)
        self.page = page
        self.layout = layout
        self.page_bytes = page.page_bytes
        self.layers = page.layers
        segments = _segments(tensors, page, layout)
        counts = {segment.view.shape[0] for segment in segments}
        if len(counts) != 1 or 0 in counts:
            raise GeometryError(f"the tensors hold {sorted(counts)} slots: give each layer as many, at least one")
        self.slots: int = counts.pop()
        self._segments: tuple[Segment, ...] = segments
        self._converter: PageConverter | None = PageConverter(page, segments)

    @classmethod
    def attach(cls, tensors: Any, geometry: KVGeometry, *, page_size: int, layout: str) -> TensorDevicePool:
        """A pool over an engine's own tensors, which are used where they are: nothing is copied or allocated.

        A slot is one page's place in all layers: the same number in each layer.
        What `Request.load` and `Request.allocate` return are such numbers.

        Args:
            tensors: the engine's KV memory, torch tensors on the CPU or numpy arrays, writable: one for all layers,
                or (layout "layer_first" only) a list or tuple with one per layer, in layer order.
            geometry: what the tensors hold; the same as the namespace's.
            page_size: tokens a page; the same as the namespace's.
            layout: a key of `hicache.LAYOUTS`, which name the order of the axes.

        Shapes:
            - "layer_first": `(layers, 2, slots, page_size, kv_heads, head_dim)`; one per layer
              `(2, slots, page_size, kv_heads, head_dim)`. MLA: `(layers, slots, page_size, latent_dim + rope_dim)`;
              one per layer `(slots, page_size, latent_dim + rope_dim)`. Slots and tokens may be one axis of
              `slots * page_size`.
            - "page_first": `(slots, layers, 2, page_size, kv_heads, head_dim)`; MLA
              `(slots, layers, page_size, latent_dim + rope_dim)`.
            - "opaque": `(slots, page_bytes)`, bytes.

            The axis of length 2 is keys, then values. Elements have the geometry's dtype, or are integers of its size
            (numpy has no bfloat16), or bytes with a last axis of as many bytes. Views with gaps between rows are fine;
            one row (one token and head) must lie in one run.

        Returns:
            The pool, for `hicache.open(namespace, device=pool, ...)`. It keeps the tensors alive until `close`. They
            stay the caller's: the cache never frees or resizes them, closing a cache leaves a pool that it was given
            open, and closing the pool leaves the tensors as they are. Give one pool to one cache at a time.

        Thread-safety: reads and writes of different slots may come from any threads at once. Until the cache is
        closed, an engine writes only slots that a request of its own has allocated and not committed, and reads those
        and what `load` returned.

        Raises:
            GeometryError: an unknown layout; a tensor of a wrong shape, dtype, device or stride, read-only, or whose
                elements share memory with each other or with another layer's; another number of slots in each layer.
            InvalidInput: a page size that is none.
        """
        return cls(tensors, page=PageLayout.of(geometry, page_size), layout=layout)

    @classmethod
    def allocate(
        cls, geometry: KVGeometry, *, page_size: int, slots: int, layout: str | None = None
    ) -> TensorDevicePool:
        """A pool with zeroed memory of its own, in main memory.

        Args:
            geometry: what its pages hold.
            page_size: tokens a page.
            slots: pages that it has room for, 1 or more.
            layout: a key of `hicache.LAYOUTS`; None is "layer_first", or "opaque" for pages without layers and heads.

        Shapes:
            One array in the shape that `attach` describes for the layout, as bytes: the last axis counts bytes.

        Returns:
            The pool. It belongs to the caller, who closes it after the caches that use it; the memory goes back when
            the last copy that is under way has ended.

        Raises:
            ConfigError: a number of slots that is not positive, or more bytes than are available.
            GeometryError: an unknown layout, or one that cannot hold these pages.
            InvalidInput: a page size that is none.
        """
        page = PageLayout.of(geometry, page_size)
        count = whole_number(slots)
        if count is None or count <= 0:
            raise ConfigError(f"slots of a device pool must be a positive integer, not {slots!r:.40}")
        slots = count
        check_memory(slots * page.page_bytes, f"a device pool of {slots} pages in main memory")
        name = layout or ("opaque" if page.kind == "opaque" else "layer_first")
        return cls(_zeros(_shape(page, name, slots)), page=page, layout=name)

    def check_geometry(self, geometry: KVGeometry, page_size: int) -> None:
        """See that slots hold pages of this geometry."""
        self.page.check_holds(geometry, page_size)

    def gather(self, slots: Slots, host: HostPool, host_slots: Slots) -> None:
        """Copy pages to canonical form in host slots."""
        self._check(slots, host, host_slots)
        self._open().gather(slots, host.pages, host_slots)

    def scatter(
        self, host: HostPool, host_slots: Slots, slots: Slots, *, layers: tuple[int, int] | None = None
    ) -> None:
        """Copy canonical pages from host slots, all of them or the layers [first, end)."""
        self._check(slots, host, host_slots)
        self._open().scatter(host.pages, host_slots, slots, layers or (0, self.layers))

    def read_page(self, slot: int) -> Bytes:
        """A copy of one page in canonical form, (page_bytes,)."""
        slots = self._one(slot)
        page = np.empty((1, self.page_bytes), np.uint8)
        self._open().gather(slots, page, _FIRST)
        first: Bytes = page[0]
        return first

    def write_page(self, slot: int, data: bytes | bytearray | memoryview | npt.NDArray[Any]) -> None:
        """Write one page from canonical bytes."""
        slots = self._one(slot)
        page = _page_of(data)
        if page.size != self.page_bytes:
            raise GeometryError(f"a page has {self.page_bytes} bytes, not {page.size}")
        self._open().scatter(page[None], _FIRST, slots, (0, self.layers))

    def poison(self, slots: Slots) -> None:
        """Fill slots with `POISON`."""
        _check_slots(slots, self.slots, "device")
        for segment in self._segments:
            for slot in slots.tolist():
                segment.view[slot].fill(POISON)

    def close(self) -> None:
        """Let go of the tensors."""
        self._converter = None
        self._segments = ()

    def __repr__(self) -> str:
        state = "" if self._converter is not None else ", closed"
        return f"<hicache.TensorDevicePool {self.slots} slots of {self.page.describe()}, {self.layout}{state}>"

    def _open(self) -> PageConverter:
        if self._converter is None:
            raise CacheClosed("this device pool is closed: its tensors were given back")
        return self._converter

    def _one(self, slot: int) -> Slots:
        number = whole_number(slot)
        if number is None:
            raise GeometryError(f"device slot {slot!r:.40} is no slot number: give an integer, as load and allocate do")
        if not 0 <= number < self.slots:
            raise _no_slot(number, self.slots, "device")
        return np.array([number], np.int64)

    def _check(self, slots: Slots, host: HostPool, host_slots: Slots) -> None:
        if host.page_bytes != self.page_bytes:
            raise GeometryError(f"host pages have {host.page_bytes} bytes, device pages {self.page_bytes}")
        if len(slots) != len(host_slots):
            raise GeometryError(f"{len(slots)} device slots do not pair with {len(host_slots)} host slots")
        _check_slots(slots, self.slots, "device")
        _check_slots(host_slots, host.slots, "host")


def _page_of(data: bytes | bytearray | memoryview | npt.NDArray[Any]) -> Bytes:
    try:
        if isinstance(data, np.ndarray):
            return np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        return np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise GeometryError(f"a page is given as bytes or a numpy array, not {type(data).__name__} ({error})") from None


_ALIGNMENT = 4096
_FIRST: Slots = np.zeros(1, np.int64)


def _segments(tensors: Any, page: PageLayout, layout: str) -> tuple[Segment, ...]:
    if not isinstance(tensors, (list, tuple)):
        return (Segment(0, _view(tensors, page, layout, where="the device tensor")),)
    if layout != "layer_first":
        raise GeometryError(f'layout "{layout}" is one tensor: a list of tensors is for "layer_first"')
    if len(tensors) != page.layers:
        raise GeometryError(f"{len(tensors)} tensors given for {page.layers} layers: give one per layer")
    views = [
        _view(tensor, page, layout, where=f"the tensor of layer {at}", one_layer=True)
        for at, tensor in enumerate(tensors)
    ]
    check_apart(views)
    return tuple(Segment(at, view) for at, view in enumerate(views))


def _view(tensor: Any, page: PageLayout, layout: str, *, where: str, one_layer: bool = False) -> Bytes:
    array, itemsize = view_bytes(tensor, where=where, page=page)
    return device_view(array, itemsize, layout, page, where=where, one_layer=one_layer)


def _shape(page: PageLayout, layout: str, slots: int) -> tuple[int, ...]:
    sizes = {"slot": slots, "layer": page.layers, "plane": page.planes, "token": page.tokens, "head": page.heads}
    sizes |= {"dim": page.row_bytes, "byte": page.page_bytes}
    return tuple(sizes[axis] for axis in layout_axes(layout, page))


def _zeros(shape: tuple[int, ...]) -> Bytes:
    # Aligned, as memory of numpy's own begins 16 bytes behind a cache line, which halves the speed of plain copies.
    size = math.prod(shape)
    memory: Bytes = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].reshape(shape)


def _check_slots(slots: Slots, count: int, what: str) -> None:
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < count:
        bad = int(slots[(slots < 0) | (slots >= count)][0])
        raise _no_slot(bad, count, what)


def _no_slot(slot: int, count: int, what: str) -> GeometryError:
    return GeometryError(f"{what} slot {slot} does not exist: the pool has {count}")
