"""Every call to the operating system that the backend makes, in one place, so that tests can stand between."""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["FileSystem"]


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

    def fsync(self, fd: int) -> None:
        """Wait until the bytes are on the device."""
        os.fsync(fd)

    def rename(self, source: str, target: str) -> None:
        """Replace atomically."""
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        """A second name; fails where the target exists."""
        os.link(source, target)

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
