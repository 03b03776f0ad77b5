"""The small files of a namespace: its generation and its manifest."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from typing import Final

from hicache.storage.base import MAX_MANIFEST

from .directories import Directories
from .filesystem import FileSystem
from .names import Names
from .root import Root, replace_file

__all__ = ["Labels"]

GENERATION: Final = "GENERATION"
MANIFEST: Final = "MANIFEST"

_NUMBER = re.compile(rb"(0|[1-9][0-9]{0,19})\n?")
_HEX = re.compile(r"[0-9a-f]+")


class Labels:
    """Reads and writes them. Thread-safe.

    Args:
        fs, root, names, directories: the backend's parts.
    """

    def __init__(self, fs: FileSystem, root: Root, names: Names, directories: Directories) -> None:
        self._fs = fs
        self._root = root
        self._names = names
        self._directories = directories
        self._lock = threading.RLock()
        self._floors: dict[bytes, int] = {}  # of namespaces that this process cleared

    def generation(self, namespace: bytes) -> int:
        """The current generation, from the file.

        A file that cannot be understood is written anew, above all that is there, so that nothing cleared comes back.

        Raises:
            OSError, StorageUnavailable: it cannot be read, or not be written anew.
        """
        path = self._names.namespace_path(namespace)
        content = self._read(f"{path}/{GENERATION}", 64)
        if content is None:
            return 0
        found = _NUMBER.fullmatch(content)
        if found is not None:
            return int(found[1])
        with self._lock:
            numbers = [int(e.name) for e in self._fs.scandir(path) if _NUMBER.fullmatch(os.fsencode(e.name))]
            above = max(max(numbers, default=0), self.floor(namespace)) + 1
            self._write(namespace, GENERATION, str(above).encode() + b"\n")
            return above

    def floor(self, namespace: bytes) -> int:
        """The lowest valid generation as far as this process has set it; costs no I/O."""
        return self._floors.get(namespace, 0)

    def raise_to(self, namespace: bytes, generation: int) -> int:
        """Raise the generation durably; it never goes down. Returns what it is now.

        Raises:
            OSError, StorageUnavailable: it could not be written; then nothing has changed.
        """
        with self._lock:  # rare, and two raises must not overtake each other
            current = self.generation(namespace)
            if generation > current:
                self._write(namespace, GENERATION, str(generation).encode() + b"\n")
                current = generation
            self._floors[namespace] = current
            return current

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
