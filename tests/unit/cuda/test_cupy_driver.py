"""What the driver over cupy calls, how it words failures, and what opening refuses. cupy itself is only looked at.

A stand-in records the calls, as cupy needs a GPU for nearly all of them; where cupy is installed, its own signatures
are compared with what is called here.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache.cuda import cupy_driver
from hicache.cuda.cupy_driver import CupyDriver, open_driver
from hicache.cuda.driver import CudaError, Pointer
from hicache.errors import ConfigError

NO_DRIVER = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"


class RuntimeSaysError(RuntimeError):
    """As cupy's: a status and a text that begins with the name."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Runtime:
    """Stands for `cupy.cuda.runtime`: `answers` by name of the call, `broken` what raises instead."""

    CUDARuntimeError = RuntimeSaysError

    def __init__(self) -> None:
        self.hostAllocPortable, self.hostAllocMapped, self.memcpyDefault = 1, 2, 4
        self.cudaDevAttrCanUseHostPointerForRegisteredMem = 91
        self.cudaDevAttrHostRegisterReadOnlySupported = 113
        self.context = 4711  # of the calling thread; 0: none
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.broken: dict[str, RuntimeSaysError] = {}
        self.answers: dict[str, Any] = {"getDeviceCount": 2, "getDevice": 0, "driverGetVersion": 13000}
        self.answers |= {"runtimeGetVersion": 13020, "eventQuery": 0, "memGetInfo": (10, 20), "eventElapsedTime": 2.5}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            if name in self.broken:
                raise self.broken[name]
            return self.answers.get(name)

        return call

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of that name."""
        return [arguments for called, arguments in self.calls if called == name]


class DriverSaysError(RuntimeError):
    status = 1


class Kernel:
    """Stands for `cupy.RawKernel`."""

    def __init__(self, source: str, name: str, *, options: tuple[str, ...]) -> None:
        self.source, self.name, self.options = source, name, options
        self.launches: list[tuple[Any, ...]] = []

    def compile(self) -> None:
        if "nonsense" in self.source:
            raise ValueError("kernel.cu(1): error:\n  nonsense")

    def __call__(self, *arguments: Any, stream: Any) -> None:
        if self.source == "too large":
            raise DriverSaysError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        self.launches.append((*arguments, stream))


class Bindings:
    """Stands for `cuda.bindings.runtime`."""

    def __init__(self) -> None:
        self.cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream="in stream order")
        self.cudaMemcpyFlags = SimpleNamespace(cudaMemcpyFlagPreferOverlapWithCompute=1)
        self.calls: list[tuple[Any, ...]] = []
        self.status: Any = type("Success", (int,), {"name": "cudaSuccess"})(0)

    @staticmethod
    def cudaMemcpyAttributes() -> SimpleNamespace:
        return SimpleNamespace(srcAccessOrder=None, flags=0)

    def cudaMemcpyBatchAsync(self, *arguments: Any) -> tuple[Any, ...]:
        if not all(type(size) is int for size in arguments[2]):
            raise TypeError("Argument 'sizes' is not instance of type\n(expected tuple[int] or list[int]")
        self.calls.append(arguments)
        return (self.status,)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    runtime = Runtime()
    cuda = SimpleNamespace(
        runtime=runtime,
        driver=SimpleNamespace(
            CUDADriverError=DriverSaysError,
            ctxGetCurrent=lambda: runtime.context,
            ctxSetCurrent=lambda context: runtime.calls.append(("ctxSetCurrent", (context,))),
        ),
        Stream=lambda **options: SimpleNamespace(ptr=77, **options),
        Event=lambda **options: SimpleNamespace(ptr=88, **options),
        get_current_stream=lambda: SimpleNamespace(ptr=99),
    )
    module = SimpleNamespace(cuda=cuda, RawKernel=Kernel, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    made = Bindings()
    for name, module in (("cuda", SimpleNamespace()), ("cuda.bindings", SimpleNamespace(runtime=made))):
        monkeypatch.setitem(sys.modules, name, module)
    return made


# ---- opening


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        ConfigError, match=r"needs cupy, which cannot be imported \(.*\): pip install 'hicache\[cuda\]'"
    ):
        open_driver()


@pytest.mark.parametrize(
    ("driver", "text"),
    [
        (
            0,
            r"there is no NVIDIA driver here \(cudaErrorInsuff.*\): install one that serves CUDA 13.2, for which",
        ),
        (12020, r"the NVIDIA driver serves CUDA 12.2 and cupy was built for 13.2 .*or the cupy for CUDA 12$"),
        (13020, r"the NVIDIA driver serves CUDA 13.2 and shows no device \(cudaErrorInsuff.*\): see nvidia-smi"),
    ],
)
def test_a_driver_that_cannot_serve_is_told_with_both_versions(cupy: Any, driver: int, text: str) -> None:
    cupy.runtime.broken["getDeviceCount"] = RuntimeSaysError(NO_DRIVER, 35)
    cupy.runtime.answers["driverGetVersion"] = driver
    with pytest.raises(ConfigError, match=text) as caught:
        open_driver()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", [2, -1, "first", True])
def test_a_device_that_does_not_exist_is_refused(cupy: Any, device: Any) -> None:
    with pytest.raises(ConfigError, match=r"CUDA device .* does not exist: this process sees 2, numbered from 0"):
        open_driver(device)


def test_the_current_device_is_the_default(cupy: Any) -> None:
    cupy.runtime.answers["getDevice"] = 1
    assert open_driver().device == 1


# ---- calls


def made(cupy: Any, device: int = 0) -> CupyDriver:
    return CupyDriver(cupy, device)


def test_another_device_is_current_only_while_it_is_called(cupy: Any) -> None:
    cupy.runtime.answers["malloc"] = 512
    assert made(cupy, 1).malloc(64) == 512
    assert [call for call in cupy.runtime.calls if call[0] in {"setDevice", "malloc", "ctxSetCurrent"}] == [
        ("setDevice", (1,)),
        ("malloc", (64,)),
        ("ctxSetCurrent", (4711,)),
    ]


def test_a_thread_without_a_context_keeps_the_device_and_makes_none_on_another(cupy: Any) -> None:
    """CUDA makes a context where a thread goes back to a device, which takes that device's memory."""
    cupy.runtime.context = 0
    driver = made(cupy, 1)
    driver.memory()
    assert cupy.runtime.named("setDevice") == [(1,)]
    assert cupy.runtime.named("ctxSetCurrent") == []


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda driver: driver.query(driver.external_event(6)), "eventQuery"),
        (lambda driver: driver.memcpy_async(1, 2, 3, driver.external_stream(5)), "memcpyAsync"),
        (lambda driver: driver.record(driver.external_event(6), driver.external_stream(5)), "eventRecord"),
    ],
)
def test_calls_that_are_made_often_choose_the_device_too(cupy: Any, call: Any, named: str) -> None:
    call(made(cupy, 1))
    order = [name for name, _ in cupy.runtime.calls if name in {"setDevice", "ctxSetCurrent", named}]
    assert order == ["setDevice", named, "ctxSetCurrent"]


def test_a_copy_that_is_refused_is_told_with_its_name(cupy: Any) -> None:
    cupy.runtime.broken["memcpyAsync"] = RuntimeSaysError("cudaErrorInvalidValue: invalid argument", 1)
    for device in (0, 1):
        with pytest.raises(CudaError, match=r"^cudaMemcpyAsync: cudaErrorInvalidValue \(1\): invalid argument$"):
            made(cupy, device).memcpy_async(1, 2, 3, made(cupy).external_stream(5))


def test_a_failure_has_the_call_the_name_and_the_code_and_the_device_is_put_back(cupy: Any) -> None:
    cupy.runtime.broken["hostRegister"] = RuntimeSaysError("cudaErrorMemoryAllocation: out of memory", 2)
    with pytest.raises(
        CudaError, match=r"^cudaHostRegister: cudaErrorMemoryAllocation \(2\): out of memory$"
    ) as caught:
        made(cupy, 1).host_register(4096, 8192)
    assert (caught.value.name, caught.value.code) == ("cudaErrorMemoryAllocation", 2)
    assert cupy.runtime.named("ctxSetCurrent") == [(4711,)]


def test_host_memory_is_pinned_for_all_devices_and_mapped(cupy: Any) -> None:
    driver = made(cupy)
    driver.host_register(4096, 8192)
    assert cupy.runtime.named("hostRegister") == [(4096, 8192, 3)]
    cupy.runtime.answers["hostAlloc"] = 512
    assert driver.host_alloc(100) == 512
    assert cupy.runtime.named("hostAlloc") == [(100, 3)]
    driver.host_unregister(4096)
    driver.host_free(512)
    assert cupy.runtime.named("hostUnregister") == [(4096,)]
    assert cupy.runtime.named("freeHost") == [(512,)]


def test_memory_that_is_mapped_for_reading_is_pinned_so_where_the_device_can(cupy: Any) -> None:
    driver = made(cupy)
    cupy.runtime.answers["deviceGetAttribute"] = 1
    driver.host_register(4096, 8192, read_only=True)
    assert cupy.runtime.named("deviceGetAttribute") == [(113, 0)]
    assert cupy.runtime.named("hostRegister") == [(4096, 8192, 11)]
    cupy.runtime.answers["deviceGetAttribute"] = 0
    with pytest.raises(CudaError, match=r"cudaErrorNotSupported \(801\): the memory is mapped for reading only"):
        driver.host_register(4096, 8192, read_only=True)


def test_streams_and_events_are_those_that_overlap_and_let_threads_sleep(cupy: Any) -> None:
    driver = made(cupy)
    low, high = driver.stream(), driver.stream("high")
    assert (low.non_blocking, low.priority, high.priority) == (True, 0, -1)  # type: ignore[attr-defined]
    event, timed = driver.event(), driver.event(timing=True)
    assert (event.block, event.disable_timing, timed.disable_timing) == (True, True, False)  # type: ignore[attr-defined]
    driver.record(event, low)
    driver.wait(low, event)
    driver.synchronize(event)
    assert cupy.runtime.named("eventRecord") == [(88, 77)]
    assert cupy.runtime.named("streamWaitEvent") == [(77, 88)]
    assert cupy.runtime.named("eventSynchronize") == [(88,)]
    assert driver.elapsed(timed, timed) == 0.0025


def test_an_event_that_has_not_passed_is_no_error(cupy: Any) -> None:
    driver, event = made(cupy), made(cupy).event()
    assert driver.query(event)
    cupy.runtime.answers["eventQuery"] = 600
    assert not driver.query(event)
    cupy.runtime.answers["eventQuery"] = 700
    cupy.runtime.broken["check_status"] = RuntimeSaysError("cudaErrorIllegalAddress: an illegal address", 700)
    with pytest.raises(CudaError, match=r"cudaEventQuery: cudaErrorIllegalAddress \(700\)"):
        driver.query(event)


def test_the_current_stream_is_cupys_where_torch_does_not_compute(cupy: Any) -> None:
    assert made(cupy).current_stream().ptr == 99


def test_the_current_stream_is_torchs_where_it_computes(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(cuda_stream=123)
    asked: list[int] = []
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_stream=lambda device: (asked.append(device), current)[1],
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    assert made(cupy, 1).current_stream().ptr == 123
    assert asked == [1]
    unfinished: Any = SimpleNamespace()  # as another thread imports it
    monkeypatch.setitem(sys.modules, "torch", unfinished)
    assert made(cupy, 1).current_stream().ptr == 99


def test_what_is_at_an_address(cupy: Any) -> None:
    driver = made(cupy)
    for kind, expected in ((0, Pointer("unregistered", -1)), (1, Pointer("host", 1)), (2, Pointer("device", 1))):
        cupy.runtime.answers["pointerGetAttributes"] = SimpleNamespace(type=kind, device=1)
        assert driver.pointer(4096) == expected


def test_what_the_device_is(cupy: Any) -> None:
    properties = {"name": b"NVIDIA X", "major": 9, "minor": 0, "multiProcessorCount": 132, "totalGlobalMem": 1 << 37}
    cupy.runtime.answers |= {"getDeviceProperties": properties, "deviceGetAttribute": 1, "deviceGetPCIBusId": "none"}
    facts = made(cupy).facts()
    assert (facts.name, facts.capability, facts.multiprocessors) == ("NVIDIA X", (9, 0), 132)
    assert (facts.maps_host, facts.numa_node, facts.driver, facts.runtime) == (True, None, 13000, 13020)
    assert made(cupy).memory() == (10, 20)


def test_what_the_device_is_is_asked_once_and_needs_no_bus(cupy: Any) -> None:
    properties = {"name": b"NVIDIA X", "major": 9, "minor": 0, "multiProcessorCount": 132, "totalGlobalMem": 1 << 37}
    cupy.runtime.answers |= {"getDeviceProperties": properties, "deviceGetAttribute": 1}
    cupy.runtime.broken["deviceGetPCIBusId"] = RuntimeSaysError("cudaErrorInvalidValue: invalid argument", 1)
    driver = made(cupy)
    assert driver.facts() is driver.facts()
    assert driver.facts().numa_node is None
    assert len(cupy.runtime.named("getDeviceProperties")) == 1


def test_plain_copies_and_fills_go_to_their_stream(cupy: Any) -> None:
    driver = made(cupy)
    stream = driver.external_stream(5)
    driver.memcpy_async(100, 200, 300, stream)
    driver.memset_async(100, 0xEE, 300, stream)
    assert cupy.runtime.named("memcpyAsync") == [(100, 200, 300, 4, 5)]
    assert cupy.runtime.named("memsetAsync") == [(100, 0xEE, 300, 5)]
    assert driver.external_event(6).ptr == 6
    driver.free(100)
    assert cupy.runtime.named("free") == [(100,)]


# ---- batched copies


def test_a_batch_has_one_set_of_attributes_for_all_runs(cupy: Any, bindings: Bindings) -> None:
    driver = made(cupy)
    assert driver.batches
    driver.memcpy_batch_async((1, 2), (3, 4), (5, 6), driver.external_stream(7))
    ((targets, sources, sizes, count, attributes, first, kinds, stream),) = bindings.calls
    assert (targets, sources, sizes, count, first, kinds, stream) == ([1, 2], [3, 4], [5, 6], 2, [0], 1, 7)
    assert attributes == [SimpleNamespace(srcAccessOrder="in stream order", flags=1)]


def test_a_batch_that_is_refused_is_told_with_its_name(cupy: Any, bindings: Bindings) -> None:
    bindings.status = type("Failure", (int,), {"name": "cudaErrorInvalidValue"})(1)
    driver = made(cupy)
    with pytest.raises(CudaError, match=r"cudaMemcpyBatchAsync: cudaErrorInvalidValue \(1\)"):
        driver.memcpy_batch_async([1], [2], [3], driver.external_stream(7))


def test_numbers_that_the_bindings_do_not_take_are_told_as_any_failure(cupy: Any, bindings: Bindings) -> None:
    """So an executor that uses them wrongly is found by its proof and left out, and attaching goes on."""
    driver = made(cupy)
    with pytest.raises(CudaError, match=r"cudaMemcpyBatchAsync: TypeError \(-1\): Argument 'sizes' .* \(expected"):
        driver.memcpy_batch_async([1], [2], [np.int64(3)], driver.external_stream(7))
    assert not bindings.calls


def test_why_there_are_no_batches(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    driver = made(cupy)
    assert not driver.batches
    assert "cuda-bindings cannot be imported" in driver.no_batches
    assert driver.no_batches.endswith("pip install 'hicache[cuda]'")
    with pytest.raises(CudaError, match="cuda-bindings cannot be imported"):
        driver.memcpy_batch_async([1], [2], [3], driver.external_stream(7))
    cupy.runtime.answers["driverGetVersion"] = 12060
    assert made(cupy).no_batches == "the driver serves CUDA 12.6, and batched copies begin with 12.8"


def test_bindings_that_are_too_old_have_no_batches(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(runtime=SimpleNamespace())
    for name, module in (("cuda", SimpleNamespace()), ("cuda.bindings", old)):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    assert made(cupy).no_batches == "cuda-bindings is older than 12.8: pip install -U cuda-bindings"


# ---- kernels


def test_a_kernel_is_compiled_at_once_and_launched_on_its_stream(cupy: Any) -> None:
    driver = made(cupy)
    kernel = driver.compile("source", "name", ["--std=c++17"])
    assert (kernel.name, kernel.options) == ("name", ("--std=c++17",))
    stream = driver.stream()
    driver.launch(kernel, (4, 1, 1), (512, 1, 1), [np.int64(3)], stream)
    assert kernel.launches == [((4, 1, 1), (512, 1, 1), (np.int64(3),), stream)]


def test_what_the_compiler_says_is_one_line(cupy: Any) -> None:
    expected = re.escape("compiling name: ValueError (-1): kernel.cu(1): error: nonsense")
    with pytest.raises(CudaError, match=f"^{expected}$"):
        made(cupy).compile("nonsense", "name")


def test_a_launch_that_is_refused_is_told_with_its_name(cupy: Any) -> None:
    driver = made(cupy)
    with pytest.raises(CudaError, match=r"cuLaunchKernel: CUDA_ERROR_INVALID_VALUE \(1\): invalid argument"):
        driver.launch(driver.compile("too large", "name"), (1, 1, 1), (1, 1, 1), [], driver.stream())


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="cupy is not installed: its signatures unseen")
def test_the_calls_are_those_of_cupy_itself() -> None:
    import cupy

    expected = {
        "hostRegister": 3, "hostUnregister": 1, "hostAlloc": 2, "freeHost": 1, "malloc": 1, "free": 1, "memGetInfo": 0,
        "memcpyAsync": 5, "memsetAsync": 4, "eventRecord": 2, "streamWaitEvent": 3, "eventQuery": 1,
        "eventSynchronize": 1, "eventElapsedTime": 2, "pointerGetAttributes": 1, "deviceGetPCIBusId": 1,
        "deviceGetAttribute": 2, "getDeviceProperties": 1, "driverGetVersion": 0, "check_status": 1, "getDevice": 0,
        "setDevice": 1, "getDeviceCount": 0, "runtimeGetVersion": 0,
    }  # fmt: skip
    for name, count in expected.items():
        signature = re.match(rf"{name}\((.*?)\)", getattr(cupy.cuda.runtime, name).__doc__)
        assert signature is not None, name
        assert len([part for part in signature[1].split(",") if part]) == count, name
    for name in (
        "hostAllocPortable",
        "hostAllocMapped",
        "memcpyDefault",
        "cudaDevAttrCanUseHostPointerForRegisteredMem",
        "cudaDevAttrHostRegisterReadOnlySupported",
    ):
        assert isinstance(getattr(cupy.cuda.runtime, name), int), name
    assert issubclass(cupy.cuda.driver.CUDADriverError, Exception)
    assert callable(cupy.cuda.driver.ctxGetCurrent)
    assert callable(cupy.cuda.driver.ctxSetCurrent)
    assert {"type", "device"} <= set(dir(cupy.cuda.runtime.PointerAttributes))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="cupy is not installed: its streams unseen")
def test_streams_and_events_are_made_as_cupy_makes_them() -> None:
    import cupy

    for made_by, names in ((cupy.cuda.Stream, {"non_blocking", "priority"}), (cupy.cuda.Event, {"block"})):
        assert names <= set(inspect.signature(made_by.__init__).parameters), made_by


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="cuda-bindings is not installed: its calls unseen",
)
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="a driver is here, which would believe the handles")
def test_the_bindings_take_what_they_are_given() -> None:
    """Where there is no driver they say so, but only once they have taken all of it."""
    found, attributes, absent = cupy_driver._bindings(13000)
    assert absent == ""
    assert int(attributes.srcAccessOrder) == 1
    assert int(attributes.flags) == 1
    (status,) = found.cudaMemcpyBatchAsync([1 << 40], [1 << 30], [16], 1, [attributes], [0], 1, 12345)
    assert status.name
    assert int(status) != 0
    with pytest.raises(TypeError):
        found.cudaMemcpyBatchAsync([1 << 40], [1 << 30], [np.int64(16)], 1, [attributes], [0], 1, 12345)
