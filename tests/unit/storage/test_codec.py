from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from hicache.core.keys import ObjectKey, Shard
from hicache.errors import InvalidInput
from hicache.storage.codec import (
    MAGIC,
    MAX_HEADER,
    RAW,
    Header,
    HeaderError,
    Verdict,
    VerdictKind,
    decode_header,
    encode_header,
    header_length,
    padded,
    verify,
)

OK, CORRUPT, FOREIGN, NEWER = VerdictKind.OK, VerdictKind.CORRUPT, VerdictKind.FOREIGN, VerdictKind.NEWER
SHARD = Shard("hg1-0123456789abcdef", (0, 32), 1)
KEY = ObjectKey(b"n" * 16, 3, b"h" * 16, SHARD)
PARENT = b"p" * 16
TOKENS = struct.pack("<4I", 1, 2, 3, 2**32 - 1)
EXTRAS = bytes(range(16))
PAYLOAD = bytes(range(256)) * 16


def encode(key: ObjectKey = KEY, payload: Any = PAYLOAD, **changes: Any) -> bytes:
    fields: dict[str, Any] = {"parent_hash": PARENT, "depth": 4, "tokens": TOKENS, "extras": EXTRAS}
    return encode_header(key, payload=payload, **(fields | changes))


def sealed(header: bytes, **words: int) -> bytes:
    """The header with other numbers at given offsets (`u32_16=5`), and a checksum that holds."""
    data = bytearray(header)
    for place, value in words.items():
        size, at = place.split("_")
        data[int(at) : int(at) + int(size[1:]) // 8] = value.to_bytes(int(size[1:]) // 8, "little")
    data[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:-8])))
    return bytes(data)


def judged(header: bytes, payload: Any = PAYLOAD, key: ObjectKey = KEY) -> tuple[VerdictKind, str]:
    verdict = verify(key, header, payload)
    assert verdict.ok == (verdict.kind is OK)
    return verdict.kind, verdict.reason


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        (KEY, {}),
        (ObjectKey(b"\0" * 16, 0, b"\xff" * 32, Shard(SHARD.geometry, (60, 61), None)), {"parent_hash": b"p" * 32}),
        (KEY, {"parent_hash": None, "depth": 0}),
        (KEY, {"tokens": b""}),
        (KEY, {"extras": b""}),
        (KEY, {"depth": 2**32 - 1}),
        (ObjectKey(b"n" * 16, 2**64 - 1, b"h" * 16, SHARD), {}),
        (KEY, {"codec_id": 7, "decoded_length": 10**9}),
    ],
)
def test_headers_give_back_what_was_put_in(key: ObjectKey, changes: dict[str, Any]) -> None:
    fields = {"parent_hash": PARENT, "depth": 4, "tokens": TOKENS, "extras": EXTRAS, "codec_id": RAW} | changes
    header = encode(key, **changes)
    assert decode_header(header) == Header(
        key=key,
        parent_hash=fields["parent_hash"],
        depth=fields["depth"],
        tokens=fields["tokens"],
        extras=fields["extras"],
        codec_id=fields["codec_id"],
        decoded_length=fields.get("decoded_length", len(PAYLOAD)),
        payload_length=len(PAYLOAD),
        payload_checksum=xxhash.xxh3_64_intdigest(PAYLOAD),
        length=len(header),
    )


def test_no_extras_and_extras_of_zeros_are_the_same() -> None:
    assert encode(extras=bytes(16)) == encode(extras=b"")
    assert decode_header(encode(extras=bytes(16))).extras == b""


@pytest.mark.case("PLUG-1")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_payloads_of_every_dtype_are_bytes(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(7).integers(0, 256, 4096, np.uint8)
    tensor = torch.from_numpy(bits).view(getattr(torch, dtype))
    assert tensor.numel() * tensor.itemsize == 4096
    view = memoryview(tensor.view(torch.uint8).numpy())
    header = encode(payload=view)
    assert decode_header(header).payload_length == 4096
    assert header == encode(payload=bits.tobytes())
    assert judged(header, view) == (OK, "")


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_any_bytes_will_do(wrap: Any) -> None:
    header = encode(payload=wrap(PAYLOAD))
    assert judged(wrap(header), wrap(PAYLOAD)) == (OK, "")
    assert decode_header(wrap(header)).key == KEY
    assert header_length(wrap(header)[:64]) == len(header)
    shaped = memoryview(np.frombuffer(PAYLOAD, np.uint16).reshape(8, -1))
    assert judged(header, shaped) == (OK, "")


def test_empty_payloads_and_padding() -> None:
    header = encode(payload=b"")
    assert judged(header, b"") == (OK, "")
    assert judged(header + bytes(4096 - len(header)), b"") == (OK, "")
    assert judged(header, b"x") == (CORRUPT, "payload_length")
    assert [padded(n) for n in (0, 1, 4095, 4096, 4097)] == [0, 4096, 4096, 4096, 8192]


@pytest.mark.case("FILE-4")
def test_one_flipped_bit_anywhere_is_never_a_hit() -> None:
    header = encode()
    for at in range(len(header)):
        for bit in range(8):
            changed = bytearray(header)
            changed[at] ^= 1 << bit
            kind, reason = judged(bytes(changed))
            assert kind is (FOREIGN if at < len(MAGIC) else CORRUPT), (at, bit, kind, reason)
    for at in range(0, len(PAYLOAD), 97):
        changed = bytearray(PAYLOAD)
        changed[at] ^= 1
        assert judged(header, changed) == (CORRUPT, "payload_checksum")


@pytest.mark.case("FILE-4", "FILE-1")
def test_what_was_cut_short_is_corrupt() -> None:
    header = encode()
    assert judged(b"") == (CORRUPT, "empty")
    assert judged(bytes(5)) == judged(bytes(4096)) == (CORRUPT, "zeroed")
    for length in range(1, len(header)):
        assert judged(header[:length]) == (CORRUPT, "truncated")
    assert judged(header, PAYLOAD[:-1]) == (CORRUPT, "payload_length")
    assert judged(header, PAYLOAD + b"\0") == (CORRUPT, "payload_length")
    assert judged(header, bytes(len(PAYLOAD))) == (CORRUPT, "payload_checksum")


@pytest.mark.case("FILE-4", "KEY-5", "PLUG-2")
@pytest.mark.parametrize(
    "other",
    [
        ObjectKey(b"m" * 16, 3, b"h" * 16, SHARD),
        ObjectKey(b"n" * 16, 4, b"h" * 16, SHARD),
        ObjectKey(b"n" * 16, 3, b"g" * 16, SHARD),
        ObjectKey(b"n" * 16, 3, b"h" * 16, Shard("hg1-0123456789abcdee", (0, 32), 1)),
        ObjectKey(b"n" * 16, 3, b"h" * 16, Shard(SHARD.geometry, (0, 31), 1)),
        ObjectKey(b"n" * 16, 3, b"h" * 16, Shard(SHARD.geometry, (1, 32), 1)),
        ObjectKey(b"n" * 16, 3, b"h" * 16, Shard(SHARD.geometry, (0, 32), 0)),
        ObjectKey(b"n" * 16, 3, b"h" * 16, Shard(SHARD.geometry, (0, 32), None)),
    ],
)
def test_another_identity_is_foreign_whatever_its_bytes(other: ObjectKey) -> None:
    header = encode(other)
    assert judged(header) == (FOREIGN, "identity")
    assert judged(header, b"damaged too") == (FOREIGN, "identity")
    assert verify(KEY, header, PAYLOAD).header == decode_header(header)
    assert judged(header, key=other) == (OK, "")


@pytest.mark.case("SEC-1")
@pytest.mark.parametrize("kind", ["pickle", "text", "almost"])
def test_other_programs_objects_are_foreign_and_never_run(kind: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    bomb = b"\x80\x04\x95" + f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    data = {"pickle": bomb, "text": b"hello", "almost": MAGIC[:-1] + b"X" + bytes(200)}[kind]
    assert judged(data, data) == (FOREIGN, "magic")
    assert not marker.exists()


def test_newer_versions_are_told_from_damage() -> None:
    newer = sealed(encode(), u16_8=2)
    assert judged(newer) == (NEWER, "version")
    assert judged(newer[:64]) == (NEWER, "version")  # not enough to doubt it: left alone
    assert judged(newer[:-1] + bytes([newer[-1] ^ 1])) == (CORRUPT, "header_checksum")
    assert judged(sealed(encode(), u16_8=0)) == (CORRUPT, "version")
    assert judged(sealed(encode(), u16_10=8)) == (NEWER, "flags")
    assert judged(sealed(encode(), u8_57=1)) == (NEWER, "flags")
    assert judged(encode(codec_id=1)) == (NEWER, "codec")
    with pytest.raises(HeaderError) as caught:
        header_length(newer)
    assert caught.value.kind is NEWER


@pytest.mark.parametrize(
    "words",
    [
        {"u32_12": 0},
        {"u32_12": 64},
        {"u32_12": MAX_HEADER + 1},
        {"u32_12": 2**32 - 1},
    ],
)
def test_absurd_header_lengths_cost_nothing(words: dict[str, int]) -> None:
    assert judged(sealed(encode(), **words)) == (CORRUPT, "header_length")


@pytest.mark.parametrize(
    "words",
    [
        {"u32_20": 0},  # a parent at depth 0
        {"u8_56": 0},
        {"u8_56": 17},
        {"u8_56": 255},
        {"u32_60": 0},
        {"u32_60": 2**32 - 1},
        {"u64_24": 1},  # a raw payload of another decoded length
        {"u32_104": 0},
        {"u32_104": 2**32 - 1},
        {"u32_108": 70_000},
        {"u8_80": 0xFF},
        {"u8_80": 0x41},
        {"u16_10": 0},
        {"u16_10": 7 ^ 1},
    ],
)
def test_nonsense_under_a_good_checksum_is_corrupt(words: dict[str, int]) -> None:
    assert judged(sealed(encode(), **words)) == (CORRUPT, "fields")


def test_header_length_raises_what_verify_says() -> None:
    for data, kind in ((b"", CORRUPT), (b"other", FOREIGN), (MAGIC, CORRUPT), (encode()[:63], CORRUPT)):
        with pytest.raises(HeaderError) as caught:
            header_length(data)
        assert caught.value.kind is kind
        assert verify(KEY, data, b"") == Verdict(kind, caught.value.reason)
        with pytest.raises(HeaderError):
            decode_header(data)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parent_hash": None}, "parent hash"),
        ({"depth": 0}, "parent hash"),
        ({"depth": -1}, "depth"),
        ({"depth": 2**32}, "depth"),
        ({"parent_hash": b"p" * 32}, "length"),
        ({"tokens": b"abc"}, "tokens"),
        ({"extras": b"abc"}, "extras"),
        ({"codec_id": -1}, "codec"),
        ({"decoded_length": 1}, "raw payload"),
        ({"tokens": bytes(MAX_HEADER)}, "fewer tokens"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        encode(**changes)


def test_the_largest_page_fits_into_a_header() -> None:
    header = encode(tokens=bytes(4 * 32_768))
    assert len(header) <= MAX_HEADER
    assert judged(header) == (OK, "")


def test_random_bytes_are_foreign() -> None:
    for _ in range(100):
        data = b"x" + os.urandom(200)
        assert judged(data) == (FOREIGN, "magic")
