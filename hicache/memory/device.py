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
from hicache.memory.tensors import device_view, view_bytes

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
        """A pool over an engine's tensors that hold pages of this geometry."""
        return cls(tensors, page=PageLayout.of(geometry, page_size), layout=layout)

    @classmethod
    def allocate(
        cls, geometry: KVGeometry, *, page_size: int, slots: int, layout: str | None = None
    ) -> TensorDevicePool:
        """A pool with zeroed memory of its own, by default "layer_first", or "opaque" for pages without layers.

        Raises:
            ConfigError: a number of slots that is not positive, or more bytes than are available.
        """
        page = PageLayout.of(geometry, page_size)
        if type(slots) is not int or slots <= 0:
            raise ConfigError(f"slots of a device pool must be a positive integer, not {slots!r:.40}")
        check_memory(slots * page.page_bytes, f"a device pool of {slots} pages in main memory")
        name = layout or ("opaque" if page.kind == "opaque" else "layer_first")
        return cls(_zeros(_shape(page, name, slots)), page=page, layout=name)

    def check_geometry(self, geometry: KVGeometry, page_size: int) -> None:
        """See that slots hold pages of this geometry."""
        wanted = PageLayout.of(geometry, page_size)
        if wanted != self.page:
            raise GeometryError(
                f"the device pool holds {self.page.describe()} ({self.page.dtype}), the namespace has "
                f"{wanted.describe()} ({wanted.dtype}): open it with the pool's geometry and page size"
            )

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
        page: Bytes = data.view(np.uint8).reshape(-1) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
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

    def _open(self) -> PageConverter:
        if self._converter is None:
            raise CacheClosed("this device pool is closed: its tensors were given back")
        return self._converter

    def _one(self, slot: int) -> Slots:
        if not 0 <= slot < self.slots:
            raise _no_slot(slot, self.slots, "device")
        return np.array([slot], np.int64)

    def _check(self, slots: Slots, host: HostPool, host_slots: Slots) -> None:
        if host.page_bytes != self.page_bytes:
            raise GeometryError(f"host pages have {host.page_bytes} bytes, device pages {self.page_bytes}")
        if len(slots) != len(host_slots):
            raise GeometryError(f"{len(slots)} device slots do not pair with {len(host_slots)} host slots")
        _check_slots(slots, self.slots, "device")
        _check_slots(host_slots, host.slots, "host")


_ALIGNMENT = 4096
_FIRST: Slots = np.zeros(1, np.int64)


def _segments(tensors: Any, page: PageLayout, layout: str) -> tuple[Segment, ...]:
    if not isinstance(tensors, (list, tuple)):
        return (Segment(0, _view(tensors, page, layout, where="the device tensor")),)
    if layout != "layer_first":
        raise GeometryError(f'layout "{layout}" is one tensor: a list of tensors is for "layer_first"')
    if len(tensors) != page.layers:
        raise GeometryError(f"{len(tensors)} tensors given for {page.layers} layers: give one per layer")
    return tuple(
        Segment(at, _view(tensor, page, layout, where=f"the tensor of layer {at}", one_layer=True))
        for at, tensor in enumerate(tensors)
    )


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
