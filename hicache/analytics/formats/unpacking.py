"""MessagePack values that lie one after the other in a file, told apart without trusting any of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Final

from hicache.analytics.trace import MAX_LINE
from hicache.errors import TraceError

# By the type byte: bytes behind it, or of the field that tells how many there are.
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bytes and text
_EXTENDED: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}  # the same, and a byte for its type
# nothing, no, yes; floats; unsigned; signed; extensions
_FIXED: Final = dict(
    zip(
        (0xC0, 0xC2, 0xC3, *range(0xCA, 0xD9)),
        (0, 0, 0, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17),
        strict=True,
    )
)
_MANY: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # count field, values an entry


class Payloads:
    """The values of a file. Iterate once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._data = bytearray()

    def __iter__(self) -> Iterator[bytes]:
        """Yield encoded values.

        Raises:
            TraceError: the file breaks off, or is none of such values.
        """
        while first := self._file.read(1):
            self._data = bytearray(first)
            self._skip(first[0])
            yield bytes(self._data)

    def _skip(self, kind: int) -> None:
        left = self._inside(kind)
        while left:
            left += self._inside(self._take(1)[0]) - 1

    def _inside(self, kind: int) -> int:
        """Read what belongs to a value of a kind; how many values are inside it."""
        if kind < 0x80 or kind >= 0xE0:
            return 0
        if kind < 0xA0:
            return (kind & 0x0F) * (2 if kind < 0x90 else 1)
        if kind < 0xC0:
            self._take(kind & 0x1F)
            return 0
        if kind in _FIXED:
            self._take(_FIXED[kind])
            return 0
        if kind in _MANY:
            width, each = _MANY[kind]
            return int.from_bytes(self._take(width), "big") * each
        field = _SIZED.get(kind) or _EXTENDED.get(kind)
        if field is None:
            raise TraceError("this is no MessagePack")
        self._take(int.from_bytes(self._take(field), "big") + (kind in _EXTENDED))
        return 0

    def _take(self, size: int) -> bytes:
        if len(self._data) + size > MAX_LINE:
            raise TraceError(f"a message is longer than {MAX_LINE // 2**20} MiB, so this is no capture of KV events")
        data = self._file.read(size)
        if len(data) < size:
            raise TraceError("the last message breaks off; read what is in front of it with --skip-bad")
        self._data += data
        return data
