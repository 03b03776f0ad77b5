"""Prompts hash each page once, also while they grow."""

from __future__ import annotations

from hicache.core.hashing import PageHasher
from hicache.core.prompt import Prompt, SymbolsAreHashes


class CountingPages:
    """A hasher that counts the pages it is asked for."""

    def __init__(self) -> None:
        self._hasher = PageHasher("xxh3_128", page_size=1)
        self.size = self._hasher.size
        self.pages = 0

    def extend(self, parent, symbols, pages):
        self.pages += pages
        return self._hasher.extend(parent, symbols, pages)


def test_a_growing_prompt_hashes_only_what_is_new():
    hasher = CountingPages()
    prompt = Prompt(bytes(range(40)), 4, hasher)
    first = prompt.hashes(0, 10)
    for i in range(20):
        prompt = prompt.extended(bytes([i]) * 4)
        prompt.hashes(0, prompt.pages)
    assert hasher.pages == 30
    assert prompt.hashes(0, 10) == first
    assert prompt.hashes(0, 30) == Prompt(prompt.symbols, 4, hasher).hashes(0, 30)


def test_identities_chain_from_the_page_before():
    prompt = Prompt(bytes(range(16)), 4, PageHasher("xxh3_128", page_size=1))
    whole = prompt.identities(0, 4)
    assert whole[0].parent is None
    assert [page.parent for page in whole[1:]] == [page.hash for page in whole[:-1]]
    assert prompt.identities(2, 4) == whole[2:]
    assert prompt.identities(2, 2) == ()
    assert [page.symbol for page in whole] == [bytes(range(i, i + 4)) for i in (0, 4, 8, 12)]


def test_an_unaligned_end_is_no_page():
    prompt = Prompt(bytes(10), 4, SymbolsAreHashes(4))
    assert (prompt.pages, len(prompt.symbols)) == (2, 8)
    assert prompt.hash(1) == bytes(4)
