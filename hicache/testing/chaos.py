"""A trace replayed while its storage is in trouble: what was right, how long calls took, when hits came back.

`ChaosReplay` drives a cache as `hicache replay` does, every returned byte checked, with a deadline for each request.
Meanwhile the steps of a schedule are taken one after the other, each of which brings trouble and ends it.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import hicache
from hicache.analytics.content import PageContent
from hicache.analytics.pace import wait_until_quiet
from hicache.analytics.prompts import IdPages
from hicache.analytics.replay import Replay
from hicache.analytics.result import ReplayResult
from hicache.analytics.run import ReplayOptions
from hicache.analytics.trace import TraceRequest
from hicache.storage.base import StorageBackend, StorageUrl
from hicache.storage.breaker import BreakerPolicy
from hicache.storage.registry import load_backend
from hicache.testing.timed import PATIENCE, TimedBackend, TimedRequest

__all__ = ["ChaosOptions", "ChaosReplay", "ChaosReport", "Step", "StepReport", "mixed", "replay_at"]

LATE: Final = 0.1
"""Seconds by which one call in a thousand may pass its deadline."""
MUCH_TOO_LATE: Final = 1.0
"""Seconds by which no call may pass it."""
FLAT: Final = 48 << 20
"""Bytes by which resident memory may grow once the pools are full: by what the cache remembers of pages that it has
seen, and by what allocators keep for threads. Pages that pile up would be many times that."""
AGAIN: Final = 0.1
_QUIET_SECONDS: Final = 0.5


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Step:
    """One kind of trouble.

    Attributes:
        name: for people.
        begin: brings it.
        hold: seconds for which it lasts.
        end: ends it, and returns when it has ended.
        again: called every tenth of a second meanwhile.
        loses: whether what was stored is gone, so that hits need writes to come back first.
    """

    name: str
    begin: Callable[[], object]
    hold: float
    end: Callable[[], object] = _nothing
    again: Callable[[], object] = _nothing
    loses: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did.

    Attributes:
        name, loses: of the step.
        failed: objects that storage answered for with something else than "absent" meanwhile and until the first
            hit, by reason.
        answered_after: seconds from its end until storage answered a read or a write again.
        written_after: the same until an object was written well; 0 where that was not waited for, since nothing is
            lost and there may be nothing to write.
        hit_after: the same until an object was read well.
        rss: bytes of resident memory then.
    """

    name: str
    loses: bool
    failed: dict[str, int]
    answered_after: float
    written_after: float
    hit_after: float
    rss: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """How to replay.

    Attributes:
        device_pages, host_pages, page_bytes: of the cache.
        requests: to replay at least; it goes on until all steps were taken.
        request_deadline: seconds that a request may wait for lower tiers.
        call_deadline: seconds that a call of the backend may take, by its own settings.
        breaker: of the storage; None = as `hicache.open` has it by default.
        probe_seconds: that a probe itself may take, when it finds storage well.
    """

    device_pages: int = 300
    host_pages: int = 400
    page_bytes: int = 262_144
    requests: int = 200
    request_deadline: float = 0.5
    call_deadline: float = 1.0
    breaker: BreakerPolicy | None = None
    probe_seconds: float = 0.1

    @property
    def interval(self) -> float:
        """Seconds between two probes of storage in trouble."""
        policy = self.breaker or hicache.Options().breaker
        return policy.interval if policy is not None else 0.0


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """What came of it.

    Attributes:
        result: of the replay.
        steps: one report a step.
        back_within: seconds within which hits have to come back: an interval between probes, and a probe.
        waits, calls: how many waits of requests and calls of the backend were timed.
        late: seconds by which the one in a thousand passed its deadline; negative: it did not.
        latest: the same of the worst.
        slowest_allocate: seconds that a request waited for free slots at most.
        rss_warm, rss_end: bytes of resident memory when the pools had filled, and at the end.
        held: pages pinned, private or quarantined, and transfers and requests under way, at the end.
    """

    result: ReplayResult
    steps: tuple[StepReport, ...]
    back_within: float
    waits: int
    calls: int
    late: float
    latest: float
    slowest_allocate: float
    rss_warm: int
    rss_end: int
    held: dict[str, int] = field(default_factory=dict)

    def broken(self) -> list[str]:
        """What was promised and not kept, in words; empty when all was."""
        return [*self._broken(), *(f"{step.name}: {text}" for step in self.steps for text in self._broken_by(step))]

    def _broken(self) -> Iterator[str]:
        yield from self.result.problems
        if self.result.pages_wrong:
            yield f"{self.result.pages_wrong} pages wrong"
        if self.result.requests_refused:
            yield f"{self.result.requests_refused} requests refused"
        if not self.result.pages_storage:
            yield "no page came from storage"
        if self.late > LATE:
            yield f"p99.9 of {self.waits + self.calls} calls is {self.late:.3f} s beyond the deadline"
        if self.latest > MUCH_TOO_LATE:
            yield f"a call was {self.latest:.3f} s beyond its deadline"
        if self.rss_end - self.rss_warm > FLAT:
            yield f"resident memory grew from {self.rss_warm >> 20} to {self.rss_end >> 20} MiB"
        yield from (f"{count} {what} at the end" for what, count in self.held.items() if count)

    def _broken_by(self, step: StepReport) -> Iterator[str]:
        # Where all was lost, there is something to find once requests have written it and ask for it again.
        hits = math.inf if step.loses else self.back_within
        for what, after, most in (
            ("answers", step.answered_after, self.back_within),
            ("writes", step.written_after, self.back_within),
            ("hits", step.hit_after, hits),
        ):
            if after > most or math.isinf(after):
                yield f"{what} came back after {after:.2f} s, above {most:.2f}"
        if step.rss - self.rss_warm > FLAT:
            yield f"resident memory was {step.rss >> 20} MiB, {self.rss_warm >> 20} before"


def replay_at(url: str, options: ChaosOptions, requests: Iterable[TraceRequest], steps: Sequence[Step]) -> ChaosReport:
    """Open the storage that a URL names, replay on it, close it."""
    parsed = StorageUrl.parse(url)
    backend = load_backend(parsed.scheme).from_url(parsed)
    try:
        return ChaosReplay(backend, options).run(requests, steps)
    finally:
        backend.close()


def mixed(requests: Sequence[TraceRequest], *, hot: int, every: int = 4) -> Iterator[TraceRequest]:
    """The first `hot` requests again and again, and one of the others after so many of them, without end."""
    others = itertools.cycle(requests[hot:] or requests)
    for number, request in enumerate(itertools.cycle(requests[:hot])):
        yield request
        if number % every == every - 1:
            yield next(others)


class ChaosReplay:
    """One replay with trouble.

    Args:
        backend: the storage; closed by its owner.
        options: how.
    """

    def __init__(self, backend: StorageBackend, options: ChaosOptions) -> None:
        self._timed = TimedBackend(backend)
        self._options = options
        self._waits: list[float] = []
        self._allocated: list[float] = []
        self._seen = 0
        self._warm = threading.Event()
        self._stop = threading.Event()
        self._steps: list[StepReport] = []
        self._rss_warm = 0
        self._error: BaseException | None = None

    def run(self, requests: Iterable[TraceRequest], steps: Sequence[Step]) -> ChaosReport:
        """Replay until there were enough requests and all steps were taken.

        Args:
            requests: more than enough.
            steps: taken in order, once the pools are full, spread over the requests.
        """
        options = self._options
        replayed = ReplayOptions(
            device_pages=options.device_pages, host_pages=options.host_pages, page_bytes=options.page_bytes
        )
        namespace = replayed.namespace()
        more = {} if options.breaker is None else {"breaker": options.breaker}
        with hicache.open(
            namespace,
            device=options.device_pages,
            host=options.host_pages,
            storage=self._timed,
            prefetch="wait_complete",
            **cast("Any", more),
        ) as cache:
            content = PageContent(namespace=namespace.digest, page_tokens=1, page_bytes=options.page_bytes)
            driver = Replay(
                lambda tokens: cast("hicache.Request", self._ask(cache, tokens)),
                prompts=IdPages(),
                content=content,
                pages=cache.device,
            )
            schedule = threading.Thread(target=self._take, args=(cache, steps), name="chaos-steps")
            schedule.start()
            try:
                driver.run(requests, before=lambda _: self._before(cache, schedule))
            finally:
                self._stop.set()
                self._warm.set()
                schedule.join()
            if self._error is not None:
                raise self._error
            return self._report(cache, driver)

    def _ask(self, cache: hicache.EmbeddedCache, tokens: Any) -> TimedRequest:
        started = time.monotonic()
        request = cache.request(tokens, logits=False, deadline=self._options.request_deadline)
        return TimedRequest(request, started, self._waits, self._allocated)

    def _before(self, cache: hicache.EmbeddedCache, schedule: threading.Thread) -> bool:
        wait_until_quiet(cache, _QUIET_SECONDS)
        self._seen += 1
        if not self._warm.is_set() and self._seen % 8 == 0:
            core = cache.statistics().core
            if core.device.evicted and core.host.evicted:
                self._rss_warm = _resident()
                self._warm.set()
        return schedule.is_alive() or self._seen <= self._options.requests

    def _take(self, cache: hicache.EmbeddedCache, steps: Sequence[Step]) -> None:
        try:
            for number, step in enumerate(steps):
                due = number * self._options.requests // (len(steps) + 1)
                self._until(functools.partial(self._due, due), step)
                self._timed.wait_hit(time.monotonic())
                self._until(lambda: not cache.statistics().degraded, step)  # breakers, of the step before
                self._steps.append(self._one(step))
        except BaseException as error:
            self._error = error

    def _due(self, due: int) -> bool:
        return self._warm.is_set() and self._seen >= due

    def _until(self, ready: Callable[[], bool], step: Step) -> None:
        """Wait until the step may begin."""
        end = time.monotonic() + PATIENCE
        while not ready():
            if self._stop.wait(AGAIN) or time.monotonic() > end:
                raise RuntimeError(f"it never came to step {step.name!r}")

    def _one(self, step: Step) -> StepReport:
        timed = self._timed
        before = Counter(timed.reasons)
        step.begin()
        try:
            end = time.monotonic() + step.hold
            while (left := end - time.monotonic()) > 0 and not self._stop.wait(min(left, AGAIN)):
                step.again()
        finally:
            step.end()
        ended = time.monotonic()
        answered = timed.wait_answered(ended)
        written = timed.wait_written(ended) if step.loses else 0.0
        hit = timed.wait_hit(ended)
        return StepReport(step.name, step.loses, dict(timed.reasons - before), answered, written, hit, _resident())

    def _report(self, cache: hicache.EmbeddedCache, driver: Replay) -> ChaosReport:
        wait_until_quiet(cache, PATIENCE)
        cache.check()
        statistics, options = cache.statistics(), self._options
        tiers = (statistics.core.device, statistics.core.host)
        waits = [seconds - options.request_deadline for seconds in self._waits]
        calls = [seconds - options.call_deadline for seconds in self._timed.seconds]
        late = sorted(waits + calls)
        return ChaosReport(
            result=driver.result(
                bytes_to_storage=statistics.bytes_to_storage, bytes_from_storage=statistics.bytes_from_storage
            ),
            steps=tuple(self._steps),
            back_within=options.interval + options.probe_seconds,
            waits=len(waits),
            calls=len(calls),
            late=late[math.ceil(0.999 * len(late)) - 1],
            latest=late[-1],
            slowest_allocate=max(self._allocated, default=0.0),
            rss_warm=self._rss_warm,
            rss_end=_resident(),
            held={
                "pages pinned": sum(tier.pinned for tier in tiers),
                "pages private": sum(tier.private for tier in tiers),
                "pages quarantined": sum(tier.quarantined for tier in tiers),
                "requests open": statistics.open_requests,
                "internal errors": statistics.internal_errors,
            },
        )


def _resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
