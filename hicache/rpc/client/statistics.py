"""What a client counts, as frozen snapshots."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """A snapshot of one client; counts are since `connect`. What the service counts, the service tells.

    So there is no `tokens` here, unlike in the statistics of an embedded cache: hits by tier and misses by reason are
    counted over all clients, across reconnects of each, by the service. `hicache stats ADDRESS --json` has them, as
    `statistics.tokens` of each pool, and `hicache top ADDRESS --once --json` those of all pools, as `tokens`.

    Attributes:
        connected: whether there is a service now that answers.
        why_away: why there is none, in words; empty while connected.
        connections: sessions that were attached; `attempts`: how often one was tried.
        requests: requests that were closed. open_requests: those that are open.
        past: of those closed, how many went past the cache, because the service was away or for what they asked.
        answered_away: calls that were answered by "no cache", as there was no service.
        unanswered: calls that the service did not answer in time. late_answers: of these, answered later.
        lost: open requests whose lease was lost: by the end of a session, by a call that got no answer, by expiry.
        refused: calls that a limit or a trouble of the service refused; the engine went on without.
        revoked: leases that the service took back.
        overwritten_pages: pages that were read too late, so that their bytes were not used.
        dropped: requests that were never closed, only collected.
        failed_commits: commits that nobody waited for and that published nothing.
        pages_read, pages_written: pages copied by `read_into` and `write_from` that count.
    """

    connected: bool
    why_away: str
    connections: int
    attempts: int
    requests: int
    open_requests: int
    past: int
    answered_away: int
    unanswered: int
    late_answers: int
    lost: int
    refused: int
    revoked: int
    overwritten_pages: int
    dropped: int
    failed_commits: int
    pages_read: int
    pages_written: int


class Counters:
    """Running counts, by the names of `ClientStatistics`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Count something."""
        with self._lock:
            self._counts[name] += count

    def forked(self) -> None:
        """This is a forked child, where the lock may be held by a thread that it does not have."""
        self._lock = threading.Lock()

    def get(self, name: str) -> int:
        """How often it was counted."""
        with self._lock:
            return self._counts[name]
