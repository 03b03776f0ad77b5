"""A CUDA without a GPU: real bytes in host memory, streams that run in any order that real ones could.

Work that is put into a stream is done only when somebody asks for an event, or a test says so, and which stream goes on
is drawn from a seed. A copy is done in two steps: first its target is filled with poison, later its bytes come, read at
one of the two. So whoever reads or writes without having waited as he must finds poison, or is overwritten, under some
seed. What CUDA, cupy or its bindings would refuse at once is refused here too: numbers of a wrong type, memory that is
not mapped or pinned in part, the default stream for batches, handles of nobody. Nothing here says how fast a GPU is.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from hicache.cuda.driver import OUT_OF_MEMORY, CudaError, DeviceFacts, Event, Kernel, Pointer, Priority, Stream
from hicache.memory.base import POISON
from hicache.testing.cudachecks import check_batch, check_launch, check_mapped, check_numbers, check_whole, inside
from hicache.testing.cudastreams import FakeEvent, FakeStream, Gate, Timeline, Work

__all__ = ["FakeCuda", "KernelModel", "Run"]

Run: TypeAlias = tuple[int, int, int]
"""Target, source, bytes."""

KernelModel: TypeAlias = "Callable[[FakeCuda, Sequence[Any]], Sequence[Run]]"
"""What a kernel copies, by its arguments; it is asked when the kernel begins."""

_ALIGNMENT: Final = 256
_INVALID_VALUE: Final = ("cudaErrorInvalidValue", 1)
_INVALID_HANDLE: Final = ("cudaErrorInvalidResourceHandle", 400)


@dataclass(slots=True)
class _Fault:
    call: str
    error: CudaError
    after: int


class FakeCuda:
    """A `CudaDriver`. Thread-safe.

    Args:
        seed: of the order in which streams run.
        memory: bytes of the device.
        lockable: bytes of host memory that can be pinned; None: any.
        device: number of this device.
        batches: whether copies can be batched.
        kernels: what each kernel copies, by name. A kernel that is not here fails to compile.
        seconds: how long a call takes, for `elapsed`, by its kind ("copy", "batch" or "kernel"), runs and bytes.
        numa_node: of the host, on which the device hangs.

    Attributes:
        registered: pinned ranges that exist, address to bytes.
        allocated: memory of the device that exists, address to bytes.
        calls: how often each call was made, by its name.
        timeline: the streams.
        default: the stream that is current where `use` chose none.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        memory: int = 1 << 28,
        lockable: int | None = None,
        device: int = 0,
        batches: bool = True,
        kernels: Mapping[str, KernelModel] | None = None,
        seconds: Callable[[str, int, int], float] = lambda kind, runs, size: 1e-6 * runs + size / 5e10,  # noqa: ARG005
        numa_node: int | None = None,
    ) -> None:
        self.device = device
        self.batches = batches
        self.no_batches = "" if batches else "this fake has none"
        self.registered: dict[int, int] = {}
        self.allocated: dict[int, int] = {}
        self.calls: dict[str, int] = {}
        self._memory = memory
        self._lockable = lockable
        self._kernels = dict(kernels or {})
        self._seconds = seconds
        self._numa_node = numa_node
        self.timeline = Timeline(seed)
        self._changed = self.timeline.lock
        self._buffers: dict[int, Any] = {}
        self._foreign: dict[int, tuple[int, int]] = {}
        self._faults: list[_Fault] = []
        self._local = threading.local()
        self.default = self.timeline.stream("low")

    # ---- for tests

    def fail(self, call: str, name: str, code: int, *, after: int = 0) -> None:
        """Let one call of a method of this class raise, behind `after` that do not.

        Args:
            call: name of the method; "work" breaks the device when a piece of work begins, as a bad address does.
            name: of the error.
            code: its number.
            after: calls that still succeed.
        """
        with self._changed:
            self._faults.append(_Fault(call, CudaError(call, name, code, "injected"), after))

    def lose(self, name: str = "cudaErrorIllegalAddress", code: int = 700) -> None:
        """Break the device for good: every call raises from now on, those that wait too.

        What its streams hold is not gone: it goes on where a test says so, by `drive` or `finish`, as copies that were
        under way may.
        """
        self.timeline.lose(CudaError("the device", name, code, "injected"))

    def use(self, stream: FakeStream) -> None:
        """Make a stream the calling thread's current one."""
        self._local.stream = stream

    def gate(self, stream: FakeStream) -> Gate:
        """Hold a stream at this point, as a long kernel does."""
        return self.timeline.gate(stream)

    def compute(self, stream: FakeStream, work: Callable[[], None]) -> None:
        """Put a kernel of the engine into a stream: `work` is called when it ends."""
        self.timeline.put(stream, Work(work))

    def adopt(self, address: int, size: int, *, device: int | None = None) -> None:
        """Say that memory is the device's (or another one's): a tensor that an engine has allocated there."""
        with self._changed:
            self._foreign[address] = (size, self.device if device is None else device)

    def drive(self, steps: int) -> int:
        """Do so many steps of the work that waits; how many there were."""
        return self.timeline.drive(steps)

    def finish(self) -> None:
        """Do all work that can be done."""
        while self.timeline.step():
            pass

    @property
    def waiting(self) -> int:
        """Pieces of work that have not been done."""
        with self._changed:
            return sum(len(stream.work) for stream in self.timeline.streams.values())

    # ---- CudaDriver

    def facts(self) -> DeviceFacts:
        """What the device is."""
        self._called("facts")
        return DeviceFacts(
            number=self.device,
            name="fake",
            capability=(9, 0),
            multiprocessors=132,
            total_bytes=self._memory,
            maps_host=True,
            numa_node=self._numa_node,
            driver=13000,
            runtime=13000,
        )

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all of them."""
        self._called("memory")
        with self._changed:
            return self._memory - sum(self.allocated.values()), self._memory

    def pointer(self, address: int) -> Pointer:
        """What is at an address."""
        self._called("pointer")
        check_numbers("cudaPointerGetAttributes", address)
        with self._changed:
            for start, (size, device) in self._foreign.items():
                if start <= address < start + size:
                    return Pointer("device", device)
            if inside(self.allocated, address, 1):
                return Pointer("device", self.device)
            if inside(self.registered, address, 1):
                return Pointer("host", self.device)
            return Pointer("unregistered", -1)

    def host_register(self, address: int, size: int, *, read_only: bool = False) -> None:
        """Pin host memory that exists."""
        self._called("host_register")
        check_numbers("cudaHostRegister", address, size)
        check_mapped(address, size, read_only=read_only)
        with self._changed:
            if self._lockable is not None and sum(self.registered.values()) + size > self._lockable:
                raise CudaError("cudaHostRegister", OUT_OF_MEMORY, 2, "out of memory")
            if any(start < address + size and address < start + held for start, held in self.registered.items()):
                raise CudaError("cudaHostRegister", "cudaErrorHostMemoryAlreadyRegistered", 712)
            self.registered[address] = size

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`."""
        self._called("host_unregister")
        with self._changed:
            if address in self._buffers or self.registered.pop(address, None) is None:
                raise CudaError("cudaHostUnregister", "cudaErrorHostMemoryNotRegistered", 713)

    def host_alloc(self, size: int) -> int:
        """New pinned host memory."""
        self._called("host_alloc")
        check_numbers("cudaHostAlloc", size)
        with self._changed:
            address = self._buffer(size)
            self.registered[address] = size
            return address

    def host_free(self, address: int) -> None:
        """Give back what `host_alloc` gave."""
        self._called("host_free")
        with self._changed:
            if address not in self.registered or self._buffers.pop(address, None) is None:
                raise CudaError("cudaFreeHost", *_INVALID_VALUE)
            del self.registered[address]

    def malloc(self, size: int) -> int:
        """New memory on the device, full of poison."""
        self._called("malloc")
        check_numbers("cudaMalloc", size)
        with self._changed:
            if sum(self.allocated.values()) + size > self._memory:
                raise CudaError("cudaMalloc", OUT_OF_MEMORY, 2, "out of memory")
            address = self._buffer(size)
            self.allocated[address] = size
            return address

    def free(self, address: int) -> None:
        """Give back what `malloc` gave, behind all work."""
        self._called("free")
        self.finish()
        with self._changed:
            if self.allocated.pop(address, None) is None:
                raise CudaError("cudaFree", *_INVALID_VALUE)
            del self._buffers[address]

    def stream(self, priority: Priority = "low") -> FakeStream:
        """A new stream."""
        self._called("stream")
        return self.timeline.stream(priority)

    def external_stream(self, ptr: int, keep: object = None) -> FakeStream:
        """A stream by its handle."""
        del keep
        if ptr not in self.timeline.streams:
            raise CudaError("cudaStreamGetFlags", *_INVALID_HANDLE)
        return self.timeline.streams[ptr]

    def current_stream(self) -> FakeStream:
        """What `use` has chosen, else the first stream."""
        found: FakeStream = getattr(self._local, "stream", self.default)
        return found

    def event(self, *, timing: bool = False) -> FakeEvent:
        """A new event."""
        self._called("event")
        return self.timeline.event(timing=timing)

    def external_event(self, ptr: int, keep: object = None) -> FakeEvent:
        """An event by its handle."""
        del keep
        return self._handled(ptr)

    def record(self, event: Event, stream: Stream) -> None:
        """Let the event pass behind what is in the stream now."""
        self._called("record")
        self.timeline.record(self._event(event), self._stream(stream))

    def wait(self, stream: Stream, event: Event) -> None:
        """Let the stream wait for the event as it was recorded last."""
        self._called("wait")
        self.timeline.wait(self._stream(stream), self._event(event))

    def query(self, event: Event) -> bool:
        """Do a few steps, or none; whether the event has passed."""
        self._called("query")
        with self._changed:
            self.drive(self.timeline.random.randrange(4))
            self.timeline.raise_broken()
            asked = self._event(event)
            return asked.passed >= asked.recorded

    def synchronize(self, event: Event) -> None:
        """Do steps until the event has passed, or block where none can be done."""
        self._called("synchronize")
        self.timeline.synchronize(self._event(event))

    def elapsed(self, start: Event, end: Event) -> float:
        """Seconds between two events, as `seconds` says."""
        self._called("elapsed")
        both = self._event(start), self._event(end)
        if any(not event.timing or not event.recorded for event in both):
            raise CudaError("cudaEventElapsedTime", *_INVALID_HANDLE)
        if any(event.passed < event.recorded for event in both):
            raise CudaError("cudaEventElapsedTime", "cudaErrorNotReady", 600)
        return both[1].at - both[0].at

    def memcpy_async(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Copy bytes."""
        self._called("memcpy_async")
        check_numbers("cudaMemcpyAsync", target, source, size)
        with self._changed:
            for address in (target, source):
                check_whole("cudaMemcpyAsync", self.registered, address, size)
        self._copies(stream, "copy", lambda: [(target, source, size)], runs=1, size=size)

    def memcpy_batch_async(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Stream
    ) -> None:
        """Copy many runs."""
        self._called("memcpy_batch_async")
        if not self.batches:
            raise CudaError("cudaMemcpyBatchAsync", "cudaErrorNotSupported", 801, self.no_batches)
        check_batch(stream.ptr, self.default.ptr, targets, sources, sizes)
        runs = list(zip(targets, sources, sizes, strict=True))
        with self._changed:
            known = self._reachable()
            for target, source, size in runs:
                if not all(any(inside(ranges, address, size) for ranges in known) for address in (target, source)):
                    raise CudaError("cudaMemcpyBatchAsync", *_INVALID_VALUE)
            self.timeline.random.shuffle(runs)  # there is no order among them
        self._copies(stream, "batch", lambda: runs, runs=len(runs), size=sum(sizes))

    def memset_async(self, address: int, value: int, size: int, stream: Stream) -> None:
        """Fill bytes."""
        self._called("memset_async")
        check_numbers("cudaMemsetAsync", address, size)
        self.timeline.put(self._stream(stream), Work(lambda: _fill(address, value, size)))

    def compile(self, source: str, name: str, options: Sequence[str] = ()) -> Kernel:
        """The model of that name."""
        del options
        self._called("compile")
        model = self._kernels.get(name)
        if model is None or name not in source:
            raise CudaError(f"compiling {name}", "CompileException", -1, "no model of it")
        return model

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Any],
        stream: Stream,
    ) -> None:
        """Let a kernel copy what its model says. Host memory that it touches must be pinned."""
        self._called("launch")
        check_launch(grid, block, arguments)
        given = tuple(arguments)
        self._copies(stream, "kernel", lambda: kernel(self, given), runs=1, size=0, by_kernel=True)

    # ---- within

    def _stream(self, stream: Stream) -> FakeStream:
        return self.timeline.streams[stream.ptr]

    def _event(self, event: Event) -> FakeEvent:
        return self._handled(event.ptr)

    def _handled(self, ptr: int) -> FakeEvent:
        found = self.timeline.events.get(ptr)
        if found is None:
            raise CudaError("cudaEventQuery", *_INVALID_HANDLE)
        return found

    def _reachable(self) -> tuple[Mapping[int, int], ...]:
        """Memory that the device itself reaches."""
        return self.allocated, self.registered, {start: size for start, (size, _) in self._foreign.items()}

    def _copies(
        self,
        stream: Stream,
        kind: str,
        asked: Callable[[], Sequence[Run]],
        *,
        runs: int,
        size: int,
        by_kernel: bool = False,
    ) -> None:
        found: list[Run] = []
        early: dict[int, bytes] = {}

        def begin() -> None:
            self._fault("work")
            found.extend(asked())
            for target, source, length in found:
                self._check_range(target, length, by_kernel=by_kernel)
                self._check_range(source, length, by_kernel=by_kernel)
                if self.timeline.random.random() < 0.5:
                    early[target] = ctypes.string_at(source, length)
            for target, _, length in found:
                _fill(target, POISON, length)

        def end() -> None:
            for target, source, length in found:
                if target in early:
                    ctypes.memmove(target, early[target], length)
                else:
                    ctypes.memmove(target, source, length)

        self.timeline.put(self._stream(stream), Work(end, begin=begin, seconds=self._seconds(kind, runs, size)))

    def _check_range(self, address: int, size: int, *, by_kernel: bool) -> None:
        """Nothing may leave the memory in which it begins; kernels reach only the device's and what is pinned."""
        reachable = self._reachable()
        known = any(inside(ranges, address, 1) for ranges in reachable)
        if (known or by_kernel) and not any(inside(ranges, address, size) for ranges in reachable):
            raise CudaError("a copy", "cudaErrorIllegalAddress", 700, f"{size} bytes at {address:#x}")

    def _buffer(self, size: int) -> int:
        buffer = ctypes.create_string_buffer(size + _ALIGNMENT)
        address = -(-ctypes.addressof(buffer) // _ALIGNMENT) * _ALIGNMENT
        _fill(address, POISON, size)
        self._buffers[address] = buffer
        return address

    def _called(self, call: str) -> None:
        with self._changed:
            self.calls[call] = self.calls.get(call, 0) + 1
            self.timeline.raise_broken()
            self._fault(call)

    def _fault(self, call: str) -> None:
        for fault in self._faults:
            if fault.call == call:
                if fault.after:
                    fault.after -= 1
                    return
                self._faults.remove(fault)
                raise fault.error


def _fill(address: int, value: int, size: int) -> None:
    ctypes.memset(address, value, size)
