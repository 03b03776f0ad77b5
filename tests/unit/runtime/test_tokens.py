"""Tokens of pages in trees of hashes: kept beside the slots, and believed only if they hash to the page's name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hicache.core.cache import Core
from hicache.core.config import CoreConfig
from hicache.core.hashing import PageHasher
from hicache.core.keys import ObjectKey
from hicache.core.prompt import PageIdentity, SymbolsAreHashes
from hicache.core.tree import HiRadixTree
from hicache.runtime.tokens import SymbolTokens, TokenStore
from hicache.storage.codec import Header, decode_header, encode_header
from hicache.testing.engine import small_namespace

P = 2
CHAIN = PageHasher("sha256", page_size=P)
TOKENS = np.array([5, 6], "<u4").tobytes()
EXTRAS = bytes(range(16))
PARENT = bytes(32)
SLOT = 3
SHARD = small_namespace().geometry.anchor(P)


@pytest.fixture
def tree() -> HiRadixTree:
    core = Core(CoreConfig(device_pages=0, host_pages=8))
    return core.tree(b"n" * 16, width=32, hasher=SymbolsAreHashes(32, CHAIN))


def page(extras: bytes = b"") -> PageIdentity:
    (own,) = [CHAIN.extend(PARENT, TOKENS + extras, 1)]
    return PageIdentity(own, PARENT, 1, own)


def header(of: PageIdentity, **fields: Any) -> Header:
    key = ObjectKey(b"n" * 16, 0, of.hash, SHARD)
    given = {"tokens": TOKENS, "extras": b""} | fields
    return decode_header(encode_header(key, parent_hash=PARENT, depth=1, payload=b"x", **given))


def test_what_was_committed_is_told_for_headers_and_events() -> None:
    store = TokenStore(8, P)
    slots = np.array([SLOT, 5])
    store.set(slots, TOKENS * 2, bytes(16) + EXTRAS)
    assert store.of(page(), SLOT) == (TOKENS, b"")  # no extras are none, not zeros
    assert store.of(page(), 5) == (TOKENS, EXTRAS)
    assert store.tokens(slots) == TOKENS * 2
    assert store.of(page(), 0) == (b"", b"")
    assert store.tokens(np.array([SLOT, 0])) == b""  # one of them is not known
    store.set(slots, TOKENS * 2, b"")
    assert store.of(page(), 5) == (TOKENS, b"")


@pytest.mark.parametrize("extras", [b"", EXTRAS])
def test_what_was_read_is_kept_if_it_hashes_to_the_page(tree: HiRadixTree, extras: bytes) -> None:
    store, asked = TokenStore(8, P), page(extras)
    assert store.agree(tree, asked, SLOT, [header(asked, extras=extras)] * 2)
    assert store.of(asked, SLOT) == (TOKENS, extras)


def test_objects_without_tokens_are_believed_by_their_hash_and_tell_none(tree: HiRadixTree) -> None:
    """Programs that know only hashes may have written them; what the slot had before is forgotten."""
    store, asked = TokenStore(8, P), page()
    store.set(np.array([SLOT]), TOKENS, b"")
    assert store.agree(tree, asked, SLOT, [header(asked, tokens=b"")])
    assert store.of(asked, SLOT) == (b"", b"")
    assert store.agree(tree, asked, SLOT, [header(asked, tokens=b""), header(asked)])
    assert store.of(asked, SLOT) == (TOKENS, b"")


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": TOKENS[:-1] + b"\x01"},
        {"tokens": TOKENS + TOKENS},
        {"tokens": TOKENS[:4]},
        {"extras": EXTRAS},
    ],
)
def test_other_tokens_than_the_hash_says_are_refused(tree: HiRadixTree, fields: dict[str, bytes]) -> None:
    asked = page()
    assert not TokenStore(8, P).agree(tree, asked, SLOT, [header(asked, **fields)])


def test_shards_of_one_page_that_disagree_are_refused(tree: HiRadixTree) -> None:
    asked = page()
    other = replace(header(asked), tokens=TOKENS[::-1])
    assert not TokenStore(8, P).agree(tree, asked, SLOT, [header(asked), other])


def test_where_symbols_are_tokens_objects_must_have_just_these(tree: HiRadixTree) -> None:
    tokens = SymbolTokens(len(TOKENS))
    asked = page()._replace(symbol=TOKENS + EXTRAS)
    assert tokens.of(asked, SLOT) == (TOKENS, EXTRAS)
    assert tokens.agree(tree, asked, SLOT, [header(asked, extras=EXTRAS)])
    for fields in ({"tokens": TOKENS[::-1], "extras": EXTRAS}, {"tokens": b"", "extras": EXTRAS}, {"extras": b""}):
        assert not tokens.agree(tree, asked, SLOT, [header(asked, extras=EXTRAS), header(asked, **fields)])
