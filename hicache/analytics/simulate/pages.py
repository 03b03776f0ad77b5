"""Prompts of a trace as the core takes them, at any page size that goes with the trace's."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from hicache.analytics.analysis.columns import ROOT, Columns, Ints
from hicache.errors import ConfigError

WIDTH: Final = 4  # bytes of a number that names a page
_MOST: Final = 2**32


class PromptPages:
    """Cuts a trace into pages. Each is named by one number, or by several where it is larger than the trace's.

    Attributes:
        width: bytes of a page's symbol.
        step: real tokens of a whole page.
        counts: of each request, its whole pages; shape (requests,).
    """

    def __init__(self, columns: Columns, page_size: int | None) -> None:
        """Prepare.

        Raises:
            ConfigError: the page size does not go with the trace's blocks.
        """
        self._columns = columns
        self._page_size = page_size
        units = np.unique(columns.unit)
        unit = int(units[0]) if len(units) else 1
        if len(units) > 1:
            raise ConfigError(
                f"the traces have blocks of {', '.join(map(str, units))} tokens: simulate those of one size at a time"
            )
        known = np.minimum(columns.input_tokens, columns.length * unit)
        self._split, self._join = 1, 1
        if page_size is None:
            self.step, self.counts = unit, columns.length
        else:
            if unit % page_size and page_size % unit:
                raise ConfigError(
                    f"--page-size {page_size} does not divide the trace's blocks of {unit} tokens, nor they it: use "
                    f"--page-size trace, or one that does"
                )
            self.step, self.counts = page_size, known // page_size
            self._split, self._join = max(1, unit // page_size), max(1, page_size // unit)
        if columns.pages * self._split >= _MOST:
            raise ConfigError(f"--page-size {page_size}: more than {_MOST} different pages; use a larger size")
        self.width = WIDTH * self._join
        self._start: list[int] = columns.start.tolist()
        self._counts: list[int] = self.counts.tolist()
        self._names = columns.page.astype("<u4")
        self._parts = np.arange(self._split, dtype="<u4")

    def symbols(self, request: int) -> bytes:
        """A request's whole pages, as the core compares them."""
        names = self._names[self._start[request] : self._start[request + 1]]
        if self._split > 1:
            names = np.add.outer(names * np.uint32(self._split), self._parts).reshape(-1)
        return names[: self._counts[request] * self._join].tobytes()

    def covered(self, pages: Ints) -> Ints:
        """Real tokens that so many leading pages of each request stand for; shape (requests,)."""
        if self._page_size is None:
            return self._columns.covered(pages)
        return pages * self._page_size

    def cut(self) -> Columns:
        """The trace in these pages, so that what is told of traces is told of what is simulated."""
        if self._page_size is None:
            return self._columns
        columns, counts = self._columns, self.counts
        start: Ints = np.concatenate(([0], np.cumsum(counts)))
        owner = np.repeat(np.arange(columns.requests), counts)
        index = np.arange(len(owner)) - start[owner]
        # A page of several blocks is named by its last one, which stands for all before it.
        block = columns.start[owner] + index // self._split * self._join + self._join - 1
        names, page = np.unique(columns.page[block] * self._split + index % self._split, return_inverse=True)
        depth, parent = np.empty(len(names), np.int64), np.full(len(names), ROOT)
        depth[page] = index
        parent[page[index > 0]] = page[np.flatnonzero(index > 0) - 1]
        return replace(
            columns,
            unit=np.full(columns.requests, self.step),
            start=start,
            page=page,
            owner=owner,
            parent=parent,
            depth=depth,
        )
