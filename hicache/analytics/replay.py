"""Drives a cache with the requests of a trace, as an engine would, and checks what it gives back.

For each request: look, load, compare every page that came, compute (write) the others, commit, close. One thread, so
that the same trace and options give the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from hicache.analytics.content import PageContent
from hicache.analytics.prefill import PrefillModel
from hicache.analytics.prompts import IdPages, Prompt, TokenPages, Tokens
from hicache.analytics.result import ReplayResult, rate
from hicache.analytics.trace import TraceRequest
from hicache.core.reasons import RequestCounts
from hicache.core.residency import NO_SLOTS, Slots
from hicache.errors import HicacheInternalError, OutOfSlots
from hicache.memory.base import DevicePool
from hicache.memory.writer import READY
from hicache.records import MissReason
from hicache.runtime.request import Request

ALLOCATE_SECONDS = 30.0  # for which a request waits until copies let go of slots
MOST_PROBLEMS = 10  # places of wrong pages that are named; all are counted


class Replay:
    """One replay under way. Not thread-safe."""

    def __init__(
        self,
        ask: Callable[[Tokens], Request],
        *,
        prompts: IdPages | TokenPages,
        content: PageContent | None = None,
        pages: DevicePool | None = None,
        prefill: PrefillModel | None = None,
    ) -> None:
        """Prepare.

        Args:
            ask: opens a request of the cache for a prompt's tokens.
            prompts: makes prompts of traced requests.
            content: makes and checks bytes; None where pages hold none.
            pages: where bytes are read and written; needed with `content`.
            prefill: adds up what requests would cost an engine.
        """
        self._ask = ask
        self._prompts = prompts
        self._content = content
        self._pages = pages
        self._prefill = prefill
        # Pages with bytes hold slots while they are copied; an engine would wait for them as well. Without bytes
        # nothing is ever under way.
        self._patience = None if content is None else ALLOCATE_SECONDS
        self._missed = dict.fromkeys(MissReason, 0)
        self._requests = self._refused = 0
        self._need = self._have = 0  # slots that the largest refused request needs, and slots that there are
        self._asked = self._device = self._host = self._storage = 0
        self._tokens_asked = self._tokens_hit = 0
        self._rates = 0.0  # sum of the requests' own page rates
        self._rated = 0
        self._verified = self._wrong = 0
        self._problems: list[str] = []
        self._seconds = 0.0

    def run(self, requests: Iterable[TraceRequest], *, before: Callable[[TraceRequest], bool]) -> bool:
        """Replay until the requests end, `before` says stop, or an invariant is found broken.

        Args:
            requests: in the order in which they are to be asked.
            before: called before each request; may wait; False stops.

        Returns:
            Whether the requests came to their end.
        """
        started = time.perf_counter()
        try:
            for traced in requests:
                if not before(traced):
                    return False
                self._one(traced)
        except HicacheInternalError as error:
            self._problems.append(f"broken invariant: {error}")
            return False
        finally:
            self._seconds += time.perf_counter() - started
        return True

    def _one(self, traced: TraceRequest) -> None:
        prompt = self._prompts.prompt(traced)
        tokens = prompt.tokens
        request = self._ask(tokens)
        loaded: Slots = NO_SLOTS
        refused = False
        try:
            loaded = request.load()
            states = self._verify(loaded, tokens, traced) if self._content is not None else ()
            fresh = request.allocate(deadline=self._patience)
            if states:
                self._write(fresh, states[len(loaded) :])
            request.commit(upto=len(tokens), ready=READY)
        except OutOfSlots as error:
            refused = True
            self._refused += 1
            self._need = max(self._need, len(loaded) + error.asked)
            self._have = error.capacity
        finally:
            counts = request.close()
        if self._prefill is not None:
            self._prefill.add(prompt, traced.input_tokens, request)
        self._count(traced, prompt, counts, refused=refused)

    def _verify(self, loaded: Slots, tokens: Tokens, traced: TraceRequest) -> list[bytes]:
        """Compare all loaded pages; return the states of all pages of the prompt."""
        assert self._content is not None
        assert self._pages is not None
        states = list(self._content.states(tokens.astype("<u4", copy=False).tobytes()))
        for number, slot in enumerate(loaded.tolist()):
            self._verified += 1
            if not self._content.matches(states[number], self._pages.read_page(slot)):
                self._wrong += 1
                if len(self._problems) < MOST_PROBLEMS:
                    self._problems.append(f"{traced.place}, page {number}: wrong bytes in device slot {slot}")
        return states

    def _write(self, fresh: Slots, states: list[bytes]) -> None:
        assert self._content is not None
        assert self._pages is not None
        for slot, state in zip(fresh.tolist(), states, strict=True):
            self._pages.write_page(slot, self._content.make(state))

    def _count(self, traced: TraceRequest, prompt: Prompt, counts: RequestCounts, *, refused: bool) -> None:
        hits = counts.device + counts.host + counts.storage
        self._requests += 1
        self._asked += counts.asked
        self._device += counts.device
        self._host += counts.host
        self._storage += counts.storage
        for reason, pages in counts.missed.items():
            # Whether a refused request's pages were known or not: there was no room for them.
            self._missed[MissReason.OVER_BUDGET if refused else reason] += pages
        self._tokens_asked += traced.input_tokens
        self._tokens_hit += prompt.covered(hits)
        if counts.asked:
            self._rates += hits / counts.asked
            self._rated += 1

    def _warnings(self) -> list[str]:
        if not self._refused:
            return []
        where = f"--device {self._have}: {self._refused:,} of {self._requests:,} requests refused"
        if self._need > self._have:
            return [
                f"{where}, as one prompt needs up to {self._need} pages at once; they are missed as over_budget: "
                f"give at least {self._need}"
            ]
        return [f"{where}, as copies held too many pages for too long; they are missed as over_budget: give more"]

    def result(self, **more: Any) -> ReplayResult:
        """The counts so far; `more` are fields of the result that the cache or the caller knows."""
        hits = self._device + self._host + self._storage
        missed = sum(self._missed.values())
        problems = [*self._problems, *more.pop("problems", ())]
        if hits + missed != self._asked:
            problems.append(f"{self._asked} pages asked, but {hits} came and {missed} were missed")
        if self._content is not None and self._verified != hits:
            problems.append(f"{hits} pages counted as hits, but {self._verified} were returned")
        return ReplayResult(
            requests=self._requests,
            pages_asked=self._asked,
            pages_device=self._device,
            pages_host=self._host,
            pages_storage=self._storage,
            pages_missed=missed,
            hit_rate_pages=rate(hits, self._asked),
            hit_rate_tokens=rate(self._tokens_hit, self._tokens_asked),
            hit_rate_requests=rate(self._rates, self._rated),
            tokens_asked=self._tokens_asked,
            tokens_hit=self._tokens_hit,
            misses_by_reason={reason.value: pages for reason, pages in self._missed.items()},
            pages_verified=self._verified,
            pages_wrong=self._wrong,
            requests_refused=self._refused,
            prefill=None if self._prefill is None else self._prefill.times(),
            requests_per_second=rate(self._requests, self._seconds),
            problems=tuple(problems),
            warnings=(*self._warnings(), *more.pop("warnings", ())),
            **more,
        )
