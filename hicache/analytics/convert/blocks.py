"""Ids of blocks of one size as ids of blocks of another, numbered anew from 0."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from hicache.analytics.trace import TraceRequest
from hicache.errors import TraceError


class Blocks:
    """Gives each request's blocks numbers. Holds 100 to 200 bytes for each that is different.

    Attributes:
        unit: tokens a block of what comes out; 0 for the trace's own, which may differ between requests.
        units: of all that was written.
        tails: how many requests have last blocks with ids that nobody else has, as the trace has none for them.
        joined: whether blocks were put together.
    """

    def __init__(self, unit: int, *, partial: bool, chained: bool) -> None:
        """Prepare.

        Args:
            unit: tokens a block, 0 for the trace's own.
            partial: whether each last, partial block must have an id; else it has one where the trace has it.
            chained: whether an id stands for a block and everything before it, so that the same block behind another
                past needs another id.
        """
        self.unit = unit
        self.units: set[int] = set()
        self.tails = 0
        self.joined = False
        self._partial = partial
        self._chained = chained
        self._known: dict[Hashable, int] = {}
        self._next = 0

    def unit_of(self, request: TraceRequest) -> int:
        """Tokens of a block of this request.

        Raises:
            TraceError: the trace's blocks do not go into those of the target, nor they into them.
        """
        unit = self.unit or request.unit
        if unit % request.unit and request.unit % unit:
            raise TraceError(
                f"blocks of {request.unit} tokens cannot be made into blocks of {unit}: choose a divisor or a multiple "
                "with --to-unit"
            )
        return unit

    def ids(self, request: TraceRequest) -> list[int]:
        """Numbers of its blocks.

        Raises:
            TraceError: as `unit_of`.
        """
        unit = self.unit_of(request)
        self.units.add(unit)
        parts = max(1, request.unit // unit)
        names: Iterator[Hashable] = iter(request.ids.tolist())
        if unit > request.unit:
            names = self._together(request, unit)
        ids = self._numbers(names, parts)
        if parts > 1:
            ids = [number + part for number in ids for part in range(parts)][: -(-request.known_tokens // unit)]
        lacks = -(-request.input_tokens // unit) if self._partial else request.input_tokens // unit
        lacks -= len(ids)
        if lacks > 0:
            ids += range(self._next, self._next + lacks)
            self._next += lacks
            self.tails += 1
        return ids

    def _numbers(self, names: Iterator[Hashable], parts: int) -> list[int]:
        """A number of each name, with as many behind it that are nobody else's as it has parts."""
        known, chained = self._known, self._chained
        numbers = []
        before = -1
        for name in names:
            key: Hashable = (before, name) if chained else name
            number = known.get(key)
            if number is None:
                number = known[key] = self._next
                self._next += parts
            numbers.append(number)
            before = number
        return numbers

    def _together(self, request: TraceRequest, unit: int) -> Iterator[Hashable]:
        """Names of blocks that have several of the request's in them."""
        self.joined = True
        data = request.ids.tobytes()
        step = unit // request.unit * request.ids.itemsize
        whole = request.known_tokens // unit
        yield from ((0, data[place * step : (place + 1) * step]) for place in range(whole))
        rest = data[whole * step :]
        if rest and request.known_tokens == request.input_tokens:
            # A partial block with all of its tokens known: its length is part of what it is.
            yield request.input_tokens % unit, rest
