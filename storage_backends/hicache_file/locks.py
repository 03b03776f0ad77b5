"""Locks on files: held by one open file at a time, in all processes, and let go when the process ends however it ends.

They are `flock` locks. On a network file system they reach other machines only where the mount passes them on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from collections.abc import Callable
from typing import Final

from .filesystem import FileSystem

__all__ = ["LockFile", "locks_work"]

_UNSUPPORTED: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_opened: weakref.WeakSet[LockFile] = weakref.WeakSet()


class LockFile:
    """A file that is there to be locked. Not thread-safe: its owner calls it from one thread at a time.

    A child made by `fork` has no part in it: the child's copy of the descriptor is closed at once, since it would
    keep the lock beyond the parent's end.

    Args:
        fs: the operating system's calls.
        path: made when it is locked, if it may be.
        may_make: whether the folder is still the one that the file belongs to.

    Attributes:
        fd: the open file, or -1.
        held: whether the lock is ours.
    """

    def __init__(self, fs: FileSystem, path: str, may_make: Callable[[], bool] = lambda: True) -> None:
        self._fs = fs
        self._may_make = may_make
        self.path: Final = path
        self.fd = -1
        self.held = False
        _opened.add(self)

    def try_lock(self, *, shared: bool = False) -> bool:
        """Take the lock without waiting; False if it is somebody else's.

        Args:
            shared: several may have it, as long as nobody has it alone.

        Raises:
            OSError: the file cannot be opened, or this file system has no locks (`locks_work`).
        """
        while not self.held:
            if self.fd < 0:
                self.open()
            try:
                self._fs.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()  # also because the name may lead to another file by the next time
                return False
            if self._is_named():
                self.held = True
            else:
                self.close()  # removed, and perhaps made anew, before it was locked
        return True

    def open(self) -> None:
        """Open the file without locking it; raises `OSError`."""
        try:
            self.fd = self._fs.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            if not self._may_make():
                raise
            self.fd = self._fs.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)

    def check(self) -> bool:
        """Whether the lock is still worth something: held, and its name still leads to it."""
        if self.held and not self._is_named():
            self.close()
        return self.held

    def release(self) -> None:
        """Let go, and keep the file open."""
        if self.held:
            self.held = False
            with contextlib.suppress(OSError):
                self._fs.flock(self.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go and close. Idempotent."""
        self.held = False
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                self._fs.close(fd)

    def _is_named(self) -> bool:
        try:
            ours, named = self._fs.fstat(self.fd), self._fs.lstat(self.path)
        except OSError:
            return False
        return (ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino)


def locks_work(error: OSError) -> bool:
    """Whether the error of a lock is anything else than that there are no locks here."""
    return error.errno not in _UNSUPPORTED


def _close_in_child() -> None:
    for lock in list(_opened):
        fd, lock.fd, lock.held = lock.fd, -1, False
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


os.register_at_fork(after_in_child=_close_in_child)
