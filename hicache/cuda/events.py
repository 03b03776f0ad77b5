"""CUDA's events as writer events."""

from __future__ import annotations

import time
from typing import Any, Final

from hicache.cuda.driver import CudaDriver, Event
from hicache.memory.writer import WriterEvent

__all__ = ["CudaEvent", "event_behind"]

_LOOK_SECONDS: Final = 0.0002
"""Between two looks of a wait with a time-out, which CUDA has not. Kernels take as long."""


class CudaEvent:
    """A writer event that passes on the device. Any thread may use it.

    Args:
        driver: of the device.
        event: recorded already.

    Attributes:
        event: as given; streams can wait for it without the host.
    """

    def __init__(self, driver: CudaDriver, event: Event) -> None:
        self._driver = driver
        self._passed = False
        self.event = event

    def query(self) -> bool:
        """Whether it has passed.

        Raises:
            CudaError: the device has failed.
        """
        self._passed = self._passed or self._driver.query(self.event)
        return self._passed

    def wait(self, timeout: float | None) -> bool:
        """Block until it has passed, at most `timeout` seconds; whether it has. Raises as `query` does."""
        if timeout is None:
            self._driver.synchronize(self.event)
            self._passed = True
        else:
            end = time.monotonic() + timeout
            while not self.query() and (left := end - time.monotonic()) > 0:
                time.sleep(min(left, _LOOK_SECONDS))
        return self.query()


def event_behind(driver: CudaDriver, ready: WriterEvent | Any) -> Event | None:
    """The event of CUDA that a writer event is, so that a stream can wait for it; None where it is another kind.

    Those of `CudaDevicePool.record` are, and torch's and cupy's own.
    """
    if isinstance(ready, CudaEvent):
        return ready.event
    for name in ("cuda_event", "ptr"):  # torch's, and cupy's
        handle = getattr(ready, name, None)
        if type(handle) is int and handle:
            return driver.external_event(handle, ready)
    return None
