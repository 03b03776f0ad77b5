"""The byte account that all processes on one root share: one small file, changed under a short lock.

Every byte is charged before it is written and until its file is gone: `used` is what objects take plus what writers
have been given to write. It may be too high (a writer died with what it had been given), never too low. A writer is
given bytes in portions and accounts for them by itself in between; what it publishes lets others bound what it has
done since. There is no memory map and no assumption beyond a lock that processes exclude each other with, and that a
file written and unlocked by one is what the next one reads.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final
from zlib import crc32

from .filesystem import FileSystem
from .locks import LockFile

__all__ = ["LEDGER", "Account", "Books", "Ledger", "LedgerBusy"]

LEDGER: Final = "HICACHE-LEDGER"

_FORMAT: Final = 1
_ROOM: Final = 16 * 1024  # written in full at first, so that later changes need no space on the device
_LONGEST: Final = 4 * 2**20
_HEAD: Final = 18  # two numbers of 8 hex digits, a space and a newline
_PATIENCE: Final = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.01


class LedgerBusy(Exception):  # noqa: N818  a state
    """Somebody kept the ledger for too long: stopped, or its file system hangs."""


@dataclass(slots=True)
class Account:
    """One writer, as it last published itself.

    Attributes:
        held: bytes that it may still write or is writing.
        settled, removed: bytes that it has put in place, and taken away, since it joined.
        portion: most bytes that it settles, and most that it removes, between two publications.
    """

    held: int = 0
    settled: int = 0
    removed: int = 0
    portion: int = 0


@dataclass(slots=True)
class Books:
    """What the file says.

    Attributes:
        used: bytes of all objects and of all that writers hold; None = nobody knows until it is counted.
        doubt: a writer died, so `used` may be too high until it is counted again.
        epoch: rises when a writer comes, leaves or dies.
        writers: by token.
        cleared: namespaces (hex) whose older generations are to be removed, with the lowest one that stays.
    """

    used: int | None = None
    doubt: bool = False
    epoch: int = field(default_factory=lambda: secrets.randbits(40))
    writers: dict[str, Account] = field(default_factory=dict)
    cleared: dict[str, int] = field(default_factory=dict)


class Ledger:
    """The file. Thread-safe; whoever waits for it does so for two seconds at most.

    Args:
        fs: the operating system's calls.
        path: the file.
        alive: whether the root is there, so that a file that is gone may be made anew.
        locking: whether to lock; False where this process is alone by agreement and there are no locks.
    """

    def __init__(self, fs: FileSystem, path: str, alive: Callable[[], bool], *, locking: bool = True) -> None:
        self._fs = fs
        self._locking = locking
        self._thread = threading.Lock()
        self._file = LockFile(fs, path, alive)
        self._keep = False

    @contextlib.contextmanager
    def books(self) -> Iterator[Books]:
        """The content, to be read and changed; what was changed is written when the block ends without exception.

        Raises:
            LedgerBusy: it could not be had in time.
            OSError: it cannot be read or written.
        """
        if not self._thread.acquire(timeout=_PATIENCE):
            raise LedgerBusy(f"{self._file.path} is busy")
        try:
            self._lock()
            try:
                books = self._read()
                before = asdict(books)
                yield books
                if asdict(books) != before or not self._is_there():
                    self._write(books)
            finally:
                if not self._keep:
                    self._file.release()
        finally:
            self._thread.release()

    def keep(self) -> None:
        """Keep the lock from the next use on until `close`: nobody else gets to the root meanwhile."""
        self._keep = self._locking

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._thread:
            self._file.close()

    def _lock(self) -> None:
        if not self._locking:
            if self._file.fd < 0:
                self._file.open()
            return
        end = time.monotonic() + _PATIENCE
        pause = _FIRST_PAUSE
        while not (self._file.check() or self._file.try_lock()):
            if time.monotonic() >= end:
                raise LedgerBusy(f"{self._file.path} is busy")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _is_there(self) -> bool:
        return self._fs.fstat(self._file.fd).st_size > 0

    def _read(self) -> Books:
        """The content; new books where there is none or it is damaged."""
        try:
            head = self._pread(_HEAD, 0)
            length, checksum = int(head[:8], 16), int(head[9:17], 16)
            content = self._pread(min(length, _LONGEST), _HEAD)
            if crc32(content) == checksum and len(content) == length:
                return _parse(json.loads(content))
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        return Books(doubt=True)

    def _write(self, books: Books) -> None:
        document = {"format": _FORMAT, **asdict(books)}
        content = json.dumps(document, separators=(",", ":")).encode()
        whole = b"%08x %08x\n" % (len(content), crc32(content)) + content
        if not self._is_there():
            whole = whole.ljust(_ROOM)
        self._fs.pwrite(self._file.fd, whole, 0)

    def _pread(self, length: int, offset: int) -> bytes:
        buffer = bytearray(length)
        return bytes(buffer[: self._fs.preadv(self._file.fd, [buffer], offset)])


def _parse(document: Any) -> Books:
    if document["format"] != _FORMAT:
        raise ValueError("another format")
    used = document["used"]
    writers = {str(token): Account(**_numbers(account)) for token, account in document["writers"].items()}
    return Books(
        used=None if used is None else max(0, int(used)),
        doubt=bool(document["doubt"]),
        epoch=int(document["epoch"]),
        writers=writers,
        cleared={str(namespace): int(number) for namespace, number in document["cleared"].items()},
    )


def _numbers(account: dict[str, Any]) -> dict[str, int]:
    return {name: max(0, int(account[name])) for name in ("held", "settled", "removed", "portion")}
