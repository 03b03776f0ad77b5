"""The tokens of pages: where they come from when an object's header is written, and what is known from one read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hicache.core.hashing import PageHasher
from hicache.core.prompt import PageIdentity, SymbolsAreHashes
from hicache.core.residency import Slots
from hicache.core.symbols import EXTRAS_SIZE, TOKEN_SIZE
from hicache.core.tree import HiRadixTree
from hicache.storage.codec import Header

_NO_EXTRAS = bytes(EXTRAS_SIZE)


class PageTokens(Protocol):
    """What tells a page's tokens and extras digest. Thread-safe for different slots."""

    def of(self, page: PageIdentity, slot: int) -> tuple[bytes, bytes]:
        """Tokens and extras digest of the page in a HOST slot, each empty where there are none or they are unknown."""
        ...

    def agree(self, tree: HiRadixTree, page: PageIdentity, slot: int, headers: Sequence[Header]) -> bool:
        """Whether the headers of all objects read for a page say what was asked for.

        Place in the chain and names have been compared before; this is about tokens and extras. Called while the
        transfer owns the slot.
        """
        ...


class SymbolTokens:
    """Pages of a tree whose symbols are tokens and extras. Immutable.

    Args:
        token_bytes: bytes of a page's tokens at the front of a symbol; what follows is its extras digest.
    """

    def __init__(self, token_bytes: int) -> None:
        self._token_bytes = token_bytes

    def of(self, page: PageIdentity, slot: int) -> tuple[bytes, bytes]:
        """See `PageTokens`."""
        del slot
        return page.symbol[: self._token_bytes], page.symbol[self._token_bytes :]

    def agree(self, tree: HiRadixTree, page: PageIdentity, slot: int, headers: Sequence[Header]) -> bool:
        """Hashes alone may collide, tokens cannot."""
        del tree
        tokens, extras = self.of(page, slot)
        return all(
            header.tokens == tokens and (header.extras or bytes(len(extras))) == extras  # as they were committed
            for header in headers
        )


class TokenStore:
    """Pages of trees of hashes: their tokens lie beside the HOST slots, 4 bytes a token and 17 a slot.

    They come with a commit, or from a stored object's header, and go into headers and events. A slot's row is written
    while whoever writes the slot owns it, and read while the slot is resident and pinned or under the reducer's lock.

    Args:
        slots: slots of HOST.
        page_size: tokens a page.
    """

    def __init__(self, slots: int, page_size: int) -> None:
        self._width = TOKEN_SIZE * page_size
        self._tokens = np.zeros((slots, self._width), np.uint8)  # untouched rows take no memory
        self._extras = np.zeros((slots, EXTRAS_SIZE), np.uint8)
        self._known = np.zeros(slots, np.bool_)

    def set(self, slots: Slots, tokens: bytes, extras: bytes) -> None:
        """What is in these slots: `4 * page_size` bytes a slot, and 16 bytes or nothing at all of extras."""
        self._tokens[slots] = np.frombuffer(tokens, np.uint8).reshape(len(slots), self._width)
        self._extras[slots] = np.frombuffer(extras, np.uint8).reshape(len(slots), EXTRAS_SIZE) if extras else 0
        self._known[slots] = True

    def forget(self, slots: Slots) -> None:
        """Nobody knows the tokens of what is in these slots: they come with names only."""
        self._known[slots] = False

    def known(self, slots: Slots) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Of each slot, whether its tokens are known."""
        return self._known[slots]

    def rows(self, slots: Slots) -> tuple[bytes, bytes]:
        """Tokens and extras of these slots, each glued together as `set` takes them."""
        return self._tokens[slots].tobytes(), self._extras[slots].tobytes()

    def tokens(self, slots: Slots) -> bytes:
        """Tokens of these slots, glued together; empty unless all of them are known."""
        return self._tokens[slots].tobytes() if self._known[slots].all() else b""

    def of(self, page: PageIdentity, slot: int) -> tuple[bytes, bytes]:
        """See `PageTokens`."""
        del page
        if not self._known[slot]:
            return b"", b""
        extras = self._extras[slot].tobytes()
        return self._tokens[slot].tobytes(), b"" if extras == _NO_EXTRAS else extras

    def agree(self, tree: HiRadixTree, page: PageIdentity, slot: int, headers: Sequence[Header]) -> bool:
        """The page hash proves tokens and extras, so they are hashed again; an object may have none."""
        said = {(header.tokens, header.extras) for header in headers if header.tokens}
        if len(said) > 1:
            return False
        self._known[slot] = bool(said)
        for tokens, extras in said:
            if len(tokens) != self._width or not _proved(tree, page, tokens, extras):
                return False
            self._tokens[slot] = np.frombuffer(tokens, np.uint8)
            self._extras[slot] = np.frombuffer(extras, np.uint8) if extras else 0
        return True


def _proved(tree: HiRadixTree, page: PageIdentity, tokens: bytes, extras: bytes) -> bool:
    return chain_of(tree).extend(page.parent, tokens + extras, 1) == page.hash


def chain_of(tree: HiRadixTree) -> PageHasher:
    """The hasher of the tokens behind a tree of hashes."""
    assert isinstance(tree.hasher, SymbolsAreHashes)
    assert isinstance(tree.hasher.chain, PageHasher)
    return tree.hasher.chain
