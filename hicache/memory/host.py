"""Host pools: pages in canonical layout in anonymous memory or in a memfd."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

import numpy as np

from hicache.errors import CacheClosed, ConfigError, GeometryError
from hicache.memory.base import POISON, Bytes, HostPool, Slots
from hicache.memory.limits import check_memory
from hicache.units import LARGEST_SIZE, format_size, whole_number

__all__ = ["PAGE_ALIGNMENT", "MmapHostPool"]

PAGE_ALIGNMENT = 4096
"""Slots begin on multiples of it: direct I/O and pinning need that, and no two slots share a page of the machine."""

_RESERVE_STEP = 1 << 30  # reserving is not interruptible inside one call


class MmapHostPool(HostPool):
    """A host pool over `mmap`. Any thread may read and write slots; who may is the caller's business.

    The size is checked against what the machine and the control group leave before anything is allocated.

    Args:
        slots: number of slots.
        page_bytes: bytes of one page; slots are `stride` bytes apart, the next multiple of 4 KiB.
        memfd: back the memory by a file descriptor (`fd`) that other processes can map. It is reserved at once, so
            that touching it later cannot fail; without, the kernel gives it page by page.
        root: folder under which `proc` and `sys` are looked up for the limits.

    Raises:
        ConfigError: a size that is not positive, absurd, or more than there is.
    """

    def __init__(self, slots: int, page_bytes: int, *, memfd: bool = False, root: Path = Path("/")) -> None:
        self.slots = _positive(slots, "slots")
        self.page_bytes = _positive(page_bytes, "bytes of a page")
        self.stride = -(-page_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
        self.size = slots * self.stride
        self.fd = -1
        check_memory(self.size, f"a host pool of {slots} pages", root=root)
        self._map = self._reserve() if memfd else _anonymous(self.size)
        self._pages: Bytes | None = np.frombuffer(self._map, np.uint8).reshape(slots, self.stride)[:, :page_bytes]

    def _reserve(self) -> mmap.mmap:
        self.fd = os.memfd_create("hicache-host-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            for start in range(0, self.size, _RESERVE_STEP):
                os.posix_fallocate(self.fd, start, min(_RESERVE_STEP, self.size - start))
            return mmap.mmap(self.fd, self.size)
        except OSError as error:
            self._close_fd()
            raise ConfigError(
                f"a host pool of {format_size(self.size)} in a memfd cannot be reserved: {_why(error)}; "
                "make it smaller, or give the process more memory"
            ) from error

    @property
    def pages(self) -> Bytes:
        """All pages, (slots, page_bytes); rows are `stride` bytes apart."""
        if self._pages is None:
            raise CacheClosed("this host pool is closed: its pages are gone")
        return self._pages

    def page(self, slot: int) -> Bytes:
        """One page, (page_bytes,), not a copy."""
        page: Bytes = self.pages[self._checked(slot)]
        return page

    def buffer(self, slot: int, offset: int = 0, length: int | None = None) -> memoryview:
        """Bytes of one page from `offset` on, writable, not a copy. Aligned to 4 KiB where `offset` is."""
        end = self.page_bytes if length is None else offset + length
        if not 0 <= offset <= end <= self.page_bytes:
            raise GeometryError(f"bytes {offset} to {end} are not inside a page of {self.page_bytes} bytes")
        return self.page(slot)[offset:end].data

    def poison(self, slots: Slots) -> None:
        """Fill slots with `POISON`."""
        for slot in slots.tolist():
            self.page(slot).fill(POISON)

    def close(self) -> None:
        """Give the memory back. While somebody still holds a view, it stays mapped until the last view is gone."""
        if self._pages is None:
            return
        self._pages = None
        # Unmapping under a view would crash its reader. The views keep the mapping alive, and end it.
        with contextlib.suppress(BufferError):
            self._map.close()
        self._close_fd()

    def _close_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _checked(self, slot: int) -> int:
        number = slot if type(slot) is int else whole_number(slot)
        if number is None or not 0 <= number < self.slots:
            raise GeometryError(f"host slot {slot!r:.40} does not exist: the pool has {self.slots}")
        return number


def _positive(value: int, what: str) -> int:
    if type(value) is not int or not 0 < value <= LARGEST_SIZE:
        raise ConfigError(f"{what} of a host pool must be a positive integer, not {value!r:.40}")
    return value


def _anonymous(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(f"a host pool of {format_size(size)} cannot be mapped: {_why(error)}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages: slower to fill, otherwise the same
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _why(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "unknown")
    return f"{error.strerror or error} ({name})"
