"""CUDA through cupy, and its batched copies through cuda-bindings. The only module that imports either.

Nothing here has run on a GPU. Calls and their arguments are those of cupy 14 and cuda-bindings 13.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from hicache.cuda.driver import (
    CudaError,
    DeviceFacts,
    Event,
    Kernel,
    MemoryKind,
    Pointer,
    Priority,
    Stream,
    version_text,
)
from hicache.errors import ConfigError
from hicache.units import whole_number

__all__ = ["CupyDriver", "open_driver"]

_KINDS: Final[dict[int, MemoryKind]] = {0: "unregistered", 1: "host", 2: "device", 3: "managed"}
_OLDEST_BATCH: Final = 12080
"""CUDA 12.8 is the first with batched copies, in the driver as in the bindings."""
_SAID: Final = 300
"""Characters of a compiler's words that an error has."""
_HIGH: Final = -1
"""Priority of a stream; CUDA has at least this one above the default of 0, and takes what is nearest."""
_NOT_READY: Final = 600
_NOT_SUPPORTED: Final = 801
_REGISTER_READ_ONLY: Final = 8
"""cudaHostRegisterReadOnly, which cupy has no name for."""


class _Handle:
    """A stream or event of somebody else, kept alive."""

    __slots__ = ("keep", "ptr")

    def __init__(self, ptr: int, keep: object) -> None:
        self.ptr = ptr
        self.keep = keep


def open_driver(device: int | None = None) -> CupyDriver:
    """CUDA's device of a number; None: the one that is current in the calling thread.

    Raises:
        ConfigError: no cupy, no driver, one that is too old, or no such device; says what to do.
    """
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"device memory on CUDA needs cupy, which cannot be imported ({error}): pip install 'hicache[cuda]'"
        ) from error
    runtime = cupy.cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise ConfigError(_no_driver(runtime, error)) from error
    number = int(runtime.getDevice()) if device is None else whole_number(device)
    if number is None or not 0 <= number < count:
        raise ConfigError(
            f"CUDA device {device!r:.40} does not exist: this process sees {count}, numbered from 0 "
            "(CUDA_VISIBLE_DEVICES says which)"
        )
    return CupyDriver(cupy, number)


def _no_driver(runtime: Any, error: Exception) -> str:
    needs, has = int(runtime.runtimeGetVersion()), _driver_version(runtime)
    name = str(error).partition(":")[0]
    if has == 0:
        return (
            f"there is no NVIDIA driver here ({name}): install one that serves CUDA {version_text(needs)}, for which "
            "cupy was built, or keep the device tier in main memory"
        )
    if has < needs:
        return (
            f"the NVIDIA driver serves CUDA {version_text(has)} and cupy was built for {version_text(needs)} ({name}): "
            f"install a newer driver, or the cupy for CUDA {has // 1000}"
        )
    return f"the NVIDIA driver serves CUDA {version_text(has)} and shows no device ({error}): see nvidia-smi"


def _driver_version(runtime: Any) -> int:
    try:
        return int(runtime.driverGetVersion())
    except runtime.CUDARuntimeError:
        return 0


class CupyDriver:
    """A `CudaDriver`; see there for what its methods promise.

    Args:
        cupy: the module.
        device: number of a device that exists.
    """

    def __init__(self, cupy: Any, device: int) -> None:
        self.device = device
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._facts: DeviceFacts | None = None
        self._bindings, self._attributes, self.no_batches = _bindings(_driver_version(self._runtime))
        self.batches = self._bindings is not None

    def facts(self) -> DeviceFacts:
        """What the device is. Asked once: some of it takes CUDA milliseconds, with the GIL held."""
        if self._facts is None:
            self._facts = self._look()
        return self._facts

    def _look(self) -> DeviceFacts:
        runtime, number = self._runtime, self.device
        bus = ""
        with self._calls("cudaDeviceGetAttribute"):
            properties = runtime.getDeviceProperties(number)
            maps = runtime.deviceGetAttribute(runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, number)
            with suppress(runtime.CUDARuntimeError):  # virtual machines may have no such bus
                bus = str(runtime.deviceGetPCIBusId(number))
        return DeviceFacts(
            number=number,
            name=bytes(properties["name"]).decode("ascii", "replace"),
            capability=(int(properties["major"]), int(properties["minor"])),
            multiprocessors=int(properties["multiProcessorCount"]),
            total_bytes=int(properties["totalGlobalMem"]),
            maps_host=bool(maps),
            numa_node=_numa_node(bus),
            driver=_driver_version(runtime),
            runtime=int(runtime.runtimeGetVersion()),
        )

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all of them."""
        with self._calls("cudaMemGetInfo"):
            free, total = self._runtime.memGetInfo()
        return int(free), int(total)

    def pointer(self, address: int) -> Pointer:
        """What is at an address."""
        with self._calls("cudaPointerGetAttributes"):
            found = self._runtime.pointerGetAttributes(address)
        kind = _KINDS.get(int(found.type), "unregistered")
        return Pointer(kind, -1 if kind == "unregistered" else int(found.device))

    def host_register(self, address: int, size: int, *, read_only: bool = False) -> None:
        """Pin host memory that exists."""
        runtime = self._runtime
        flags = runtime.hostAllocPortable | runtime.hostAllocMapped  # the same bits as cudaHostRegister's
        with self._calls("cudaHostRegister"):
            if read_only:
                if not runtime.deviceGetAttribute(runtime.cudaDevAttrHostRegisterReadOnlySupported, self.device):
                    said = "the memory is mapped for reading only, which this device cannot pin"
                    raise CudaError("cudaHostRegister", "cudaErrorNotSupported", _NOT_SUPPORTED, said)
                flags |= _REGISTER_READ_ONLY
            runtime.hostRegister(address, size, flags)

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`."""
        with self._calls("cudaHostUnregister"):
            self._runtime.hostUnregister(address)

    def host_alloc(self, size: int) -> int:
        """New pinned host memory."""
        flags = self._runtime.hostAllocPortable | self._runtime.hostAllocMapped
        with self._calls("cudaHostAlloc"):
            return int(self._runtime.hostAlloc(size, flags))

    def host_free(self, address: int) -> None:
        """Give back what `host_alloc` gave."""
        with self._calls("cudaFreeHost"):
            self._runtime.freeHost(address)

    def malloc(self, size: int) -> int:
        """New memory on the device, not from cupy's pool, so that it goes back when it is given back."""
        with self._calls("cudaMalloc"):
            return int(self._runtime.malloc(size))

    def free(self, address: int) -> None:
        """Give back what `malloc` gave."""
        with self._calls("cudaFree"):
            self._runtime.free(address)

    def stream(self, priority: Priority = "low") -> Stream:
        """A new stream."""
        with self._calls("cudaStreamCreateWithPriority"):
            made: Stream = self._cupy.cuda.Stream(non_blocking=True, priority=_HIGH if priority == "high" else 0)
            return made

    def external_stream(self, ptr: int, keep: object = None) -> Stream:
        """Somebody else's stream."""
        return _Handle(ptr, keep)

    def current_stream(self) -> Stream:
        """Torch's stream where it is loaded and has begun to use CUDA, else cupy's."""
        of_torch = getattr(sys.modules.get("torch"), "cuda", None)  # none while another thread imports torch
        if of_torch is not None and of_torch.is_initialized():
            current = of_torch.current_stream(self.device)
            return _Handle(int(current.cuda_stream), current)
        with self._calls("cudaGetDevice"):
            current = self._cupy.cuda.get_current_stream()
        return _Handle(int(current.ptr), current)

    def event(self, *, timing: bool = False) -> Event:
        """A new event."""
        with self._calls("cudaEventCreateWithFlags"):
            made: Event = self._cupy.cuda.Event(block=True, disable_timing=not timing)
            return made

    def external_event(self, ptr: int, keep: object = None) -> Event:
        """Somebody else's event."""
        return _Handle(ptr, keep)

    def record(self, event: Event, stream: Stream) -> None:
        """Let the event pass behind what is in the stream now."""
        with self._calls("cudaEventRecord"):
            self._runtime.eventRecord(event.ptr, stream.ptr)

    def wait(self, stream: Stream, event: Event) -> None:
        """Let the stream wait for the event."""
        with self._calls("cudaStreamWaitEvent"):
            self._runtime.streamWaitEvent(stream.ptr, event.ptr)

    def query(self, event: Event) -> bool:
        """Whether the event has passed."""
        runtime = self._runtime
        with self._calls("cudaEventQuery"):
            status = int(runtime.eventQuery(event.ptr))
            if status != _NOT_READY:
                runtime.check_status(status)
        return status != _NOT_READY

    def synchronize(self, event: Event) -> None:
        """Block until the event has passed."""
        with self._calls("cudaEventSynchronize"):
            self._runtime.eventSynchronize(event.ptr)

    def elapsed(self, start: Event, end: Event) -> float:
        """Seconds between two events."""
        with self._calls("cudaEventElapsedTime"):
            return float(self._runtime.eventElapsedTime(start.ptr, end.ptr)) / 1e3

    def memcpy_async(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Copy bytes; CUDA tells by the addresses from where to where."""
        runtime = self._runtime
        try:
            if runtime.getDevice() == self.device:  # thousands in a row: without what `_calls` costs
                runtime.memcpyAsync(target, source, size, runtime.memcpyDefault, stream.ptr)
                return
        except runtime.CUDARuntimeError as error:
            raise _worded("cudaMemcpyAsync", error) from error
        with self._calls("cudaMemcpyAsync"):
            runtime.memcpyAsync(target, source, size, runtime.memcpyDefault, stream.ptr)

    def memcpy_batch_async(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Stream
    ) -> None:
        """Copy many runs by one call."""
        bindings = self._bindings
        if bindings is None:
            raise CudaError("cudaMemcpyBatchAsync", "cudaErrorNotSupported", _NOT_SUPPORTED, self.no_batches)
        try:
            with self._calls("cudaMemcpyBatchAsync"):
                answer = bindings.cudaMemcpyBatchAsync(
                    list(targets), list(sources), list(sizes), len(sizes), [self._attributes], [0], 1, stream.ptr
                )
        except (TypeError, ValueError, OverflowError) as error:  # of the bindings, before CUDA is called
            said = " ".join(str(error).split())[:_SAID]
            raise CudaError("cudaMemcpyBatchAsync", type(error).__name__, -1, said) from error
        status = answer[0]
        if int(status) != 0:
            raise CudaError("cudaMemcpyBatchAsync", str(status.name), int(status))

    def memset_async(self, address: int, value: int, size: int, stream: Stream) -> None:
        """Fill bytes."""
        with self._calls("cudaMemsetAsync"):
            self._runtime.memsetAsync(address, value, size, stream.ptr)

    def compile(self, source: str, name: str, options: Sequence[str] = ()) -> Kernel:
        """Compile by NVRTC, for this very device, and load it. cupy keeps what it compiled in a folder of its own."""
        try:
            with self._calls("cudaGetDevice"):
                kernel = self._cupy.RawKernel(source, name, options=tuple(options))
                kernel.compile()
                return kernel
        except CudaError:
            raise
        except Exception as error:  # of NVRTC, of its absence, of the driver's loader: all mean that there is no kernel
            said = " ".join(str(error).split())[:_SAID]
            raise CudaError(f"compiling {name}", type(error).__name__, -1, said) from error

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Any],
        stream: Stream,
    ) -> None:
        """Put a kernel into a stream."""
        try:
            with self._calls("cuLaunchKernel"):
                kernel(grid, block, tuple(arguments), stream=stream)
        except self._cupy.cuda.driver.CUDADriverError as error:
            raise _worded("cuLaunchKernel", error) from error

    @contextmanager
    def _calls(self, call: str) -> Iterator[None]:
        """Make the device the current one of this thread, and give errors their common form."""
        before = 0
        try:
            before = self._choose()
            yield
        except self._runtime.CUDARuntimeError as error:
            raise _worded(call, error) from error
        finally:
            if before:
                self._cupy.cuda.driver.ctxSetCurrent(before)

    def _choose(self) -> int:
        """Make the device this thread's current one; the context to go back to, 0 where there is none.

        A thread without a context, as those that hicache starts, keeps the device: it counts as on device 0 only as
        nobody has chosen, and to choose that would make a context there, which takes hundreds of MiB of another GPU.
        """
        if int(self._runtime.getDevice()) == self.device:
            return 0
        before = int(self._cupy.cuda.driver.ctxGetCurrent())
        self._runtime.setDevice(self.device)
        return before


def _worded(call: str, error: Any) -> CudaError:
    """An error of cupy, which has a status and a text that begins with the name."""
    name, _, text = str(error).partition(":")
    return CudaError(call, name, int(error.status), text.strip())


def _bindings(driver: int) -> tuple[Any, Any, str]:
    """The module with batched copies and the attributes of all copies, or None and why."""
    if driver < _OLDEST_BATCH:
        return None, None, f"the driver serves CUDA {version_text(driver)}, and batched copies begin with 12.8"
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        return None, None, f"cuda-bindings cannot be imported ({error}): pip install 'hicache[cuda]'"
    if not hasattr(runtime, "cudaMemcpyBatchAsync"):
        return None, None, "cuda-bindings is older than 12.8: pip install -U cuda-bindings"
    attributes = runtime.cudaMemcpyAttributes()
    # Sources are read in stream order, behind whatever the stream was made to wait for.
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    # The model computes beside them. A hint, which a device may leave aside.
    attributes.flags = int(runtime.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute)
    return runtime, attributes, ""


def _numa_node(bus: str) -> int | None:
    """The host's node of a device on the PCI bus."""
    try:
        node = int((Path("/sys/bus/pci/devices") / bus.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
