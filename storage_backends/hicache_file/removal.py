"""Taking objects away: victims, damaged files, and what a clear left behind. Each removal holds the object's claim."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Final

from .filesystem import FileSystem
from .names import Names, Place
from .space import Space, Victim

__all__ = ["CLAIM_WAIT", "Removal"]

CLAIM_WAIT: Final = 30.0
"""Seconds that a call waits for another one's I/O on the same object."""


class Removal:
    """Removes object files and keeps the accounts right. Thread-safe.

    Args:
        fs: the file system.
        names: the mapping.
        space: the accounts.
    """

    def __init__(self, fs: FileSystem, names: Names, space: Space) -> None:
        self._fs = fs
        self._names = names
        self._space = space

    def evict(self, victims: list[Victim]) -> bool:
        """Unlink victims; False if one could not be. Each claim ends here, whatever happens.

        What is no longer the file that was stored is somebody else's, and stays; it does not count as ours either.
        """
        good = True
        for victim in victims:
            path = self._names.place_of(victim.id).path
            if not self._is_as_stored(path, victim.size) or self._unlink(path):
                self._space.unlinked(victim)
            else:
                good = False
                self._space.kept(victim, self._space.bucket())
        return good

    def withdraw(self, place: Place, seen: os.stat_result) -> None:
        """Remove a damaged object if its name still leads to the file that was read.

        Whoever else has the claim is replacing or removing it, so then there is nothing to do.
        """
        if self._space.claim(place.id) is not None:
            return
        try:
            if self._is_same(place.path, seen):
                counted = self._space.forget(place.id, disbelieve=not self._unlink(place.path))
                if not counted and not self._space.ready:
                    self._space.unseen_removed(seen.st_size)
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
            if not self._space.forget(place.id) and not self._space.ready:
                self._space.unseen_removed(info.st_size)
            return True
        finally:
            self._space.release(place.id)

    def _unlink(self, path: str) -> bool:
        try:
            self._fs.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _is_as_stored(self, path: str, size: int) -> bool:
        try:
            info = self._fs.lstat(path)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # let the removal say what is wrong
        return stat.S_ISREG(info.st_mode) and info.st_size == size

    def _is_same(self, path: str, seen: os.stat_result) -> bool:
        try:
            now = self._fs.lstat(path)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (seen.st_dev, seen.st_ino)
