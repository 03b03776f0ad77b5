from __future__ import annotations

import struct
from hashlib import sha256
from typing import Any

import pytest
import xxhash

from hicache.core.hashing import HASH_ALGORITHMS, HashAlgorithm, PageHasher, hash_seed
from hicache.core.symbols import page_extras, symbols
from hicache.errors import InvalidInput

PARAMETERS = pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)


def split(hashes: bytes, size: int) -> list[bytes]:
    return [hashes[i : i + size] for i in range(0, len(hashes), size)]


def reference(algorithm: HashAlgorithm, tokens: list[int], page_size: int, before: bytes = b"") -> list[bytes]:
    """The chain, word by word."""
    hashes = []
    for first in range(0, len(tokens) - page_size + 1, page_size):
        data = before + struct.pack(f"<{page_size}I", *tokens[first : first + page_size])
        before = sha256(data).digest() if algorithm == "sha256" else xxhash.xxh3_128(data).digest()
        hashes.append(before)
    return hashes


@PARAMETERS
def test_chain_equals_a_naive_one(algorithm: HashAlgorithm) -> None:
    tokens = [(i * 977) % 50_000 for i in range(333)]
    hasher = PageHasher(algorithm, page_size=16, seed=b"seed")
    assert split(hasher.extend(None, symbols(tokens, 16), 20), hasher.hash_size) == reference(
        algorithm, tokens, 16, b"seed"
    )


@PARAMETERS
@pytest.mark.case("KEY-2")
def test_a_page_depends_on_all_before_it(algorithm: HashAlgorithm) -> None:
    hasher = PageHasher(algorithm, page_size=4)
    x = [9, 9, 9, 9]
    for a, b in (([1, 2, 3, 4], [1, 2, 3, 5]), ([1, 2, 3, 4], [0, 2, 3, 4])):
        first = split(hasher.extend(None, symbols(a + x, 4), 2), hasher.hash_size)
        second = split(hasher.extend(None, symbols(b + x, 4), 2), hasher.hash_size)
        assert first[1] != second[1]
    alone = hasher.extend(None, symbols(x, 4), 1)
    assert alone not in (first[1], second[1])


@PARAMETERS
def test_extending_equals_hashing_at_once(algorithm: HashAlgorithm) -> None:
    hasher = PageHasher(algorithm, page_size=4, seed=b"s")
    data = symbols(range(40), 4)
    whole = hasher.extend(None, data, 10)
    head = hasher.extend(None, data[: 16 * 3], 3)
    assert head + hasher.extend(head[-hasher.hash_size :], data[16 * 3 :], 7) == whole
    assert hasher.extend(None, b"", 0) == b""
    assert hasher.extend(head[-hasher.hash_size :], b"", 0) == b""


@PARAMETERS
@pytest.mark.case("KEY-6")
def test_images_part_the_chain_where_they_begin(algorithm: HashAlgorithm) -> None:
    hasher = PageHasher(algorithm, page_size=16)
    tokens = [7] * 64

    def pages(*items: tuple[bytes, int, int]) -> list[bytes]:
        data = symbols(tokens, 16, page_extras(items, 16, 4))
        return split(hasher.extend(None, data, 4), hasher.hash_size)

    none = pages()
    variants = [none, pages((b"h1" * 16, 32, 32)), pages((b"h2" * 16, 32, 32)), pages((b"h1" * 16, 33, 31))]
    for page in (0, 1):
        assert len({variant[page] for variant in variants}) == 1
    for page in (2, 3):
        assert len({variant[page] for variant in variants}) == 4
    # Trees with and without extras agree on pages that have none.
    assert none == split(hasher.extend(None, symbols(tokens, 16), 4), hasher.hash_size)


@PARAMETERS
def test_extras_are_framed_behind_the_tokens(algorithm: HashAlgorithm) -> None:
    hasher = PageHasher(algorithm, page_size=1, seed=b"s")
    extras = bytes(range(1, 17))
    message = b"s" + b"\x05\0\0\0" + b"\x01" + struct.pack("<Q", 16) + extras
    expected = sha256(message).digest() if algorithm == "sha256" else xxhash.xxh3_128(message).digest()
    assert hasher.extend(None, symbols([5], 1, extras), 1) == expected


@PARAMETERS
def test_seeds_separate_presence_and_place(algorithm: HashAlgorithm) -> None:
    assert hash_seed(algorithm, adapter_name=None, salt=None) is None
    seeds = {
        hash_seed(algorithm, adapter_name=adapter, salt=salt)
        for adapter, salt in (("a", None), (None, "a"), ("a", "a"), ("aa", None), (None, "aa"))
    }
    assert len(seeds) == 5


@pytest.mark.parametrize(
    ("parent", "data", "pages"),
    [
        (b"short", b"1234", 1),
        (b"x" * 32, b"1234", 1),
        (None, b"123", 1),
        (None, b"1234", 2),
        (None, b"1234", 0),
        (None, b"", 1),
    ],
)
def test_lengths_are_checked(parent: bytes | None, data: bytes, pages: int) -> None:
    with pytest.raises(InvalidInput, match="bytes"):
        PageHasher("xxh3_128", page_size=1).extend(parent, data, pages)


@pytest.mark.parametrize("algorithm", ["md5", "", None, []])
def test_unknown_algorithms_name_the_known(algorithm: Any) -> None:
    with pytest.raises(InvalidInput, match="sha256, xxh3_128"):
        PageHasher(algorithm, page_size=1)
