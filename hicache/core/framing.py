"""Frames: the one way in which fields become bytes for a digest.

A glued string lets two different records look the same ("a" + "bc", "ab" + "c"); a frame says whether a field is
there, how long it is, and what it is, so that different records are different bytes.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import Final

__all__ = ["ABSENT", "digest16", "frame", "frame_number", "frame_text"]

ABSENT: Final = b"\x00"
_LENGTH = struct.Struct("<BQ")
_NUMBER = struct.Struct("<BQQ")


def frame(value: bytes | None) -> bytes:
    """`00` for None, else `01`, the length as u64 little endian, and the bytes."""
    return ABSENT if value is None else _LENGTH.pack(1, len(value)) + value


def frame_text(value: str | None) -> bytes:
    """The frame of the text's UTF-8 bytes."""
    return ABSENT if value is None else frame(value.encode("utf-8"))


def frame_number(value: int | None) -> bytes:
    """The frame of the number as u64 little endian."""
    return ABSENT if value is None else _NUMBER.pack(1, 8, value)


def digest16(data: bytes) -> bytes:
    """First 16 bytes of the sha256."""
    return sha256(data).digest()[:16]
