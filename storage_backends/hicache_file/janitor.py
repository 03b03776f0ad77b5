"""What happens in the background: index what an earlier process left, sweep what a clear or a crash left."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from hicache.storage.codec import VerdictKind

from .names import temp_writer
from .parts import Parts

__all__ = ["Janitor"]

_BYTE = re.compile(r"[0-9a-f]{2}")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_GENERATION = re.compile(r"0|[1-9][0-9]{0,19}")
_PAUSE_EVERY: Final = 64  # files
_PAUSE: Final = 0.001  # seconds: a scan of millions of files leaves the interpreter to others in between
_TRIM_STEP: Final = 64 * 2**20


class _Leaf(NamedTuple):
    namespace: str
    generation: str
    number: int
    path: str


class Janitor:
    """One thread. It holds no lock during I/O and looks at every 64 files whether it should stop."""

    def __init__(self, parts: Parts) -> None:
        self._fs = parts.fs
        self._root = parts.root
        self._names = parts.names
        self._space = parts.space
        self._files = parts.files
        self._removal = parts.removal
        self._floor = parts.labels.generation
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._wake = threading.Condition()
        self._cleared: dict[bytes, None] = {}
        self._busy = True
        self._since_pause = 0
        self.errors = 0
        self._thread = threading.Thread(target=self._run, name="hicache-file-janitor", daemon=True)

    def start(self) -> None:
        """Start the thread: it scans first."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Ask the thread to end, and wait for it. Idempotent."""
        self._stop.set()
        with self._wake:
            self._wake.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def sweep(self, namespace: bytes) -> None:
        """Have the namespace's older generations removed."""
        with self._wake:
            self._cleared[namespace] = None
            self._busy = True
            self._wake.notify_all()

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the first scan is through."""
        return self._ready.wait(timeout)

    def wait_idle(self, timeout: float) -> bool:
        """Wait until there is nothing to sweep."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._busy, timeout)

    def _run(self) -> None:
        if not self._guarded(self._scan):
            self._space.scanned(exact=False)
        self._ready.set()
        while (namespace := self._next()) is not None:
            self._guarded(lambda namespace=namespace: self._sweep_namespace(namespace))  # type: ignore[misc]

    def _next(self) -> bytes | None:
        with self._wake:
            if not self._cleared:
                self._busy = False
                self._wake.notify_all()
            self._wake.wait_for(lambda: self._cleared or self._stop.is_set())
            if self._stop.is_set():
                return None
            namespace = next(iter(self._cleared))
            del self._cleared[namespace]
            return namespace

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Trouble with one job must not end the thread; says whether there was none."""
        try:
            work()
        except Exception:
            self.errors += 1
            return False
        return True

    # --- scan ---------------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        dead = self._root.dead_writers()
        if not self._space.ready:
            self._sweep_temps(self._root.path)
            for namespace in self._namespaces():
                self._sweep_temps(namespace)
                self._scan_namespace(namespace)
                if self._stop.is_set():
                    return
            for token in dead:
                self._root.bury(token)
        self._space.scanned()
        while not self._stop.is_set() and (victims := self._space.over(_TRIM_STEP)):
            if not self._removal.evict(victims):
                return

    def _scan_namespace(self, path: str) -> None:
        digest = os.path.basename(path)
        floor = self._floor(bytes.fromhex(digest))
        for generation in self._directories(path, _GENERATION):
            number = os.path.basename(generation)
            if int(number) < floor:
                self._sweep_generation(generation)
                continue
            for leaf in self._leaves(generation):
                for entry in self._entries(leaf.path):
                    self._look(leaf, entry)
                if self._stop.is_set():
                    return

    def _look(self, leaf: _Leaf, entry: os.DirEntry[str]) -> None:
        """Index one file if it is an object of ours; remove it if it is a damaged one; else leave it alone."""
        self._pause()
        if self._is_orphan(entry.name):
            self._files.remove_quietly(entry.path)
            return
        key = self._names.parse(leaf.namespace, leaf.generation, leaf.number, entry.name)
        if key is None or not entry.is_file(follow_symlinks=False):
            return
        place = self._names.place(key)
        if self._space.known(place.id):
            return
        with contextlib.suppress(OSError):
            seen = self._files.peek(entry.path, key)
            if seen.verdict.kind is VerdictKind.CORRUPT:
                self._removal.withdraw(place, seen.stat)
            elif seen.verdict.header is not None and seen.verdict.ok:
                depth = seen.verdict.header.depth
                self._space.found(place.id, size=seen.size, depth=depth, mtime=seen.stat.st_mtime)

    # --- sweep --------------------------------------------------------------------------------------------------

    def _sweep_namespace(self, namespace: bytes) -> None:
        path = self._names.namespace_path(namespace)
        floor = self._floor(namespace)
        for generation in self._directories(path, _GENERATION):
            if int(os.path.basename(generation)) < floor:
                self._sweep_generation(generation)

    def _sweep_generation(self, path: str) -> None:
        """Remove our files of a generation, then the directories that are empty."""
        for leaf in self._leaves(path):
            for entry in self._entries(leaf.path):
                self._pause()
                if self._is_orphan(entry.name):
                    self._files.remove_quietly(entry.path)
                    continue
                self._remove_ours(entry.path, leaf, entry.name)
            self._remove_directory(leaf.path)
            if self._stop.is_set():
                return
        for first in self._directories(path, _BYTE):
            self._remove_directory(first)
        self._remove_directory(path)

    def _remove_ours(self, path: str, leaf: _Leaf, name: str) -> None:
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
        for entry in self._entries(directory):
            if self._is_orphan(entry.name):
                self._files.remove_quietly(entry.path)

    def _is_orphan(self, name: str) -> bool:
        token = temp_writer(name)
        return token is not None and not self._root.is_living(token)

    # --- walking ------------------------------------------------------------------------------------------------

    def _namespaces(self) -> Iterator[str]:
        for prefix in self._directories(self._root.path, _BYTE):
            for namespace in self._directories(prefix, _NAMESPACE):
                if os.path.basename(namespace).startswith(os.path.basename(prefix)):
                    yield namespace

    def _leaves(self, generation: str) -> Iterator[_Leaf]:
        namespace, number = os.path.basename(os.path.dirname(generation)), os.path.basename(generation)
        fan = self._names.fan_out
        for first in self._directories(generation, _BYTE):
            for second in self._directories(first, _BYTE):
                leaf = int(os.path.basename(first), 16) * fan + int(os.path.basename(second), 16)
                yield _Leaf(namespace, number, leaf, second)

    def _directories(self, path: str, pattern: re.Pattern[str]) -> list[str]:
        """Real directories of ours in a directory; links and other names are not ours."""
        return [
            entry.path
            for entry in self._entries(path)
            if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]

    def _entries(self, path: str) -> list[os.DirEntry[str]]:
        try:
            return sorted(self._fs.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                self.errors += 1
            return []

    def _remove_directory(self, path: str) -> None:
        with contextlib.suppress(OSError):  # not empty: a late put, or files of others
            self._fs.rmdir(path)

    def _pause(self) -> None:
        self._since_pause += 1
        if self._since_pause >= _PAUSE_EVERY:
            self._since_pause = 0
            self._stop.wait(_PAUSE)
