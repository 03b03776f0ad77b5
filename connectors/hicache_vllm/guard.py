"""An exception in a connector ends the engine, for all requests: so none leaves it."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

__all__ = ["complain", "guarded"]

_log = logging.getLogger("vllm.hicache")

SECONDS: Final = 60.0
"""Between two tracebacks of one entry point."""

_lock = threading.Lock()
_said: dict[str, float] = {}


def guarded(default: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a method answer `default(self, *arguments)` where it raises, and log it, at most once a minute.

    Args:
        default: gets what the method got; must not raise.
    """

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            try:
                return method(self, *arguments, **named)
            except Exception as error:
                complain(method.__name__, error)
                return default(self, *arguments, **named)

        return call

    return wrap


def complain(name: str, error: Exception) -> None:
    """Log an error of an entry point, at most once a minute."""
    now = time.monotonic()
    with _lock:
        again = now - _said.get(name, -SECONDS) < SECONDS
        if not again:
            _said[name] = now
    if not again:
        _log.error("hicache: %s failed, and the engine goes on without: %s", name, error, exc_info=error)
