"""A page of a hit that the engine computes all the same, so that both can be compared (shadow audit)."""

from __future__ import annotations

from hicache_vllm.lookups import Lookup
from hicache_vllm.plans import Audit, StepPlan
from hicache_vllm.requests import Tracked
from hicache_vllm.saving import Stage

__all__ = ["Auditing"]


class Auditing:
    """One such page. Used on the scheduler's thread only.

    Attributes:
        job: its number. tracked: the request. pages: 1.
        stage: READY with the step behind the one that computes the page.
        reason: why it is not compared, or "".
        hashes: none, see `Saving`.
        blocks: the engine's numbers of its blocks.
    """

    pages = 1
    hashes = b""

    def __init__(self, job: int, tracked: Tracked, page: int, blocks: list[int], lookup: Lookup) -> None:
        self.job = job
        self.tracked = tracked
        self.stage = Stage.READY
        self.reason = ""
        self._page = page
        self.blocks = blocks
        self._lookup = lookup

    def send(self, plan: StepPlan) -> None:
        """The workers get it with this step."""
        ticket = self._lookup.ticket()
        if ticket is None:
            self.stage, self.reason = Stage.OVER, "audited page lost"
            return
        self.stage = Stage.SENT
        plan.audits.append(Audit(self.job, self.tracked.id, ticket, self._page, self.blocks))

    def end(self, *, aborted: bool) -> None:
        """Give the lease back."""
        self.stage = Stage.OVER
        self._lookup.close(aborted=aborted)
