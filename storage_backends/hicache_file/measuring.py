"""Whether to write past the page cache: measured once per root, kept beside it."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from hicache.errors import ConfigError

from .files import DIRECT_FROM
from .filesystem import FileSystem
from .root import Root, replace_file

__all__ = ["IoChoice", "IoMode"]

FILE: Final = "HICACHE-IO"
_FORMAT: Final = 1
_SIZES: Final = (256 * 1024, 2 * 2**20)
_PIECES: Final = 4
_ROUNDS: Final = 3
_LIMIT: Final = 0.3  # seconds in all
_ENOUGH: Final = 2**28  # free bytes below which eight megabytes more could be the ones that others lack
_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_ANY: Final = 0


class IoMode(StrEnum):
    """How objects are written. Reading goes through the page cache in any case: it serves what is read again."""

    AUTO = "auto"  # large ones past the page cache where that was measured to be faster
    DIRECT = "direct"  # past the page cache wherever the caller's memory is aligned
    BUFFERED = "buffered"  # through the page cache


class IoChoice:
    """Decides from which size on payloads are written directly. For one thread at a time.

    Args:
        fs: the operating system's calls.
        root: the root.
        mode: what was asked for.
        clock: seconds, fine enough for a millisecond.
    """

    def __init__(
        self, fs: FileSystem, root: Root, mode: IoMode, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._fs = fs
        self._root = root
        self._mode = mode
        self._clock = clock
        self._path = f"{root.path}/{FILE}"
        self.measured = mode is not IoMode.AUTO

    def first(self) -> int | None:
        """What to do before anything is measured here: what was measured before, or a guess.

        Raises:
            ConfigError: direct I/O was asked for, and this file system has none.
        """
        if self._mode is IoMode.BUFFERED:
            return None
        if self._mode is IoMode.DIRECT:
            if not self._has_direct():
                raise ConfigError(
                    f"file storage: {self._root.path!r} is on a file system without direct I/O: "
                    "give io=auto or io=buffered"
                )
            return _ANY
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            document = json.loads(self._read())
            least = document["direct_from"]
            known = document["format"] == _FORMAT and document["device"] == self._device()
            if known and (least is None or (type(least) is int and least >= 0)):
                self.measured = True
                return least
        return DIRECT_FROM if _DIRECT else None

    def measure(self, *, stopped: Callable[[], bool] = lambda: False) -> int | None:
        """Try both ways, for 0.3 s at most, and note what was found.

        Through the page cache a write is done when it has reached the device, as it is sooner or later: otherwise it
        would be memory that is measured. Where the device is nearly full nothing is measured.

        Returns:
            Least bytes of payloads that are written directly; None = none are.

        Raises:
            OSError: it could not be measured.
        """
        self.measured = True
        if self._fs.free(self._root.path) < _ENOUGH:
            return DIRECT_FROM if _DIRECT else None
        end = self._clock() + _LIMIT
        block = memoryview(mmap.mmap(-1, max(_SIZES)))
        least: int | None = None
        for size in reversed(_SIZES):
            if size != _SIZES[-1] and self._clock() > end:
                break
            direct: list[float] = []
            buffered: list[float] = []
            for _ in range(_ROUNDS):
                if stopped():
                    return DIRECT_FROM if _DIRECT else None
                if direct and self._clock() > end:
                    break
                taken = self._time(block[:size], direct=True)
                if taken is None:
                    return self._note(None)
                direct.append(taken)
                buffered.append(self._time(block[:size], direct=False) or 0.0)
            if min(direct) > min(buffered):
                break
            least = size
        return self._note(least)

    def _time(self, block: memoryview, *, direct: bool) -> float | None:
        """Seconds to write a file in a few pieces; None where there is no direct I/O."""
        path = self._root.temp_path(self._root.path)
        start = self._clock()
        try:
            try:
                fd = self._fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (_DIRECT if direct else 0))
            except OSError as error:
                if direct and error.errno == errno.EINVAL:
                    return None
                raise
            try:
                for piece in range(_PIECES):
                    self._fs.pwrite(fd, block, piece * block.nbytes)
                if not direct:
                    self._fs.fsync(fd)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:
                    return None
                raise
            finally:
                self._fs.close(fd)
            return self._clock() - start
        finally:
            with contextlib.suppress(OSError):
                self._fs.unlink(path)

    def _has_direct(self) -> bool:
        if not _DIRECT:
            return False
        path = self._root.temp_path(self._root.path)
        try:
            fd = self._fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise ConfigError(
                    f"file storage: folder {self._root.path!r} cannot be written ({error.strerror}): "
                    "name a writable folder with space"
                ) from error
            return False
        else:
            self._fs.close(fd)
            return True
        finally:
            with contextlib.suppress(OSError):
                self._fs.unlink(path)

    def _note(self, least: int | None) -> int | None:
        document = {"format": _FORMAT, "direct_from": least, "device": self._device()}
        with contextlib.suppress(OSError):
            content = json.dumps(document).encode() + b"\n"
            replace_file(self._fs, self._path, content, temp=self._root.temp_path(self._root.path))
        return least

    def _device(self) -> int:
        return self._fs.lstat(self._root.path).st_dev

    def _read(self) -> bytes:
        fd = self._fs.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            content = bytearray(4096)
            return bytes(content[: self._fs.preadv(fd, [content], 0)])
        finally:
            self._fs.close(fd)
