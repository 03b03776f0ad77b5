"""The form of an access log: gzip members, each of which holds JSON lines that can be read without the others.

`zcat access-*.jsonl.gz` shows it. The first line of a member describes it, each other line is a request. A field of
the gzip header, `HC`, has the member's length, so that a reader finds the next one behind a member that is damaged.
hicache/analytics/README.md has every field.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

__all__ = [
    "HASH_BYTES",
    "MAX_LINE",
    "MAX_MEMBER",
    "MAX_TEXT",
    "PREFIX_BYTES",
    "SIGNATURE",
    "SUFFIX",
    "VERSION",
    "Entry",
    "Head",
    "NamespaceRecord",
    "begins_access_log",
    "member_length",
    "pack",
    "unpack",
]

VERSION: Final = 1

SUFFIX: Final = ".jsonl.gz"

HASH_BYTES: Final = 8
"""Of a page hash that are kept: among ten million pages two meet by chance once in 400,000 logs."""

MAX_MEMBER: Final = 16 * 2**20
"""Bytes of a member; writers stay far below."""

MAX_TEXT: Final = 64 * 2**20
"""Bytes of its lines."""

MAX_LINE: Final = 32 * 2**20
"""Bytes of one line: a request of 2^21 pages."""

SIGNATURE: Final = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x08\0HC\x04\0"
"""How each member begins: deflate, one extra field of four bytes, no time."""

_LENGTH: Final = struct.Struct("<I")
_TAIL: Final = struct.Struct("<II")  # crc32 and length of the lines, as gzip has them

PREFIX_BYTES: Final = len(SIGNATURE) + _LENGTH.size
"""Bytes in front of a member's compressed part."""

_LEVEL: Final = 1
"""Hashes do not shrink, and the rest does at any level."""

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Tokens = Annotated[int, Meta(ge=0, le=2**24)]
_Seconds = Annotated[float, Meta(ge=0, lt=1e12)]


class NamespaceRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whose pages: only pages of one namespace and generation can be the same.

    Attributes:
        namespace: digest of the derived namespace, in hex.
        generation: of its content.
        page_size: tokens a page.
        model: as it was opened with.
        tenant: by name, as a digest, or not told; see the settings.
    """

    namespace: str
    page_size: Annotated[int, Meta(ge=1, le=2**24)]
    generation: _Count = 0
    model: str = ""
    tenant: str | None = None


class Head(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first line of a member.

    Attributes:
        version: of the form.
        boot: names one life of the writer.
        namespaces: those of the member's requests.
        sample: share of the requests that is written.
        sample_by: what decides which: "prefix" or "request".
        sample_tokens: the prefix's length where prefixes decide; 0: one page.
        key: names the key that hashes are hidden with; empty: they are not.
        requests, written, left_out, dropped: of this boot, up to here: all that ended, those that are in the log,
            those that are not in the sample, and those that were lost.
    """

    version: int = msgspec.field(name="hicache_access_log")
    boot: str
    namespaces: tuple[NamespaceRecord, ...] = ()
    sample: Annotated[float, Meta(gt=0, le=1)] = 1.0
    sample_by: str = "prefix"
    sample_tokens: _Count = 0
    key: str = ""
    requests: _Count = 0
    written: _Count = 0
    left_out: _Count = 0
    dropped: _Count = 0


class Entry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Its pages are the first `same` ones of the member's request `like` (from 0), and `pages` behind.

    Attributes:
        time: when it began, in seconds since 1970.
        seconds: until it ended.
        load: seconds until its load ended; None: it has not loaded.
        namespace: index into the head's.
        tokens: of its prompt.
        output: tokens that were added to it.
        asked: leading pages that it might have taken from the cache.
        device, host, storage: pages that it got, by the tier they came from.
        missed: the others, by reason.
        kept: leading pages that the cache had of it in the end.
        aborted: whether it ended without success.
        session: of the service, or None.
        like, same, pages: see above; `pages` are 8 bytes each.
    """

    time: _Seconds
    seconds: _Seconds = 0.0
    load: _Seconds | None = None
    namespace: _Count = 0
    tokens: _Tokens = 0
    output: _Tokens = 0
    asked: _Tokens = 0
    device: _Tokens = 0
    host: _Tokens = 0
    storage: _Tokens = 0
    missed: dict[str, _Tokens] = {}
    kept: _Tokens = 0
    aborted: bool = False
    session: _Count | None = None
    like: _Count = 0
    same: _Tokens = 0
    pages: bytes = b""


_encoder = msgspec.json.Encoder()


def pack(head: Head, entries: Sequence[Entry]) -> bytes:
    """One member."""
    text = _encoder.encode_lines([head, *entries])
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = deflate.compress(text) + deflate.flush()
    length = PREFIX_BYTES + len(body) + _TAIL.size
    return b"".join((SIGNATURE, _LENGTH.pack(length), body, _TAIL.pack(zlib.crc32(text), len(text))))


def begins_access_log(head: bytes) -> bool:
    """Whether a file that begins so is an access log; of one of a few bytes, whether it could become one."""
    return bool(head) and SIGNATURE.startswith(head[: len(SIGNATURE)])


def member_length(prefix: bytes) -> int:
    """Bytes of the member that begins so.

    Raises:
        ValueError: no member does, or one that is larger than any.
    """
    if len(prefix) < PREFIX_BYTES or not prefix.startswith(SIGNATURE):
        raise ValueError("no block of an access log begins here")
    (length,) = _LENGTH.unpack_from(prefix, len(SIGNATURE))
    if not PREFIX_BYTES + _TAIL.size <= length <= MAX_MEMBER:
        raise ValueError(f"a block says to have {length} bytes, and none has more than {MAX_MEMBER}")
    return int(length)


def unpack(member: bytes) -> bytes:
    """The lines of a whole member. Takes `MAX_TEXT` bytes at most, whatever it holds.

    Raises:
        ValueError: it is damaged.
    """
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        text = inflate.decompress(member[PREFIX_BYTES : -_TAIL.size], MAX_TEXT)
    except zlib.error:
        raise ValueError("a block is damaged: it does not unpack") from None
    check, length = _TAIL.unpack(member[-_TAIL.size :])
    if not inflate.eof or length != len(text) or zlib.crc32(text) != check:
        raise ValueError("a block is damaged: its checksum is of other content")
    return text
