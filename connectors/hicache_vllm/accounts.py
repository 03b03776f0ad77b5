"""Where each token of an admitted request came from, and why it did not come from the cache: sums always reconcile.

    asked = local + hit + missed

`asked` are a request's tokens when the engine takes it up, again after a preemption, as vLLM counts them too. `local`
are those in the engine's own blocks, `hit` those that the cache has really brought, `missed` all others, each by one
reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from hicache.core.reasons import RequestCounts
from hicache.records import MissReason
from hicache_vllm.counters import Counters

__all__ = ["Account", "Missed"]


class Missed(StrEnum):
    """Why tokens did not come, where this side knows; else a `MissReason` of the service."""

    AWAY = "away"  # the service was not connected
    BUSY = "busy"  # the service, or what talks to it, had too much to do
    LATE = "late"  # no answer within the deadline
    FAILED = "failed"  # the question, or a load of this request before, has failed
    LOST = "lost"  # found, and gone before it was here
    AUDITED = "audited"  # found, and computed all the same, to compare
    BYPASSED = "bypassed"  # the request does not take part: embeddings, an adapter that cannot be read, its own wish
    OFF = "off"  # the connector runs without a cache, or does not read
    UNALIGNED_TAIL = "unaligned_tail"  # behind the last whole page that a request may take
    UNTOLD = "untold"  # the service has ended before it said why


_ORDER: Final = (
    MissReason.FAILED,
    MissReason.LATE,
    MissReason.OVER_BUDGET,
    MissReason.BYPASSED,
    MissReason.EVICTED,
    MissReason.EXPIRED,
    MissReason.OTHER_NAMESPACE,
    MissReason.COLD,
)
"""Of missed pages, those that come first in a prompt: the service tells how many, not which."""


class Account:
    """One request, taken up once. Filled by the scheduler's thread, closed once, by any.

    Args:
        counters: get it when it is closed.
        page: tokens a page.
        asked: tokens of the request.
        local: of them in the engine's blocks.

    Attributes:
        reason: why nothing was asked or found at all; None where the service tells.
        found: leading pages that the service had.
        planned: tokens that a load is to bring, by tier, in the order in which they lie in the prompt.
        gone: of them those that did not come.
        audited: tokens of a page that is computed all the same.
    """

    def __init__(self, counters: Counters, *, page: int, asked: int, local: int) -> None:
        self.reason: Missed | None = None
        self.found = 0
        self.planned: dict[str, int] = {}
        self.gone = 0
        self.audited = 0
        self._counters = counters
        self._page = page
        self._asked = asked
        self._local = min(local, asked)
        self._closed = False

    def close(self, counts: RequestCounts | None = None) -> None:
        """Count it. Idempotent.

        Args:
            counts: what the service says of its pages; None where it was not asked or does not answer.
        """
        if self._closed:
            return
        self._closed = True
        missed: Counter[str] = Counter()
        usable = max(self._asked - 1, 0) // self._page * self._page
        missed[Missed.UNALIGNED_TAIL] = self._asked - max(usable, self._local)
        planned = sum(self.planned.values())
        missed[Missed.LOST] = min(self.gone, planned)
        missed[Missed.AUDITED] = self.audited
        rest = max(usable - self._local, 0) - planned - self.audited
        if self.reason is not None:
            missed[self.reason] += rest
        else:
            missed.update(self._by_reason(rest, {} if counts is None else counts.missed))
        self._counters.add_all(
            {"asked_tokens": self._asked, "local_tokens": self._local}
            | {f"hit_tokens/{tier}": count for tier, count in self._came(planned - missed[Missed.LOST]).items()}
            | {f"missed_tokens/{reason}": count for reason, count in missed.items()}
        )

    def _came(self, left: int) -> dict[str, int]:
        """Tokens that came, by tier: what does not come is at the end."""
        found = {}
        for tier, count in self.planned.items():
            found[tier] = min(count, left)
            left -= found[tier]
        return found

    def _by_reason(self, rest: int, pages: Mapping[MissReason, int]) -> Counter[str]:
        """Tokens by reason of the service, for pages that the engine does not have itself."""
        missed: Counter[str] = Counter()
        covered = max(self._local - self.found * self._page, 0)
        for reason in _ORDER:
            tokens = pages.get(reason, 0) * self._page
            own = min(covered, tokens)
            covered -= own
            taken = min(tokens - own, rest)
            missed[reason.value] += taken
            rest -= taken
        missed[Missed.UNTOLD] += rest
        return missed
