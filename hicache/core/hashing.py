"""Page hashes: a chain in which each hash names a page and its whole past.

    h(i) = H(h(i-1) || tokens of page i as u32 little endian || extras frame)

Before the first page stands the namespace's seed, if it has one, else nothing. H is sha256 or xxh3_128. The extras
frame is absent for a page without extras (zero bytes), else `01`, u64 16, and the 16-byte extras digest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import sha256
from typing import Final, Literal, TypeAlias, get_args

import xxhash

from hicache.core.framing import frame, frame_text
from hicache.core.symbols import EXTRAS_SIZE, TOKEN_SIZE, check_page_size
from hicache.errors import InvalidInput

__all__ = ["HASH_ALGORITHMS", "HashAlgorithm", "PageHasher", "hash_seed"]

HashAlgorithm: TypeAlias = Literal["sha256", "xxh3_128"]
HASH_ALGORITHMS: Final[tuple[HashAlgorithm, ...]] = get_args(HashAlgorithm)

# The tag and the structure are those of SGLang's storage keys, so that under sha256 the chains are equal.
_SEED_TAG: Final = b"sglang-cache-namespace-v1"
_NO_EXTRAS = bytes(EXTRAS_SIZE)


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


_DIGEST: Final[dict[HashAlgorithm, Callable[[bytes], bytes]]] = {
    "sha256": _sha256,
    "xxh3_128": xxhash.xxh3_128_digest,
}


def hash_seed(algorithm: HashAlgorithm, *, adapter_name: str | None, salt: str | None) -> bytes | None:
    """What stands before the first page, or None where neither an adapter nor a salt is set.

    Under sha256 it is SGLang's seed with the adapter's name as extra_key and the salt as cache_salt. Under xxh3_128
    the same bytes are hashed with xxh3_128.
    """
    if adapter_name is None and salt is None:
        return None
    return _DIGEST[algorithm](_SEED_TAG + frame_text(adapter_name) + frame_text(salt))


class PageHasher:
    """Hashes consecutive pages of one namespace. Immutable, safe in any thread.

    Attributes:
        algorithm: "sha256" or "xxh3_128".
        page_size: tokens a page.
        seed: what stands before the first page.
        hash_size: bytes of one hash, 32 or 16.
    """

    __slots__ = ("_digest", "algorithm", "hash_size", "page_size", "seed")

    def __init__(self, algorithm: HashAlgorithm, *, page_size: int, seed: bytes | None = None) -> None:
        if algorithm not in HASH_ALGORITHMS:
            raise InvalidInput(f"page hash {algorithm!r:.40} is unknown: use one of {', '.join(HASH_ALGORITHMS)}")
        self.algorithm = algorithm
        self.page_size = check_page_size(page_size)
        self.seed = seed
        self._digest = _DIGEST[algorithm]
        self.hash_size = len(self._digest(b""))

    @property
    def size(self) -> int:
        """`hash_size`, by the name under which trees ask for it."""
        return self.hash_size

    def extend(self, parent: bytes | None, symbols: bytes, pages: int) -> bytes:
        """Hashes of consecutive pages, glued together: `pages * hash_size` bytes.

        Args:
            parent: hash of the page before the first one here; None at the start of a prompt.
            symbols: the pages' symbols, all of one width: 4 bytes a token, or these and a 16-byte extras digest.
            pages: how many.

        Raises:
            InvalidInput: a parent or symbols of another length.
        """
        if parent is not None and len(parent) != self.hash_size:
            raise InvalidInput(f"parent hash has {len(parent)} bytes, {self.algorithm} has {self.hash_size}")
        before = parent if parent is not None else self.seed or b""
        if pages == 0 and not symbols:
            return b""
        tokens_width = TOKEN_SIZE * self.page_size
        if len(symbols) == pages * tokens_width:
            return self._plain(before, symbols, tokens_width)
        if len(symbols) == pages * (tokens_width + EXTRAS_SIZE):
            return self._with_extras(before, symbols, tokens_width)
        raise InvalidInput(f"{len(symbols)} bytes of symbols are not {pages} pages of {self.page_size} tokens")

    def _plain(self, before: bytes, symbols: bytes, width: int) -> bytes:
        # The hot loop: 2,048 pages in about 0.25 ms (xxh3_128) or 1.1 ms (sha256). Unpacking slices once a page, and
        # one call on the glued bytes is faster than two updates of a hash object.
        pages = struct.iter_unpack(f"{width}s", symbols)
        if self.algorithm == "sha256":
            return b"".join([before := sha256(before + page).digest() for (page,) in pages])
        digest = self._digest
        return b"".join([before := digest(before + page) for (page,) in pages])

    def _with_extras(self, before: bytes, symbols: bytes, tokens_width: int) -> bytes:
        digest = self._digest
        hashes = []
        for tokens, extras in struct.iter_unpack(f"{tokens_width}s{EXTRAS_SIZE}s", symbols):
            before = digest(before + tokens if extras == _NO_EXTRAS else before + tokens + frame(extras))
            hashes.append(before)
        return b"".join(hashes)
