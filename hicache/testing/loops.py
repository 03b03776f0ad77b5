"""An event loop whose time does not pass: it jumps to the next timer as soon as nothing else is left to do."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["JumpingLoop", "run"]

T = TypeVar("T")
_PATIENCE = 30.0  # real seconds for which a loop without timers waits for something outside of it


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            ready = super().select(_PATIENCE)
            if not ready:
                raise TimeoutError(f"no timer is set, and nothing has happened for {_PATIENCE} real seconds")
            return ready
        ready = super().select(0)
        if not ready and timeout > 0:
            self.now += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """For tests of deadlines: hours take no time, and what comes first in the loop's time comes first.

    Not for what waits for threads or sockets under a timeout: the loop's time would be over before they have answered.
    """

    def __init__(self) -> None:
        self._jumping = _Selector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds of the loop's own time."""
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop of its own whose time jumps.

    Raises:
        TimeoutError: it waits for something that nothing will bring.
    """
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main)
