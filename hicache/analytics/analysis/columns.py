"""A whole trace as arrays, so that millions of requests are analysed without a loop over them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.analytics.trace import TraceRequest
from hicache.errors import ConfigError, TraceError
from hicache.memory.limits import check_memory

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

BYTES_A_REFERENCE: Final = 200
"""Of all arrays that an analysis holds at its peak, measured; asked of the memory before a trace grows too large."""

_LOOK_EVERY: Final = 1 << 16  # requests between looks at the memory

ROOT: Final = -1
"""The parent of pages that begin prompts."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """All requests of a trace, in its order. Every page that was ever asked for is a number, dense from 0.

    A page is one id of the trace and everything before it, so the same id behind another past is another page.

    Attributes:
        time: seconds, shape (requests,).
        input_tokens, output_tokens: shape (requests,).
        unit: tokens a page of the request, shape (requests,).
        start: where each request's pages begin in `page`, shape (requests + 1,); the last is the number of them all.
        page: the pages asked for, request after request, each from the prompt's begin on; shape (references,).
        owner: the request of each of them, shape (references,).
        parent: of each page, the page before it or `ROOT`; shape (pages,).
        depth: of each page, how many pages are before it; shape (pages,).
    """

    time: Floats
    input_tokens: Ints
    output_tokens: Ints
    unit: Ints
    start: Ints
    page: Ints
    owner: Ints
    parent: Ints
    depth: Ints

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return len(self.time)

    @property
    def references(self) -> int:
        """How many pages were asked for."""
        return len(self.page)

    @property
    def pages(self) -> int:
        """How many different pages were asked for."""
        return len(self.parent)

    @property
    def index(self) -> Ints:
        """Of each reference, its place in its request: 0 for a prompt's first page."""
        return np.arange(self.references) - self.start[self.owner]

    @property
    def length(self) -> Ints:
        """Pages of each request."""
        return np.diff(self.start)

    def covered(self, pages: Ints) -> Ints:
        """Tokens that so many leading pages of each request stand for; shape (requests,)."""
        known: Ints = np.minimum(self.input_tokens, self.length * self.unit)
        covered: Ints = np.minimum(pages * self.unit, known)
        return covered

    @property
    def tokens(self) -> Ints:
        """Tokens that each reference stands for: the last page of a prompt may be partial."""
        unit = self.unit[self.owner]
        tokens: Ints = np.minimum(unit, self.input_tokens[self.owner] - self.index * unit)
        return tokens


def read_columns(requests: Iterable[TraceRequest], *, before: Callable[[], bool] | None = None) -> Columns:
    """Read a trace to its end.

    Args:
        requests: in the order in which they were asked.
        before: called before each request; False ends the reading.

    Raises:
        TraceError: a broken entry, or more than the memory holds.
    """
    times, inputs, outputs, units, counts = array("d"), array("q"), array("q"), array("q"), array("q")
    ids = array("I")
    for request in requests:
        if before is not None and not before():
            break
        times.append(request.time)
        inputs.append(request.input_tokens)
        outputs.append(request.output_tokens)
        units.append(request.unit)
        counts.append(len(request.ids))
        ids.frombytes(request.ids.tobytes())
        if len(times) % _LOOK_EVERY == 0:
            _check_room(len(ids))
    _check_room(len(ids))
    start = np.concatenate(([0], np.cumsum(_ints(counts))))
    page, parent, depth = _pages(np.frombuffer(ids, np.uint32) if ids else np.empty(0, np.uint32), start)
    return Columns(
        time=np.frombuffer(times, np.float64) if times else np.empty(0),
        input_tokens=_ints(inputs),
        output_tokens=_ints(outputs),
        unit=_ints(units),
        start=start,
        page=page,
        owner=np.repeat(np.arange(len(counts)), _ints(counts)),
        parent=parent,
        depth=depth,
    )


def _ints(values: array[int]) -> Ints:
    return np.frombuffer(values, np.int64) if values else np.empty(0, np.int64)


def _check_room(references: int) -> None:
    try:
        check_memory(references * BYTES_A_REFERENCE, f"an analysis of {references:,} pages asked")
    except ConfigError as error:
        raise TraceError(f"{error}; or analyse a part: --limit N") from None


def _pages(ids: npt.NDArray[np.uint32], start: Ints) -> tuple[Ints, Ints, Ints]:
    """Pages asked for, and of each page its parent and depth."""
    if not len(ids):
        return (np.empty(0, np.int64),) * 3
    names, page = np.unique(ids, return_inverse=True)
    index = np.arange(len(page)) - np.repeat(start[:-1], np.diff(start))
    before = np.where(index > 0, np.concatenate(([ROOT], page[:-1])), ROOT)
    parent = np.empty(len(names), np.int64)
    parent[page] = before
    if not np.array_equal(parent[page], before):
        # An id stands behind more than one past, as writers may do whose ids are of single blocks.
        page, parent = _chained(page, start)
    depth = np.empty(len(parent), np.int64)
    depth[page] = index
    return page, parent, depth


def _chained(ids: Ints, start: Ints) -> tuple[Ints, Ints]:
    """Pages named by their own id and the page before them."""
    known: dict[tuple[int, int], int] = {}
    pages: list[int] = []
    parents: list[int] = []
    for first, end in zip(start[:-1].tolist(), start[1:].tolist(), strict=True):
        page = ROOT
        for name in ids[first:end].tolist():
            key = (page, name)
            found = known.get(key)
            if found is None:
                found = known[key] = len(parents)
                parents.append(page)
            page = found
            pages.append(page)
    return np.array(pages, np.int64), np.array(parents, np.int64)
