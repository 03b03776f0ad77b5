"""When each request of a replay begins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import hicache
from hicache.analytics.trace import TraceRequest
from hicache.analytics.traces import Trace

QUIET_SECONDS = 60.0  # for which transfers are waited for; longer ones hang, and the replay goes on without them
SHOW_EVERY = 64  # requests; showing progress costs more than a request

Show = Callable[[int, int], None]


class Pace:
    """What happens before each request: progress, waiting for its time, and noticing that it is time to stop.

    Attributes:
        trace: what is replayed.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        stop: threading.Event,
        speed: float | None = None,
        settle: Callable[[float], bool] | None = None,
        requests: int | None = None,
        show: Show | None = None,
    ) -> None:
        """Prepare.

        Args:
            trace: what is replayed.
            stop: set by whoever wants it to end.
            speed: factor to the trace's own times; None does not wait for them.
            settle: waits, at most so many seconds, until nothing is under way; whether that was reached.
            requests: how many there will be, if it is known.
            show: takes progress as (done, total).
        """
        self.trace = trace
        self._stop = stop
        self._speed = speed
        self._settle = settle
        self._requests = requests
        self._show = show
        self._seen = 0
        self._first: float | None = None
        self._started = time.monotonic()

    def __call__(self, request: TraceRequest) -> bool:
        """Wait for the request's turn; False where the replay is to end before it."""
        if self._show is not None and self._seen % SHOW_EVERY == 0:
            self._show(*self._done())
        self._seen += 1
        if self._settle is not None and not self._settle(QUIET_SECONDS):
            self._settle = None  # something hangs; waiting for it once is enough
        if self._speed is not None:
            self._wait(request.time, self._speed)
        return not self._stop.is_set()

    @property
    def seen(self) -> int:
        """Requests so far."""
        return self._seen

    @property
    def stopped(self) -> bool:
        """Whether somebody asked to stop."""
        return self._stop.is_set()

    def _done(self) -> tuple[int, int]:
        if self._requests is None:
            return self.trace.bytes_read, self.trace.size
        return self._seen, self._requests

    def _wait(self, at: float, speed: float) -> None:
        if self._first is None:
            self._first = at
        due = self._started + (at - self._first) / speed
        self._stop.wait(min(max(0.0, due - time.monotonic()), threading.TIMEOUT_MAX))


def wait_until_quiet(cache: hicache.EmbeddedCache, seconds: float) -> bool:
    """Wait until the cache has no copy, read or write under way; False when that took longer than `seconds`."""
    reducer, now = cache.parts.reducer, cache.parts.clock.now
    end = now() + seconds
    with reducer.lock:
        reducer.settle()
        while reducer.transfers:
            left = end - now()
            if left <= 0:
                return False
            reducer.wait(left)
    return True
