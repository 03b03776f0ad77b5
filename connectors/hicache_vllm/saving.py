"""Slots for pages that the engine has computed: taken in the background, given to the workers with a later step.

Or taken before (`Ahead`), and given to them with the very step that computes the pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from hicache.errors import HicacheError, OutOfSlots
from hicache.rpc.client.cache import ConnectedCache
from hicache.rpc.client.request import ConnectedRequest
from hicache_vllm.ahead import Ahead
from hicache_vllm.lookups import Scope, Tokens
from hicache_vllm.plans import StepPlan, Store
from hicache_vllm.requests import Tracked
from hicache_vllm.tasks import Tasks

__all__ = ["Early", "Saving", "Stage"]

HASH_BYTES: Final = 32


class Stage(Enum):
    """Where a store stands."""

    PREPARING = auto()
    READY = auto()
    SENT = auto()
    OVER = auto()


class Saving:
    """The store of one request's pages from the prompt's start, as far as the cache lacks them.

    Changed by the scheduler's thread, but for the step from PREPARING to READY or OVER, which another does.

    Args:
        job: its number.
        tracked: the request.
        pages: leading pages that are to be there.
        blocks: the engine's numbers of all of their blocks.
        cache, tasks: to the service.
        deadline: seconds for it.
        ready: called when it is not PREPARING any more.

    Attributes:
        stage: where it stands.
        reason: why nothing is stored; empty where something is, or nothing has to be.
        hashes: of its pages, 32 bytes each, once it is not PREPARING any more.
        blocks: as given.
    """

    def __init__(
        self,
        job: int,
        tracked: Tracked,
        pages: int,
        blocks: list[int],
        *,
        cache: ConnectedCache,
        tasks: Tasks,
        deadline: float,
        ready: Callable[[], None],
    ) -> None:
        self.job = job
        self.tracked = tracked
        self.pages = pages
        self.reason = ""
        self.hashes = b""
        self.stage = Stage.PREPARING
        self.blocks = blocks
        self._first = 0
        self._ticket = b""
        self._cache = cache
        self._tasks = tasks
        self._deadline = deadline
        self._ready = ready
        self._lock = threading.Lock()
        self._lease: ConnectedRequest | None = None
        tokens, scope = tracked.tokens(pages * cache.page_size), tracked.scope
        if scope is None or not tasks.begin(lambda: self._prepare(tokens, scope)):
            self.reason = "" if scope is None else "busy"
            self.stage = Stage.OVER

    def _prepare(self, tokens: Tokens, scope: Scope) -> None:
        lease = None
        try:
            lease = self._cache.request(tokens, deadline=self._deadline, logits=False, **scope.arguments())
            self.hashes = lease.page_hashes
            self._reserve(lease)
        except OutOfSlots:
            self.reason = "host pool full"
        except HicacheError as error:
            self.reason = type(error).__name__
            raise
        finally:
            self._prepared(lease)

    def _reserve(self, lease: ConnectedRequest) -> None:
        if lease.bypassed:
            self.reason = "no service"
            return
        fresh = lease.allocate()
        ticket = lease.ticket()
        if lease.lost is not None or ticket is None:
            self.reason = "lease lost"
        elif len(fresh):
            self._first = self.pages - len(fresh)
            self._ticket = ticket.encode()

    def _prepared(self, lease: ConnectedRequest | None) -> None:
        with self._lock:
            wanted = self.stage is Stage.PREPARING and bool(self._ticket)
            if wanted:
                self._lease = lease
            self.stage = Stage.READY if wanted else Stage.OVER
        if not wanted and lease is not None:
            lease.close(aborted=bool(self.reason))
        self._ready()

    def send(self, plan: StepPlan) -> None:
        """The workers get it with this step."""
        per_page = len(self.blocks) // self.pages
        blocks = self.blocks[self._first * per_page :]
        self.stage = Stage.SENT
        plan.stores.append(Store(self.job, self.tracked.id, self._ticket, self._first, self.pages, blocks))

    def end(self, *, aborted: bool) -> None:
        """Nothing more is done with it; its lease goes back in the background. Idempotent."""
        with self._lock:
            self.stage = Stage.OVER
            lease, self._lease = self._lease, None
        if lease is not None and not self._tasks.begin(lambda: _close(lease, aborted)):
            del lease  # collected: released without a wait


def _close(lease: ConnectedRequest, aborted: bool) -> None:
    lease.close(aborted=aborted)


class Early:
    """The store of pages by the step that completes them: with the workers from its first moment on.

    Args:
        job: its number.
        tracked: the request.
        ahead: has its slots.
        pages: whole pages of the request behind the step.
        blocks: the engine's numbers of all of its blocks.
        per_page: blocks a page.

    Attributes:
        stage, reason, hashes, blocks: see `Saving`.
        pages: leading pages that are to be there.
    """

    stage = Stage.SENT
    reason = ""

    def __init__(
        self, job: int, tracked: Tracked, ahead: Ahead, pages: int, blocks: list[int], *, per_page: int
    ) -> None:
        self.job = job
        self.tracked = tracked
        self._ahead = ahead
        self._lacks: int | None = None
        self._first, self.pages, self._ticket = ahead.take(job, pages)
        self.hashes = ahead.lookup.hashes[: HASH_BYTES * self.pages]
        self.blocks = blocks[self._first * per_page : self.pages * per_page]

    def send(self, plan: StepPlan) -> None:
        """The workers get it with this step."""
        plan.stores.append(
            Store(self.job, self.tracked.id, self._ticket, self._first, self.pages, self.blocks, early=True)
        )

    def lacks(self, page: int) -> None:
        """A worker has not stored the pages from this index on."""
        self._lacks = page if self._lacks is None else min(self._lacks, page)

    def end(self, *, aborted: bool) -> None:
        """It is over. What it lacks is stored as any other pages are, by a later step."""
        del aborted
        if self._lacks is not None:
            self.tracked.planned = min(self.tracked.planned, self._lacks)
            self._ahead.drop()
        self._ahead.ended(self.job)
