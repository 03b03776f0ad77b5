"""The small files of a namespace: its generation and its manifest."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from hicache.storage.base import MAX_MANIFEST

from .directories import Directories
from .filesystem import FileSystem
from .ledger import Ledger
from .names import Names
from .root import Root, replace_file

__all__ = ["Labels"]

GENERATION: Final = "GENERATION"
MANIFEST: Final = "MANIFEST"

_NUMBER = re.compile(rb"(0|[1-9][0-9]{0,19})\n?")
_REMEMBERED: Final = 65_536  # namespaces
_HEX = re.compile(r"[0-9a-f]+")


class Labels:
    """Reads and writes them. Thread-safe.

    Args:
        fs: the operating system's calls.
        root: the root folder.
        names: where namespaces lie.
        directories: makes them.
        ledger: keeps processes from overtaking each other.
        refresh: seconds for which a generation that was read is believed without another look.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        fs: FileSystem,
        root: Root,
        names: Names,
        directories: Directories,
        *,
        ledger: Ledger,
        refresh: float,
        now: Callable[[], float],
    ) -> None:
        self._fs = fs
        self._root = root
        self._names = names
        self._directories = directories
        self._ledger = ledger
        self._refresh = refresh
        self._now = now
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # generation, and until when to believe it

    def generation(self, namespace: bytes) -> int:
        """The current generation, from the file.

        A file that cannot be understood is written anew, above all that is there, so that nothing cleared comes back.

        Raises:
            OSError, StorageUnavailable, LedgerBusy: it cannot be read, or not be written anew.
        """
        found = self._look(namespace)
        if found is None:
            with self._ledger.books():
                found = self._look(namespace)
                if found is None:
                    found = self._above_all(namespace)
                    self._write(namespace, GENERATION, str(found).encode() + b"\n")
        return self._note(namespace, found)

    def current(self, namespace: bytes) -> int:
        """The lowest valid generation, at most `refresh` seconds old. Costs I/O only when that time is over.

        What cannot be read counts as unchanged.
        """
        seen = self._seen.get(namespace)  # one look at a dict needs no lock
        if seen is not None and self._now() < seen[1]:
            return seen[0]
        try:
            found = self._look(namespace)
        except OSError:
            found = None
        return self._note(namespace, found or 0)

    def raise_to(self, namespace: bytes, generation: int) -> int:
        """Raise the generation durably; it never goes down. Returns what it is now.

        Raises:
            OSError, StorageUnavailable, LedgerBusy: it could not be written; then nothing has changed.
        """
        with self._ledger.books() as books:  # two raises must not overtake each other
            found = self._look(namespace)
            current = max(generation, self._above_all(namespace) if found is None else found)
            if current != found:
                self._write(namespace, GENERATION, str(current).encode() + b"\n")
                books.cleared[namespace.hex()] = current
        return self._note(namespace, current)

    def forget(self) -> None:
        """The folder is a new one: what was read is believed no longer than it must be for what was cleared here."""
        with self._lock:
            self._seen = OrderedDict((namespace, (number, 0.0)) for namespace, (number, _) in self._seen.items())

    def _note(self, namespace: bytes, found: int) -> int:
        with self._lock:
            number = max(found, self._seen.get(namespace, (0, 0.0))[0])
            self._seen[namespace] = (number, self._now() + self._refresh)
            self._seen.move_to_end(namespace)
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        return number

    def _look(self, namespace: bytes) -> int | None:
        """The number in the file, 0 where there is no file, None where it cannot be understood."""
        content = self._read(f"{self._names.namespace_path(namespace)}/{GENERATION}", 64)
        if content is None:
            return 0
        found = _NUMBER.fullmatch(content)
        return None if found is None else int(found[1])

    def _above_all(self, namespace: bytes) -> int:
        path = self._names.namespace_path(namespace)
        numbers = [int(e.name) for e in self._fs.scandir(path) if _NUMBER.fullmatch(os.fsencode(e.name))]
        return max(max(numbers, default=0), self._seen.get(namespace, (0, 0.0))[0]) + 1

    def write_manifest(self, namespace: bytes, document: bytes) -> None:
        """Store the document.

        Raises:
            OSError, StorageUnavailable: it could not be written.
        """
        self._write(namespace, MANIFEST, document)

    def read_manifests(self) -> dict[bytes, bytes]:
        """All documents that can be read."""
        found: dict[bytes, bytes] = {}
        for prefix in self._directories_in(self._root.path, 2):
            for namespace in self._directories_in(prefix, 32):
                with contextlib.suppress(OSError):
                    document = self._read(f"{namespace}/{MANIFEST}", MAX_MANIFEST)
                    if document is not None:
                        found[bytes.fromhex(os.path.basename(namespace))] = document
        return found

    def _write(self, namespace: bytes, name: str, content: bytes) -> None:
        path = self._names.namespace_path(namespace)
        self._directories.make_namespace(path)
        replace_file(self._fs, f"{path}/{name}", content, temp=self._root.temp_path(path))

    def _read(self, path: str, limit: int) -> bytes | None:
        try:
            fd = self._fs.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            content = bytearray(limit)
            return bytes(content[: self._fs.preadv(fd, [content], 0)])
        finally:
            self._fs.close(fd)

    def _directories_in(self, path: str, digits: int) -> list[str]:
        with contextlib.suppress(OSError):
            return [
                entry.path
                for entry in self._fs.scandir(path)
                if len(entry.name) == digits and _HEX.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
        return []
