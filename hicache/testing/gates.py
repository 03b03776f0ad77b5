"""Tools that put threads into an order, so that a test never sleeps."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable


class Gate:
    """A place where threads stop until a test lets them go on.

    Thread-safe. A thread that is not let through within `patience` real seconds raises instead of hanging.

    Args:
        opened: whether threads pass from the start.
        patience: real seconds.
    """

    def __init__(self, *, opened: bool = False, patience: float = 30.0) -> None:
        self._changed = threading.Condition()
        self._opened = opened
        self._permits = 0
        self._patience = patience
        self.arrived = 0
        self.passed = 0

    def enter(self) -> None:
        """Stop here until the gate is open or a permit is left.

        Raises:
            TimeoutError: nobody opened within `patience`.
        """
        with self._changed:
            self.arrived += 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._opened or self._permits > 0, self._patience):
                raise TimeoutError(f"the gate stayed closed for {self._patience} real seconds")
            if not self._opened:
                self._permits -= 1
            self.passed += 1
            self._changed.notify_all()

    def open(self) -> None:
        """Let everybody through, from now on."""
        with self._changed:
            self._opened = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop whoever comes from now on; permits that are left are taken back."""
        with self._changed:
            self._opened = False
            self._permits = 0

    def permit(self, count: int = 1) -> None:
        """Let `count` threads through, those that wait first."""
        with self._changed:
            self._permits += count
            self._changed.notify_all()

    def until_arrived(self, count: int = 1) -> None:
        """Block until `count` threads have come to the gate, since it was made.

        Raises:
            TimeoutError: they did not come within `patience`.
        """
        self._until(lambda: self.arrived >= count, f"{count} arrivals")

    def until_passed(self, count: int = 1) -> None:
        """Block until `count` threads have gone through, since it was made.

        Raises:
            TimeoutError: they did not within `patience`.
        """
        self._until(lambda: self.passed >= count, f"{count} passages")

    def _until(self, met: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(met, self._patience):
                raise TimeoutError(f"not {what} within {self._patience} real seconds: {self.arrived} came")


class Tripwire:
    """Raises at the n-th call of `step`: fault injection by counting calls.

    Run once with `trip_at=None` to learn how many steps there are (`steps`), then once for each of them.
    Thread-safe.

    Args:
        trip_at: the call, counted from 1, that raises; None: none does.
        error: what is raised.
    """

    def __init__(self, trip_at: int | None = None, *, error: type[Exception] = RuntimeError) -> None:
        self._lock = threading.Lock()
        self._trip_at = trip_at
        self._error = error
        self.steps = 0
        self.names: Counter[str] = Counter()

    def step(self, name: str) -> None:
        """Count one call, and raise if it is the chosen one."""
        with self._lock:
            self.steps += 1
            self.names[name] += 1
            step = self.steps
        if step == self._trip_at:
            raise self._error(f"tripped at step {step}: {name}")
