"""What an unlimited cache hits, over time and by page size, and when pages are used again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from hicache.analytics.analysis.columns import Columns, Floats, Ints, Mask
from hicache.analytics.analysis.distances import Uses
from hicache.analytics.result import rate

PAGE_SIZES: Final = (16, 32, 64, 128, 256, 512)
KEEP_SECONDS: Final = (1, 10, 60, 300, 900, 1800, 3600, 4 * 3600, 24 * 3600)


@dataclass(frozen=True, slots=True)
class PageSizeEffect:
    """What pages of so many tokens can reuse of what the trace tells to be the same.

    Attributes:
        page_size: tokens.
        tokens_reused: tokens of whole pages in the longest known prefix of each prompt.
        hit_rate_tokens: tokens_reused / all prompt tokens.
        lost_share: of the tokens that pages of one token would reuse.
        tokens_reused_before_last: the same where a prompt's last token is computed in any case, as engines need it.
    """

    page_size: int
    tokens_reused: int
    hit_rate_tokens: float
    lost_share: float
    tokens_reused_before_last: int


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a cache hits that keeps each page for so long after its last use, and how large it is then.

    Attributes:
        seconds: how long.
        hit_rate_pages: pages hit / pages asked.
        mean_pages: pages that it holds, on average over the trace's time: the working set of that window.
    """

    seconds: float
    hit_rate_pages: float
    mean_pages: float


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the trace's time.

    Attributes:
        begin, end: seconds.
        requests: in it.
        pages_asked: by them.
        pages_different: different pages asked: the working set of this span.
        pages_new: pages asked that no earlier request had asked for.
        ideal_hit_rate_pages: of an unlimited cache that has seen all before, pages hit / pages asked.
    """

    begin: float
    end: float
    requests: int
    pages_asked: int
    pages_different: int
    pages_new: int
    ideal_hit_rate_pages: float


def page_sizes(columns: Columns, covered: Ints, sizes: tuple[int, ...]) -> list[PageSizeEffect]:
    """The effect of page sizes.

    Args:
        columns: the trace.
        covered: tokens of each request's longest known prefix.
        sizes: in tokens.
    """
    tokens, finest = int(columns.input_tokens.sum()), int(covered.sum())
    before_last = np.minimum(covered, np.maximum(columns.input_tokens - 1, 0))
    found = []
    for size in sizes:
        reused = int((covered // size * size).sum())
        found.append(
            PageSizeEffect(
                size,
                reused,
                rate(reused, tokens),
                rate(finest - reused, finest),
                int((before_last // size * size).sum()),
            )
        )
    return found


def reuse_seconds(columns: Columns, uses: Uses) -> Floats:
    """Of each reference that was used before, the seconds since then, in the trace's order."""
    again = uses.last >= 0
    at: Floats = np.empty(columns.references)
    at[uses.place] = columns.time[columns.owner]
    return np.maximum(columns.time[columns.owner[again]] - at[uses.last[again]], 0.0)


def keeping(columns: Columns, seconds: Floats) -> list[Keeping]:
    """The effect of keeping pages for a time; `seconds` is what `reuse_seconds` gives."""
    begin, end = time_range(columns)
    duration = end - begin
    if duration <= 0:
        return []
    last = np.zeros(columns.pages)
    np.maximum.at(last, columns.page, columns.time[columns.owner])
    found = []
    for wait in (wait for wait in KEEP_SECONDS if wait < 2 * duration):
        held = np.minimum(seconds, wait).sum() + np.minimum(end - last, wait).sum()
        hits = int((seconds <= wait).sum())
        found.append(Keeping(float(wait), rate(hits, columns.references), rate(float(held), duration)))
    return found


def spans(columns: Columns, hit: Mask, count: int) -> list[Span]:
    """The trace's time in so many equal parts."""
    begin, end = time_range(columns)
    if not columns.requests:
        return []
    count = count if end > begin else 1
    width = (end - begin) / count
    part = np.minimum(((columns.time - begin) / (width or 1.0)).astype(np.int64), count - 1)
    of_page = part[columns.owner]
    # Sorted, as np.unique without an inverse hashes, which takes ten times as long for numbers that are dense.
    both = np.sort(of_page * max(columns.pages, 1) + columns.page)
    different = both[np.diff(both, prepend=-1) > 0] // max(columns.pages, 1)
    requests, asked, new, kinds = (
        np.bincount(values, minlength=count) for values in (part, of_page, of_page[~hit], different)
    )
    return [
        Span(
            begin + number * width,
            begin + (number + 1) * width,
            int(requests[number]),
            int(asked[number]),
            int(kinds[number]),
            int(new[number]),
            rate(int(asked[number] - new[number]), int(asked[number])),
        )
        for number in range(count)
    ]


def time_range(columns: Columns) -> tuple[float, float]:
    """The first and the last time; both 0 without requests."""
    if not columns.requests:
        return 0.0, 0.0
    return float(columns.time.min()), float(columns.time.max())
