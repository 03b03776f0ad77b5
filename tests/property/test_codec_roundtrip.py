from __future__ import annotations

import struct
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hicache.core.keys import ObjectKey, Shard
from hicache.storage.codec import (
    MAGIC,
    MAX_HEADER,
    HeaderError,
    VerdictKind,
    decode_header,
    encode_header,
    header_length,
    verify,
)

sizes = st.sampled_from([16, 32])


@st.composite
def keys(draw: st.DrawFn, size: int | None = None) -> ObjectKey:
    start, end = sorted(draw(st.lists(st.integers(0, 65_535), min_size=2, max_size=2, unique=True)))
    geometry = f"hg1-{draw(st.integers(0, 2**64 - 1)):016x}"
    head_group = draw(st.none() | st.integers(0, 65_534))
    size = size or draw(sizes)
    return ObjectKey(
        draw(st.binary(min_size=16, max_size=16)),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.binary(min_size=size, max_size=size)),
        Shard(geometry, (start, end), head_group),
    )


@st.composite
def objects(draw: st.DrawFn) -> tuple[ObjectKey, dict[str, Any], bytes]:
    key = draw(keys())
    depth = draw(st.integers(0, 2**32 - 1))
    size = len(key.page_hash)
    fields = {
        "depth": depth,
        "parent_hash": draw(st.binary(min_size=size, max_size=size)) if depth else None,
        "tokens": struct.pack(
            f"<{(n := draw(st.integers(0, 8)))}I", *draw(st.lists(st.integers(0, 2**32 - 1), min_size=n, max_size=n))
        ),
        "extras": draw(st.sampled_from([b"", b"\x01" * 16])),
    }
    return key, fields, draw(st.binary(max_size=300))


@given(keys())
def test_names_parse_back(key: ObjectKey) -> None:
    assert ObjectKey.parse(key.name) == key


@given(keys(), keys())
def test_names_are_injective(one: ObjectKey, two: ObjectKey) -> None:
    assert (one.name == two.name) == (one == two)


@given(objects())
def test_headers_round_trip(made: tuple[ObjectKey, dict[str, Any], bytes]) -> None:
    key, fields, payload = made
    header = encode_header(key, payload=payload, **fields)
    found = decode_header(header + b"behind")
    assert found.key == key
    assert {name: getattr(found, name) for name in fields} == fields
    assert header_length(header[:64]) == len(header) == found.length
    assert verify(key, header, payload).ok


@pytest.mark.case("SEC-1", "FILE-4")
@given(keys(), st.binary(max_size=400), st.binary(max_size=64), st.booleans(), st.booleans())
def test_no_bytes_raise_or_pass(key: ObjectKey, data: bytes, payload: bytes, magic: bool, seal: bool) -> None:
    if magic:
        data = MAGIC + b"\x01\0" + data
    if seal and len(data) >= 24:
        # Bytes behind the fixed start are random, but the length and the checksum hold.
        body = data[:12] + struct.pack("<I", len(data)) + data[16:-8]
        data = body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    verdict = verify(key, data, payload)
    assert verdict.kind is not VerdictKind.OK
    assert verdict.reason
    with pytest.raises(HeaderError) if verdict.header is None else nullcontext():
        decode_header(data)
    with suppress(HeaderError):
        assert header_length(data) <= MAX_HEADER


@pytest.mark.case("FILE-4")
@given(objects(), st.data())
def test_damaged_objects_never_pass(made: tuple[ObjectKey, dict[str, Any], bytes], data: st.DataObject) -> None:
    key, fields, payload = made
    header = encode_header(key, payload=payload, **fields)
    whole = bytearray(header + payload)
    places = data.draw(st.sets(st.integers(0, len(whole) - 1), min_size=1, max_size=4))
    for at in places:
        whole[at] ^= data.draw(st.integers(1, 255))
    verdict = verify(key, bytes(whole[: len(header)]), bytes(whole[len(header) :]))
    assert not verdict.ok
    # A version and a header length that were both damaged may look newer: then the object is left alone.
    assert verdict.kind is not VerdictKind.NEWER or len(places) > 1


@pytest.mark.case("FILE-4")
@given(objects(), keys())
def test_only_the_own_key_accepts(made: tuple[ObjectKey, dict[str, Any], bytes], other: ObjectKey) -> None:
    key, fields, payload = made
    verdict = verify(other, encode_header(key, payload=payload, **fields), payload)
    assert verdict.ok == (other == key)
