"""What is done in the background: index what others put, sweep what a clear or a crash left, keep the limit."""

from __future__ import annotations

import contextlib
import os
from threading import Event
from typing import Final

from hicache.storage.codec import VerdictKind

from .parts import Parts
from .space import ENTRY_CHARGE
from .walk import Leaf, Walk

__all__ = ["Janitor"]

_TRIM_STEP: Final = 16 * 2**20
_TRIM_PAUSE: Final = 0.002
_EXCESS_SHARE: Final = 16  # of the capacity; a scan evicts in so large portions, as choosing sorts what is known so far


class Janitor:
    """For one thread. It holds no lock during I/O and looks at every file whether it should stop.

    Args:
        parts: of the backend.
        stop: set when it shall end.
    """

    def __init__(self, parts: Parts, stop: Event) -> None:
        self._fs = parts.fs
        self._root = parts.root
        self._names = parts.names
        self._space = parts.space
        self._accounts = parts.accounts
        self._files = parts.files
        self._removal = parts.removal
        self._floor = parts.labels.generation
        self._stop = stop
        self._walk = Walk(parts.fs, parts.names, stop)

    @property
    def errors(self) -> int:
        """Directories that could not be read."""
        return self._walk.errors

    # --- scan ---------------------------------------------------------------------------------------------------

    def scan(self, *, sweeping: bool) -> int | None:
        """Index every object that is not known yet.

        Args:
            sweeping: also remove what dead writers and cleared generations left, and, as soon as more is known than
                the capacity, what goes first of that: in the end the same is left as if all had been known before.

        Returns:
            Bytes of all objects, charges included; None if it was stopped.
        """
        dead = self._root.dead_writers() if sweeping else []
        seen = 0
        if sweeping:
            self._sweep_temps(self._root.path)
        for namespace in self._walk.namespaces():
            if sweeping:
                self._sweep_temps(namespace)
            seen += self._scan_namespace(namespace, sweeping=sweeping)
            if self._stop.is_set():
                return None
        for token in dead:
            self._root.bury(token)
        self._space.scanned()
        return seen

    def prune(self) -> None:
        """Forget objects whose files other processes have removed."""
        for identity in self._space.ids():
            self._walk.pause()
            if self._stop.is_set():
                return
            place = self._names.place_of(identity)
            with contextlib.suppress(OSError):
                if not self._exists(place.path):
                    self._removal.vanished(place)

    def _exists(self, path: str) -> bool:
        try:
            self._fs.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _scan_namespace(self, path: str, *, sweeping: bool) -> int:
        floor = self._floor(bytes.fromhex(os.path.basename(path)))
        seen = 0
        trims = self._space.capacity is not None
        for generation in self._walk.generations(path):
            if sweeping and int(os.path.basename(generation)) < floor:
                self._sweep_generation(generation)
            for leaf in self._walk.leaves(generation):
                for entry in self._walk.entries(leaf.path):
                    seen += self._look(leaf, entry, sweeping=sweeping)
                if sweeping and trims:
                    trims = self._trim_known()
                if self._stop.is_set():
                    return seen
        return seen

    def _look(self, leaf: Leaf, entry: os.DirEntry[str], *, sweeping: bool) -> int:
        """Index one file if it is an object of ours; remove it if it is a damaged one; else leave it alone.

        Returns:
            What it counts.
        """
        self._walk.pause()
        if sweeping and self._root.is_orphan(entry.name):
            self._files.remove_quietly(entry.path)
            return 0
        key = self._names.parse(leaf.namespace, leaf.generation, leaf.number, entry.name)
        if key is None or not entry.is_file(follow_symlinks=False):
            return 0
        place = self._names.place(key)
        if known := self._space.known(place.id):
            return known + ENTRY_CHARGE
        with contextlib.suppress(OSError):
            seen = self._files.peek(entry.path, key)
            if seen.verdict.kind is VerdictKind.CORRUPT:
                self._removal.withdraw(place, seen.stat)
            elif seen.verdict.header is not None and seen.verdict.ok:
                depth = seen.verdict.header.depth
                self._space.found(place.id, size=seen.size, depth=depth, mtime=seen.stat.st_mtime)
                return seen.size + ENTRY_CHARGE
        return 0

    # --- limit --------------------------------------------------------------------------------------------------

    def trim(self) -> bool:
        """Evict in small steps while the folder is above its capacity; False if it is and nothing more can go."""
        capacity = self._space.capacity
        while capacity is not None and not self._stop.is_set():
            books = self._accounts.publish(give=True)
            if books is None or books.used is None:
                return False
            if books.used <= capacity:
                break
            if not self._evict(books.used - capacity):
                return False
            self._stop.wait(_TRIM_PAUSE)
        return True

    def _trim_known(self) -> bool:
        """Evict when the objects that are known so far are well above the capacity; False if nothing can go."""
        capacity = self._space.capacity
        assert capacity is not None
        excess = self._space.standing().known - capacity
        if excess < capacity // _EXCESS_SHARE:
            return True
        while excess > 0 and not self._stop.is_set():
            if not self._evict(excess):
                return False
            self._accounts.publish(give=True)  # else puts would write these bytes again
            excess = self._space.standing().known - capacity
        return True

    def _evict(self, most: int) -> bool:
        """Evict one step's bytes; False if nothing could go."""
        victims = self._space.take_some(min(most, _TRIM_STEP))
        evicted = self._removal.evict(victims, stop=self._stop.is_set)
        return bool(evicted.removed or evicted.vanished)

    # --- sweep --------------------------------------------------------------------------------------------------

    def sweep_namespace(self, namespace: bytes) -> int:
        """Remove the older generations of a namespace. Returns the lowest that stays."""
        path = self._names.namespace_path(namespace)
        floor = self._floor(namespace)
        for generation in self._walk.generations(path):
            if int(os.path.basename(generation)) < floor:
                self._sweep_generation(generation)
        return floor

    def _sweep_generation(self, path: str) -> None:
        """Remove our files of a generation, then the directories that are empty."""
        for leaf in self._walk.leaves(path):
            for entry in self._walk.entries(leaf.path):
                self._walk.pause()
                if self._stop.is_set():
                    return
                if self._root.is_orphan(entry.name):
                    self._files.remove_quietly(entry.path)
                    continue
                self._remove_ours(entry.path, leaf, entry.name)
            self._remove_directory(leaf.path)
        for first in self._walk.fans(path):
            self._remove_directory(first)
        self._remove_directory(path)

    def _remove_ours(self, path: str, leaf: Leaf, name: str) -> None:
        key = self._names.parse(leaf.namespace, leaf.generation, leaf.number, name)
        if key is None:
            return
        kind = VerdictKind.FOREIGN
        with contextlib.suppress(OSError):
            kind = self._files.peek(path, key).verdict.kind
        if kind in (VerdictKind.OK, VerdictKind.CORRUPT):
            self._removal.remove(self._names.place(key))
        else:
            self._removal.disown(self._names.place(key))

    def _sweep_temps(self, directory: str) -> None:
        for entry in self._walk.entries(directory):
            if self._root.is_orphan(entry.name):
                self._files.remove_quietly(entry.path)

    def _remove_directory(self, path: str) -> None:
        with contextlib.suppress(OSError):  # not empty: a late put, or files of others
            self._fs.rmdir(path)
