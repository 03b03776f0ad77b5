"""Stack distances: how many other pages a cache must hold so that a page is still there when it is asked for again.

The order is that of the cache's own LRU. A prompt's pages are used together, from the last to the first: what is held
is closed under prefixes, and leaves go first. So of two pages that were used by the same prompt last, the one nearer to
the prompt's begin is the newer one. A request looks for all its pages before it changes anything, so a page's distance
is its place in the stack when the request comes. An LRU cache of C pages hits exactly the pages of a distance below C
(R. L. Mattson and others, "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.analytics.analysis.columns import Columns, Ints

NEVER: Final = -1
"""In place of an earlier use, where there is none."""


class Uses:
    """When pages are used, and used again.

    A use's place is a number that grows with time; in a request the last page comes first.

    Attributes:
        place: of each reference of the trace.
        last: of each reference, the place of the page's use before; `NEVER` at the first.
        begin: of each reference, the first place of its request.
    """

    __slots__ = ("begin", "last", "place")

    def __init__(self, columns: Columns) -> None:
        self.begin = columns.start[columns.owner]
        self.place = self.begin + columns.start[columns.owner + 1] - 1 - np.arange(columns.references)
        order = np.lexsort((self.place, columns.page))
        page, place = columns.page[order], self.place[order]
        last = np.full(columns.references, NEVER, np.int64)
        last[1:][page[1:] == page[:-1]] = place[:-1][page[1:] == page[:-1]]
        self.last = np.empty_like(last)
        self.last[order] = last

    def next(self, chosen: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """Of some references, in the order of their places: the places, and where the same page is used next.

        The choice must be of whole pages: all references of a page, or none.
        """
        places = np.full(len(self.place), len(self.place), np.int64)
        again = chosen & (self.last >= 0)
        places[self.last[again]] = self.place[again]
        own = np.sort(self.place[chosen])
        return own, places[own]


def stack_distances(uses: Uses, wanted: npt.NDArray[np.bool_], counted: npt.NDArray[np.bool_]) -> Ints:
    """For references, how many different pages were used between the page's use before and the request.

    Args:
        uses: of the trace.
        wanted: references to answer for; each must have a use before.
        counted: references whose pages count; whole pages, see `Uses.next`.

    Returns:
        One number for each wanted reference, in the trace's order.
    """
    own, following = uses.next(counted)
    after, before = uses.last[wanted], uses.begin[wanted]
    # A page that was used in between is counted at its last use there: one that is followed by none before the request.
    behind = np.searchsorted(own, after, side="right")
    upto = np.searchsorted(own, before, side="left")
    return (upto - behind) - (smaller_before(following, upto, before) - smaller_before(following, behind, before))


def smaller_before(values: Ints, ends: Ints, limits: Ints) -> Ints:
    """For each query, how many of `values[:end]` are below `limit`. O((values + queries) log values) without a loop.

    The bits of a wavelet matrix (F. Claude and G. Navarro, "The wavelet matrix", SPIRE 2012), level after level, with
    all queries carried along, so that only one level is held.

    Args:
        values: not negative, shape (n,).
        ends: 0 to n, shape (queries,).
        limits: not negative, shape (queries,).
    """
    found = np.zeros(len(ends), np.int64)
    if not len(values) or not len(ends):
        return found
    bits = int(values.max()).bit_length()
    above = limits >= 1 << bits
    found[above] = ends[above]
    first, end = np.zeros(len(ends), np.int64), ends.astype(np.int64)
    end[above] = 0
    for bit in range(bits - 1, -1, -1):
        ones = values >> bit & 1 == 1
        zeros = np.concatenate(([0], np.cumsum(~ones)))
        zeros_first, zeros_end = zeros[first], zeros[end]
        one = limits >> bit & 1 == 1
        found += np.where(one, zeros_end - zeros_first, 0)
        first = np.where(one, zeros[-1] + first - zeros_first, zeros_first)
        end = np.where(one, zeros[-1] + end - zeros_end, zeros_end)
        values = np.concatenate((values[~ones], values[ones]))
    return found
