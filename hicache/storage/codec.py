"""Self-proving objects: the header that says what a payload is, and the check that it is what was asked for.

`proto/formats.md` has the byte table with examples. Two promises hold for every version, so that an older reader can
tell a newer object from a damaged one: bytes 0 to 15 are magic, version, flags and header length, and the last 8
bytes of the header are the xxh3_64 of all bytes before them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

import xxhash

from hicache.core.keys import GEOMETRY_DIGEST_LENGTH, HASH_SIZES, NAMESPACE_SIZE, ObjectKey, Shard
from hicache.errors import InvalidInput

__all__ = [
    "ALIGNMENT",
    "EXTRAS_SIZE",
    "MAGIC",
    "MAX_HEADER",
    "PREFIX_SIZE",
    "RAW",
    "VERSION",
    "BytesLike",
    "Header",
    "HeaderError",
    "Verdict",
    "VerdictKind",
    "decode_header",
    "encode_header",
    "header_length",
    "padded",
    "verify",
]

BytesLike: TypeAlias = bytes | bytearray | memoryview

MAGIC: Final = b"\x89HICACHE"
VERSION: Final = 1
PREFIX_SIZE: Final = 64
RAW: Final = 0
"""Codec id of payloads that are the shard's bytes as they are."""
ALIGNMENT: Final = 4096
"""Files pad header and payload to multiples of this."""
MAX_HEADER: Final = 256 * 1024
"""Longest header in bytes: bounds what a reader copies and hashes before it believes anything."""
EXTRAS_SIZE: Final = 16
"""Bytes of a page's extras digest."""

_PREFIX = struct.Struct("<8sHHIIIQQQQB3sI")
_BODY = struct.Struct(f"<{NAMESPACE_SIZE}s{GEOMETRY_DIGEST_LENGTH}sIII")
_CHECKSUM = struct.Struct("<Q")
_START = struct.Struct("<8sHHI")
_BODY_END = PREFIX_SIZE + _BODY.size
_SHORTEST = _BODY_END + min(HASH_SIZES) + _CHECKSUM.size
_HAS_PARENT, _HAS_HEAD_GROUP, _HAS_EXTRAS = 1, 2, 4
_ALL_FLAGS = _HAS_PARENT | _HAS_HEAD_GROUP | _HAS_EXTRAS
_NO_EXTRAS = bytes(EXTRAS_SIZE)
_U32, _U64 = 2**32 - 1, 2**64 - 1


class VerdictKind(StrEnum):
    """What a reader may do with an object that was found under a name."""

    OK = "ok"  # it is what was asked for: use it
    CORRUPT = "corrupt"  # ours, and damaged: a miss; may be removed, and the next put overwrites it
    FOREIGN = "foreign"  # another identity, or no object of ours: a miss; left alone, only a put replaces it
    NEWER = "newer"  # written by a newer version: a miss; never touched


class HeaderError(InvalidInput):
    """Bytes that are no header this version can read.

    Attributes:
        kind: CORRUPT, FOREIGN or NEWER.
        reason: one word for counters, e.g. "magic", "truncated", "header_checksum".
    """

    def __init__(self, kind: VerdictKind, reason: str) -> None:
        self.kind = kind
        self.reason = reason
        super().__init__(f"not a readable object header: {kind.value} ({reason})")


@dataclass(frozen=True, slots=True)
class Header:
    """What an object says of itself.

    Attributes:
        key: its identity.
        parent_hash: hash of the page before, same length as the page's; None for a first page.
        depth: index of the page in its chain, 0 for a first page.
        tokens: the page's tokens as u32 little endian; empty where the writer did not know them.
        extras: digest of non-text input that overlaps the page, 16 bytes; empty where there is none.
        codec_id: how the payload is encoded; `RAW` = as it is.
        decoded_length: bytes of the shard once decoded.
        payload_length: bytes of the payload as stored.
        payload_checksum: xxh3_64 of the payload as stored.
        length: bytes of the encoded header, without padding.
    """

    key: ObjectKey
    parent_hash: bytes | None
    depth: int
    tokens: bytes
    extras: bytes
    codec_id: int
    decoded_length: int
    payload_length: int
    payload_checksum: int
    length: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of `verify`.

    Attributes:
        kind: what may be done with the object.
        reason: empty when OK, else one word for counters.
        header: what the object says of itself, where that could be read.
    """

    kind: VerdictKind
    reason: str = ""
    header: Header | None = None

    @property
    def ok(self) -> bool:
        """Whether the payload may be used."""
        return self.kind is VerdictKind.OK


def padded(n: int) -> int:
    """`n` rounded up to whole 4 KiB, as files store header and payload."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def encode_header(
    key: ObjectKey,
    *,
    parent_hash: bytes | None,
    depth: int,
    tokens: bytes,
    payload: BytesLike,
    extras: bytes = b"",
    codec_id: int = RAW,
    decoded_length: int | None = None,
) -> bytes:
    """The header of one object, unpadded. Costs one xxh3 pass over the payload, with the GIL released.

    Args:
        key: the object's identity.
        parent_hash: hash of the page before; None exactly for a first page.
        depth: index of the page in its chain.
        tokens: the page's tokens, u32 little endian; empty = unknown.
        payload: the bytes as they will be stored, C-contiguous; not kept.
        extras: the page's 16-byte extras digest; empty or all zero = none.
        codec_id: how the payload is encoded.
        decoded_length: bytes once decoded; by default those of the payload.

    Raises:
        InvalidInput: fields that contradict each other or are out of range.
    """
    payload_length = memoryview(payload).nbytes
    decoded_length = payload_length if decoded_length is None else decoded_length
    extras = b"" if extras == _NO_EXTRAS else extras
    _check_fields(key, parent_hash, depth, tokens, extras, codec_id, decoded_length, payload_length)
    head_group = key.shard.head_group
    flags = (
        (_HAS_PARENT if parent_hash is not None else 0)
        | (_HAS_HEAD_GROUP if head_group is not None else 0)
        | (_HAS_EXTRAS if extras else 0)
    )
    tail = b"".join((key.page_hash, parent_hash or b"", extras, tokens))
    length = _BODY_END + len(tail) + _CHECKSUM.size
    if length > MAX_HEADER:
        raise InvalidInput(f"object header of {length} bytes, above {MAX_HEADER}: use pages of fewer tokens")
    prefix = _PREFIX.pack(
        MAGIC,
        VERSION,
        flags,
        length,
        codec_id,
        depth,
        decoded_length,
        payload_length,
        xxhash.xxh3_64_intdigest(payload),
        key.generation,
        len(key.page_hash),
        b"",
        len(tokens),
    )
    body = _BODY.pack(key.namespace, key.shard.geometry.encode("ascii"), *key.shard.layers, head_group or 0)
    header = prefix + body + tail
    return header + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header))


def _check_fields(
    key: ObjectKey,
    parent_hash: bytes | None,
    depth: int,
    tokens: bytes,
    extras: bytes,
    codec_id: int,
    decoded_length: int,
    payload_length: int,
) -> None:
    if not 0 <= depth <= _U32 or not 0 <= codec_id <= _U32 or not 0 <= decoded_length <= _U64:
        raise InvalidInput(f"object header: depth {depth}, codec {codec_id} or length {decoded_length} out of range")
    if (parent_hash is None) != (depth == 0):
        raise InvalidInput(
            f"object header: a page at depth {depth} must have a parent hash exactly if it is not the first"
        )
    if parent_hash is not None and len(parent_hash) != len(key.page_hash):
        raise InvalidInput("object header: parent hash and page hash differ in length")
    if len(tokens) % 4 != 0:
        raise InvalidInput(f"object header: {len(tokens)} bytes are no whole u32 tokens")
    if len(extras) not in (0, EXTRAS_SIZE):
        raise InvalidInput(f"object header: extras must be {EXTRAS_SIZE} bytes or empty, not {len(extras)}")
    if codec_id == RAW and decoded_length != payload_length:
        raise InvalidInput(f"object header: raw payload of {payload_length} bytes cannot decode to {decoded_length}")


def header_length(prefix: BytesLike) -> int:
    """Length of the whole header, from its first 64 bytes or more.

    The number is bounded but not yet proven: only the header's checksum tells whether it is right.

    Raises:
        HeaderError: with the kind of object that these bytes belong to.
    """
    return _frame(_copy(prefix, PREFIX_SIZE))


def decode_header(data: BytesLike, *, likely: ObjectKey | None = None) -> Header:
    """Read a header; bytes behind it (padding, payload) are ignored.

    Args:
        data: the header.
        likely: the key that the object is probably of. Where it is, the header gets this very key, which spares
            making and checking an equal one: about half of the time that decoding takes.

    Raises:
        HeaderError: it is damaged, of a newer version, or not ours.
    """
    return _decode(_copy(data, MAX_HEADER), likely)


def verify(key: ObjectKey, header: BytesLike, payload: BytesLike) -> Verdict:
    """Whether header and payload, as read under the key's name, are what the key asks for.

    Raises nothing, whatever the bytes are. Costs one xxh3 pass over the payload, and that only when all else is
    right. The caller still compares tokens, extras, parent and depth with its own where it has them.

    Args:
        key: what was asked for.
        header: the bytes that were read, at least the header; padding behind it is ignored.
        payload: the bytes that were read as payload, C-contiguous, without padding. A buffer of another length than
            the header says is CORRUPT ("payload_length"): compare a buffer that a caller brought first.
    """
    try:
        found = decode_header(header, likely=key)
    except HeaderError as error:
        return Verdict(error.kind, error.reason)
    if found.key is not key and found.key != key:
        return Verdict(VerdictKind.FOREIGN, "identity", found)
    if found.codec_id != RAW:
        return Verdict(VerdictKind.NEWER, "codec", found)
    if memoryview(payload).nbytes != found.payload_length:
        return Verdict(VerdictKind.CORRUPT, "payload_length", found)
    if xxhash.xxh3_64_intdigest(payload) != found.payload_checksum:
        return Verdict(VerdictKind.CORRUPT, "payload_checksum", found)
    return Verdict(VerdictKind.OK, "", found)


def _copy(data: BytesLike, limit: int) -> bytes:
    view = memoryview(data)
    # A view of no bytes cannot be cast; any other shape is seen as plain bytes.
    return bytes(view.cast("B")[:limit]) if view.nbytes else b""


def _corrupt(reason: str) -> HeaderError:
    return HeaderError(VerdictKind.CORRUPT, reason)


def _frame(data: bytes) -> int:
    """Judge magic, version and header length; the order makes damage, foreign and newer objects distinguishable."""
    if not data.strip(b"\0"):
        # A crash after the rename leaves a file without its bytes: empty, or full of zeros.
        raise _corrupt("zeroed" if data else "empty")
    if not (data.startswith(MAGIC) or MAGIC.startswith(data)):
        raise HeaderError(VerdictKind.FOREIGN, "magic")
    if len(data) < _START.size:
        raise _corrupt("truncated")
    _, version, _, length = _START.unpack_from(data)
    if version > VERSION:
        raise HeaderError(VerdictKind.NEWER, "version")
    if version < VERSION:
        raise _corrupt("version")
    if len(data) < PREFIX_SIZE:
        raise _corrupt("truncated")
    if not _SHORTEST <= length <= MAX_HEADER:
        raise _corrupt("header_length")
    return int(length)


def _checksum_holds(data: bytes, length: int) -> bool:
    end = length - _CHECKSUM.size
    (stored,) = _CHECKSUM.unpack_from(data, end)
    return bool(stored == xxhash.xxh3_64_intdigest(memoryview(data)[:end]))


def _decode(data: bytes, likely: ObjectKey | None) -> Header:
    try:
        length = _frame(data)
    except HeaderError as error:
        if error.kind is VerdictKind.NEWER:
            _doubt_newer(data)
        raise
    if len(data) < length:
        raise _corrupt("truncated")
    if not _checksum_holds(data, length):
        raise _corrupt("header_checksum")
    try:
        return _fields(data, length, likely)
    except (struct.error, InvalidInput, UnicodeDecodeError) as error:
        if isinstance(error, HeaderError):
            raise
        # The checksum holds, so somebody wrote nonsense on purpose or by a bug.
        raise _corrupt("fields") from error


def _doubt_newer(data: bytes) -> None:
    """One flipped bit can make a version look newer, and a newer object is never touched: let the checksum decide."""
    length = _START.unpack_from(data)[3]
    if _START.size + _CHECKSUM.size <= length <= len(data) and not _checksum_holds(data, length):
        raise _corrupt("header_checksum")


def _fields(data: bytes, length: int, likely: ObjectKey | None) -> Header:
    (
        _,
        _,
        flags,
        _,
        codec_id,
        depth,
        decoded,
        payload_length,
        checksum,
        generation,
        hash_size,
        reserved,
        token_bytes,
    ) = _PREFIX.unpack_from(data)
    if flags & ~_ALL_FLAGS or any(reserved):
        raise HeaderError(VerdictKind.NEWER, "flags")
    namespace, geometry, start, end, head_group = _BODY.unpack_from(data, PREFIX_SIZE)
    sizes = (
        hash_size,
        hash_size if flags & _HAS_PARENT else 0,
        EXTRAS_SIZE if flags & _HAS_EXTRAS else 0,
        token_bytes,
    )
    if _BODY_END + sum(sizes) + _CHECKSUM.size != length:
        raise _corrupt("fields")
    parts = []
    at = _BODY_END
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    page_hash, parent_hash, extras, tokens = parts
    where = (geometry.decode("ascii"), (start, end), head_group if flags & _HAS_HEAD_GROUP else None)
    if likely is not None and _names(likely, namespace, generation, page_hash, where):
        key = likely
    else:
        key = ObjectKey(namespace, generation, page_hash, Shard(*where))
    parent = parent_hash if flags & _HAS_PARENT else None
    _check_fields(key, parent, depth, tokens, extras, codec_id, decoded, payload_length)
    return Header(key, parent, depth, tokens, extras, codec_id, decoded, payload_length, checksum, length)


def _names(
    key: ObjectKey,
    namespace: bytes,
    generation: int,
    page_hash: bytes,
    where: tuple[str, tuple[int, int], int | None],
) -> bool:
    shard = key.shard
    return (
        key.page_hash == page_hash
        and key.namespace == namespace
        and key.generation == generation
        and (shard.geometry, shard.layers, shard.head_group) == where
    )
