"""Storing one object: make room, write a temporary file beside the place, give it its name."""

from __future__ import annotations

import contextlib
import errno
import stat
import threading
from typing import Final, NoReturn

from hicache.storage.base import StoredObject
from hicache.storage.codec import VerdictKind

from .files import Seen, file_size
from .ledger import LedgerBusy
from .names import Place
from .parts import Parts
from .space import ENTRY_CHARGE

__all__ = ["Refused", "Writer"]

_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 30.0
_ROUNDS: Final = 64  # of one put that looks for room
_MOST_STUCK: Final = 16  # victims that one put may fail to remove
_MOST_SPARED: Final = 32  # victims that one put leaves because other processes use them
_NAMINGS: Final = 8


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
        self._accounts = parts.accounts
        self._floor = parts.labels.current
        self._now = parts.now
        self._wall = parts.wall
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
        seen = self._look_at_target(stored, place)
        if seen is not None and self._is_believed(seen, place):
            self._adopt(seen, place, bucket)
            return
        size = file_size(stored.header, stored.payload.nbytes)
        self._make_room(place, size)
        settled = False
        try:
            others = self._write(stored, place, size)
            if others is None:
                swept = self._remove_if_cleared(stored, place)
                self._space.settle(place.id, size=size, depth=depth, bucket=bucket)
                settled = True
                if swept:  # who swept it counts its bytes as free
                    self._space.forget(place.id)
                    raise Refused("cleared")
        finally:
            if not settled:
                self._space.cancel(size)
        if others is not None:
            self._adopt(others, place, bucket)
            return
        if self._accounts.is_due():
            self._accounts.publish()
        with self._lock:
            self.bytes_written += stored.payload.nbytes

    def _is_believed(self, seen: Seen, place: Place) -> bool:
        """Whether what lies there is what would be written: its header says so, and nobody here found it damaged."""
        return seen.verdict.ok and not self._space.known(place.id) and not self._space.is_disbelieved(place.id)

    def _adopt(self, seen: Seen, place: Place, bucket: int) -> None:
        """Another process, or an earlier one, has stored the object: it is known and used from now on."""
        header = seen.verdict.header
        assert header is not None
        self._space.adopt_claimed(place.id, size=seen.size, depth=header.depth, bucket=bucket)
        with contextlib.suppress(OSError):
            self._fs.set_mtime(place.path, self._wall())

    def _make_room(self, place: Place, size: int) -> None:
        """Set the bytes of a file aside: from what this process may write, from the ledger, or by evicting."""
        capacity = self._space.capacity
        if capacity is not None and size + ENTRY_CHARGE > capacity:
            raise Refused("too_large")
        stuck = spared = 0
        asked_anew = False
        for _ in range(_ROUNDS):
            lacking = self._space.reserve(size)
            if not lacking or (self._draw(place, lacking) and not self._space.reserve(size)):
                return
            lacking = self._space.lacking(size)
            victims = self._space.take(lacking)
            if victims is None:
                if not asked_anew:  # perhaps the ledger was not asked, since it had nothing a moment ago
                    asked_anew = True
                    self._accounts.refill()
                    continue
                raise Refused("no_room" if self._space.ready else "rebuilding")
            evicted = self._removal.evict(victims, spare=spared < _MOST_SPARED)
            if evicted.vanished:
                self._accounts.refill()  # alone, what vanished is room
            stuck += evicted.stuck
            spared += evicted.spared
            if stuck >= _MOST_STUCK:
                raise Refused("evict")
        raise Refused("evict" if stuck else "no_room")

    def _draw(self, place: Place, lacking: int) -> bool:
        try:
            return self._accounts.draw(lacking)
        except LedgerBusy:
            raise Refused("busy") from None
        except FileNotFoundError:
            self._directories.forget(place.folder)  # the whole folder went away
            self._directories.revive()
            return self._accounts.draw(lacking)

    def _look_at_target(self, stored: StoredObject, place: Place) -> Seen | None:
        """What lies under the name, if it may be replaced; refuses to replace what is not ours."""
        try:
            if not self._directories.check(place):
                return None
            info = self._fs.lstat(place.path)
            if not stat.S_ISREG(info.st_mode):
                raise Refused("foreign_file")
            seen = self._files.peek(place.path, stored.key)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise Refused("foreign_file") from None
        kind = seen.verdict.kind
        if kind is VerdictKind.NEWER:
            raise Refused("newer")
        if kind is VerdictKind.FOREIGN and seen.verdict.reason != "identity":
            raise Refused("foreign_file")
        return seen

    def _write(self, stored: StoredObject, place: Place, size: int) -> Seen | None:
        """Write once; when the disk is full make room from what is ours and write once more.

        Returns:
            None, or what another process has put there meanwhile: the same object.
        """
        try:
            others = self._write_once(stored, place)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._removal.evict(self._space.take(size) or self._full())
            try:
                others = self._write_once(stored, place)
            except OSError as again:
                if again.errno in _FULL:
                    self._full()
                raise
        if self._delay:
            self._delay = 0.0
        return others

    def _write_once(self, stored: StoredObject, place: Place) -> Seen | None:
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
        named = False
        try:
            others = self._name(temp, stored, place)
            named = others is None
        finally:
            if not named:
                self._files.remove_quietly(temp)
        self._files.sync_directory(directory)
        return others

    def _name(self, temp: str, stored: StoredObject, place: Place) -> Seen | None:
        """Give the file its name, or say what has got there before: the same object.

        Anything else that is ours is removed first, and not just replaced, so that its bytes are counted once.
        """
        for _ in range(_NAMINGS):
            try:
                self._fs.rename_new(temp, place.path)
            except FileExistsError:
                seen = self._look_at_target(stored, place)
                if seen is None:
                    continue
                if self._is_believed(seen, place):
                    return seen
                if self._replace(temp, place, seen):
                    return None
            else:
                return None
        raise Refused("busy")

    def _replace(self, temp: str, place: Place, seen: Seen) -> bool:
        """Make way for a file, or, where nothing can be removed, put it over what is there and say True."""
        counted = seen.verdict.kind is not VerdictKind.FOREIGN
        try:
            self._removal.clear_way(place, seen.stat, counted=counted)
        except OSError:
            self._fs.rename(temp, place.path)
            if counted:
                self._space.gone(place.id, seen.size)
            return True
        return False

    def _refuse_while_full(self) -> None:
        if self._delay and self._now() < self._refuse_until:
            raise Refused("no_space")

    def _full(self) -> NoReturn:
        """Refuse puts for a while, longer each time, so that a full disk is not tried with every page."""
        with self._lock:
            self._delay = min(max(2 * self._delay, _FIRST_DELAY), _LONGEST_DELAY)
            self._refuse_until = self._now() + self._delay
        raise Refused("no_space")

    def _refuse_cleared(self, stored: StoredObject) -> None:
        if stored.key.generation < self._floor(stored.key.namespace):
            raise Refused("cleared")

    def _remove_if_cleared(self, stored: StoredObject, place: Place) -> bool:
        """A clear that came while we wrote: its sweep may have passed already. True if another sweep was faster."""
        if stored.key.generation >= self._floor(stored.key.namespace):
            return False
        try:
            self._fs.unlink(place.path)
        except FileNotFoundError:
            return True
        raise Refused("cleared")
