"""Makes a trace's requests, in the order of their times, and counts what is known of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

from hicache.analytics.convert.files import new_file
from hicache.analytics.convert.targets import TARGETS
from hicache.analytics.synth.misses import Misses
from hicache.analytics.synth.segments import Known
from hicache.analytics.synth.workload import LONGEST, Ask, Session, Workload, World
from hicache.analytics.trace import Details, TraceRequest, pack_ids

FORMS: Final = ("mooncake", "bailian", "kv-cache-tester", "dynamo")
"""Formats in which requests keep their pages, so that what is known of them stays true."""

_Waiting: TypeAlias = tuple[float, int, str, Session, Ask]
"""When, a number that makes it unique, of which session, and what it asks."""


class Making:
    """A trace that is being made. Iterate once; holds what is shared and the sessions under way.

    Attributes:
        known: of the requests so far.
    """

    def __init__(self, workload: Workload, unit: int) -> None:
        """Prepare.

        Args:
            workload: what it is like.
            unit: tokens of a page.
        """
        self.known = Known(unit)
        self._workload = workload
        self._unit = unit
        self._world = World(workload, unit)
        self._numbers = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests."""
        world, left = self._world, self._workload.requests
        waiting: list[_Waiting] = []
        arrival = world.next_arrival(0.0)
        while left:
            while not waiting or arrival <= waiting[0][0]:
                self._go_on(waiting, arrival, self._new_name(), world.session())
                arrival = world.next_arrival(arrival)
            at, _, name, session, ask = heapq.heappop(waiting)
            prompt = ask.end.ask()
            self.known.add(prompt, ask.output)
            left -= 1
            yield TraceRequest(
                time=round(at, 3),
                ids=pack_ids(prompt.ids),
                unit=self._unit,
                input_tokens=prompt.tokens,
                output_tokens=ask.output,
                scope="",
                place=f"request {self._workload.requests - left}",
                details=Details(session=name, kind=ask.kind, turn=ask.turn),
            )
            for fork in ask.forks:
                self._go_on(waiting, at, self._new_name(), fork)
            if prompt.tokens < LONGEST:
                self._go_on(waiting, at, name, session)

    def _go_on(self, waiting: list[_Waiting], at: float, name: str, session: Session) -> None:
        ask = next(session, None)
        if ask is not None and ask.end.end <= LONGEST:
            self._numbers += 1
            heapq.heappush(waiting, (at + ask.wait, self._numbers, name, session, ask))

    def _new_name(self) -> str:
        self._numbers += 1
        return f"session-{self._numbers}"


def make(
    making: Making | Misses,
    form: str,
    out: Path,
    *,
    unit: int,
    stopped: Callable[[], bool] | None = None,
    progress: Callable[[int], None] | None = None,
) -> bool:
    """Write a made trace.

    Args:
        making: it.
        form: one of `FORMS`.
        out: the file, which is replaced when all is written; `-` is the standard output.
        unit: tokens of its pages.
        stopped: whether to end now, without a file.
        progress: called now and then with the requests so far.

    Returns:
        Whether it was written: False if it was stopped.

    Raises:
        InvalidInput: the file cannot be written.
    """
    with new_file(out) as (file, finish):
        writer = TARGETS[form](file, unit)
        for number, request in enumerate(making):
            if number % 256 == 0:
                if progress is not None:
                    progress(number)
                if stopped is not None and stopped():
                    return False
            writer.add(request)
        writer.end()
        finish()
    return True
