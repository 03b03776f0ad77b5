"""A prompt as the tree sees it: a string of fixed-width page symbols, with lazily chained page hashes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike


class Hasher(Protocol):
    """Chains page hashes. Pure."""

    @property
    def size(self) -> int:
        """Bytes of one hash."""
        ...

    def extend(self, parent: bytes | None, symbols: bytes, pages: int) -> bytes:
        """Hashes of `pages` consecutive pages, glued together, behind the page whose hash is `parent`."""
        ...


@lru_cache(maxsize=64)
def _row(size: int) -> DTypeLike:
    return np.dtype(f"V{size}")


def cut(glued: bytes, size: int) -> list[bytes]:
    """Parts of `size` bytes each, of which `glued` is a whole number. A quarter of what slicing each out takes."""
    return np.frombuffer(glued, _row(size)).tolist() if glued else []


class SymbolsAreHashes:
    """The hasher of an alphabet whose symbols are the page hashes themselves (sidecar, plug-ins).

    Attributes:
        size: bytes of one hash.
        chain: what made the hashes of tokens, where that is known.
    """

    __slots__ = ("chain", "size")

    def __init__(self, size: int, chain: Hasher | None = None) -> None:
        self.size = size
        self.chain = chain

    def extend(self, parent: bytes | None, symbols: bytes, pages: int) -> bytes:
        """The symbols."""
        del parent
        return symbols[: pages * self.size]


class PageIdentity(NamedTuple):
    """What a stored page is checked against.

    Attributes:
        hash: its page hash.
        parent: the hash of the page before it, None for the first.
        depth: its index from the root, 0 first.
        symbol: its token bytes (u32 little endian, extras behind them), or its hash in a tree of hashes.
    """

    hash: bytes
    parent: bytes | None
    depth: int
    symbol: bytes


class Prompt:
    """Whole pages of one prompt. Immutable but for the hashes, which are computed when first asked for.

    Attributes:
        symbols: `pages * width` bytes.
        width: bytes of one symbol.
        pages: number of pages; an unaligned tail is not in here.
    """

    __slots__ = ("_hashed", "_hashes", "_named", "hasher", "pages", "symbols", "width")

    def __init__(self, symbols: bytes, width: int, hasher: Hasher) -> None:
        self.pages = len(symbols) // width
        self.symbols = symbols if len(symbols) == self.pages * width else symbols[: self.pages * width]
        self.width = width
        self.hasher = hasher
        self._named = type(hasher) is SymbolsAreHashes
        self._hashes = b""
        self._hashed = 0

    def hashes(self, first: int, end: int) -> list[bytes]:
        """Hashes of the pages `first` to `end - 1`. Not locked: called by one thread at a time."""
        size = self.hasher.size
        if self._named:
            return cut(self.symbols[first * size : end * size], size)
        if end > self._hashed:
            parent = self._hashes[-size:] if self._hashed else None
            start = self._hashed * self.width
            more = self.hasher.extend(parent, self.symbols[start : end * self.width], end - self._hashed)
            self._hashes += more
            self._hashed = end
        return cut(self._hashes[first * size : end * size], size)

    def extended(self, symbols: bytes) -> Prompt:
        """A longer prompt: this one and more pages' symbols behind it. It keeps the hashes that are known."""
        longer = Prompt(self.symbols + symbols, self.width, self.hasher)
        known = self._hashed  # read first: hashes are appended before they are counted
        longer._hashes = self._hashes[: known * self.hasher.size]
        longer._hashed = known
        return longer

    def hash(self, page: int) -> bytes:
        """Hash of one page."""
        return self.hashes(page, page + 1)[0]

    def identities(self, first: int, end: int) -> tuple[PageIdentity, ...]:
        """What the pages `first` to `end - 1` are checked against in storage."""
        if end <= first:
            return ()
        width = self.width
        start = max(first - 1, 0)
        known = self.hashes(start, end)
        parents: list[bytes | None] = [*known[:-1]] if first else [None, *known[:-1]]
        own = known[first - start :]
        symbols = cut(self.symbols[first * width : end * width], width)
        return tuple(map(PageIdentity, own, parents, range(first, end), symbols))
