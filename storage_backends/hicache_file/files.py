"""One object, one file: the header padded to whole 4 KiB, then the payload padded to whole 4 KiB."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from typing import Final, NamedTuple

import numpy as np

from hicache.storage import codec
from hicache.storage.base import ObjectKey
from hicache.storage.codec import ALIGNMENT, Verdict, VerdictKind, padded

from .filesystem import FileSystem

__all__ = ["DIRECT_FROM", "ObjectFiles", "Seen", "file_size"]

DIRECT_FROM: Final = 256 * 1024
"""Payloads from this size on are written past the page cache, until it is known what suits the file system."""

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a link is refused, and a FIFO cannot hang the open
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_ZEROS: Final = bytes(ALIGNMENT)
_NOT_A_FILE: Final = {errno.EISDIR, errno.ESPIPE, errno.ENXIO, errno.EINVAL, errno.EAGAIN}


class Seen(NamedTuple):
    """What lies under a name, by its header alone.

    Attributes:
        verdict: OK = ours, undamaged as far as the header tells, of this identity.
        size: bytes of the file.
        stat: of the file that was read.
    """

    verdict: Verdict
    size: int
    stat: os.stat_result


def file_size(header: bytes, payload_length: int) -> int:
    """Bytes of an object's file."""
    return padded(len(header)) + padded(payload_length)


class ObjectFiles:
    """Reads and writes object files. Thread-safe.

    Args:
        fs: the file system.
        fsync: wait for the device before an object gets its name.
        direct_from: least bytes of payloads that are written past the page cache; None = none are.

    Attributes:
        direct_from: as above; may be set at any time.
    """

    def __init__(self, fs: FileSystem, *, fsync: bool, direct_from: int | None) -> None:
        self._fs = fs
        self._fsync = fsync
        self.direct_from = direct_from
        self._local = threading.local()

    def choose(self, direct_from: int | None) -> None:
        """Set from which size on payloads are written past the page cache; None = none are."""
        self.direct_from = direct_from

    def open(self, path: str) -> int:
        """Open an object for reading; a link raises `OSError` (ELOOP)."""
        return self._fs.open(path, _READ)

    def read(self, fd: int, key: ObjectKey, buffer: memoryview) -> Verdict:
        """Read the payload into the buffer and verify everything.

        Where the header says another length than the buffer has, the verdict is CORRUPT with a header whose
        `payload_length` differs from the buffer's.

        Raises:
            OSError: the read failed.
        """
        head = bytearray(ALIGNMENT)
        try:
            got = self._fs.preadv(fd, [head, buffer], 0)
            while ALIGNMENT <= got < ALIGNMENT + buffer.nbytes:
                more = self._fs.preadv(fd, [buffer[got - ALIGNMENT :]], got)
                if more == 0:
                    break
                got += more
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                return Verdict(VerdictKind.FOREIGN, "not_a_file")
            raise
        length = _declared_length(head)
        if got >= ALIGNMENT and ALIGNMENT < length <= codec.MAX_HEADER:
            return self._read_behind(fd, key, length, buffer)
        payload = buffer[: max(0, got - ALIGNMENT)]
        return _judge(key, memoryview(head)[: min(got, length or ALIGNMENT)], payload)

    def peek(self, path: str, key: ObjectKey) -> Seen:
        """Look at the header of what lies under a name.

        Raises:
            OSError: it cannot be opened or read.
        """
        fd = self.open(path)
        try:
            info = self._fs.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return Seen(Verdict(VerdictKind.FOREIGN, "not_a_file"), 0, info)
            head = bytearray(ALIGNMENT)
            got = self._fs.preadv(fd, [head], 0)
            if got == ALIGNMENT < (length := _declared_length(head)) <= codec.MAX_HEADER:
                head = bytearray(length)
                got = self._fs.preadv(fd, [head], 0)
        finally:
            self._fs.close(fd)
        return Seen(_judge_header(key, memoryview(head)[:got], info.st_size), info.st_size, info)

    def write(self, path: str, header: bytes, payload: memoryview) -> None:
        """Make a new file with everything in it; on failure nothing is left of it.

        Raises:
            OSError: it cannot be made or written; `FileExistsError` if something has that name.
        """
        least = self.direct_from
        direct = least is not None and payload.nbytes >= least and _is_aligned(payload)
        fd, direct = self._create(path, direct=direct)
        try:
            try:
                views = self._aligned(header, payload) if direct else _plain(header, payload)
                self._write_all(fd, views, direct=direct)
                if self._fsync:
                    self._fs.fsync(fd)
            finally:
                self._fs.close(fd)
        except BaseException:
            self.remove_quietly(path)
            raise

    def sync_directory(self, path: str) -> None:
        """With `fsync`: make the names in a directory durable."""
        if self._fsync:
            fd = self._fs.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self._fs.fsync(fd)
            finally:
                self._fs.close(fd)

    def remove_quietly(self, path: str) -> bool:
        """Remove a name; False if it is still there."""
        try:
            self._fs.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _create(self, path: str, *, direct: bool) -> tuple[int, bool]:
        if direct:
            try:
                return self._fs.open(path, _CREATE | os.O_DIRECT), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # This file system has no direct I/O. Some leave the file behind when they say so.
                self.direct_from = None
                self.remove_quietly(path)
        return self._fs.open(path, _CREATE), False

    def _write_all(self, fd: int, views: list[memoryview], *, direct: bool) -> None:
        offset = 0
        while views:
            try:
                written = self._fs.pwritev(fd, views, offset)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                # Refused only now, or a short write left the offset unaligned: go on through the page cache.
                direct, self.direct_from = False, None
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                continue
            if written <= 0:
                raise OSError(errno.EIO, "nothing was written")
            offset += written
            views = _behind(views, written)

    def _aligned(self, header: bytes, payload: memoryview) -> list[memoryview]:
        """Header and tail in aligned memory of this thread; the aligned part of the payload as it is."""
        whole = payload.nbytes // ALIGNMENT * ALIGNMENT
        head, tail = padded(len(header)), padded(payload.nbytes - whole)
        block = self._block(head + tail)
        block[:head] = header.ljust(head, b"\0")
        if tail:
            block[head : head + tail] = bytes(payload[whole:]).ljust(tail, b"\0")
        parts = [block[:head], payload[:whole], block[head : head + tail]]
        return [part for part in parts if part.nbytes]

    def _block(self, size: int) -> memoryview:
        block: memoryview | None = getattr(self._local, "block", None)
        if block is None or block.nbytes < size:
            block = self._local.block = memoryview(mmap.mmap(-1, size))
        return block

    def _read_behind(self, fd: int, key: ObjectKey, length: int, buffer: memoryview) -> Verdict:
        """Read again, as an object whose header is longer than one 4 KiB."""
        head = bytearray(padded(length))
        got = self._fs.preadv(fd, [head, buffer], 0)
        return _judge(key, memoryview(head)[: min(got, length)], buffer[: max(0, got - len(head))])


def _declared_length(head: bytearray) -> int:
    """Header length as bytes 12 to 15 say it in every version, not yet proven; 0 where the magic is not ours."""
    return int.from_bytes(head[12:16], "little") if head.startswith(codec.MAGIC) else 0


def _judge(key: ObjectKey, header: memoryview, payload: memoryview) -> Verdict:
    verdict = codec.verify(key, header, payload)
    if verdict.reason == "magic" and _ours_but_for_magic(key, header):
        return Verdict(VerdictKind.CORRUPT, "magic")
    return verdict


def _judge_header(key: ObjectKey, header: memoryview, size: int) -> Verdict:
    """As `codec.verify`, without the payload but with the file's size."""
    try:
        found = codec.decode_header(header, likely=key)
    except codec.HeaderError as error:
        if error.reason == "magic" and _ours_but_for_magic(key, header):
            return Verdict(VerdictKind.CORRUPT, "magic")
        return Verdict(error.kind, error.reason)
    if found.key != key:
        return Verdict(VerdictKind.FOREIGN, "identity", found)
    if found.codec_id != codec.RAW:
        return Verdict(VerdictKind.NEWER, "codec", found)
    if size < padded(found.length) + found.payload_length:
        return Verdict(VerdictKind.CORRUPT, "truncated", found)
    return Verdict(VerdictKind.OK, "", found)


def _ours_but_for_magic(key: ObjectKey, header: memoryview) -> bool:
    """A flipped bit in the magic alone must not make an object another program's, which nobody may replace."""
    try:
        return codec.decode_header(codec.MAGIC + bytes(header[len(codec.MAGIC) :])).key == key
    except codec.HeaderError:
        return False


def _is_aligned(payload: memoryview) -> bool:
    return int(np.asarray(payload).ctypes.data) % ALIGNMENT == 0


def _plain(header: bytes, payload: memoryview) -> list[memoryview]:
    padding = memoryview(_ZEROS)
    parts = [memoryview(header), padding[: -len(header) % ALIGNMENT], payload, padding[: -payload.nbytes % ALIGNMENT]]
    return [part for part in parts if part.nbytes]


def _behind(views: list[memoryview], written: int) -> list[memoryview]:
    """What is left to write."""
    while views and written >= views[0].nbytes:
        written -= views[0].nbytes
        views = views[1:]
    return [views[0][written:], *views[1:]] if views else []
