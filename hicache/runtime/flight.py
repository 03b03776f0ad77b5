"""The flight recorder of a cache: where its segments lie, and what becomes of them when something breaks."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import re
import secrets
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache.core.recordings import trimmed
from hicache.errors import ConfigError

_log = logging.getLogger("hicache.runtime")

SUFFIX: Final = ".hcr"
LEAST_BYTES: Final = 4096
_OURS = re.compile(r"((?:flight|failure)-[0-9]+-[0-9a-f]{8})(?:-[0-9]+)?\.hcr")


@dataclass(frozen=True, slots=True)
class FlightRecorder:
    """How a cache records what its core is asked, so that any failure can be repeated by `hicache replay`.

    Two segments are kept, so a recording reaches back over at least `segment_bytes` of inputs: a few hundred bytes a
    request and transfer, page hashes included, tokens never. Recording costs some microseconds an input. Where a
    segment is full, all that the core knows is written down once, under the cache's lock: about 2 ms for 1,000 pages,
    so a large cache wants large segments.

    Attributes:
        folder: where the segments lie as files (`flight-PID-ID-NUMBER.hcr`) that survive the death of the process; it
            must be on a local file system. None keeps them in memory.
        segment_bytes: bytes of inputs in one segment.
        keep: recordings of processes that are gone that are left in the folder; older ones are removed at opening.
    """

    folder: str | os.PathLike[str] | None = None
    segment_bytes: int = 8 << 20
    keep: int = 8

    def __post_init__(self) -> None:
        folder: object = self.folder
        if folder is not None and not (isinstance(folder, (str, os.PathLike)) and os.fspath(folder)):
            raise ConfigError(f"flight_recorder.folder={folder!r:.60} is not a folder")
        for name, least in (("segment_bytes", LEAST_BYTES), ("keep", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= 2**31:
                raise ConfigError(f"flight_recorder.{name}={value!r:.60} is not a whole number of {least} to 2^31")


def flight_recorder(given: object) -> FlightRecorder | None:
    """The setting behind what `open` takes: True records in memory, a path into files there, None and False nothing.

    Raises:
        ConfigError: anything else.
    """
    if given is None or given is False:
        return None
    if given is True:
        return FlightRecorder()
    if isinstance(given, FlightRecorder):
        return given
    if isinstance(given, (str, os.PathLike)) and str(given):
        return FlightRecorder(folder=Path(given))
    raise ConfigError(f"flight_recorder={given!r:.60} is not None, True, a folder or a FlightRecorder")


class Flight:
    """One cache's recording. `begin` is called under the cache's lock, the others by any thread.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, settings: FlightRecorder) -> None:
        self._folder = None if settings.folder is None else Path(settings.folder)
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._kept: list[tuple[Path | None, bytearray | mmap.mmap]] = []
        self._number = 0
        self._failed = self._closed = False
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                remove_old(self._folder, keep=settings.keep)
            except OSError as error:
                raise ConfigError(f"flight_recorder: {self._folder} cannot be used: {error.strerror}") from error

    def begin(self, size: int) -> memoryview:
        """A zeroed buffer for the next segment. The one before the last goes.

        Raises:
            ConfigError: the first file cannot be made. Later ones fall back to memory, for a recorder fails nobody.
        """
        path = None
        if self._folder is not None and not self._closed:
            path = self._folder / f"flight-{self._name}-{self._number}{SUFFIX}"
        buffer: bytearray | mmap.mmap
        try:
            buffer = bytearray(size) if path is None else _mapped(path, size)
        except OSError as error:
            if not self._number:
                raise ConfigError(f"flight_recorder: {path} cannot be made: {error.strerror}") from error
            _log.warning("the flight recorder goes on in memory, as %s cannot be made: %s", path, error.strerror)
            path, buffer = None, bytearray(size)
        self._number += 1
        gone, self._kept = self._kept[:-1], [*self._kept[-1:], (path, buffer)]
        for old, _ in gone:
            _unlink(old)
        return memoryview(buffer)

    def dump(self, path: Path) -> None:
        """Write what is kept into one file, which is replaced.

        Raises:
            ConfigError: it cannot be written.
        """
        data = b"".join(trimmed(memoryview(buffer)) for _, buffer in self._kept)
        try:
            path.write_bytes(data)
        except OSError as error:
            raise ConfigError(f"the recording cannot be written to {path}: {error.strerror}") from error

    def failed(self, error: BaseException) -> None:
        """Something broke that must not: the recording up to there is put into a file, once. Never raises."""
        if self._failed:
            return
        self._failed = True  # what follows a broken invariant says nothing new
        folder = Path(tempfile.gettempdir()) if self._folder is None else self._folder
        path = folder / f"failure-{self._name}{SUFFIX}"
        try:
            self.dump(path)
        except ConfigError as trouble:
            _log.error("%s: %s; %s", type(error).__name__, error, trouble)
            return
        command = f"hicache replay {shlex.quote(str(path))}"
        _log.error("%s: %s; what led to it is in %s, repeat it with: %s", type(error).__name__, error, path, command)

    def close(self) -> None:
        """The cache was closed in order: its segments go, unless something broke. Idempotent."""
        self._closed = True
        kept, self._kept = self._kept, []
        for path, _ in kept:
            if not self._failed:
                _unlink(path)


def remove_old(folder: Path, *, keep: int) -> None:
    """Leave the newest `keep` recordings of processes that are gone. Files of others are not touched."""
    recordings: dict[str, list[Path]] = {}
    for path in folder.iterdir():
        if ours := _OURS.fullmatch(path.name):
            recordings.setdefault(ours[1], []).append(path)
    dead = [paths for paths in recordings.values() if not any(_in_use(path) for path in paths)]
    dead.sort(key=_newest)
    for paths in dead[: max(0, len(dead) - keep)]:
        for path in paths:
            _unlink(path)


def _mapped(path: Path, size: int) -> mmap.mmap:
    """A new file in memory, locked for as long as it is mapped."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: others will think that it is in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # All of its room is taken now: a write into a mapped hole of a full file system would kill the process.
        os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    except BaseException:
        _unlink(path)
        raise
    finally:
        os.close(file)


def _in_use(path: Path) -> bool:
    """Whether a living process has the file mapped."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(file)


def _newest(paths: list[Path]) -> float:
    times = [0.0]
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _unlink(path: Path | None) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()
