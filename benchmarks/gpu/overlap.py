"""How much of a load a model's own work hides, and how much that work is slowed down by copies.

A load of 32 layers goes through the copy engine, and before each layer's compute the compute stream waits for that
layer alone. Compute is set to take as long as the load. What is hidden is the part of the load's time by which both
together take less than one after the other.

`slowdown` is how much longer the same compute takes while pages are copied beside it without a pause, both ways.
"""

from __future__ import annotations

from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.gpu.machine import Machine
from hicache.core.layout import KVGeometry
from hicache.cuda.driver import Stream
from hicache.cuda.executors import Executor, Executors
from hicache.cuda.options import CudaOptions
from hicache.cuda.pool import CudaDevicePool
from hicache.cuda.runs import RunTable

LAYERS: Final = 32
HIDDEN: Final = 0.9
_ROUNDS: Final = 5
_SECONDS: Final = 60.0
"""What a copy may take before the check gives up."""


def run(machine: Machine, seconds: float) -> dict[str, Any]:
    """Both measurements for each way of copying."""
    del seconds  # a few rounds of milliseconds
    ways = ("auto", "kernel") if machine.fake else ("auto", *machine.executors().usable)
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
        for kind in ("arithmetic", "memory"):
            rows += [_slowdown(machine, executors, name, kind, (up, down)) for name in executors.usable]
    executors.close()
    return rows


def _slowdown(
    machine: Machine, executors: Executors, name: str, kind: str, tables: tuple[RunTable, RunTable]
) -> dict[str, Any]:
    driver, executor = machine.driver, executors.usable[name]
    compute, streams = driver.stream(), (driver.stream("high"), driver.stream("high"))
    begin = machine.compute if kind == "arithmetic" else machine.read
    turns = _turns(machine, begin, compute, machine.size(20, 0) / 1e3)
    each = machine.seconds(lambda stream: executor.run(tables[0], stream), streams[0])

    def once(stream: Stream) -> None:
        begin(turns, stream)

    alone = median(machine.seconds(once, compute) for _ in range(_ROUNDS))
    copies = max(1, round(2 * alone / each)) if not machine.fake else 1
    beside = []
    for _ in range(_ROUNDS):
        _fill(executor, tables, streams, copies)
        beside.append(machine.seconds(once, compute))
        for stream in streams:
            machine.passed(stream)
    blocks = getattr(executor, "blocks", 0)
    return {
        "method": name,
        "kind": kind,
        "blocks": blocks,
        "multiprocessors": driver.facts().multiprocessors,
        "alone_seconds": alone,
        "beside_seconds": median(beside),
        "slowdown": median(beside) / alone - 1,
    }


def _fill(executor: Executor, tables: tuple[RunTable, RunTable], streams: tuple[Stream, Stream], copies: int) -> None:
    for _ in range(copies):
        for table, stream in zip(tables, streams, strict=True):
            executor.run(table, stream)


def _turns(machine: Machine, begin: Any, stream: Stream, seconds: float) -> int:
    """Turns that take about so long."""
    begin(1, stream)
    probe = 8
    taken = machine.seconds(lambda on: begin(probe, on), stream)
    return max(1, round(probe * seconds / taken)) if not machine.fake else 1
