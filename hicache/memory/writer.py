"""Proof that a page has been written: a page may be read only after its writer's event has passed.

An engine hands such an event over with the pages that it commits. On a GPU it is a CUDA event recorded behind the
kernel that fills the pages; on a CPU mostly `READY`, as what was called has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol, runtime_checkable

__all__ = ["READY", "Notifying", "ThreadEvent", "WriterEvent"]


class WriterEvent(Protocol):
    """Something that passes once, when the writes in front of it are done. Any thread may call it."""

    def query(self) -> bool:
        """Whether it has passed. Does not block. Once True, always True."""
        ...

    def wait(self, timeout: float | None) -> bool:
        """Block until it has passed, at most `timeout` seconds (None: without end); whether it has."""
        ...


@runtime_checkable
class Notifying(Protocol):
    """Capability of a writer event: it calls back, so that nobody needs to look again and again."""

    def on_passed(self, callback: Callable[[], None]) -> None:
        """Call once when the event passes, from any thread; at once where it already has. Must be cheap."""
        ...


class _Ready:
    """The event of writes that are done already."""

    def query(self) -> bool:
        return True

    def wait(self, timeout: float | None) -> bool:  # noqa: ARG002  there is nothing to wait for
        return True

    def __repr__(self) -> str:
        return "hicache.READY"


READY: Final[WriterEvent] = _Ready()
"""For pages whose writes are done when the call is made."""


class ThreadEvent:
    """A writer event for writers that are threads: the writer calls `set()` behind its last write. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passed = False
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        """The writes are done. Idempotent."""
        with self._changed:
            self._passed = True
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback()

    def query(self) -> bool:
        """Whether `set` was called."""
        with self._changed:
            return self._passed

    def wait(self, timeout: float | None) -> bool:
        """Block until `set` is called, at most `timeout` seconds; whether it was."""
        with self._changed:
            return self._changed.wait_for(lambda: self._passed, timeout)

    def on_passed(self, callback: Callable[[], None]) -> None:
        """Call when `set` is called, in its thread; at once where it was."""
        with self._changed:
            if not self._passed:
                self._callbacks.append(callback)
                return
        callback()
