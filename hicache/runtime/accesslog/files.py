"""The files of an access log. Whatever becomes of the disk, nothing here raises: what cannot be written is told."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hicache.errors import ConfigError
from hicache.runtime.accesslog.format import SUFFIX

__all__ = ["LogFiles", "is_log"]

_log = logging.getLogger("hicache.runtime")

_OURS: Final = re.compile(r"access-\d{8}T\d{6}Z-[0-9a-f]{8}-\d{6,}" + re.escape(SUFFIX))


def is_log(name: str) -> bool:
    """Whether a file of this name is part of an access log."""
    return _OURS.fullmatch(name) is not None


class LogFiles:
    """One writer's files in a folder. Used by one thread, but for the counters.

    Each process begins files of its own, and never touches one that it has not begun, but to remove the oldest ones. So
    nothing is renamed, and nothing is written behind what a killed process left.

    Args:
        folder: it is made where it is missing.
        file_bytes, total_bytes: bounds; see the settings.
        wall: seconds since 1970.

    Raises:
        ConfigError: the folder cannot be written.

    Attributes:
        bytes, files: written so far, and begun.
        trouble: why the last block could not be written; empty: it was.
    """

    def __init__(
        self, folder: Path, *, file_bytes: int, total_bytes: int, wall: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._total_bytes = total_bytes
        self._wall = wall
        self._id = secrets.token_hex(4)
        self._fd = -1
        self._path: Path | None = None
        self._size = 0
        self._number = 0
        self.bytes = self.files = 0
        self.trouble = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"access_log.folder {str(folder)!r:.200} cannot be made: {error.strerror}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"access_log.folder {str(folder)!r:.200} cannot be written by this user")

    def append(self, block: bytes) -> bool:
        """Write a block. Returns whether all of it is in a file; else none of it is, or it stands at a file's end."""
        try:
            self._ready(len(block))
            self._write(block)
        except OSError as error:
            trouble = f"{error.strerror or error}"
            if trouble != self.trouble:
                _log.warning("the access log in %s cannot be written, requests are missing: %s", self._folder, trouble)
            self.trouble = trouble
            return False
        self.trouble = ""
        self._size += len(block)
        self.bytes += len(block)
        return True

    def close(self) -> None:
        """End the file. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd, self._path = -1, None

    def _ready(self, more: int) -> None:
        """Have a file that is there, and has room."""
        if self._fd >= 0 and (self._size + more > self._file_bytes or not self._there()):
            self.close()
        if self._fd < 0:
            self._begin()

    def _there(self) -> bool:
        """Whether the file that is written still has its name: it may have been moved or removed."""
        assert self._path is not None
        try:
            named, own = self._path.stat(), os.fstat(self._fd)
        except OSError:
            return False
        return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._wall()))
        path = self._folder / f"access-{moment}-{self._id}-{self._number + 1:06}{SUFFIX}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._path, self._size = path, 0
        self._number += 1
        self.files += 1
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove the oldest logs, of any process, so that all of them stay within the bound while this file grows."""
        found = []
        for path in self._folder.iterdir():
            if is_log(path.name) and path != self._path:
                with contextlib.suppress(OSError):  # another process has removed it
                    found.append((path.name, path.stat().st_size, path))
        left = self._total_bytes - self._file_bytes
        for _, size, path in sorted(found, reverse=True):
            left -= size
            if left < 0:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _write(self, block: bytes) -> None:
        view = memoryview(block)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            # A part of a block would hide those behind it; what cannot be cut off ends the file.
            try:
                os.ftruncate(self._fd, self._size)
            except OSError:
                self.close()
            raise
