from __future__ import annotations

import re
from enum import StrEnum

import pytest

from hicache.core.keys import ObjectKey, Shard
from hicache.errors import GeometryError, InvalidInput

GEOMETRY = "hg1-0123456789abcdef"


def key(**changes: object) -> ObjectKey:
    fields: dict[str, object] = {
        "namespace": bytes(range(16)),
        "generation": 0,
        "page_hash": bytes(range(16)),
        "shard": Shard(GEOMETRY, (0, 32), 0),
    }
    return ObjectKey(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.case("KEY-7")
@pytest.mark.parametrize(
    ("made", "name"),
    [
        (key(), "000102030405060708090a0b0c0d0e0f/0/000102030405060708090a0b0c0d0e0f_hg1-0123456789abcdef_L0-32_H0"),
        (
            key(generation=2**64 - 1, page_hash=b"\xff" * 32, shard=Shard(GEOMETRY, (16, 17), None)),
            f"000102030405060708090a0b0c0d0e0f/18446744073709551615/{'ff' * 32}_hg1-0123456789abcdef_L16-17",
        ),
        (
            key(namespace=b"\0" * 16, generation=10, shard=Shard(GEOMETRY, (65534, 65535), 65534)),
            f"{'00' * 16}/10/000102030405060708090a0b0c0d0e0f_hg1-0123456789abcdef_L65534-65535_H65534",
        ),
    ],
)
def test_names_are_explicit_text_and_parse_back(made: ObjectKey, name: str) -> None:
    assert made.name == name
    assert ObjectKey.parse(name) == made
    assert "." not in name
    assert re.fullmatch(r"[0-9a-z/_LH-]+", name)
    assert len(name) <= 159


def test_keys_are_values() -> None:
    assert key() == key()
    assert len({key(), key(), key(generation=1), key(page_hash=b"\0" * 32)}) == 3
    with pytest.raises(AttributeError):
        key().generation = 1  # type: ignore[misc]


GOOD = key().name


@pytest.mark.case("SEC-2")
@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "..",
        "../../etc",
        "/etc/x",
        "a\0b",
        "CON",
        "x" * 10_240,
        "\ud800",
        GOOD + "\n",
        " " + GOOD,
        GOOD.upper(),
        GOOD.replace("/0/", "/00/"),
        GOOD.replace("/0/", "/-1/"),
        GOOD.replace("/0/", "/+0/"),
        GOOD.replace("/0/", "/18446744073709551616/"),
        GOOD.replace("/0/", "/٣/"),  # a digit, but not an ASCII one
        GOOD.replace("/0/", "//"),
        GOOD.replace("L0-32", "L00-32"),
        GOOD.replace("L0-32", "L0-032"),
        GOOD.replace("L0-32", "L32-32"),
        GOOD.replace("L0-32", "L33-32"),
        GOOD.replace("L0-32", "L0-99999"),
        GOOD.replace("_H0", "_H"),
        GOOD.replace("_H0", "_H00"),
        GOOD.replace("_H0", "_H65535"),
        GOOD.replace("_H0", "_H0_H0"),
        GOOD.replace("hg1-", "hg2-"),
        GOOD[1:],
        GOOD.replace("/", "\\"),
        b"bytes",
        None,
        7,
    ],
)
def test_every_other_text_is_refused(text: object) -> None:
    with pytest.raises(InvalidInput):
        ObjectKey.parse(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": b"short"},
        {"namespace": "0" * 16},
        {"namespace": bytearray(16)},
        {"generation": -1},
        {"generation": 2**64},
        {"generation": True},
        {"generation": 1.0},
        {"page_hash": b""},
        {"page_hash": b"x" * 20},
        {"page_hash": "x" * 16},
        {"shard": None},
        {"shard": (GEOMETRY, (0, 1), 0)},
    ],
)
def test_keys_refuse_other_types_and_ranges(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="object key"):
        key(**changes)


class Kind(StrEnum):
    LOOKS_RIGHT = "hg1-0123456789abcdef"


@pytest.mark.parametrize(
    ("geometry", "layers", "head_group"),
    [
        ("", (0, 1), 0),
        ("hg1-0123456789ABCDEF", (0, 1), 0),
        ("hg1-0123456789abcdef\n", (0, 1), 0),
        (Kind.LOOKS_RIGHT, (0, 1), 0),
        (GEOMETRY, (1, 1), 0),
        (GEOMETRY, (2, 1), 0),
        (GEOMETRY, (-1, 1), 0),
        (GEOMETRY, (0, 65536), 0),
        (GEOMETRY, [0, 1], 0),
        (GEOMETRY, (0, 1, 2), 0),
        (GEOMETRY, (False, True), 0),
        (GEOMETRY, (0, 1), -1),
        (GEOMETRY, (0, 1), 65535),
        (GEOMETRY, (0, 1), True),
        (GEOMETRY, (0, 1), "0"),
    ],
)
def test_shards_refuse_what_is_no_rectangle(geometry: str, layers: tuple[int, int], head_group: int) -> None:
    with pytest.raises(GeometryError, match="shard"):
        Shard(geometry, layers, head_group)
