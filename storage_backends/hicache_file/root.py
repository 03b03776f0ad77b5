"""The root folder: whose it is, who writes in it, and how full it was left.

HICACHE-ROOT             JSON marker with the format version and the fan-out; only a folder that has it is used
HICACHE-LEDGER           the byte account that all processes share
HICACHE-JANITOR          locked by the process that sweeps; HICACHE-JANITOR-ALWAYS by one that was told to
HICACHE-IO               JSON, what was measured of the file system
writers/{token}.lock     locked by its process for as long as that lives; its temporary files carry the token
{00..ff}/{namespace}/    objects, and the files GENERATION and MANIFEST
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import secrets
import time
from typing import Final

from hicache.errors import ConfigError

from .filesystem import FileSystem
from .locks import LockFile
from .names import TEMP_SUFFIX, temp_writer

__all__ = ["MARKER", "Root", "replace_file"]

MARKER: Final = "HICACHE-ROOT"
WRITERS: Final = "writers"
FORMAT: Final = 1

_TOKEN_LOCK = re.compile(r"[0-9a-f]{16}\.lock")
_TYPICAL_OBJECT: Final = 64 * 1024
_PER_LEAF: Final = 128
_MOMENT: Final = 0.001


def replace_file(fs: FileSystem, path: str, content: bytes, *, temp: str) -> None:
    """Give a small file new content, durably and atomically.

    Raises:
        OSError: it could not be written; the old content is still there.
    """
    fd = fs.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    try:
        try:
            fs.pwrite(fd, content, 0)
            fs.fsync(fd)
        finally:
            fs.close(fd)
        fs.rename(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fs.unlink(temp)
        raise
    directory = fs.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fs.fsync(directory)
    finally:
        fs.close(directory)


class Root:
    """An opened root. Thread-safe.

    Args:
        fs: the file system.
        path: the folder; made if absent.
        capacity: byte limit, which sets the fan-out of a new root.

    Raises:
        ConfigError: it cannot be used; the text says why and what to do.

    Attributes:
        path: resolved.
        fan_out: directories per level.
        token: 16 hex digits that name this writer.
        created: whether it was made by this call.
        alone: whether no other process uses it, by agreement.
    """

    def __init__(self, fs: FileSystem, path: str, *, capacity: int | None) -> None:
        self._fs = fs
        self.token: Final = secrets.token_hex(8)
        self.path: Final = os.path.realpath(path)
        self.created = False
        self.alone = False
        self._lock: LockFile | None = None
        self._temps = itertools.count()
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            self._device = fs.lstat(self.path).st_dev
            self.fan_out: Final = self._open_marker(capacity)
            if self._lock is None:
                self._announce()
        except ConfigError:
            self.leave()
            raise
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"file storage: {path!r} is not a folder: name a folder") from None
        except OSError as error:
            self.leave()
            raise ConfigError(
                f"file storage: folder {path!r} cannot be used ({error.strerror}): name a writable folder with space"
            ) from error

    def temp_path(self, directory: str) -> str:
        """A name for a temporary file of this writer, never given twice."""
        return f"{directory}/{self.token}-{next(self._temps):x}{TEMP_SUFFIX}"

    def alive(self) -> bool:
        """Whether the root is there and ours."""
        try:
            self._fs.lstat(f"{self.path}/{MARKER}")
        except OSError:
            return False
        return True

    def revive(self) -> bool:
        """Make a root again in an empty folder on the same device; an empty mount point on another is left alone."""
        try:
            if self._fs.lstat(self.path).st_dev != self._device or self._others():
                return False
            self._announce()
            self._write_marker(self.fan_out)
        except OSError:
            return False
        return True

    def leave(self) -> None:
        """End: this writer is gone. Idempotent."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._fs.unlink(self._lock_path(self.token))
            self._lock.close()
            self._lock = None

    def is_living(self, token: str) -> bool:
        """Whether a writer may still be at work. Where locks do not work, everyone may, unless we are alone."""
        if token == self.token or self.alone:
            return token == self.token
        try:
            fd = self._fs.open(self._lock_path(token), os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            self._fs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            self._fs.close(fd)
        return False

    def is_orphan(self, name: str) -> bool:
        """Whether a name is that of a temporary file whose writer is gone."""
        token = temp_writer(name)
        return token is not None and not self.is_living(token)

    def dead_writers(self) -> list[str]:
        """Tokens whose processes ended without leaving."""
        with contextlib.suppress(OSError):
            names = [entry.name for entry in self._fs.scandir(f"{self.path}/{WRITERS}")]
            tokens = [name.removesuffix(".lock") for name in names if _TOKEN_LOCK.fullmatch(name)]
            return [token for token in tokens if not self.is_living(token)]
        return []

    def bury(self, token: str) -> None:
        """A dead writer's temporary files are gone: forget it."""
        if not self.is_living(token):
            with contextlib.suppress(OSError):
                self._fs.unlink(self._lock_path(token))

    def _open_marker(self, capacity: int | None) -> int:
        try:
            content = self._read(f"{self.path}/{MARKER}")
        except FileNotFoundError:
            others = self._others()
            if others:
                raise ConfigError(
                    f"file storage: folder {self.path!r} belongs to another program (it has {others[0]!r} and no "
                    f"{MARKER}): name an empty or absent folder"
                ) from None
            self._announce()  # first, so that nobody takes the marker's temporary file for a dead writer's
            self.created = self._write_marker(_fan_out(capacity))
            content = self._read(f"{self.path}/{MARKER}")
        return self._parse_marker(content)

    def _parse_marker(self, content: bytes) -> int:
        where = f"file storage: {self.path}/{MARKER}"
        try:
            document = json.loads(content)
            version, fan_out = document["format"], document.get("fan_out")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ConfigError(f"{where} is damaged: restore it, or remove the whole folder") from None
        if type(version) is int and version > FORMAT:
            raise ConfigError(
                f"{where} says format {version}, newer than {FORMAT}: upgrade hicache, or use a new folder"
            )
        if version != FORMAT or type(fan_out) is not int or not 1 <= fan_out <= 256:
            raise ConfigError(f"{where} is damaged: restore it, or remove the whole folder")
        return fan_out

    def _write_marker(self, fan_out: int) -> bool:
        """Make the marker; False if another process was faster."""
        content = json.dumps({"format": FORMAT, "program": "hicache", "fan_out": fan_out}).encode() + b"\n"
        ours, path = self.temp_path(self.path), f"{self.path}/{MARKER}"
        replace_file(self._fs, ours, content, temp=self.temp_path(self.path))
        try:
            self._fs.rename_new(ours, path)
        except FileExistsError:
            self._fs.unlink(ours)
            return False
        return True

    def _others(self) -> list[str]:
        """Names in the folder that are neither ours nor of the file system itself."""
        names = [entry.name for entry in self._fs.scandir(self.path)]
        ours = {"lost+found", MARKER, *self._beginnings()}
        return sorted(name for name in names if name not in ours and temp_writer(name) is None)

    def _beginnings(self) -> list[str]:
        """The writers' folder, if nothing else is in it: another process is making this root at the same moment."""
        try:
            locks = self._fs.scandir(f"{self.path}/{WRITERS}")
        except OSError:
            return []
        return [WRITERS] if all(_TOKEN_LOCK.fullmatch(entry.name) for entry in locks) else []

    def _announce(self) -> None:
        with contextlib.suppress(FileExistsError):
            self._fs.mkdir(f"{self.path}/{WRITERS}")
        if self._lock is not None:
            self._lock.close()
        self._lock = LockFile(self._fs, self._lock_path(self.token))
        with contextlib.suppress(OSError):  # no locks here: then nobody's temporary files are swept
            while not self._lock.try_lock():
                time.sleep(_MOMENT)  # somebody is looking whether its owner is still there

    def _lock_path(self, token: str) -> str:
        return f"{self.path}/{WRITERS}/{token}.lock"

    def _read(self, path: str) -> bytes:
        fd = self._fs.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            content = bytearray(64 * 1024)
            return bytes(content[: self._fs.preadv(fd, [content], 0)])
        finally:
            self._fs.close(fd)


def _fan_out(capacity: int | None) -> int:
    """Per level, so that a full store of typical objects has about 128 in a leaf: more directories only cost room."""
    if capacity is None:
        return 256
    leaves = capacity / _TYPICAL_OBJECT / _PER_LEAF
    return max(4, min(256, math.ceil(math.sqrt(leaves))))
