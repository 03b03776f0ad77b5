"""The words of an explanation: what a reason means, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hicache.analytics.analysis.knee import WORTH_DOUBLING
from hicache.analytics.analysis.larger import by_estimates
from hicache.analytics.explain.records import Cause, Other
from hicache.records import MissReason

if TYPE_CHECKING:
    from hicache.core.whatif import WhatIfStatistics

__all__ = ["larger_tiers", "page_tail", "words_of"]

_WORDS = {
    MissReason.COLD: "never seen here, or so long ago that nobody remembers",
    MissReason.EVICTED: "evicted, to make room for others: a larger tier or a store below it would have kept it",
    MissReason.EXPIRED: "gone with a clear of its namespace",
    MissReason.FAILED: "withdrawn, as its stored copy was damaged or could not be read; the next commit stores it anew",
}


def words_of(reason: MissReason, *, others: Sequence[Other] = (), differs_at: int | None = None) -> str:
    """A reason in words.

    Args:
        reason: of the miss.
        others: namespaces that have the prompt, nearest first.
        differs_at: index of the first token in which the prompt differs from one that is here; None: not known.
    """
    if reason is MissReason.OTHER_NAMESPACE:
        return "known under another namespace, which differs in " + "; ".join(
            f"{each.field}: asked {each.asked}, there {each.found}" for each in others[0].differs
        )
    if reason is MissReason.COLD and differs_at is not None:
        return (
            f"new from token {differs_at:,} on: a prompt that is here has the same {differs_at:,} tokens in front, and "
            "goes on differently"
        )
    return _WORDS[reason]


def larger_tiers(what_if: Sequence[WhatIfStatistics], page_bytes: int) -> Iterator[str]:
    """What larger tiers would hit, of those that would hit a point more than they do, for prompts that were evicted.

    Args:
        what_if: what a service estimates of its tiers, of all requests since its start.
        page_bytes: of a page.
    """
    for ghost in what_if:
        found = by_estimates(ghost.points)
        if found is not None and found.gain >= WORTH_DOUBLING:
            yield f"a larger {ghost.tier} would evict less: {found.told(page_bytes)} since the start"


def page_tail(tokens: int, page_size: int) -> Iterator[Cause]:
    """The tokens behind the last whole page, if there are any."""
    pages, tail = divmod(tokens, page_size)
    if tail:
        text = f"behind the last whole page of {page_size} tokens: only whole pages are kept, so these are computed"
        yield Cause(pages, pages, tail, MissReason.UNALIGNED_TAIL, text)
