"""The form of flight recordings: segments of a header and inputs, which prove what they are and that they are whole.

A recording is a row of segments. A segment is bytes: entries of a u32 length and a u32 checksum (xxh32 of the value;
both little endian) and a MessagePack value, ended by a length of 0 or the end. The length is written after the rest, so
an entry cut short by the death of the process does not count. The first entry is a `Header`; each further one an array
`[mark, operation, arguments...]`, where `mark` is a fingerprint of the state before it, by which a replay notices that
it went another way.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, Protocol

import msgspec
import xxhash

from hicache.core.config import CoreConfig
from hicache.errors import InvalidInput

VERSION: Final = 3
MAGIC: Final = "hicache flight recording"
HEAD: Final = struct.Struct("<II")
"""What is in front of a value: its length and its checksum."""

_LENGTH = struct.Struct("<I")
_NO_RECORDING = "this is no flight recording of hicache, or it is damaged"


class Header(msgspec.Struct, kw_only=True):
    """The first entry of a segment.

    Attributes:
        magic: what this is.
        version: of the format.
        number: of the segment, from 0.
        inputs: inputs recorded before this segment.
        segment_bytes: bytes behind the header that the segment's buffer has; what is trimmed has less.
        config: of the core.
        state: the checkpoint (`checkpoint.encode`), or nothing if the core was new.
        trees: namespaces of the trees, by number.
        next_tree, next_lease: the next numbers of trees and leases.
    """

    magic: str
    version: int
    number: int
    inputs: int
    segment_bytes: int
    config: CoreConfig
    state: bytes
    trees: dict[int, bytes]
    next_tree: int
    next_lease: int


class Segments(Protocol):
    """Where segments are kept."""

    def begin(self, size: int) -> memoryview:
        """A zeroed, writable buffer for the next segment; the one before the last may be thrown away."""
        ...


class MemorySegments:
    """The last two segments, in memory."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def begin(self, size: int) -> memoryview:
        """The next segment."""
        self._kept = [*self._kept[-1:], bytearray(size)]
        return memoryview(self._kept[-1])

    def dump(self) -> bytes:
        """What is kept, oldest first. Any thread may call it: what is written is never changed."""
        return b"".join(trimmed(segment) for segment in self._kept)


def put_entry(buffer: memoryview, at: int, value: bytes) -> int:
    """Write an entry into a zeroed buffer. Returns where the next one goes."""
    start = at + HEAD.size
    end = start + len(value)
    buffer[start:end] = value  # metadata, a few hundred bytes: no page content comes here
    buffer[at + 4 : start] = _LENGTH.pack(xxhash.xxh32_intdigest(value))
    buffer[at : at + 4] = _LENGTH.pack(len(value))
    return end


def trimmed(segment: bytes | bytearray | memoryview) -> bytes:
    """A segment without what it has not used, so that another may follow it."""
    at = 0
    while (size := _size_at(segment, at)) and at + HEAD.size + size <= len(segment):
        at += HEAD.size + size
    return bytes(segment[:at]) + bytes(HEAD.size) if at else b""


def is_recording(start: bytes) -> bool:
    """Whether a file that begins with these bytes (256 are enough) is a recording, of any version."""
    return MAGIC.encode() in start[:256] and _size_at(start, 0) > 0


def untorn(data: bytes) -> bytes:
    """A file as it was written: one whole buffer of a segment is trimmed, a dump is itself."""
    header = _header_at(data, 0)
    if header is not None and len(data) == HEAD.size + _size_at(data, 0) + header.segment_bytes:
        return trimmed(data)
    return data


def first_header(data: bytes) -> Header:
    """The header of the first segment.

    Raises:
        InvalidInput: this is no recording, one of another version, or a damaged one.
    """
    header = _header_at(data, 0)
    if header is None:
        raise InvalidInput(_NO_RECORDING)
    return header


def read_segments(data: bytes) -> Iterator[tuple[Header, Iterator[list[Any]]]]:
    """The segments of a recording, each with its inputs, which must be read before the next segment is.

    Raises:
        InvalidInput: this is no recording, one of another version, or a damaged one.
    """
    at = 0
    while (header := _header_at(data, at)) is not None:
        entries = _Entries(data, at + HEAD.size + _size_at(data, at))
        yield header, iter(entries)
        for _ in entries:
            pass
        if any(data[entries.at : entries.at + HEAD.size]):
            break
        at = entries.at + HEAD.size
    if not data or any(data[at:]):
        raise InvalidInput(_NO_RECORDING)


def _size_at(data: bytes | bytearray | memoryview, at: int) -> int:
    return int(_LENGTH.unpack_from(data, at)[0]) if at + HEAD.size <= len(data) else 0


def _value_at(data: bytes, at: int) -> bytes | None:
    """The value of an entry; None if it is not whole."""
    size, checksum = HEAD.unpack_from(data, at)
    value = data[at + HEAD.size : at + HEAD.size + size]
    return value if len(value) == size and xxhash.xxh32_intdigest(value) == checksum else None


def _header_at(data: bytes, at: int) -> Header | None:
    value = _value_at(data, at) if _size_at(data, at) else None
    if value is None:
        return None
    try:
        start = msgspec.msgpack.decode(value)
        if not isinstance(start, dict) or start.get("magic") != MAGIC:
            return None
        if start.get("version") != VERSION:
            raise InvalidInput(
                f"a flight recording of version {start.get('version')!r:.20}; this hicache reads version {VERSION}: "
                "replay it with the hicache that wrote it"
            )
        return msgspec.convert(start, Header)
    except msgspec.MsgspecError:
        return None


class _Entries:
    """The inputs of one segment, and where they end."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def __iter__(self) -> Iterator[list[Any]]:
        while size := _size_at(self._data, self.at):
            value = _value_at(self._data, self.at)
            entry = None if value is None else _decoded(value)
            if not isinstance(entry, list) or len(entry) < 2 or not isinstance(entry[1], str):
                raise InvalidInput("the flight recording is damaged: an input cannot be read")
            self.at += HEAD.size + size
            yield entry


def _decoded(value: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(value)
    except msgspec.MsgspecError:
        return None
