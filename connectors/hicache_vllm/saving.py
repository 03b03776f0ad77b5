"""Slots for pages that the engine has computed: taken in the background, given to the workers with a later step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum, auto

from hicache.errors import HicacheError, OutOfSlots
from hicache.rpc.client.cache import ConnectedCache
from hicache.rpc.client.request import ConnectedRequest
from hicache_vllm.lookups import Scope, Tokens
from hicache_vllm.tasks import Tasks

__all__ = ["Saving", "Stage"]


class Stage(Enum):
    """Where a store stands."""

    PREPARING = auto()
    READY = auto()
    SENT = auto()
    OVER = auto()


class Saving:
    """The store of one request's pages up to some token.

    Changed by the scheduler's thread, but for the step from PREPARING to READY or OVER, which another does.

    Attributes:
        job: its number.
        request: vLLM's id.
        blocks: the engine's numbers of the blocks of all pages from the prompt's start.
        first, end: page indices of what is to be written, once READY.
        ticket: of its lease.
        reason: why nothing is stored; empty where something is, or nothing has to be.
    """

    def __init__(
        self,
        job: int,
        request: str,
        blocks: list[int],
        *,
        cache: ConnectedCache,
        tasks: Tasks,
        tokens: Tokens,
        scope: Scope,
        deadline: float,
        ready: Callable[[], None],
    ) -> None:
        self.job = job
        self.request = request
        self.blocks = blocks
        self.first = self.end = 0
        self.ticket = b""
        self.reason = ""
        self.stage = Stage.PREPARING
        self._cache = cache
        self._tasks = tasks
        self._deadline = deadline
        self._ready = ready
        self._lock = threading.Lock()
        self._lease: ConnectedRequest | None = None
        if not tasks.begin(lambda: self._prepare(tokens, scope)):
            self.reason = "busy"
            self.stage = Stage.OVER

    def _prepare(self, tokens: Tokens, scope: Scope) -> None:
        lease = None
        try:
            lease = self._cache.request(tokens, deadline=self._deadline, logits=False, **scope.arguments())
            self._reserve(lease, len(tokens) // self._cache.page_size)
        except OutOfSlots:
            self.reason = "host pool full"
        except HicacheError as error:
            self.reason = type(error).__name__
            raise
        finally:
            self._prepared(lease)

    def _reserve(self, lease: ConnectedRequest, pages: int) -> None:
        if lease.bypassed:
            self.reason = "no service"
            return
        fresh = lease.allocate()
        if not len(fresh):
            self.reason = "" if lease.lost is None else "lease lost"
            return
        ticket = lease.ticket()
        if ticket is None:
            self.reason = "lease lost"
            return
        self.first, self.end = pages - len(fresh), pages
        self.ticket = ticket.encode()

    def _prepared(self, lease: ConnectedRequest | None) -> None:
        with self._lock:
            wanted = self.stage is Stage.PREPARING and bool(self.ticket)
            if wanted:
                self._lease = lease
            self.stage = Stage.READY if wanted else Stage.OVER
        if not wanted and lease is not None:
            lease.close(aborted=bool(self.reason))
        self._ready()

    def sent(self) -> None:
        """The workers have it with the next step."""
        self.stage = Stage.SENT

    def end_it(self, *, aborted: bool) -> None:
        """Nothing more is done with it; its lease goes back in the background. Idempotent."""
        with self._lock:
            self.stage = Stage.OVER
            lease, self._lease = self._lease, None
        if lease is not None and not self._tasks.begin(lambda: _close(lease, aborted)):
            del lease  # collected: released without a wait


def _close(lease: ConnectedRequest, aborted: bool) -> None:
    lease.close(aborted=aborted)
