"""Asking the service what it has of a prompt, and bringing it into host memory, while the scheduler goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.core.identity import Adapter
from hicache.core.symbols import Span
from hicache.errors import HicacheError
from hicache.rpc.client.cache import ConnectedCache
from hicache.rpc.client.request import ConnectedRequest
from hicache_vllm.accounts import Account, Missed
from hicache_vllm.tasks import Tasks

__all__ = ["Lookup", "Scope"]

_log = logging.getLogger("vllm.hicache")

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose pages a request may use.

    Attributes:
        adapter: makes its LoRA with the digest of its content, which may have to be read; None without one.
        salt: vLLM's cache_salt.
        extras: non-text input, see `hicache.core.symbols.page_extras`.
    """

    adapter: Callable[[], Adapter] | None = None
    salt: str | None = None
    extras: tuple[Span, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """As `ConnectedCache.request` takes them. May read files."""
        return {
            "adapter": None if self.adapter is None else self.adapter(),
            "salt": self.salt,
            "extras": self.extras,
        }


class Lookup:
    """One prompt's question. Begun by the scheduler's thread, answered in another; its lease is held until `close`.

    Args:
        cache, tasks: to the service.
        tokens, scope: the prompt, and whose pages it may use.
        deadline: seconds for the answer.
        reserve: tokens of a page, where pages that are not found shall have slots at once; 0 where not.
        now: a monotonic clock in seconds.

    Attributes:
        pages: leading pages that are in host memory and pinned, once `done`; 0 where there is nothing.
        host, storage: how many of them were in which tier when it began.
        reason: why nothing was asked, or answered, once it is done; None where the service has told what it has.
        hashes: of the prompt's whole pages, 32 bytes each, once it is done.
        account: is closed with what the service says of its pages at the end; or None.
        reserved: pages behind those found that have slots of this lease, once it is done.
    """

    def __init__(
        self,
        cache: ConnectedCache,
        tasks: Tasks,
        tokens: Tokens,
        scope: Scope,
        *,
        deadline: float,
        reserve: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pages = self.host = self.storage = self.reserved = 0
        self.reason: Missed | None = None
        self.hashes = b""
        self.account: Account | None = None
        self._cache = cache
        self._tasks = tasks
        self._deadline = deadline
        self._now = now
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._closed = False
        self._held = False
        self._to_close: bool | None = None  # once nobody holds it: whether as aborted
        self._reserve = reserve
        self._request: ConnectedRequest | None = None
        self._begun = now()
        if not tasks.begin(lambda: self._ask(tokens, scope)):
            self.reason = Missed.BUSY
            self._done.set()

    def _ask(self, tokens: Tokens, scope: Scope) -> None:
        request = None
        try:
            left = self._deadline - self.seconds
            if left > 0 and not self._closed:
                named = scope.arguments()
                request = self._cache.request(tokens, deadline=left, **named)
                self.hashes = request.page_hashes
                found = request.load()
                self.pages = len(found)
                self.host = min(request.match.host, self.pages)
                self.storage = self.pages - self.host
                if request.bypassed:
                    self.reason = self._why_past(named["adapter"])
                elif self._reserve:
                    self._allocate(request, len(tokens))
            else:
                self.reason = Missed.LATE
        except BaseException:
            self.pages = 0
            self.reason = Missed.FAILED
            raise
        finally:
            with self._lock:
                self._request = request
                closed = self._closed
            self._done.set()
            if closed and request is not None:
                request.close()

    def _allocate(self, request: ConnectedRequest, tokens: int) -> None:
        """Slots for the whole pages that were not found. Where there are none, they are asked for again later."""
        if self.pages >= (tokens - 1) // self._reserve:
            return  # all that may be found; of an exact multiple the last page may be there too
        try:
            self.reserved = len(request.allocate(tokens // self._reserve - self.pages))
        except HicacheError as error:
            _log.debug("hicache: no slots before pages are computed: %s", error)

    def hold(self) -> None:
        """Its lease stays until `release`, also behind `close`. On the scheduler's thread, once it is done."""
        self._held = True

    def release(self) -> None:
        """Undo `hold`."""
        self._held = False
        if self._to_close is not None:
            self.close(aborted=self._to_close)

    def _why_past(self, adapter: Adapter | None) -> Missed:
        """Why the client went past the service."""
        if adapter is not None and adapter.digest is None:
            return Missed.BYPASSED
        if not self._cache.connected:
            return Missed.AWAY
        return Missed.LATE if self.seconds >= self._deadline else Missed.BUSY

    @property
    def seconds(self) -> float:
        """How long ago it began."""
        return self._now() - self._begun

    @property
    def late(self) -> bool:
        """Whether the answer is not there although the deadline has passed."""
        return not self._done.is_set() and self.seconds > self._deadline

    def wait(self, seconds: float) -> bool:
        """Whether it is answered, or will be within so long."""
        return self._done.wait(seconds)

    @property
    def lost(self) -> bool:
        """Whether its lease has ended, so that its pages are nobody's."""
        request = self._request
        return request is None or request.lost is not None or request.closed

    def ticket(self) -> bytes | None:
        """What the workers need to read the pages; None where the lease is lost."""
        request = self._request
        ticket = None if request is None else request.ticket()
        return None if ticket is None else ticket.encode()

    def close(self, *, aborted: bool = False) -> None:
        """Give the lease back, in the background. Idempotent."""
        if self._held:
            self._to_close = aborted
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            request = self._request
        account = self.account
        if request is None or not self._tasks.begin(lambda: _close(request, account, aborted)):
            del request  # collected: released without a wait
            if account is not None:
                account.close()


def _close(request: ConnectedRequest, account: Account | None, aborted: bool) -> None:
    counts = None
    try:
        counts = request.close(aborted=aborted)
    finally:
        if account is not None:
            account.close(counts)
