"""What is needed of CUDA, as one small interface: everything above it runs on a machine without a GPU, over a fake.

`hicache.testing.cuda.FakeCuda` is that fake; `hicache.cuda.cupy_driver.CupyDriver` is CUDA itself. Addresses are
integers. Streams and events are objects with an integer `ptr`, which keep the handle alive while somebody has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from hicache.errors import HicacheError

__all__ = [
    "ALREADY_PINNED",
    "OUT_OF_MEMORY",
    "CudaDriver",
    "CudaError",
    "DeviceFacts",
    "Event",
    "Kernel",
    "MemoryKind",
    "Pointer",
    "Priority",
    "Stream",
    "version_text",
]

MemoryKind: TypeAlias = Literal["device", "host", "managed", "unregistered"]
"""What CUDA knows of an address; "host" is pinned, "unregistered" is host memory that it knows nothing of."""

Priority: TypeAlias = Literal["high", "low"]

OUT_OF_MEMORY: Final = "cudaErrorMemoryAllocation"
ALREADY_PINNED: Final = "cudaErrorHostMemoryAlreadyRegistered"


class CudaError(HicacheError):
    """A call of CUDA that failed; of a copy it is a result of its pages instead.

    Attributes:
        call: what was called.
        name: the error's name, such as "cudaErrorMemoryAllocation".
        code: its number.
        text: what is said beside the name; may be empty.
    """

    def __init__(self, call: str, name: str, code: int, text: str = "") -> None:
        self.call = call
        self.name = name
        self.code = code
        self.text = text
        super().__init__(f"{call}: {name} ({code})" + (f": {text}" if text else ""))


class Stream(Protocol):
    """A queue of work on a device, done in order. `ptr` is its handle, a `cudaStream_t`."""

    @property
    def ptr(self) -> int:
        """The handle."""
        ...


class Event(Protocol):
    """A mark in a stream. `ptr` is its handle, a `cudaEvent_t`."""

    @property
    def ptr(self) -> int:
        """The handle."""
        ...


Kernel: TypeAlias = Any
"""A compiled kernel, which only its driver looks into."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """What CUDA says of an address.

    Attributes:
        kind: of the memory.
        device: number of the device that has it, or that was current when it was pinned; -1 where unregistered.
    """

    kind: MemoryKind
    device: int


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device is.

    Attributes:
        number: by which CUDA knows it in this process.
        name: the vendor's.
        capability: compute capability, such as (9, 0).
        multiprocessors: how many it has.
        total_bytes: its memory.
        maps_host: whether its kernels may read and write pinned host memory by the host's own addresses.
        numa_node: the host's node that it hangs on, or None where that is not known.
        driver: version of CUDA that the driver serves, such as 13000; 0 without a driver.
        runtime: version of the CUDA that cupy was built for.
    """

    number: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    total_bytes: int
    maps_host: bool
    numa_node: int | None
    driver: int
    runtime: int


class CudaDriver(Protocol):
    """One device. Any thread may call it; none needs to choose the device first.

    A thread that has used no device before is left with this one as its current one, others with theirs. Calls that
    only put work into a stream return at once, but for copies from or to host memory that is not pinned, which may
    block, and for streams that hold about a thousand pieces of work. All but `record` release the GIL where they may
    block. All raise `CudaError`; an error of work that was put into a stream earlier comes out of any later call.

    Attributes:
        device: its number.
        batches: whether `memcpy_batch_async` can be called.
        no_batches: why not; empty where it can.
    """

    device: int
    batches: bool
    no_batches: str

    def facts(self) -> DeviceFacts:
        """What the device is."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes of the device that are free, and all of them."""
        ...

    def pointer(self, address: int) -> Pointer:
        """What is at an address."""
        ...

    # ---- memory

    def host_register(self, address: int, size: int, *, read_only: bool = False) -> None:
        """Pin host memory that exists, for all devices, so that they may reach it.

        `read_only` is for memory that is mapped so; some devices cannot pin that at all.
        """
        ...

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`, while the memory is still mapped."""
        ...

    def host_alloc(self, size: int) -> int:
        """New pinned host memory; its address."""
        ...

    def host_free(self, address: int) -> None:
        """Give back what `host_alloc` gave."""
        ...

    def malloc(self, size: int) -> int:
        """New memory on the device; its address, a multiple of 256."""
        ...

    def free(self, address: int) -> None:
        """Give back what `malloc` gave. Waits for the work that may use it."""
        ...

    # ---- order

    def stream(self, priority: Priority = "low") -> Stream:
        """A new stream, which waits for no other by itself. It ends with the object."""
        ...

    def external_stream(self, ptr: int, keep: object = None) -> Stream:
        """Somebody else's stream, in which events are recorded and which may be let wait. Keeps `keep` alive."""
        ...

    def current_stream(self) -> Stream:
        """The stream on which the calling thread computes: torch's where it is loaded, else cupy's."""
        ...

    def event(self, *, timing: bool = False) -> Event:
        """A new event, which counts as passed until it is recorded. A host thread that waits for it sleeps."""
        ...

    def external_event(self, ptr: int, keep: object = None) -> Event:
        """Somebody else's event. Keeps `keep` alive."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """The event passes when what is in the stream now is done."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is put into the stream from now on waits for the event, as it was recorded last. The host does not."""
        ...

    def query(self, event: Event) -> bool:
        """Whether the event has passed."""
        ...

    def synchronize(self, event: Event) -> None:
        """Block the calling thread until the event has passed."""
        ...

    def elapsed(self, start: Event, end: Event) -> float:
        """Seconds between two events made with `timing=True` that have passed."""
        ...

    # ---- work

    def memcpy_async(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Copy bytes between any two addresses."""
        ...

    def memcpy_batch_async(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Stream
    ) -> None:
        """Copy many runs by one call, in any order among themselves.

        As many of each, at least one, all of Python's own integers; none is empty. Host memory must be pinned, and
        the stream one that `stream` made: CUDA takes no batch for its default one.
        """
        ...

    def memset_async(self, address: int, value: int, size: int, stream: Stream) -> None:
        """Fill bytes of the device."""
        ...

    def compile(self, source: str, name: str, options: Sequence[str] = ()) -> Kernel:
        """Compile CUDA C++ for this device and load the function `name`, which is `extern "C"`.

        Raises:
            CudaError: it does not compile; the text has the compiler's first words.
        """
        ...

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Any],
        stream: Stream,
    ) -> None:
        """Put a kernel into a stream that `stream` made. Integers go as 64 bits, scalars of numpy as they are."""
        ...


def version_text(version: int) -> str:
    """Words for CUDA's number of a version: 13020 is "13.2"; 0 is "none"."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else "none"
