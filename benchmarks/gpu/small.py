"""A small copy by every executor, for `compute-sanitizer`: runs of odd lengths and alignments, every byte compared."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from benchmarks.gpu.machine import Machine, bytes_at
from hicache.cuda.runs import RunTable

_LENGTHS: Final = (1, 2, 3, 15, 16, 17, 255, 511, 512, 513, 2048, 4095, 4096, 20_011)


def run(machine: Machine, seconds: float) -> dict[str, Any]:
    """Wrong bytes of each executor, for tables of few runs and of many, and for one block and for several."""
    del seconds
    rows = []
    for blocks in (1, 4):
        executors = machine.executors(blocks)
        for name, executor in executors.usable.items():
            if name == "kernel" or blocks == 1:
                rows += [_row(machine, executor, name, blocks, count) for count in (3, 200)]
        executors.close()
    return {"ok": all(row["wrong_bytes"] == 0 for row in rows), "rows": rows}


def _row(machine: Machine, executor: Any, name: str, blocks: int, count: int) -> dict[str, Any]:
    random = np.random.default_rng(count)
    length = random.choice(_LENGTHS, count).astype(np.int64)
    room = int(length.sum()) + count
    gaps = np.arange(count)
    with machine.device_memory(room) as device, machine.host_memory(2 * room) as host:
        sent, back = bytes_at(host, room), bytes_at(host + room, room)
        sent[:], back[:] = random.integers(0, 256, room, np.uint8), 0
        at = np.cumsum(length) - length + gaps
        there = np.zeros_like(at)
        order = random.permutation(count)
        there[order] = device + np.cumsum(length[order]) - length[order]
        stream = machine.driver.stream()
        # Tools that look for memory that nobody has written do not know every call that writes some.
        machine.driver.memset_async(device, 0, room, stream)
        executor.run(RunTable(host + at, there, length), stream)
        executor.run(RunTable(there, host + room + at, length), stream)
        machine.passed(stream)
        inside = np.zeros(room, bool)
        for start, size in zip(at.tolist(), length.tolist(), strict=True):
            inside[start : start + size] = True
        wrong = int(np.count_nonzero(back != np.where(inside, sent, 0)))
    return {"method": name, "blocks": blocks, "runs": count, "bytes": int(length.sum()), "wrong_bytes": wrong}
