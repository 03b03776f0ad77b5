"""How an event loop learns that a cache has something to do, in the place of a pump thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class LoopRinger:
    """Rings an event loop. Thread-safe without a lock.

    Attributes:
        wake: rings; nothing until the loop is there.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = _nobody
        self._watching = False

    def ring(self) -> None:
        """There may be something to do. Any thread, finalisers too."""
        self.wake()

    def watch(self) -> None:
        """Storage work has begun: whoever does not watch for calls that hang has to begin with it. Any thread."""
        if not self._watching:
            self.wake()

    def looking(self) -> None:
        """The loop looks at what is under way now: what begins from here on rings."""
        self._watching = False

    def looked(self, *, watching: bool) -> None:
        """The loop has looked, and will look again if it is `watching`."""
        self._watching = watching

    def stop(self, join: Callable[[threading.Thread], None]) -> bool:
        """The cache is closed: nobody is rung any more."""
        del join
        self.wake = _nobody
        return True


def _nobody() -> None:
    pass
