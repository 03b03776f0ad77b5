from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from hicache.core.symbols import check_page_size, extras_digest, page_extras, symbols
from hicache.errors import InvalidInput

IDS = [5, 0, 1, 2**32 - 1, 7]
BYTES = b"\x05\0\0\0\0\0\0\0\x01\0\0\0\xff\xff\xff\xff\x07\0\0\0"


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        [np.int64(i) for i in IDS],
        array.array("Q", IDS),
        np.array(IDS, np.int64),
        np.array(IDS, np.uint64),
        np.array(IDS, np.uint32),
        np.array(IDS, ">i8"),
        np.array(IDS, ">u4"),
        np.array([i for i in IDS for _ in (0, 1)], np.uint32)[::2],
        np.array([i for i in IDS for _ in (0, 1)], np.int64)[::2],
    ],
)
def test_all_integer_forms_give_the_same_bytes(tokens: Any) -> None:
    assert symbols(tokens, 1) == BYTES
    assert symbols(tokens, 2) == BYTES[:16]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.int32])
def test_small_integers_are_widened(dtype: Any) -> None:
    assert symbols(np.array([3, 127], dtype), 2) == b"\x03\0\0\0\x7f\0\0\0"


def test_ranges_and_tensors() -> None:
    torch = pytest.importorskip("torch")
    assert symbols(range(2), 2) == b"\0\0\0\0\x01\0\0\0"
    assert symbols(torch.arange(2), 2) == b"\0\0\0\0\x01\0\0\0"
    with pytest.raises(InvalidInput, match="float32"):
        symbols(torch.zeros(2), 2)


@pytest.mark.case("PAGE-2")
@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 0), (63, 0), (64, 1), (65, 1), (130, 2)])
def test_only_whole_pages_become_symbols(tokens: int, pages: int) -> None:
    assert len(symbols(range(tokens), 64)) == pages * 256
    assert len(symbols(np.arange(tokens), 64)) == pages * 256
    assert tokens - pages * 64 == (2 if tokens == 130 else tokens % 64)


def test_no_tokens_of_any_kind_are_no_pages() -> None:
    for nothing in ([], (), np.array([]), np.array([], np.uint32)):
        assert symbols(nothing, 64) == b""  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1, -1], "token -1 at position 1"),
        ([1, 2, 2**32], "token 4294967296 at position 2"),
        ([2**70], "position 0"),
        ([1.0], "token 1.0 at position 0"),
        ([0, True], "token True at position 1"),
        ([np.bool_(False)], "position 0"),
        ([None], "token None at position 0"),
        (["1"], "position 0"),
        ([[1, 2]], "position 0"),
        (np.array([3, -1]), "token -1 at position 1"),
        (np.array([3, -1], np.int8), "token -1 at position 1"),
        (np.array([3, -1], ">i4"), "token -1 at position 1"),
        (np.array([3, 2**32]), "token 4294967296 at position 1"),
        (np.array([2**63], np.uint64), "position 0"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array([[1, 2]]), "2 dimensions"),
        (np.array(3), "tokens are ndarray: give a list"),
        ("12", "str"),
        (b"12", "bytes"),
        (None, "tokens are NoneType: give a list"),
        ({1: 2}, "tokens are dict: give a list"),
    ],
)
def test_what_is_no_token_is_named(tokens: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        symbols(tokens, 1)


def test_a_bad_token_in_the_tail_is_still_an_error() -> None:
    with pytest.raises(InvalidInput, match="position 64"):
        symbols([1] * 64 + [-1], 64)


@pytest.mark.parametrize("page_size", [0, -1, 32_769, 1.0, True, "64", None])
def test_page_sizes_are_checked(page_size: Any) -> None:
    with pytest.raises(InvalidInput, match="page_size"):
        check_page_size(page_size)


def test_extras_stand_behind_each_page() -> None:
    extras = bytes(range(16)) + bytes(16)
    assert symbols([1, 2, 3], 1, extras + b"\xee" * 16) == (
        b"\x01\0\0\0" + bytes(range(16)) + b"\x02\0\0\0" + bytes(16) + b"\x03\0\0\0" + b"\xee" * 16
    )
    assert symbols(np.array([1, 2, 9], ">u4"), 1, extras + bytes(16))[20:24] == b"\x02\0\0\0"
    with pytest.raises(InvalidInput, match="2 pages"):
        symbols([1, 2], 1, b"")


HASH = bytes(range(32))


@pytest.mark.case("KEY-6")
def test_items_mark_the_pages_that_they_overlap() -> None:
    extras = page_extras([(HASH, 32, 32)], 16, 5)
    pages = [extras[i : i + 16] for i in range(0, 80, 16)]
    assert pages[0] == pages[1] == pages[4] == bytes(16)
    assert len(set(pages)) == 3
    assert pages[2] == extras_digest([(HASH, 0, 16)])
    assert pages[3] == extras_digest([(HASH, -16, 16 + 16)])


@pytest.mark.case("KEY-6")
def test_hash_offset_and_length_all_count() -> None:
    base = page_extras([(HASH, 3, 5)], 16, 1)
    others = [
        page_extras([(HASH, 4, 5)], 16, 1),
        page_extras([(HASH, 3, 6)], 16, 1),
        page_extras([(HASH[:31], 3, 5)], 16, 1),
        page_extras([(HASH, 3, 5), (HASH, 9, 1)], 16, 1),
        bytes(16),
    ]
    assert len({base, *others}) == 6


def test_order_of_items_and_what_lies_outside_do_not_count() -> None:
    one, two = (HASH, 3, 5), (b"other", 9, 40)
    assert page_extras([one, two], 16, 2) == page_extras([two, one], 16, 2)
    assert page_extras([(HASH, 40, 4)], 16, 2) == bytes(32)
    # Where an item ends behind the page does not change the page: later tokens never do.
    assert page_extras([(HASH, 3, 50)], 16, 1) == page_extras([(HASH, 3, 500)], 16, 1)
    # A huge claim costs no more than the pages asked for.
    assert len(page_extras([(HASH, 0, 2**60)], 16, 2)) == 32


def test_pages_asked_later_are_the_same_pages() -> None:
    items = [(HASH, 5, 100), (b"other", 60, 3)]
    whole = page_extras(items, 16, 8)
    assert page_extras(items, 16, 3) + page_extras(items, 16, 5, first_page=3) == whole


@pytest.mark.parametrize(
    "item", [(b"", 0, 1), (b"x" * 65, 0, 1), ("text", 0, 1), (HASH, -1, 1), (HASH, 0, 0), (HASH, 0, True)]
)
def test_items_are_checked(item: Any) -> None:
    with pytest.raises(InvalidInput, match="non-text input"):
        page_extras([item], 16, 1)
