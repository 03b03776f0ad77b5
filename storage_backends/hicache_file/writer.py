"""Storing one object: make room, write a temporary file beside the place, give it its name."""

from __future__ import annotations

import errno
import stat
import threading
from typing import Final

from hicache.storage.base import StoredObject
from hicache.storage.codec import VerdictKind

from .files import file_size
from .names import Place
from .parts import Parts

__all__ = ["Refused", "Writer"]

_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 30.0


class Refused(Exception):  # noqa: N818  an outcome
    """The object was not stored, for a reason that callers count."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Writer:
    """Stores objects whose claim the caller holds. Thread-safe."""

    def __init__(self, parts: Parts) -> None:
        self._fs = parts.fs
        self._root = parts.root
        self._directories = parts.directories
        self._files = parts.files
        self._space = parts.space
        self._removal = parts.removal
        self._floor = parts.labels.floor
        self._now = parts.now
        self._lock = threading.Lock()
        self._delay = 0.0  # how long puts are refused after the disk was full
        self._refuse_until = 0.0
        self.bytes_written = 0

    def store(self, stored: StoredObject, place: Place, *, depth: int, bucket: int) -> None:
        """Store one object that is not there, or not believed.

        Raises:
            Refused: with the reason.
            StorageUnavailable: the root is gone.
            OSError: what the system said.
        """
        self._refuse_while_full()
        self._refuse_cleared(stored)
        replaced = self._look_at_target(stored, place)
        size = file_size(stored.header, stored.payload.nbytes)
        victims = self._space.reserve(size)
        if isinstance(victims, str):
            raise Refused(victims)
        settled = False
        try:
            if not self._removal.evict(victims):
                raise Refused("evict")
            self._write(stored, place, size)
            self._remove_if_cleared(stored, place)
            self._space.settle(place.id, reserved=size, size=size, depth=depth, bucket=bucket)
            settled = True
        finally:
            if not settled:
                self._space.cancel(size)
        if replaced and not self._space.ready:
            self._space.unseen_removed(replaced)
        with self._lock:
            self.bytes_written += stored.payload.nbytes

    def _look_at_target(self, stored: StoredObject, place: Place) -> int:
        """Refuse to replace what is not ours; bytes of an object of ours that will be replaced."""
        try:
            if not self._directories.check(place):
                return 0
            info = self._fs.lstat(place.path)
            if not stat.S_ISREG(info.st_mode):
                raise Refused("foreign_file")
            verdict = self._files.peek(place.path, stored.key).verdict
        except FileNotFoundError:
            return 0
        except NotADirectoryError:
            raise Refused("foreign_file") from None
        if verdict.kind is VerdictKind.NEWER:
            raise Refused("newer")
        if verdict.kind is VerdictKind.FOREIGN:
            if verdict.reason != "identity":
                raise Refused("foreign_file")
            return 0  # another identity was never counted
        return info.st_size

    def _write(self, stored: StoredObject, place: Place, size: int) -> None:
        """Write once; when the disk is full make room from what is ours and write once more."""
        try:
            self._write_once(stored, place)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            victims = self._space.spare(size)
            if not victims:
                self._full()
            self._removal.evict(victims)
            try:
                self._write_once(stored, place)
            except OSError as again:
                if again.errno in _FULL:
                    self._full()
                raise
        if self._delay:
            self._delay = 0.0

    def _write_once(self, stored: StoredObject, place: Place) -> None:
        directory = place.path.rpartition("/")[0]
        temp = self._root.temp_path(directory)
        self._directories.make(place)
        try:
            self._files.write(temp, stored.header, stored.payload)
        except FileNotFoundError:
            # The directory went away under us: swept when it was empty, or the whole folder is gone.
            self._directories.forget(place.folder)
            self._directories.make(place)
            self._files.write(temp, stored.header, stored.payload)
        try:
            self._fs.rename(temp, place.path)
        except BaseException:
            self._files.remove_quietly(temp)
            raise
        self._files.sync_directory(directory)

    def _refuse_while_full(self) -> None:
        if self._delay and self._now() < self._refuse_until:
            raise Refused("no_space")

    def _full(self) -> None:
        """Refuse puts for a while, longer each time, so that a full disk is not tried with every page."""
        with self._lock:
            self._delay = min(max(2 * self._delay, _FIRST_DELAY), _LONGEST_DELAY)
            self._refuse_until = self._now() + self._delay
        raise Refused("no_space")

    def _refuse_cleared(self, stored: StoredObject) -> None:
        if stored.key.generation < self._floor(stored.key.namespace):
            raise Refused("cleared")

    def _remove_if_cleared(self, stored: StoredObject, place: Place) -> None:
        """A clear that came while we wrote: its sweep may have passed already."""
        if stored.key.generation < self._floor(stored.key.namespace):
            self._files.remove_quietly(place.path)
            raise Refused("cleared")
