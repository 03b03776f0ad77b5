"""How much of a load a model's own work hides, and how much that work is slowed down by copies.

A load of 32 layers goes through the copy engine, and before each layer's compute the compute stream waits for that
layer alone. Compute is set to take as long as the load. What is hidden is the part of the load's time by which both
together take less than one after the other.

`slowdown` is how much longer the same compute takes while pages are copied beside it without a pause, both ways.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.gpu.machine import Machine
from hicache.core.layout import KVGeometry
from hicache.cuda.driver import Event, Stream
from hicache.cuda.executors import Executor, Executors
from hicache.cuda.options import CudaOptions
from hicache.cuda.pool import CudaDevicePool
from hicache.cuda.runs import RunTable

LAYERS: Final = 32
HIDDEN: Final = 0.9
_ROUNDS: Final = 5
_KERNELS: Final = 40
_KERNEL_SECONDS: Final = 0.5e-3
"""Of compute beside copies: kernels like a model's, between whose blocks others get their turn."""
_AHEAD: Final = 3
"""Copies of each direction that are in their streams at once; the kernel has room for the tables of a few more."""
_SECONDS: Final = 30.0
"""What a copy may take before the check gives up."""


def run(machine: Machine, seconds: float) -> dict[str, Any]:
    """Both measurements for each way of copying."""
    del seconds  # a few rounds of milliseconds
    executors = machine.executors()
    ways = ("auto", "kernel") if machine.fake else ("auto", *executors.usable)
    executors.close()
    hidden = [_hidden(machine, method) for method in ways]
    slowed = _slowdowns(machine)
    for row in hidden:
        row["ok"] = machine.fake or row["method"] != "auto" or row["hidden"] >= HIDDEN
    return {"ok": all(row["ok"] for row in hidden), "bar": HIDDEN, "hidden": hidden, "slowdown": slowed}


def _hidden(machine: Machine, method: Any) -> dict[str, Any]:
    tokens = 16
    geometry = KVGeometry.mha(LAYERS, kv_heads=8, head_dim=machine.size(128, 4), dtype="bfloat16")
    pages = machine.size(256, 8)
    compute = machine.driver.stream()
    pool = CudaDevicePool.allocate(
        geometry,
        page_size=tokens,
        slots=pages,
        stream=compute,
        driver=machine.driver,
        options=CudaOptions(method=method),
    )
    host = pool.host_pool(geometry, tokens, pages)
    engine = pool.cuda_engine(host)
    slots = np.arange(pages)
    try:

        def load(turns: int, *, copying: bool) -> float:
            def work(stream: Stream) -> None:
                copy = engine.host_to_device(slots, slots, done=lambda _: None) if copying else None
                for layer in range(LAYERS):
                    if copy is not None and not copy.let_wait(layer, stream, _SECONDS):
                        raise RuntimeError(f"layer {layer} of a load did not begin: {copy.results}")
                    if turns:
                        machine.compute(turns, stream)
                if copy is not None:
                    copies.append(copy)

            copies: list[Any] = []
            taken = machine.seconds(work, compute)
            for copy in copies:
                if not copy.wait(_SECONDS):
                    raise RuntimeError("a load did not end")
            return taken

        def typical(turns: int, *, copying: bool) -> float:
            load(turns, copying=copying)
            return median(load(turns, copying=copying) for _ in range(_ROUNDS))

        alone = typical(0, copying=True)
        probe = 2000
        turns = max(1, round(probe * alone / typical(probe, copying=False)))
        if machine.fake:
            turns = 1
        computing, both = typical(turns, copying=False), typical(turns, copying=True)
    finally:
        engine.close(_SECONDS)
        host.close()
        pool.close()
    return {
        "method": method,
        "bytes": pages * pool.page_bytes,
        "load_seconds": alone,
        "compute_seconds": computing,
        "both_seconds": both,
        "hidden": 1 - (both - computing) / alone,
    }


def _slowdowns(machine: Machine) -> list[dict[str, Any]]:
    executors = machine.executors()
    rows = []
    size = machine.size(64 << 20, 1 << 16)
    run_bytes = machine.size(1 << 20, 1 << 12)  # few runs, so that the queue is full while compute runs
    with machine.device_memory(2 * size) as device, machine.host_memory(2 * size) as host:
        at = np.arange(size // run_bytes, dtype=np.int64) * run_bytes
        lengths = np.full(len(at), run_bytes, np.int64)
        up = RunTable(host + at, device + at, lengths)
        down = RunTable(device + size + at, host + size + at, lengths)
        try:
            for kind in ("arithmetic", "memory"):
                rows += [_slowdown(machine, executors, name, kind, (up, down)) for name in executors.usable]
        finally:
            executors.close()
    return rows


def _slowdown(
    machine: Machine, executors: Executors, name: str, kind: str, tables: tuple[RunTable, RunTable]
) -> dict[str, Any]:
    driver, executor = machine.driver, executors.usable[name]
    compute, streams = driver.stream(), (driver.stream("high"), driver.stream("high"))
    begin = machine.compute if kind == "arithmetic" else machine.read
    turns = _turns(machine, begin, compute)

    def work(stream: Stream) -> None:
        for _ in range(machine.size(_KERNELS, 1)):
            begin(turns, stream)

    alone = median(machine.seconds(work, compute) for _ in range(_ROUNDS))
    rounds = [_beside(machine, executor, tables, streams, work, compute) for _ in range(_ROUNDS)]
    beside = median(taken for taken, _ in rounds)
    return {
        "method": name,
        "kind": kind,
        "blocks": getattr(executor, "blocks", 0),
        "multiprocessors": driver.facts().multiprocessors,
        "alone_seconds": alone,
        "beside_seconds": beside,
        "slowdown": beside / alone - 1,
        "copied_bytes_per_second": median(copied / taken for taken, copied in rounds),
    }


def _beside(
    machine: Machine,
    executor: Executor,
    tables: tuple[RunTable, RunTable],
    streams: tuple[Stream, Stream],
    work: Callable[[Stream], None],
    compute: Stream,
) -> tuple[float, int]:
    """Seconds of work while copies both ways never pause, and about how many bytes those moved in that time."""
    driver = machine.driver
    start, end = driver.event(timing=True), driver.event(timing=True)
    under_way: deque[list[Event]] = deque()
    ended = 0

    def copy() -> None:
        under_way.append([driver.event(), driver.event()])
        for table, stream, event in zip(tables, streams, under_way[-1], strict=True):
            executor.run(table, stream)
            driver.record(event, stream)

    for _ in range(_AHEAD):
        copy()
    driver.record(start, compute)
    work(compute)
    driver.record(end, compute)
    while not driver.query(end):
        for event in under_way.popleft():
            driver.synchronize(event)
        ended += 1
        copy()
    for stream in streams:
        machine.passed(stream)
    return max(driver.elapsed(start, end), 1e-9), ended * sum(table.total for table in tables)


def _turns(machine: Machine, begin: Callable[[int, Stream], None], stream: Stream) -> int:
    """Turns with which a kernel takes about as long as one of a model's."""
    begin(1, stream)
    turns, taken = 1, machine.seconds(lambda on: begin(1, on), stream)
    while taken < _KERNEL_SECONDS / 2 and not machine.fake:  # short ones take as long as their launch
        turns *= 2
        taken = machine.seconds(lambda on, count=turns: begin(count, on), stream)
    return max(1, round(turns * _KERNEL_SECONDS / taken)) if not machine.fake else 1
