"""Reading, looking and touching: what does not need an object's claim."""

from __future__ import annotations

import contextlib
import errno
import stat

from hicache.storage.base import ObjectKey, ObjectResult, ObjectStatus
from hicache.storage.codec import VerdictKind

from .names import Place
from .parts import Parts

__all__ = ["Reader", "failed"]

_NOT_OURS = {errno.ELOOP, errno.ENOTDIR, errno.ENXIO}


def failed(error: OSError) -> ObjectResult:
    """The result for what the system refused: its own name for it, or "unavailable" where the way is gone."""
    name = errno.errorcode.get(error.errno or 0, "oserror").lower()
    return ObjectResult(ObjectStatus.FAILED, "unavailable" if name == "enoent" else name)


class Reader:
    """Reads objects and keeps their recency. Thread-safe."""

    def __init__(self, parts: Parts) -> None:
        self._fs = parts.fs
        self._root = parts.root
        self._space = parts.space
        self._names = parts.names
        self._directories = parts.directories
        self._files = parts.files
        self._removal = parts.removal
        self._floor = parts.labels.current
        self._wall = parts.wall

    def get(self, key: ObjectKey, buffer: memoryview, bucket: int) -> ObjectResult:
        """Read one object into a buffer of its payload's length."""
        if key.generation < self._floor(key.namespace):
            return ObjectResult(ObjectStatus.MISSING, "cleared")
        place = self._names.place(key)
        try:
            if self._directories.check(place):
                fd = self._files.open(place.path)
                try:
                    return self._read(fd, place, key, buffer, bucket)
                finally:
                    self._fs.close(fd)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in _NOT_OURS:
                return ObjectResult(ObjectStatus.MISSING, "foreign")
            return failed(error)
        if self._space.known(place.id):
            if not self._root.alive():
                return ObjectResult(ObjectStatus.FAILED, "unavailable")
            self._directories.forget(place.folder)
            self._removal.vanished(place)
        return ObjectResult(ObjectStatus.MISSING, "absent")

    def _read(self, fd: int, place: Place, key: ObjectKey, buffer: memoryview, bucket: int) -> ObjectResult:
        verdict = self._files.read(fd, key, buffer)
        kind, header = verdict.kind, verdict.header
        if kind is VerdictKind.FOREIGN or kind is VerdictKind.NEWER:
            self._removal.disown(place)
        elif header is not None and header.payload_length != buffer.nbytes:
            return ObjectResult(ObjectStatus.FAILED, "size")
        elif kind is VerdictKind.OK and header is not None:
            self._used(fd, place, header.depth, bucket)
        else:
            self._removal.withdraw(place, self._fs.fstat(fd))
        return ObjectResult.of(verdict)

    def _used(self, fd: int, place: Place, depth: int, bucket: int) -> None:
        stamp = self._space.use(place.id, bucket)
        if stamp is None:
            info = self._fs.fstat(fd)
            if info.st_nlink:
                self._space.adopt(place.id, size=info.st_size, depth=depth, bucket=bucket)
            stamp = True
        if stamp:
            self._stamp(fd)

    def is_stored(self, place: Place, bucket: int) -> bool:
        """Whether the index has it and its file is there as it was written."""
        size = self._space.known(place.id)
        if not size:
            return False
        try:
            info = self._fs.lstat(place.path)
        except OSError:
            return False
        if not stat.S_ISREG(info.st_mode) or info.st_size != size:
            return False
        if self._space.use(place.id, bucket):
            self._stamp(place.path)
        return True

    def exists(self, key: ObjectKey) -> bool:
        """Whether a file lies there, whatever is in it, and its generation has not ended.

        Raises:
            OSError: the file system does not tell.
        """
        if key.generation < self._floor(key.namespace):
            return False
        place = self._names.place(key)
        try:
            if not self._directories.check(place):
                return False
            info = self._fs.lstat(place.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(info.st_mode) and info.st_size > 0

    def touch(self, key: ObjectKey, bucket: int) -> bool:
        """Mark as used now; False where there is none.

        Raises:
            OSError: the file system does not tell.
        """
        if not self.exists(key):
            return False
        place = self._names.place(key)
        if self._space.use(place.id, bucket) is not False:
            self._stamp(place.path)
        return True

    def _stamp(self, target: int | str) -> None:
        with contextlib.suppress(OSError):  # order after a restart is a help, not a promise worth a failed read
            self._fs.set_mtime(target, self._wall())
