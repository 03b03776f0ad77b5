"""What the plug-in counts: for SGLang's metrics, and for people."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Counters", "Sample", "Statistics"]

_SAMPLES: Final = 4096
"""Transfers kept between two questions of the engine; it asks every step, so more means that nobody asks."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer that moved something: pages, and their GB a second."""

    pages: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot. All counts are of pages since start.

    Attributes:
        asked, read: pages that SGLang wanted to have, and got.
        given, written: pages that SGLang wanted to store, and that are stored.
        looked_up, found: pages of `exists`, and those of them that are there.
        read_failures, write_failures, lookup_failures: pages that did not come or go, by reason.
        hung: storage calls that were given up and have not come back.
        disabled: why it runs without a cache; empty if it has one.
    """

    asked: int = 0
    read: int = 0
    given: int = 0
    written: int = 0
    looked_up: int = 0
    found: int = 0
    read_failures: dict[str, int] = field(default_factory=dict)
    write_failures: dict[str, int] = field(default_factory=dict)
    lookup_failures: dict[str, int] = field(default_factory=dict)
    hung: int = 0
    disabled: str = ""


class Counters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reasons: dict[str, Counter[str]] = {"read": Counter(), "write": Counter(), "lookup": Counter()}
        self._prefetched: deque[Sample] = deque(maxlen=_SAMPLES)
        self._backed_up: deque[Sample] = deque(maxlen=_SAMPLES)

    def looked_up(self, asked: int, found: int) -> None:
        """A question has been answered."""
        with self._lock:
            self._counts["looked_up"] += asked
            self._counts["found"] += found

    def read(self, asked: int, done: int, size: int, seconds: float) -> None:
        """Pages have been read; `size` is the bytes of one."""
        with self._lock:
            self._counts["asked"] += asked
            self._counts["read"] += done
            if done:
                self._prefetched.append(_sample(done, size, seconds))

    def wrote(self, given: int, done: int, size: int, seconds: float) -> None:
        """Pages have been stored."""
        with self._lock:
            self._counts["given"] += given
            self._counts["written"] += done
            if done:
                self._backed_up.append(_sample(done, size, seconds))

    def failed(self, kind: str, reason: str, pages: int = 1) -> None:
        """Pages failed; `kind` is "read", "write" or "lookup"."""
        with self._lock:
            self._reasons[kind][reason] += pages

    def drain(self) -> tuple[list[Sample], list[Sample]]:
        """Transfers from and to storage since the last call."""
        with self._lock:
            prefetched, backed_up = list(self._prefetched), list(self._backed_up)
            self._prefetched.clear()
            self._backed_up.clear()
        return prefetched, backed_up

    def snapshot(self, *, hung: int, disabled: str) -> Statistics:
        """All counts as a record."""
        with self._lock:
            return Statistics(
                **self._counts,
                read_failures=dict(self._reasons["read"]),
                write_failures=dict(self._reasons["write"]),
                lookup_failures=dict(self._reasons["lookup"]),
                hung=hung,
                disabled=disabled,
            )


def _sample(pages: int, size: int, seconds: float) -> Sample:
    return Sample(pages, pages * size / 1e9 / max(seconds, 1e-9))
