"""A hosted cache whose clients know hashes and no tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from hicache.errors import InvalidInput
from hicache.events import Stored
from hicache.memory.host import MmapHostPool
from hicache.runtime.hosting import open_hosted
from hicache.storage.base import StorageBackend
from hicache.storage.memory import MemoryBackend
from hicache.testing.engine import prompt, small_namespace
from hicache.testing.hosted import HostedLoop, content

NAMESPACE = small_namespace(hash="sha256")
SIZE = NAMESPACE.page_size
PAGE_BYTES = NAMESPACE.geometry.page_bytes(SIZE)
SLOTS = 64


@contextmanager
def opened(storage: StorageBackend) -> Iterator[HostedLoop]:
    host, words = MmapHostPool(SLOTS, PAGE_BYTES), np.zeros(SLOTS, np.uint64)
    options = {"prefetch": "wait_complete", "retry": None, "canary": False, "events": True}
    loop = HostedLoop(open_hosted(NAMESPACE, host=host, storage=storage, words=words, **options))
    yield loop
    loop.close()
    host.close()


def test_pages_whose_tokens_nobody_knows_are_pages_like_others() -> None:
    """Committed by hash alone they are found, stored without tokens, and told in events without them."""
    storage, tokens = MemoryBackend(), prompt(1, 3 * SIZE)
    with opened(storage) as loop:
        request = loop.request(tokens)
        for page, slot in enumerate(request.reserve(3).tolist(), 1):
            loop.cache.host.page(slot)[:] = np.frombuffer(content(tokens[: page * SIZE], PAGE_BYTES), np.uint8)
        with pytest.raises(InvalidInput, match="page 4 is behind"):
            request.commit(4, tokens=None, first=0)
        request.commit(3, tokens=None, first=0)
        request.close()
        assert loop.elsewhere(lambda: loop.cache.flush(5.0))
        loop.until(lambda: bool(loop.events))
        assert {event.tokens for event in loop.events if isinstance(event, Stored)} == {b""}
        assert loop.run([*tokens, *prompt(2, SIZE)]) == 3  # one more, which tells its tokens
        assert loop.elsewhere(lambda: loop.cache.flush(5.0))
        with opened(storage) as other:
            assert other.run([*tokens, *prompt(2, SIZE)]) == 4
            other.until(lambda: bool(other.events))
            assert isinstance(other.events[0], Stored)
            assert other.events[0].tokens == b""
