"""Copies that whoever asks for them waits for: of single pages, and of the few that no copy engine moves."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from hicache.cuda.driver import CudaDriver, Event
from hicache.cuda.executors import PlainExecutor
from hicache.cuda.kept import keep
from hicache.cuda.runs import RunTable

__all__ = ["DirectCopies"]


class DirectCopies:
    """A stream of its own for copies that end inside the call. Thread-safe."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._plain = PlainExecutor(driver)
        self._lock = threading.Lock()
        self._stream = driver.stream()

    def run(self, tables: Iterable[RunTable], *, behind: Sequence[Event], memory: object) -> None:
        """Carry out tables, and wait until it is done.

        Args:
            tables: what is copied.
            behind: events for which it waits, on the device.
            memory: of the host, on the one side of each table. It is kept for good where nobody can tell whether it is
                still written.

        Raises:
            CudaError: a call failed, or the device did. Some of the bytes may have been copied; none is any more.
        """
        driver, end = self._driver, self._driver.event()
        failed: Exception | None = None
        with self._lock:
            for event in behind:
                driver.wait(self._stream, event)
            with self._or_kept(memory):
                try:
                    for table in tables:
                        self._plain.run(table, self._stream)
                except Exception as error:
                    failed = error
                driver.record(end, self._stream)  # behind a failure, too: some runs may be on their way
        with self._or_kept(memory):
            driver.synchronize(end)
        if failed is not None:
            raise failed

    @contextmanager
    def _or_kept(self, memory: object) -> Iterator[None]:
        try:
            yield
        except Exception:
            keep(memory, "host memory of a copy whose end is not known")
            raise
