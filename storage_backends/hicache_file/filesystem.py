"""Every call to the operating system that the backend makes, in one place, so that tests can stand between."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence
from typing import Final

__all__ = ["FileSystem"]

_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
_LACKING: Final = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


class FileSystem:
    """Thin: each method is the call of the same name in `os`, and raises what that raises. Thread-safe."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Open; the descriptor is closed on exec."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """Close."""
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        """Read into buffers, with the GIL released."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """Write from buffers, with the GIL released."""
        return os.pwritev(fd, buffers, offset)

    def pwrite(self, fd: int, content: bytes | memoryview, offset: int) -> int:
        """Write a small thing that is no object."""
        return os.pwrite(fd, content, offset)

    def fsync(self, fd: int) -> None:
        """Wait until the bytes are on the device."""
        os.fsync(fd)

    def rename(self, source: str, target: str) -> None:
        """Replace atomically."""
        os.rename(source, target)

    def rename_new(self, source: str, target: str) -> None:
        """Give a file its name if nobody has that name yet: exactly one of several that try succeeds.

        Where the file system cannot do that in one step it is a second name and the end of the first. Where it has
        no second names either, there is a look before the rename, and of two at the same moment the later one wins.

        Raises:
            FileExistsError: something has the name.
            OSError: what `rename` raises.
        """
        if _renameat2 is not None:
            flags = ctypes.c_uint(_RENAME_NOREPLACE)
            if _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
                return
            code = ctypes.get_errno()
            if code not in _LACKING:
                raise OSError(code, os.strerror(code), source, None, target)
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in _LACKING:
                raise
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
            os.rename(source, target)
        else:
            os.unlink(source)

    def flock(self, fd: int, operation: int) -> None:
        """Lock or unlock an open file."""
        fcntl.flock(fd, operation)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make one directory, for this user alone."""
        os.mkdir(path, 0o700)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def lstat(self, path: str) -> os.stat_result:
        """Look at a name, not through a link."""
        return os.lstat(path)

    def fstat(self, fd: int) -> os.stat_result:
        """Look at an open file."""
        return os.fstat(fd)

    def free(self, path: str) -> int:
        """Bytes that this user may still write."""
        info = os.statvfs(path)
        return info.f_bavail * info.f_frsize

    def scandir(self, path: str) -> list[os.DirEntry[str]]:
        """All entries of a directory."""
        with os.scandir(path) as entries:
            return list(entries)

    def set_mtime(self, target: int | str, seconds: float) -> None:
        """Set access and modification time of an open file, or of a name that is no link."""
        if isinstance(target, int):
            os.utime(target, (seconds, seconds))
        else:
            os.utime(target, (seconds, seconds), follow_symlinks=False)
