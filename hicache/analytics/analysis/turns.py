"""Sessions and turns: which request goes on where which other one ended.

Traces seldom say so. A request is taken to be the next turn of the latest earlier one whose whole pages its own prompt
begins with; of several the one with the most pages. Pages from which prompts go on in more than `COMMON_BRANCHES` ways
are taken to be a head that all have, such as a system prompt: who ends there is nobody's turn before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from hicache.analytics.analysis.columns import ROOT, Columns, Floats, Ints
from hicache.analytics.analysis.spread import Spread, spread
from hicache.analytics.result import rate

NONE: Final = -1
COMMON_BRANCHES: Final = 8
"""Answers that are asked for anew, and turns that fork, make fewer."""


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """Sessions in numbers.

    Attributes:
        sessions: requests that go on nowhere.
        turns: how many requests a session has.
        requests_in_later_turns: requests that are not the first of their session.
        share_of_requests: requests_in_later_turns / requests.
        pauses: seconds from a request to the next turn's.
        new_tokens: prompt tokens of a next turn behind its longest known prefix.
        branching: requests that more than one request goes on from.
    """

    sessions: int
    turns: Spread
    requests_in_later_turns: int
    share_of_requests: float
    pauses: Spread
    new_tokens: Spread
    branching: int


def sessions_of(columns: Columns, covered: Ints) -> tuple[SessionSummary, Ints]:
    """Find them.

    Args:
        columns: the trace.
        covered: tokens of each request that were known before.

    Returns:
        The summary, and of each request the number of its session, dense from 0.
    """
    before = predecessors(columns)
    later = before != NONE
    session = _sessions(before)
    turns = np.bincount(session)
    pauses: Floats = columns.time[later] - columns.time[before[later]]
    summary = SessionSummary(
        sessions=int((~later).sum()),
        turns=spread(turns),
        requests_in_later_turns=int(later.sum()),
        share_of_requests=rate(int(later.sum()), columns.requests),
        pauses=spread(np.maximum(pauses, 0.0)),
        new_tokens=spread((columns.input_tokens - covered)[later]),
        branching=int((np.bincount(before[later], minlength=1) > 1).sum()),
    )
    return summary, session


def predecessors(columns: Columns) -> Ints:
    """Of each request, the one that it goes on from, or `NONE`."""
    none = np.full(columns.requests, NONE, np.int64)
    whole = np.minimum(columns.length, columns.input_tokens // np.maximum(columns.unit, 1))
    children = np.bincount(columns.parent[columns.parent != ROOT], minlength=columns.pages)
    ends = np.flatnonzero(whole > 0)
    end_page = columns.page[columns.start[ends] + whole[ends] - 1]
    own = children[end_page] <= COMMON_BRANCHES
    ends, end_page = ends[own], end_page[own]
    if not len(ends):
        return none
    first_end = np.full(columns.pages, columns.requests, np.int64)
    np.minimum.at(first_end, end_page, ends)
    known = first_end[columns.page] < columns.owner
    deepest = np.full(columns.requests, ROOT, np.int64)
    np.maximum.at(deepest, columns.owner[known], columns.index[known])
    later = np.flatnonzero(deepest != ROOT)
    pages = columns.page[columns.start[later] + deepest[later]]
    # Of all requests that end at that page, the latest before this one.
    keys = np.sort(end_page * columns.requests + ends)
    none[later] = keys[np.searchsorted(keys, pages * columns.requests + later) - 1] % columns.requests
    return none


def _sessions(before: Ints) -> Ints:
    session = np.where(before == NONE, np.arange(len(before)), before)
    while True:  # each step goes twice as far back
        further = session[session]
        if np.array_equal(further, session):
            break
        session = further
    numbered: Ints = np.unique(session, return_inverse=True)[1].astype(np.int64)
    return numbered
