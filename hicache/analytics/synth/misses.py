"""A trace whose misses are known by reason, at settings of `hicache simulate` that go with it.

A round asks, two minutes apart so that nothing is under way any more: A, B, C, A, a prompt of four times the pages, A.
All prompts are new in each round, of `pages` pages and half a page behind them. What becomes of the second A depends on
where it is by then: evicted from a device of one prompt, in storage behind a host of one prompt, or in the other of two
instances that take turns. The large prompt does not fit into a device of one prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from hicache.analytics.result import rate
from hicache.analytics.synth.segments import Known, Segment, Text
from hicache.analytics.trace import Details, TraceRequest, pack_ids

GAP: Final = 120.0
LARGE: Final = 4
"""Times the pages that the large prompt has."""

TOKEN_BYTES: Final = 256
"""Of KV: so few that no queue is ever full."""

_ASKED: Final = 5 + LARGE
"""Prompts' worth of pages that a round asks."""


class Misses:
    """A trace that is being made. Iterate once.

    Attributes:
        known: of the requests so far.
    """

    def __init__(self, rounds: int, pages: int, unit: int) -> None:
        self.known = Known(unit)
        self._rounds, self._pages, self._unit = rounds, pages, unit

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests."""
        text, number = Text(self._unit), 0
        for _ in range(self._rounds):
            first, second, third, large = (self._prompt(text, times) for times in (1, 1, 1, LARGE))
            for segment in (first, second, third, first, large, first):
                prompt = segment.ask()
                self.known.add(prompt, 1)
                yield TraceRequest(
                    time=number * GAP,
                    ids=pack_ids(prompt.ids),
                    unit=self._unit,
                    input_tokens=prompt.tokens,
                    output_tokens=1,
                    scope="",
                    place=f"request {number + 1}",
                    details=Details(kind="misses"),
                )
                number += 1

    def _prompt(self, text: Text, times: int) -> Segment:
        return text.begin(times * self._pages * self._unit + self._unit // 2)

    def simulations(self) -> list[dict[str, Any]]:
        """Settings of `hicache simulate`, and what it counts there, of whole pages."""
        one = self._pages
        each = one * self._rounds
        tail = 6 * (self._unit // 2) * self._rounds
        common = {"page_size": self._unit, "device": one, "token_bytes": TOKEN_BYTES}
        behind = common | {"host": one, "storage": "unlimited"}

        def expected(hits: dict[str, int], missed: dict[str, int]) -> dict[str, Any]:
            pages = {f"pages_{tier}": hits.get(tier, 0) * each for tier in ("device", "host", "storage")}
            return {
                "requests": 6 * self._rounds,
                "pages_asked": _ASKED * each,
                **pages,
                "pages_missed": sum(missed.values()) * each,
                "hit_rate_pages": rate(sum(pages.values()), _ASKED * each),
                "misses_by_reason": {name: count * each for name, count in missed.items()},
                "tokens_unaligned_tail": tail,
            }

        return [
            {
                "settings": common,
                "expected": expected({"device": 1}, {"cold": 3, "evicted": 1, "over_budget": LARGE}),
            },
            {
                "settings": behind | {"prefetch": "wait_complete"},
                "expected": expected({"device": 1, "storage": 1}, {"cold": 3, "over_budget": LARGE}),
            },
            {
                "settings": behind | {"prefetch": "best_effort"},
                "expected": expected({"device": 1}, {"cold": 3, "late": 1, "over_budget": LARGE}),
            },
            {
                "settings": common | {"device": 2 * LARGE * one, "instances": 2, "routing": "round_robin"},
                "expected": expected({"device": 1}, {"cold": 3 + LARGE, "other_instance": 1}),
            },
        ]
