"""Waiting for what other threads and processes bring about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["PATIENCE", "eventually"]

PATIENCE: Final = 30.0
"""Seconds for what takes milliseconds on a machine that is not overloaded."""

_STEP: Final = 0.01


def eventually(met: Callable[[], bool], what: str = "it", *, seconds: float = PATIENCE) -> float:
    """Look until something is true. Returns the seconds after which it was.

    Raises:
        AssertionError: it is not true in time; the text says `what`.
    """
    began = time.monotonic()
    pause = threading.Event()
    while not met():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"{what} did not happen within {seconds:g} seconds")
        pause.wait(_STEP)
    return time.monotonic() - began
