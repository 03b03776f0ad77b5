"""Unpacks compressed traces while they are read, in bounded memory, whatever the file claims."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, TypeAlias

from hicache.errors import TraceError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Packing: TypeAlias = Literal["gzip", "bzip2", "xz", "zstd"]

PACKINGS: Final[tuple[tuple[bytes, Packing], ...]] = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)
"""How compressed files begin."""

_MOST_MEMORY: Final = 2**28
"""Bytes that unpacking may take: `xz -9` needs 64 MiB, and a file may claim 4 GiB."""
_MOST_WINDOW: Final = 2**27
"""The same for zstd, whose `--long` needs that much and whose files may claim terabytes."""
_CHUNK: Final = 2**16


class DamagedFile(TraceError):  # noqa: N818  it is a kind of TraceError that readers tell from a broken entry
    """A file cannot be read on from here: it breaks off, or is no more what it began as."""


def packing_of(head: bytes) -> Packing | None:
    """How a file that begins so is compressed; None where it is not."""
    return next((name for sign, name in PACKINGS if head.startswith(sign)), None)


class Unpacking(io.RawIOBase):
    """What is compressed in a file; closes the file with itself."""

    def __init__(self, file: BinaryIO, packing: Packing, name: str, reached: Callable[[int], None]) -> None:
        """Prepare.

        Args:
            file: the compressed one.
            packing: how.
            name: of it, for messages.
            reached: takes how many of its bytes were read.

        Raises:
            TraceError: nothing here unpacks it.
        """
        self._file = _Counted(file)
        self._name = name
        self._packing = packing
        self._reached = reached
        try:
            self._unpacked = _OPEN[packing](self._file)
        except ModuleNotFoundError:
            file.close()
            raise TraceError(
                f"{name}: this is compressed with zstd, which needs a package: pip install 'hicache[zstd]', or unpack "
                "it: zstd -dc FILE | hicache analyze -"
            ) from None

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Unpack into a buffer; 0 at the end.

        Raises:
            DamagedFile: it breaks off, or is damaged.
        """
        view = memoryview(buffer).cast("B")
        try:
            data: bytes = self._unpacked.read(min(len(view), _CHUNK))
        except EOFError:
            raise DamagedFile(
                f"{self._name}: the compressed file breaks off; get the whole file, or read what is there of it with "
                "--skip-bad"
            ) from None
        except (OSError, zlib.error, lzma.LZMAError, ValueError) as error:
            raise self._damaged(error) from None
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise self._damaged(error) from None
        self._reached(self._file.position)
        view[: len(data)] = data
        return len(data)

    def _damaged(self, error: Exception) -> DamagedFile:
        return DamagedFile(
            f"{self._name}: {self._packing} cannot unpack it behind byte {self._file.position}: {error}; get the file "
            "again, or read what is before that with --skip-bad"
        )

    def close(self) -> None:
        """Close the file too."""
        super().close()
        self._file.close()


class _Counted:
    """A file that knows how much was read of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(_CHUNK if size < 0 else size)
        self.position += len(data)
        return data

    def close(self) -> None:
        self._file.close()

    def seekable(self) -> bool:
        return False


class _Lzma:
    """`lzma.LZMAFile` with a bound on memory."""

    def __init__(self, file: _Counted) -> None:
        self._file = file
        self._begin()

    def _begin(self) -> None:
        self._decompressor = lzma.LZMADecompressor(memlimit=_MOST_MEMORY)
        self._fresh = True

    def read(self, size: int) -> bytes:
        while True:
            rest = b""
            if self._decompressor.eof:
                rest = self._decompressor.unused_data.lstrip(b"\x00")  # between streams there may be padding
                self._begin()
            if not rest and self._decompressor.needs_input:
                rest = self._file.read(_CHUNK)
                if not rest:
                    if self._fresh:
                        return b""
                    raise EOFError
            self._fresh = False
            data = self._decompressor.decompress(rest, size)
            if data:
                return data


def _zstd(file: _Counted) -> Any:
    # A module of Python from 3.14 on; its package before.
    try:
        return importlib.import_module("compression.zstd").ZstdFile(
            file, options={importlib.import_module("compression.zstd").DecompressionParameter.window_log_max: 27}
        )
    except ModuleNotFoundError:
        package = importlib.import_module("zstandard")
    return _Zstandard(package.ZstdDecompressor(max_window_size=_MOST_WINDOW), file)


class _Zstandard:
    """The package's decompressor; its own reader takes a file that breaks off for one that ends."""

    def __init__(self, decompressor: Any, file: _Counted) -> None:
        self._decompressor = decompressor
        self._file = file
        self._begin()
        self._data = memoryview(b"")

    def _begin(self) -> None:
        self._object = self._decompressor.decompressobj()
        self._fresh = True

    def read(self, size: int) -> bytes:
        while not self._data:
            rest = b""
            if self._object.eof:
                rest = self._object.unused_data
                self._begin()
            rest = rest or self._file.read(_INPUT)
            if not rest:
                if self._fresh:
                    return b""
                raise EOFError
            self._fresh = False
            self._data = memoryview(self._object.decompress(rest))
        data, self._data = self._data[:size], self._data[size:]
        return bytes(data)


_INPUT: Final = 2**10
"""Compressed bytes that are unpacked at once by zstd, which cannot be told to stop: each may stand for 32 KiB."""

_OPEN: Final[dict[Packing, Callable[[Any], Any]]] = {
    "gzip": lambda file: gzip.GzipFile(fileobj=file),
    "bzip2": bz2.BZ2File,
    "xz": _Lzma,
    "zstd": _zstd,
}
