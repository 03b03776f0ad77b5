"""Where traces are read from: files, and the standard input, compressed or not."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol, cast

from hicache.analytics.packing import PACKINGS, Packing, Unpacking, packing_of
from hicache.errors import TraceError
from hicache.runtime.accesslog.format import SIGNATURE, begins_access_log

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

STANDARD_INPUT: Final = Path("-")
"""Named as a trace, it means what is piped in."""

KEPT: Final = 4 * 2**20
"""Bytes of the standard input that are kept, so that its format can be looked at before it is read."""

# The first bytes of files that hold a trace in a form that is not read here.
_WRAPPINGS: Final = (
    (b"PK\x03\x04", "a zip archive", "unpack it, and name what was in it"),
    (b"\xef\xbb\xbf", "text with a byte order mark", "save it as UTF-8 without one"),
    (b"\xff\xfe", "UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "save it as UTF-8"),
)


class Source(Protocol):
    """What a trace is read from. A path is one."""

    def open(self, mode: str = "rb", buffering: int = -1) -> BinaryIO:
        """From its beginning; for reading bytes only."""
        ...

    def stat(self) -> os.stat_result:
        """Of the file; its size is 0 where it is not known."""
        ...


class StandardInput:
    """What is piped in. It can be opened again until more than `KEPT` bytes were read. One reader at a time."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._kept = bytearray()
        self._gone = False

    def __str__(self) -> str:
        return "standard input"

    def open(self, _mode: str = "rb", buffering: int = -1) -> BinaryIO:
        """From its beginning; for reading bytes only.

        Raises:
            TraceError: it was read already.
        """
        if self._gone:
            raise TraceError("standard input: it can be read once only; save it to a file and name that")
        size = io.DEFAULT_BUFFER_SIZE if buffering < 1 else buffering
        return io.BufferedReader(_Piped(self), size)

    def stat(self) -> os.stat_result:
        """Of what is piped in; of nothing where that is no file."""
        try:
            return os.fstat(self._stream.fileno())
        except OSError:
            return os.stat(os.devnull)

    def read(self, at: int, size: int) -> bytes:
        """Up to `size` bytes from a place on, for the one who reads."""
        if at < len(self._kept):
            return bytes(self._kept[at : at + size])
        read = getattr(self._stream, "read1", self._stream.read)
        data: bytes = read(size)
        if not self._gone:
            if at + len(data) <= KEPT:
                self._kept += data
            else:
                self._gone = True
        return data


class _Piped(io.RawIOBase):
    def __init__(self, source: StandardInput) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._source.read(self._at, len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


class Packed:
    """A compressed file, unpacked while it is read. One reader at a time.

    Attributes:
        position: compressed bytes read so far, by the last reader.
    """

    def __init__(self, source: Source, packing: Packing) -> None:
        self._source = source
        self._packing = packing
        self.position = 0

    def __str__(self) -> str:
        return str(self._source)

    def open(self, _mode: str = "rb", buffering: int = -1) -> BinaryIO:
        """What was compressed, from its beginning.

        Raises:
            TraceError: nothing here unpacks it. Reading raises it too, where the file is damaged.
        """
        size = io.DEFAULT_BUFFER_SIZE if buffering < 1 else buffering
        return io.BufferedReader(Unpacking(self._source.open("rb"), self._packing, str(self), self._reached), size)

    def stat(self) -> os.stat_result:
        """Of the compressed file."""
        return self._source.stat()

    def _reached(self, position: int) -> None:
        self.position = position


def source_of(path: Path) -> Source:
    """The path itself, if it is a regular file; what is piped in for `-`; either unpacked, if it is compressed.

    Raises:
        TraceError: something else, such as a pipe or a device.
        OSError: it cannot be looked at.
    """
    source = _plain_source(path)
    with source.open("rb") as file:
        head = file.read(max(len(SIGNATURE), *(len(sign) for sign, _ in PACKINGS)))
    packing = None if begins_access_log(head) else packing_of(head)  # our own logs are read block by block
    return source if packing is None else Packed(source, packing)


def _plain_source(path: Path) -> Source:
    if path == STANDARD_INPUT:
        if sys.stdin is None:
            raise TraceError("standard input: it is closed; pipe a trace in, or name a file")
        return StandardInput(sys.stdin.buffer)
    if path.exists() and not path.is_file() and str(path) != os.devnull:
        # Looking at the head of a pipe would take it away from the reader, and a device may have no end.
        raise TraceError(
            f"{path}: this is no regular file; save the trace to a file and name that, or pipe it in and name -"
        )
    return cast("Source", path)


def check_plain(source: Source, head: bytes) -> None:
    """See that a file is in no wrapping that is not read here.

    Raises:
        TraceError: it is an archive, in another encoding, or compressed twice.
    """
    for sign, what, advice in _WRAPPINGS:
        if head.startswith(sign):
            raise TraceError(f"{source}: this is {what}; {advice}")
    if isinstance(source, Packed) and packing_of(head) is not None:
        raise TraceError(f"{source}: what is compressed in it is compressed again; unpack it once")
