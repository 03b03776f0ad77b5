"""What the connector counts, for vLLM's metrics and for people."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

__all__ = ["Counters"]


class Counters:
    """Counts since they were taken last, by a name and a label. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, label: str = "", count: float = 1) -> None:
        """Count something."""
        if count:
            with self._lock:
                self._counts[f"{name}/{label}" if label else name] += count  # type: ignore[assignment]

    def add_all(self, counts: Mapping[str, float]) -> None:
        """Count several things that belong together: who takes the counts has all of them or none."""
        with self._lock:
            for name, count in counts.items():
                if count:
                    self._counts[name] += count  # type: ignore[assignment]

    def failed(self, reason: str, pages: int = 1) -> None:
        """Pages that did not come or were not stored."""
        self.add("failed_pages", reason, pages)

    def take(self) -> dict[str, float]:
        """The counts; from now on they begin anew."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)
