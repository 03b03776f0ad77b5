"""What a replayed page holds: bytes that only its namespace and its whole past can explain.

A wrong hit cannot pass: the content is a function of the namespace and all tokens up to the page's end, chained here
by a hash that shares nothing with the cache's own page hash, so a fault there does not hide itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

_WORD = 8
_STATE = 32  # bytes carried from page to page


class PageContent:
    """Makes and checks the bytes of pages. Not thread-safe: it owns scratch buffers.

    A page is a fixed random pattern, each 8-byte word of it combined with one word of the page's state: every
    4 KiB of a page differs from every other, pages differ in every word, and both making and checking run at memory
    speed.
    """

    def __init__(self, *, namespace: bytes, page_tokens: int, page_bytes: int) -> None:
        """Prepare for one namespace.

        Args:
            namespace: digest of the namespace.
            page_tokens: tokens of a page.
            page_bytes: bytes of a page, above 0.
        """
        self.page_bytes = page_bytes
        self._step = 4 * page_tokens
        self._start = hashlib.blake2b(namespace, digest_size=_STATE, person=b"replay page").digest()
        words = -(-page_bytes // _WORD)
        self._pattern: Words = np.random.default_rng(0x68696361).integers(2**64, size=words, dtype=np.uint64)
        self._page: Words = np.empty(words, dtype=np.uint64)
        self._expected: Bytes = self._page.view(np.uint8)[:page_bytes]
        self._same = np.empty(page_bytes, dtype=np.bool_)

    def states(self, tokens: bytes) -> Iterator[bytes]:
        """One state a page, in order, for the whole pages of a prompt.

        Args:
            tokens: the prompt, unsigned 32 bit little endian.
        """
        state = self._start
        step = self._step
        for at in range(0, len(tokens) - step + 1, step):
            state = hashlib.blake2b(tokens[at : at + step], digest_size=_STATE, key=state).digest()
            yield state

    def make(self, state: bytes) -> Bytes:
        """The page's bytes, shape (page_bytes,). The array is overwritten by the next call of `make` or `matches`."""
        np.bitwise_xor(self._pattern, np.frombuffer(state, dtype=np.uint64, count=1)[0], out=self._page)
        return self._expected

    def matches(self, state: bytes, page: Bytes) -> bool:
        """Whether `page` holds exactly the state's bytes, every one of them compared."""
        expected = self.make(state)
        if page.shape != expected.shape:
            return False
        return bool(np.equal(page, expected, out=self._same).all())
