"""Memory without a name that processes share: sealed memfds and their mappings.

Nothing here appears in a file system, so nothing can go stale, be unlinked by another process, or be limited by the
size of /dev/shm. A memfd lives as long as somebody has it open or mapped; processes get it as a file descriptor.

Seals say what nobody can do to it any more. A memory that is shared can neither shrink nor grow, so touching it cannot
kill a process; who receives a descriptor checks that before mapping it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import weakref
from functools import cache
from typing import Final

import numpy as np

from hicache.errors import CacheClosed, ConfigError, HicacheInternalError
from hicache.memory.base import Bytes
from hicache.units import format_size

__all__ = [
    "HUGE_PAGE",
    "OWNERS_ONLY",
    "SEALED",
    "Mapping",
    "check_descriptor",
    "create_memfd",
    "libc",
    "reserve",
    "seal",
    "why",
]

HUGE_PAGE: Final = 2 << 20
SEALED: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
OWNERS_ONLY: Final = 0x10
"""F_SEAL_FUTURE_WRITE: mappings that exist may go on writing, no others will. Python has no name for it."""

_POPULATE_READ: Final = 22  # advice of madvise since Linux 5.14; Python has no names for it
_POPULATE_WRITE: Final = 23
_MAP_FIXED: Final = 0x10
_RESERVE_STEP: Final = 1 << 30  # reserving is not interruptible inside one call


@cache
def libc() -> ctypes.CDLL:
    """The C library, for calls that Python has not, or makes without releasing the GIL."""
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    library.mmap.restype = ctypes.c_void_p
    return library


def why(error: OSError) -> str:
    """What the kernel said, with the name of its number."""
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'unknown')})"


def create_memfd(name: str, *, huge_pages: bool = False) -> int:
    """A new memfd of no size. The caller owns it.

    Raises:
        ConfigError: the kernel gives none.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_pages:
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    try:
        return os.memfd_create(name, flags)
    except OSError as error:
        kind = "a memfd of 2 MiB pages" if huge_pages else "a memfd"
        raise ConfigError(f"the kernel gives no {kind.removeprefix('a ')}: {why(error)}") from error


def reserve(fd: int, size: int, what: str) -> None:
    """Take the memory of a memfd now, so that touching it later cannot fail.

    Raises:
        ConfigError: there is not so much; the text names `what`.
    """
    try:
        for start in range(0, size, _RESERVE_STEP):
            os.posix_fallocate(fd, start, min(_RESERVE_STEP, size - start))
    except OSError as error:
        raise ConfigError(
            f"{what} of {format_size(size)} cannot be reserved: {why(error)}; make it smaller, or give the process "
            "more memory"
        ) from error


def seal(fd: int, seals: int) -> None:
    """Add seals to a memfd."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def check_descriptor(fd: int, size: int, *, seals: int, what: str) -> None:
    """See that a descriptor that came from elsewhere is a memory that can be trusted to stay as it is.

    Raises:
        ConfigError: it is no memfd, has another size or other seals, or its memory is not reserved.
    """
    try:
        found = os.fstat(fd)
        has = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except (OSError, OverflowError, ValueError, TypeError) as error:
        raise ConfigError(f"{what}: descriptor {fd!r:.20} is no shared memory: {error}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        raise ConfigError(f"{what}: descriptor {fd} has {found.st_size} bytes where {size} were expected")
    if has != seals:
        raise ConfigError(f"{what}: descriptor {fd} has seals {has:#x} where {seals:#x} were expected")
    if found.st_blocks * 512 < size:
        raise ConfigError(f"{what}: only {found.st_blocks * 512} of the {size} bytes of descriptor {fd} are reserved")


class Mapping:
    """A mapping of a whole memfd. Any thread may use it.

    A forked child does not get the memory: what it touches there ends it, since a copy that nobody counts on might
    write when the pages are another's already.

    Args:
        fd: stays the caller's; the mapping does not need it afterwards.
        size: bytes, as `check_descriptor` found or `reserve` took them.
        writable: else its arrays are read-only.

    Raises:
        ConfigError: it cannot be mapped.
    """

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        self.size = size
        self._populated = 0
        self._populate = _POPULATE_WRITE if writable else _POPULATE_READ
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=prot)
        except (OSError, ValueError) as error:
            said = why(error) if isinstance(error, OSError) else str(error)
            raise ConfigError(f"shared memory of {format_size(size)} cannot be mapped: {said}") from error
        memory.madvise(mmap.MADV_DONTFORK)
        self._map: mmap.mmap | None = memory
        self._bytes: Bytes | None = np.frombuffer(memory, np.uint8)
        _mapped[memory] = (self.address, size)

    @property
    def bytes(self) -> Bytes:
        """All of it, (size,).

        Raises:
            CacheClosed: it is closed.
        """
        if self._bytes is None:
            raise CacheClosed("this shared memory is closed")
        return self._bytes

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._bytes is None

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return int(self.bytes.ctypes.data)

    def populate(self, step: int) -> bool:
        """Give this process the next of its pages now, so that first touches cost nothing; content stays as it is.

        For one thread in the background, which calls it until there is nothing more. The GIL is released. It may be
        closed meanwhile, which ends this. A kernel that cannot (before 5.14) gives pages as they are touched.

        Args:
            step: bytes of one slice, a multiple of the machine's pages.

        Returns:
            Whether there is more to do.

        Raises:
            HicacheInternalError: the kernel refuses, which it has no reason to do for reserved memory.
        """
        held, start = self._bytes, self._populated  # held: keeps the memory mapped while the kernel works on it
        if held is None or start >= self.size:
            return False
        count = min(step, self.size - start)
        if libc().madvise(held.ctypes.data + start, count, self._populate):
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise HicacheInternalError(f"reserved memory cannot be populated: {os.strerror(code)}")
            count = self.size - start
        self._populated = start + count
        return self._populated < self.size

    def close(self) -> None:
        """Unmap it. While somebody still holds a view, it stays mapped until the last view is gone. Idempotent."""
        self._bytes = None
        memory, self._map = self._map, None
        # Unmapping under a view would crash its reader. The views keep the mapping alive, and end it.
        if memory is not None:
            with contextlib.suppress(BufferError):
                memory.close()


_mapped: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int]] = weakref.WeakKeyDictionary()
"""Address and size of every mapping that lives, its views included."""


def _guard_child() -> None:
    # The addresses are free in a child. Taken by something else, that would be unmapped with the mapping's object.
    for mapping, (address, size) in list(_mapped.items()):
        if not mapping.closed:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            libc().mmap(address, size, 0, flags, -1, 0)


os.register_at_fork(after_in_child=_guard_child)
