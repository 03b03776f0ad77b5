"""What the bytes of every page must be: a fixed function of its namespace, generation and all tokens up to its end.

So bytes of other tokens, of another past, of another tenant or from before a clear are told from the right ones.
"""

from __future__ import annotations

import hashlib

from hicache.core.identity import DerivedNamespace, Namespace
from hicache.core.keys import ObjectKey, Shard
from hicache.core.partition import ShardPart, plan_shards
from hicache.core.symbols import TOKEN_SIZE

__all__ = ["Truth", "Violation", "require"]


class Violation(BaseException):
    """A rule was broken. Not an `Exception`, as it must pass through code that rightly survives all of these."""


def require(holds: object, what: str) -> None:
    """Raise `Violation` unless it holds."""
    if not holds:
        raise Violation(what)


class Truth:
    """Knows the content of each page that was ever asked for, by tokens and by hash.

    Args:
        namespace: the model as served, without extras.
        hides: whether clients commit pages by their hashes alone, so that nobody need know their tokens.

    Attributes:
        width: bytes of a page's tokens.
        parts: a page's shards, and where they lie in it.
        anchor: the shard that is put last.
        page_bytes: bytes of a page.
        hides: as given.
    """

    def __init__(self, namespace: Namespace, *, hides: bool = False) -> None:
        plan = plan_shards(namespace.geometry, namespace.page_size)
        self.width = TOKEN_SIZE * namespace.page_size
        self.parts: dict[Shard, ShardPart] = {part.shard: part for part in plan.parts}
        self.anchor = plan.anchor
        self.page_bytes = plan.page_bytes
        self.hides = hides
        self._contents: dict[tuple[bytes, int, bytes], bytes] = {}
        self._hashes: dict[tuple[bytes, bytes], bytes] = {}
        self._pasts: dict[tuple[bytes, bytes], bytes] = {}

    def content(self, digest: bytes, generation: int, past: bytes) -> bytes:
        """The bytes of the page that ends where `past` ends: token bytes from the prompt's start."""
        key = (digest, generation, past)
        found = self._contents.get(key)
        if found is None:
            seed = digest + generation.to_bytes(8, "little") + past
            found = self._contents[key] = hashlib.shake_128(seed).digest(self.page_bytes)
        return found

    def learn(self, namespace: DerivedNamespace, symbols: bytes) -> list[bytes]:
        """The page hashes of a prompt's whole pages; from now on they are known by hash too."""
        digest, width = namespace.digest, self.width
        hasher, parent, hashes = None, None, []
        for end in range(width, len(symbols) + 1, width):
            past = symbols[:end]
            page_hash = self._hashes.get((digest, past))
            if page_hash is None:
                hasher = hasher or namespace.hasher()
                page_hash = hasher.extend(parent, symbols[end - width : end], 1)
                self._hashes[digest, past] = page_hash
                self._pasts[digest, page_hash] = past
            hashes.append(page_hash)
            parent = page_hash
        return hashes

    def hash(self, digest: bytes, past: bytes) -> bytes | None:
        """The hash of the page that ends where `past` ends, if a prompt had it."""
        return self._hashes.get((digest, past))

    def past(self, digest: bytes, page_hash: bytes) -> bytes:
        """All tokens up to the end of the page with this hash."""
        past = self._pasts.get((digest, page_hash))
        require(past is not None, f"no prompt ever had a page with the hash {page_hash.hex()}")
        assert past is not None
        return past

    def shard(self, key: ObjectKey) -> bytes:
        """The payload that must be under a key."""
        part = self.parts[key.shard]
        page = self.content(key.namespace, key.generation, self.past(key.namespace, key.page_hash))
        return page[part.offset : part.offset + part.length]

    def tokens(self, key: ObjectKey) -> bytes:
        """The tokens of the page of a key."""
        return self.past(key.namespace, key.page_hash)[-self.width :]
