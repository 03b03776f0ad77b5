"""The streams on which an engine computes: what copies wait for, and what tells the engine's allocator of ours."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any, Final

from hicache.cuda.driver import CudaDriver, Event, Stream
from hicache.cuda.events import CudaEvent
from hicache.cuda.options import Reuse
from hicache.errors import ConfigError
from hicache.memory.base import Slots
from hicache.units import whole_number

__all__ = ["EngineStreams", "tell_allocator"]

_TOLD: Final[list[Stream]] = []
"""Streams that torch's allocator was told of. It keeps their handles, and records events in them whenever a tensor is
freed, long after what used the stream has ended: so none of them ends before this process."""


class EngineStreams:
    """Streams of an engine, and what is known of its use of slots. Thread-safe.

    Args:
        driver: of the device.
        stream: the first; see `CudaDevicePool.attach`.
        reuse: see `Reuse`.
    """

    def __init__(self, driver: CudaDriver, stream: Any, reuse: Reuse) -> None:
        self._driver = driver
        self._reuse = reuse
        self._lock = threading.Lock()
        self._streams: list[Stream] = [self._stream_of(stream)]
        self._uses: dict[int, Event] = {}

    def add(self, stream: Any) -> None:
        """The engine computes on this one, too."""
        found = self._stream_of(stream)
        with self._lock:
            self._streams.append(found)

    def record(self, stream: Any) -> CudaEvent:
        """An event behind all that a stream holds now; None is the first."""
        event = self._driver.event()
        self._driver.record(event, self._streams[0] if stream is None else self._stream_of(stream))
        return CudaEvent(self._driver, event)

    def used_until(self, slots: Slots | Iterable[int], event: CudaEvent) -> None:
        """Kernels use these slots until the event."""
        with self._lock:
            for slot in slots:
                self._uses[int(slot)] = event.event

    def ends_of_use(self, slots: Slots) -> list[Event]:
        """Events behind which others no longer use these slots."""
        if self._reuse == "told":
            with self._lock:
                found = {id(event): event for slot in slots.tolist() if (event := self._uses.pop(slot, None))}
            return list(found.values())
        return self.marks()

    def marks(self) -> list[Event]:
        """Events behind all that the streams hold now."""
        events = []
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            event = self._driver.event()
            self._driver.record(event, stream)
            events.append(event)
        return events

    def forget(self) -> None:
        """Nothing of the slots is known any more."""
        with self._lock:
            self._uses.clear()

    def _stream_of(self, stream: Any) -> Stream:
        """A stream as the engine has it: of torch, of cupy, or a handle."""
        if stream is None:
            return self._driver.current_stream()
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
        number = whole_number(handle)
        if number is None or number < 0:
            raise ConfigError(f"stream {stream!r:.60} is none: give a stream of torch or cupy, or its handle")
        return self._driver.external_stream(number, stream)


def tell_allocator(tensors: Any, stream: Stream) -> None:
    """Tell torch's allocator that a stream of ours uses tensors.

    So it does not give their memory to others while that runs, even if the engine lets go of it. The stream is kept for
    as long as this process lives.
    """
    for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
        if hasattr(tensor, "record_stream") and tensor.device.type == "cuda":
            torch: Any = sys.modules["torch"]  # the tensor is of it
            _TOLD.append(stream)
            tensor.record_stream(torch.cuda.ExternalStream(stream.ptr, device=tensor.device))
