"""Where traces are read from: files, and the standard input."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import BinaryIO, Final

from hicache.errors import TraceError

STANDARD_INPUT: Final = Path("-")
"""Named as a trace, it means what is piped in."""

# The first bytes of files that hold a trace in a form that is not read here.
_WRAPPINGS: Final = (
    (b"\x1f\x8b", "compressed with gzip", "unpack it: gzip -dc FILE | hicache replay -"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it: zstd -dc FILE | hicache replay -"),
    (b"\xfd7zXZ\x00", "compressed with xz", "unpack it: xz -dc FILE | hicache replay -"),
    (b"BZh", "compressed with bzip2", "unpack it: bzip2 -dc FILE | hicache replay -"),
    (b"PK\x03\x04", "a zip archive", "unpack it, and name what was in it"),
    (b"\xef\xbb\xbf", "text with a byte order mark", "save it as UTF-8 without one"),
    (b"\xff\xfe", "UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "save it as UTF-8"),
)


class StandardInput:
    """What is piped in, kept in a temporary file without a name, as its format is looked at before it is read.

    It is opened like a path. One reader at a time.
    """

    def __init__(self, stream: BinaryIO) -> None:
        """Take in all of it.

        Raises:
            TraceError: there is no room to keep it.
        """
        try:
            with tempfile.TemporaryFile() as kept:
                shutil.copyfileobj(stream, kept, 1 << 20)
                kept.flush()
                self._fd = os.dup(kept.fileno())
        except OSError as error:
            raise TraceError(
                f"{self}: {error.strerror or error} in {tempfile.gettempdir()}, where it is kept; "
                "save the trace to a file and name that"
            ) from None
        weakref.finalize(self, os.close, self._fd)

    def __str__(self) -> str:
        return "standard input"

    def open(self, _mode: str = "rb", buffering: int = -1) -> BinaryIO:
        """From its beginning; for reading bytes only."""
        file = os.fdopen(os.dup(self._fd), "rb", buffering)
        file.seek(0)
        return file

    def stat(self) -> os.stat_result:
        """Of the file in which it is kept."""
        return os.fstat(self._fd)

    def read_bytes(self) -> bytes:
        """All of it."""
        with self.open() as file:
            return file.read()


Source = Path | StandardInput
"""What a trace is read from."""


def source_of(path: Path) -> Source:
    """The path itself, if it is a regular file; what is piped in for `-`.

    Raises:
        TraceError: something else, such as a pipe or a device.
        OSError: it cannot be looked at.
    """
    if path == STANDARD_INPUT:
        if sys.stdin is None:
            raise TraceError("standard input: it is closed; pipe a trace in, or name a file")
        return StandardInput(sys.stdin.buffer)
    if path.exists() and not path.is_file() and str(path) != os.devnull:
        # Looking at the head of a pipe would take it away from the reader, and a device may have no end.
        raise TraceError(
            f"{path}: this is no regular file; save the trace to a file and name that, or pipe it in and name -"
        )
    return path


def check_plain(source: Source, head: bytes) -> None:
    """See that a file is text as traces are.

    Raises:
        TraceError: it is compressed, or in another encoding.
    """
    for sign, what, advice in _WRAPPINGS:
        if head.startswith(sign):
            raise TraceError(f"{source}: this is {what}; {advice}")
