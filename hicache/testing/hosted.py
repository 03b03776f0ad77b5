"""A loop and a client for tests of hosted caches: what a service does, in the test's own thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hicache.core.prompt import Prompt
from hicache.core.residency import Slots
from hicache.core.symbols import symbols
from hicache.events import Event
from hicache.runtime.hosting import HostedCache, HostedLoading, HostedRequest
from hicache.runtime.scopes import Scope

__all__ = ["HostedLoop"]

T = TypeVar("T")


class HostedLoop:
    """Drives a cache as an event loop would, while the test waits for something. For one thread.

    Args:
        cache: the cache, not started yet.
        patience: real seconds that anything may take.

    Attributes:
        events: residency events so far.
    """

    def __init__(self, cache: HostedCache, *, patience: float = 30.0) -> None:
        self.cache = cache
        self.events: list[Event] = []
        self._patience = patience
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        cache.start(self.ring, self.events.extend)

    def ring(self) -> None:
        """There may be something to do. From any thread."""
        self._bell.put(None)

    def until(self, met: Callable[[], bool]) -> None:
        """Go on until something is so.

        Raises:
            TimeoutError: it did not come to be within the loop's patience.
        """
        end = time.monotonic() + self._patience
        while not met():
            if time.monotonic() > end:
                raise TimeoutError(f"it did not happen within {self._patience} real seconds")
            self.turn()

    def turn(self) -> None:
        """One turn of the loop."""
        cache = self.cache
        cache.settle()
        cache.upkeep()
        soon = cache.look()
        try:
            self._bell.get(timeout=0.02 if soon is None else min(soon, 0.02))
        except queue.Empty:
            return

    def scope(self, **fields: Any) -> Scope:
        """A namespace whose generation is known."""
        scope = self.cache.scope(**fields)
        assert scope is not None
        self.until(lambda: scope.tree is not None)
        return scope

    def request(
        self,
        tokens: Sequence[int],
        *,
        scope: Scope | None = None,
        load: bool = True,
        extras: bytes = b"",
        **fields: Any,
    ) -> HostedRequest:
        """A request of a prompt, with what came up."""
        scope = self.scope() if scope is None else scope
        request = self.cache.request(scope, page_hashes(scope, tokens, extras), tokens=len(tokens), **fields)
        if load:
            self.load(request.loading())
        return request

    def load(self, loading: HostedLoading) -> None:
        """Wait until it has finished."""
        self.until(lambda: loading.step() is None)

    def run(self, tokens: Sequence[int], **fields: Any) -> int:
        """What an engine does with a prompt. Returns the pages that need not be computed, their bytes compared."""
        extras = fields.get("extras", b"")
        request = self.request(tokens, **fields)
        size = self.cache.page_size
        found, pages = len(request.usable), len(tokens) // size
        for page, slot in enumerate(request.usable.tolist()):
            assert bytes(self.cache.host.page(slot)) == content(tokens[: (page + 1) * size], self.cache.host.page_bytes)
        for page, slot in enumerate(request.reserve(pages - found).tolist(), found):
            text = content(tokens[: (page + 1) * size], self.cache.host.page_bytes)
            self.cache.host.page(slot)[:] = np.frombuffer(text, np.uint8)
        request.commit(
            pages, tokens=token_bytes(tokens[found * size : pages * size]), first=found, extras=extras[found * 16 :]
        )
        request.close()
        return found

    def elsewhere(self, call: Callable[[], T]) -> T:
        """Call something that waits in another thread, and go on meanwhile."""
        answers: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                answers.append(call())
            except BaseException as error:
                errors.append(error)
            self.ring()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.until(lambda: bool(answers or errors))
        thread.join()
        if errors:
            raise errors[0]
        return answers[0]

    def close(self) -> None:
        """Close the cache."""
        self.elsewhere(lambda: self.cache.close(5.0))

    def slots(self, request: HostedRequest) -> Slots:
        """All slots that a request holds."""
        return np.concatenate((request.usable, request.own))


def page_hashes(scope: Scope, tokens: Sequence[int], extras: bytes = b"") -> bytes:
    """Hashes of a prompt's whole pages, as a client computes them."""
    size = scope.chain.page_size
    spans = symbols(np.array(tokens, np.uint32), size, extras or None)
    pages = len(tokens) // size
    return b"".join(Prompt(spans, len(spans) // max(pages, 1) or 1, scope.chain).hashes(0, pages))


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as they travel."""
    return np.array(tokens, "<u4").tobytes()


def content(tokens: Sequence[int], size: int) -> bytes:
    """Bytes of a page that depend on all tokens up to its end."""
    seed = np.array(tokens, "<u4").view(np.uint8)
    generator = np.random.default_rng(seed.tolist())
    return generator.bytes(size)
