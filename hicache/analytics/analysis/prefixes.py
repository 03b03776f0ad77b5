"""The tree of all prompts of a trace: which prefixes are shared, by how many, and how deep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hicache.analytics.analysis.columns import ROOT, Columns, Ints, Mask
from hicache.analytics.result import rate


@dataclass(frozen=True, slots=True)
class Prefix:
    """A run of pages without a branch, that whoever comes to it goes through.

    Attributes:
        request: number of the first request that asked for it, from 1.
        first_page: pages before it.
        pages: its pages.
        tokens: prompt tokens up to its end, at the first request.
        sharers: requests that asked for it.
        pages_reused: pages of it that an unlimited cache would have hit, over all requests.
        share_of_hits: of all pages that an unlimited cache would have hit.
        first_seen, last_seen: seconds of the trace.
    """

    request: int
    first_page: int
    pages: int
    tokens: int
    sharers: int
    pages_reused: int
    share_of_hits: float
    first_seen: float
    last_seen: float


@dataclass(frozen=True, slots=True)
class TreeSummary:
    """The tree in numbers.

    Attributes:
        pages: different pages.
        roots: different first pages.
        leaves: pages behind which no prompt goes on.
        branches: pages behind which prompts go on in more than one way.
        runs: runs of pages without a branch, as a cache keeps them in nodes.
        deepest: pages of the longest prompt.
        one_hit_pages: pages that were asked for once.
        one_hit_share: one_hit_pages / pages.
        one_hit_share_of_asked: one_hit_pages / all pages asked.
        pages_by_sharers: pairs of a number of requests and the pages that at least so many asked for.
        hottest: prefixes by pages_reused.
    """

    pages: int
    roots: int
    leaves: int
    branches: int
    runs: int
    deepest: int
    one_hit_pages: int
    one_hit_share: float
    one_hit_share_of_asked: float
    pages_by_sharers: tuple[tuple[int, int], ...]
    hottest: tuple[Prefix, ...]


def summarise(columns: Columns, hit: Mask, *, top: int) -> TreeSummary:
    """The tree of a trace.

    Args:
        columns: the trace.
        hit: references that an unlimited cache would hit.
        top: so many of the hottest prefixes.
    """
    pages = columns.pages
    sharers = np.bincount(columns.page, minlength=pages)
    inner = columns.parent != ROOT
    children = np.bincount(columns.parent[inner], minlength=pages)
    head = _heads(columns.parent, sharers)
    once = int((sharers == 1).sum())
    steps = [1 << bit for bit in range(1, max(int(sharers.max(initial=0)), 1).bit_length())]
    return TreeSummary(
        pages=pages,
        roots=int((~inner).sum()),
        leaves=int((children == 0).sum()),
        branches=int((children > 1).sum()),
        runs=int((head == np.arange(pages)).sum()),
        deepest=int(columns.depth.max(initial=-1)) + 1,
        one_hit_pages=once,
        one_hit_share=rate(once, pages),
        one_hit_share_of_asked=rate(once, columns.references),
        pages_by_sharers=tuple((least, int((sharers >= least).sum())) for least in steps),
        hottest=tuple(_hottest(columns, hit, head, sharers, top)),
    )


def _heads(parent: Ints, sharers: Ints) -> Ints:
    """Of each page, the first page of its run: all requests that ask for the one ask for the other."""
    own = np.arange(len(parent))
    goes_on = parent != ROOT
    goes_on[goes_on] = sharers[parent[goes_on]] == sharers[goes_on]
    head = np.where(goes_on, parent, own)
    while True:  # each step goes twice as far up
        further = head[head]
        if np.array_equal(further, head):
            return head
        head = further


def _hottest(columns: Columns, hit: Mask, head: Ints, sharers: Ints, top: int) -> list[Prefix]:
    lengths = np.bincount(head, minlength=columns.pages)
    reused = lengths * (sharers - 1) * (head == np.arange(columns.pages))
    order = np.lexsort((np.arange(columns.pages), -reused))[:top]
    order = order[reused[order] > 0]
    first, last = _seen(columns, order)
    hits = int(hit.sum())
    found = []
    for page, begin, end in zip(order.tolist(), first.tolist(), last.tolist(), strict=True):
        depth, length = int(columns.depth[page]), int(lengths[page])
        unit, tokens = int(columns.unit[begin]), int(columns.input_tokens[begin])
        found.append(
            Prefix(
                request=begin + 1,
                first_page=depth,
                pages=length,
                tokens=min((depth + length) * unit, tokens),
                sharers=int(sharers[page]),
                pages_reused=int(reused[page]),
                share_of_hits=rate(int(reused[page]), hits),
                first_seen=float(columns.time[begin]),
                last_seen=float(columns.time[end]),
            )
        )
    return found


def _seen(columns: Columns, pages: Ints) -> tuple[Ints, Ints]:
    """The first and the last request of pages."""
    first = np.zeros(columns.pages, np.int64)
    last = np.zeros(columns.pages, np.int64)
    last[columns.page] = columns.owner
    first[columns.page[::-1]] = columns.owner[::-1]
    return first[pages], last[pages]
