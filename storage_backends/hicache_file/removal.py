"""Taking objects away: victims, damaged files, and what a clear left behind. Each removal holds the object's claim."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from typing import Final, NamedTuple

from .filesystem import FileSystem
from .index import MINUTE
from .names import Names, Place
from .space import Space, Victim

__all__ = ["CLAIM_WAIT", "Evicted", "Removal"]

CLAIM_WAIT: Final = 30.0
"""Seconds that a call waits for another one's I/O on the same object."""


class Evicted(NamedTuple):
    """What became of victims: removed, vanished before, spared since another process used them, or not removable."""

    removed: int = 0
    vanished: int = 0
    spared: int = 0
    stuck: int = 0


class Removal:
    """Removes object files and keeps the accounts right. Thread-safe.

    Args:
        fs: the file system.
        names: the mapping.
        space: the accounts.
        shared: whether other processes are at work on the root now.

    Attributes:
        undeletable: victims that could not be removed so far, each time they were tried.
    """

    def __init__(self, fs: FileSystem, names: Names, space: Space, shared: Callable[[], bool]) -> None:
        self._fs = fs
        self._names = names
        self._space = space
        self._shared = shared
        self.undeletable = 0

    def evict(self, victims: list[Victim], *, spare: bool = True, stop: Callable[[], bool] = lambda: False) -> Evicted:
        """Unlink victims. Each claim ends here, whatever happens.

        What is no longer the file that was stored is somebody else's, and stays; it does not count as ours either.

        Args:
            victims: from `Space.take`.
            spare: leave what other processes have used since this one did.
            stop: whether to leave the rest.
        """
        removed = vanished = spared = stuck = 0
        for victim in victims:
            path = self._names.place_of(victim.id).path
            if stop():
                self._space.kept(victim, self._space.bucket())
                continue
            info = self._is_as_stored(path, victim.size)
            if info is None:
                self._space.unlinked(victim, ours=False)
                vanished += 1
            elif spare and self._is_used(info, victim):
                self._space.kept(victim, self._space.bucket())
                spared += 1
            else:
                unlinked = self._unlink(path)
                if unlinked is None:
                    self._space.kept(victim, self._space.bucket())
                    self.undeletable += 1
                    stuck += 1
                else:
                    self._space.unlinked(victim, ours=unlinked)
                    removed += unlinked
                    vanished += not unlinked
        return Evicted(removed, vanished, spared, stuck)

    def withdraw(self, place: Place, seen: os.stat_result) -> None:
        """Remove a damaged object if its name still leads to the file that was read.

        Whoever else has the claim is replacing or removing it, so then there is nothing to do.
        """
        if self._space.claim(place.id) is not None:
            return
        try:
            if self._is_same(place.path, seen):
                if self._unlink(place.path):
                    self._space.gone(place.id, seen.st_size)
                else:
                    self._space.forget(place.id, disbelieve=True)
        finally:
            self._space.release(place.id)

    def vanished(self, place: Place) -> None:
        """Forget an object whose file is gone."""
        if self._space.claim(place.id) is not None:
            return
        try:
            with contextlib.suppress(OSError):
                self._fs.lstat(place.path)
                return  # it is back
            self._space.forget(place.id)
        finally:
            self._space.release(place.id)

    def disown(self, place: Place) -> None:
        """Forget an object because something else lies under its name."""
        if self._space.claim(place.id) is None:
            self._space.forget(place.id, disbelieve=True)
            self._space.release(place.id)

    def remove(self, place: Place) -> bool:
        """Remove an object, waiting for what others do with it; False if there was none, or it cannot be removed."""
        while (ticket := self._space.claim(place.id)) is not None:
            if not ticket.wait(CLAIM_WAIT):
                return False
        try:
            info = self._fs.lstat(place.path)
            self._fs.unlink(place.path)
        except FileNotFoundError:
            self._space.forget(place.id)
            return False
        except OSError:
            return False
        else:
            self._space.gone(place.id, info.st_size)
            return True
        finally:
            self._space.release(place.id)

    def clear_way(self, place: Place, seen: os.stat_result, *, counted: bool) -> None:
        """Remove what lies under the name of an object that the caller has the claim of, if it is still what was seen.

        Args:
            place: the object's.
            seen: of the file that has to go.
            counted: whether its bytes are counted as ours.

        Raises:
            OSError: it cannot be removed.
        """
        if not self._is_same(place.path, seen):
            return
        try:
            self._fs.unlink(place.path)
        except FileNotFoundError:
            return
        if counted:
            self._space.gone(place.id, seen.st_size)

    def _unlink(self, path: str) -> bool | None:
        """True: removed; False: it was gone already; None: it cannot be removed."""
        try:
            self._fs.unlink(path)
        except FileNotFoundError:
            return False
        except OSError:
            return None
        return True

    def _is_as_stored(self, path: str, size: int) -> os.stat_result | bool | None:
        """None if the file of the object is not there any more."""
        try:
            info = self._fs.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return True  # let the removal say what is wrong
        return info if stat.S_ISREG(info.st_mode) and info.st_size == size else None

    def _is_used(self, info: os.stat_result | bool, victim: Victim) -> bool:
        """Whether another process has stamped the file since this one used it; a stamp of the future tells nothing."""
        if isinstance(info, bool) or not self._shared():
            return False
        stamped = int(info.st_mtime // MINUTE)
        return victim.minute + 1 < stamped <= self._space.minute() + 1

    def _is_same(self, path: str, seen: os.stat_result) -> bool:
        try:
            now = self._fs.lstat(path)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (seen.st_dev, seen.st_ino)
