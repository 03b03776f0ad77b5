"""Load or recompute: how many of the pages that lower tiers have are worth waiting for.

Bringing up k pages takes the time in which storage and host memory give them, computing a page the engine's prefill
time for its tokens. The plan is the k whose sum of both is the least, among none at all, what HOST has, and what a
number of whole transfers from STORAGE brings, which is where the sum has its corners. So, as far as the times seen
last tell, a request never waits longer than it would take to compute. Computing is taken to be linear in tokens.

A tier that nothing is known of, or that was too slow when last seen, is looked at now and then: at most once in
`EXPLORE_SECONDS` some request that found pages there, or might, has one small transfer made, for which it does not
wait. So a store that has recovered is noticed, and nobody pays for that but the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Final

from hicache.core.transfers import Transfer, TransferKind
from hicache.errors import ConfigError
from hicache.records import PageResult
from hicache.runtime.meter import MEMORY, Meter, MeterStatistics

EXPLORE_SECONDS: Final = 5.0
EXPLORE_PAGES: Final = 8
MARGIN: Final = 0.01
"""Share of the computing time that must be gained at least: less is noise, and comes at the very end of patience."""


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """What was decided for one request.

    Attributes:
        host, storage: pages that were there, behind those in DEVICE.
        planned_host, planned_storage: of these, the leading pages to be brought up.
        seconds: modelled time of bringing those up and computing the others.
        compute_seconds: modelled time of computing all of them.
        explores: whether a transfer is made only to see how long it takes.
    """

    host: int
    storage: int
    planned_host: int
    planned_storage: int
    seconds: float
    compute_seconds: float
    explores: bool = False

    @property
    def planned(self) -> int:
        """Pages to be brought up."""
        return self.planned_host + self.planned_storage

    @property
    def declined(self) -> int:
        """Pages that were there and are to be computed all the same."""
        return self.host + self.storage - self.planned

    @property
    def saved(self) -> float:
        """Modelled seconds saved; never negative."""
        return max(0.0, self.compute_seconds - self.seconds)


@dataclass(frozen=True, slots=True)
class PlanningStatistics:
    """What load-or-recompute has done since opening; all zero while the prefill rate is not known.

    Attributes:
        prefill_tokens_per_second: the engine's rate, as given or reported; None if it is not known.
        requests: requests for which something was decided.
        planned, declined: pages, in their last decisions.
        explored: small transfers made only to see how long they take.
        seconds_saved: modelled.
        host, storage: what is known of the tiers.
    """

    prefill_tokens_per_second: float | None
    requests: int
    planned: int
    declined: int
    explored: int
    seconds_saved: float
    host: MeterStatistics
    storage: MeterStatistics


class Planner:
    """Decides for all requests of one cache. Used under the reducer's lock.

    Args:
        page_size: tokens of a page.
        fetch_pages: pages of one transfer from storage.
        rate: tokens a second that the engine computes; None is not known, then everything is loaded.
        now: a monotonic clock.
    """

    def __init__(self, *, page_size: int, fetch_pages: int, rate: float | None, now: Callable[[], float]) -> None:
        self._page_size = page_size
        self._fetch_pages = fetch_pages
        self._seconds_per_token = None if rate is None else 1.0 / check_rate("prefill_tokens_per_second", rate)
        self._now = now
        self._meters = {TransferKind.LOAD: Meter(), TransferKind.FETCH: Meter()}
        self._probe_seconds: float | None = None
        self._found_share: float | None = None
        self._explored_at = dict.fromkeys(self._meters, -inf)
        self._requests = self._planned = self._declined = self._explored = 0
        self._saved = 0.0

    @property
    def decides(self) -> bool:
        """Whether the prefill rate is known."""
        return self._seconds_per_token is not None

    # ---- what is seen

    def begun(self, transfer: Transfer) -> None:
        """A transfer was started."""
        meter = self._meters.get(transfer.kind)
        if meter is not None:
            meter.begin(transfer.id, transfer.count, self._now())

    def ended(self, transfer: Transfer, results: Sequence[PageResult]) -> None:
        """Its I/O has ended."""
        meter = self._meters.get(transfer.kind)
        if meter is not None:
            good = sum(result is PageResult.OK for result in results)
            # A cancelled transfer may have ended without being begun, which says nothing.
            meter.end(transfer.id, good, self._now(), learn=good > 0 or not transfer.cancelled)

    def probed(self, *, seconds: float, asked: int, found: int) -> None:
        """Storage has told how many of the pages that were asked for it has."""
        self._probe_seconds = _moved(self._probe_seconds, seconds)
        self._found_share = _moved(self._found_share, found / asked)

    def report(self, tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens in so many seconds.

        Raises:
            ConfigError: not a positive number of both.
        """
        check_rate("tokens of the prefill", tokens)
        check_rate("seconds of the prefill", seconds)
        self._seconds_per_token = _moved(self._seconds_per_token, seconds / tokens)

    # ---- what is decided

    def plan(self, host: int, storage: int, *, coming: int = 0, queued: int = 0) -> LoadDecision:
        """The plan for so many pages that HOST has, and STORAGE behind them. The prefill rate must be known.

        Args:
            host: pages.
            storage: pages.
            coming: pages of `storage`, the first ones, that were asked for before, so they come in any case.
            queued: pages of any request whose transfers from STORAGE are planned, and have not `begun`.
        """
        everything = self.compute_seconds(host + storage)
        page = self.compute_seconds(1)
        best, pages = (inf, host + coming) if coming else (everything * (1.0 - MARGIN), 0)
        for count, seconds in self._offers(host, storage, coming, queued):
            total = seconds + (host + storage - count) * page
            if total < best:
                best, pages = total, count
        planned_host = min(host, pages)
        best = best if pages else everything
        return LoadDecision(host, storage, planned_host, pages - planned_host, best, everything)

    def _offers(self, host: int, storage: int, coming: int, queued: int) -> Iterator[tuple[int, float]]:
        """(pages, seconds until they are in DEVICE)."""
        load, fetch, now = self._meters[TransferKind.LOAD], self._meters[TransferKind.FETCH], self._now()
        start, slope = load.line() if load.known else (0.0, 0.0)  # that it pays is what anybody expects of HOST
        waits = load.delay(now) + start if load.known else 0.0
        count = host + coming
        if count:
            yield count, (fetch.delay(now, queued=queued) if coming else 0.0) + waits + count * slope
        if coming >= storage or not fetch.known:
            return
        sizes = _cut(storage - coming, self._fetch_pages)
        for size, seconds in zip(sizes, fetch.arrivals(sizes, now, queued=queued), strict=True):
            count += size
            yield count, seconds + waits + count * slope

    def probe_pays(self, host: int, storage: int, unknown: int) -> bool:
        """Whether to wait for storage's answer about so many pages behind those that are known to be there."""
        seconds, share = self._probe_seconds, self._found_share
        if seconds is None or share is None:
            return False
        known = self.plan(host, storage)
        hoped = self.plan(host, storage + round(share * unknown))
        # What is hoped for and not loaded is computed in either case.
        gain = known.seconds + self.compute_seconds(hoped.storage - storage) - hoped.seconds
        return gain > seconds

    def could_pay(self, host: int, storage: int, unknown: int) -> bool:
        """Whether anything would be loaded of so many more pages, were they all there."""
        return self.plan(host, storage + unknown).planned_storage > self.plan(host, storage).planned_storage

    def may_explore(self, kind: TransferKind) -> bool:
        """Whether it is time to look at a tier that nobody waits for, and nothing is under way there anyhow."""
        return self._now() - self._explored_at[kind] >= EXPLORE_SECONDS and not self._meters[kind].busy

    def explore(self, kind: TransferKind, pages: int) -> int:
        """How many of so many pages to bring up only to see how long it takes; 0 when it is not time to."""
        if not pages or not self.may_explore(kind):
            return 0
        self._explored_at[kind] = self._now()
        self._explored += 1
        return min(pages, EXPLORE_PAGES)

    def compute_seconds(self, pages: int) -> float:
        """Seconds in which the engine computes so many pages. The prefill rate must be known."""
        assert self._seconds_per_token is not None
        return pages * self._page_size * self._seconds_per_token

    def count(self, decision: LoadDecision) -> None:
        """A request's last decision."""
        self._requests += 1
        self._planned += decision.planned
        self._declined += decision.declined
        self._saved += decision.saved

    def statistics(self) -> PlanningStatistics:
        """A snapshot."""
        return PlanningStatistics(
            prefill_tokens_per_second=None if self._seconds_per_token is None else 1.0 / self._seconds_per_token,
            requests=self._requests,
            planned=self._planned,
            declined=self._declined,
            explored=self._explored,
            seconds_saved=self._saved,
            host=self._meters[TransferKind.LOAD].statistics(),
            storage=self._meters[TransferKind.FETCH].statistics(),
        )


def check_rate(name: str, value: object) -> float:
    """A number above 0.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or value <= 0:
        raise ConfigError(f"{name}={value!r:.60} is not a number above 0")
    return float(value)


def _moved(known: float | None, seen: float) -> float:
    """An exponential moving average."""
    return seen if known is None else known * MEMORY + seen * (1.0 - MEMORY)


def _cut(pages: int, most: int) -> list[int]:
    return [min(most, pages - first) for first in range(0, pages, most)]
