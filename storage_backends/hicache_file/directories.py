"""Directories below the root: made when needed, and looked at once so that no link leads out of the root."""

from __future__ import annotations

import stat
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from hicache.errors import StorageUnavailable

from .filesystem import FileSystem
from .names import Names, Place

__all__ = ["Directories"]

_FOLDERS: Final = 1024  # folders whose looked-at leaves are remembered


class Directories:
    """Remembers which fan-out directories are real. Thread-safe; holds no lock during I/O.

    Args:
        fs: the file system.
        names: the mapping.
        alive: whether the root is there and ours; may bring it back.
    """

    def __init__(self, fs: FileSystem, names: Names, alive: Callable[[], bool]) -> None:
        self._fs = fs
        self._names = names
        self._alive = alive
        self._lock = threading.Lock()
        self._known: OrderedDict[str, set[int]] = OrderedDict()

    def check(self, place: Place) -> bool:
        """Whether the place's directory is there.

        Raises:
            NotADirectoryError: a part of the way is a link or a file.
            OSError: it cannot be looked at.
        """
        if self._is_known(place):
            return True
        for path in self._way(place):
            try:
                self._must_be_directory(path)
            except FileNotFoundError:
                return False
        self._remember(place)
        return True

    def make(self, place: Place) -> None:
        """Make the place's directory.

        Raises:
            StorageUnavailable: the root is not there.
            NotADirectoryError: a part of the way is a link or a file.
            OSError: it cannot be made.
        """
        if self._is_known(place):
            return
        self.revive()
        self._make(self._way(place))
        self._remember(place)

    def make_namespace(self, path: str) -> None:
        """Make a namespace's directory; raises as `make` does."""
        self.revive()
        self._make([path.rpartition("/")[0], path])

    def revive(self) -> None:
        """Make the root again if it was emptied.

        Raises:
            StorageUnavailable: it is not there.
        """
        if not self._alive():
            raise StorageUnavailable(f"{self._names.root} is gone, or is no folder of hicache any more")

    def forget(self, folder: str) -> None:
        """Look again before the folder is used next."""
        with self._lock:
            self._known.pop(folder, None)

    def _make(self, way: list[str]) -> None:
        for path in way:
            try:
                self._fs.mkdir(path)
            except FileExistsError:
                self._must_be_directory(path)

    def _is_known(self, place: Place) -> bool:
        leaves = self._known.get(place.folder)  # one look at a dict needs no lock
        return leaves is not None and place.leaf in leaves

    def _remember(self, place: Place) -> None:
        with self._lock:
            self._known.setdefault(place.folder, set()).add(place.leaf)
            self._known.move_to_end(place.folder)
            if len(self._known) > _FOLDERS:
                self._known.popitem(last=False)

    def _way(self, place: Place) -> list[str]:
        """Directories from below the root to the leaf."""
        namespace = place.folder.rpartition("/")[0]
        leaf = place.path.rpartition("/")[0]
        return [namespace.rpartition("/")[0], namespace, place.folder, leaf.rpartition("/")[0], leaf]

    def _must_be_directory(self, path: str) -> None:
        if not stat.S_ISDIR(self._fs.lstat(path).st_mode):
            raise NotADirectoryError(20, "is a link or a file, not a directory of hicache", path)
