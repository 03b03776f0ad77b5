"""Pages up and down by every executor, each beside one pinned copy of as many bytes in the same minute.

Pages lie in random slots on both sides, either whole ("pages") or divided into 32 layers with keys and values apart
("layers", so that a run is a 64th of a page). Every executor's bytes are compared with what was sent.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.gpu.machine import Machine, bytes_at
from hicache.clock import MonotonicClock
from hicache.core.layout import KVGeometry
from hicache.cuda.choice import choose
from hicache.cuda.driver import Stream
from hicache.cuda.regions import TensorMemory, regions_of
from hicache.cuda.runs import HostPart, PageRuns, RunTable
from hicache.memory.layout import PageLayout

PAGES: Final = tuple(kib << 10 for kib in (16, 34, 64, 128, 256, 1024, 4096, 16384))
"""34 KiB are those of a small model's pages of 16 tokens."""
LAYERS, TOKENS = 32, 16
BARS: Final = {34 << 10: 0.8, 128 << 10: 0.95}
"""Part of the pinned copy's rate that pages of this size and more must reach by what was chosen, where a run is a
page."""


def run(machine: Machine, seconds: float) -> dict[str, Any]:
    """All rates, and whether the bars were met and all bytes were right."""
    executors = machine.executors()
    chosen = choose(machine.driver, executors, MonotonicClock())
    pages = PAGES[:2] if machine.fake else PAGES
    cases = [
        (size, layout) for size in pages for layout in ("pages", "layers") if layout == "pages" or size % 1024 == 0
    ]
    each = 0.0 if machine.fake else seconds / (len(cases) * 2)  # once, where times mean nothing
    rows: list[dict[str, Any]] = []
    try:
        for size, layout in cases:
            for to_device in (True, False):
                rows += _case(machine, chosen, size, layout, to_device=to_device, seconds=each)
    finally:
        chosen.close()
    for row in rows:
        row["bar"] = _bar(row)
        row["ok"] = row["wrong_bytes"] == 0 and (machine.fake or row["ratio"] >= (row["bar"] or 0))
    return {"ok": all(row["ok"] for row in rows), "choice": chosen.choice.describe(), "rows": rows}


def _bar(row: dict[str, Any]) -> float | None:
    if row["layout"] != "pages" or row["method"] != "chosen":
        return None
    return max((bar for size, bar in BARS.items() if row["page_bytes"] >= size), default=None)


def _case(
    machine: Machine, chosen: Any, page_bytes: int, layout: str, *, to_device: bool, seconds: float
) -> list[dict[str, Any]]:
    count = max(2, machine.size(256 << 20, 1 << 18) // page_bytes)
    room = 2 * count * page_bytes
    with machine.device_memory(room) as device, machine.host_memory(room) as host, machine.host_memory(room) as other:
        random = np.random.default_rng(page_bytes)
        sent, back = bytes_at(host, room), bytes_at(other, room)
        sent[:] = random.integers(0, 256, room, np.uint8)
        slots, host_slots = (random.permutation(2 * count)[:count].astype(np.int64) for _ in range(2))
        up, down = (_runs(page_bytes, layout, device, place, 2 * count) for place in (host, other))
        stream = machine.driver.stream()
        methods = {"chosen": lambda table, on: chosen.run(table, on, to_device=to_device)}
        methods |= {name: one.run for name, one in chosen.executors.usable.items()}
        times: dict[str, list[float]] = {name: [] for name in ("reference", *methods)}
        issued: dict[str, list[float]] = {name: [] for name in methods}
        side = up if to_device else down
        wrong = {name: _wrong(machine, stream, method, up, down, slots, host_slots, sent, back, to_device=to_device)
                 for name, method in methods.items()}  # fmt: skip

        def reference(on: Stream) -> None:
            target, source = (device, host) if to_device else (other, device)
            machine.driver.memcpy_async(target, source, count * page_bytes, on)

        end = time.perf_counter() + seconds
        while not times["reference"] or (time.perf_counter() < end and len(times["reference"]) < 9):
            times["reference"].append(machine.seconds(reference, stream))
            for name, method in methods.items():
                start = time.perf_counter()
                tables = list(side.tables(slots, host_slots, to_device=to_device))
                reckoned = time.perf_counter() - start

                def work(on: Stream, tables: list[RunTable] = tables, method: Any = method) -> None:
                    for table in tables:
                        method(table, on)

                start = time.perf_counter()
                times[name].append(machine.seconds(work, stream))
                issued[name].append(time.perf_counter() - start + reckoned)
        moved = count * page_bytes
        base = moved / median(times["reference"])
        mean_run = moved // sum(len(table) for table in side.tables(slots, host_slots, to_device=to_device))
        return [
            {
                "page_bytes": page_bytes,
                "layout": layout,
                "to_device": to_device,
                "method": name,
                "run_bytes": mean_run,
                "rate": moved / median(times[name]),
                "reference_rate": base,
                "ratio": moved / median(times[name]) / base,
                "with_table_rate": moved / median(issued[name]),
                "rounds": len(times[name]),
                "wrong_bytes": wrong[name],
            }
            for name in methods
        ]


def _runs(page_bytes: int, layout: str, device: int, host: int, slots: int) -> PageRuns:
    if layout == "pages":
        geometry = KVGeometry.opaque(engine="bench", backend="none", version="1", shape="run", page_bytes=page_bytes)
        page, shape, name = PageLayout.of(geometry, TOKENS), (slots, page_bytes), "opaque"
    else:
        row = page_bytes // (LAYERS * 2 * TOKENS)
        geometry = KVGeometry.mha(LAYERS, kv_heads=1, head_dim=row, dtype="uint8")
        page, shape, name = PageLayout.of(geometry, TOKENS), (LAYERS, 2, slots, TOKENS, 1, row), "layer_first"
    strides = tuple(int(np.prod(shape[at + 1 :], dtype=np.int64)) for at in range(len(shape)))
    regions = regions_of(TensorMemory(device, shape, strides, 1), name, page)
    return PageRuns(page, regions, [HostPart.whole(host, slots, page_bytes)])


def _wrong(
    machine: Machine, stream: Stream, method: Any, up: PageRuns, down: PageRuns, slots: Any, host_slots: Any,
    sent: Any, back: Any, *, to_device: bool,
) -> int:  # fmt: skip
    """Bytes that did not come back as they were sent, by way of other pages of the device."""
    plain = machine.executors().usable["plain"].run
    back[:] = 0
    page_bytes = up.page.page_bytes
    for runs, moves, is_up in (
        (up, method if to_device else plain, True),
        (down, plain if to_device else method, False),
    ):
        for table in runs.tables(slots, host_slots, to_device=is_up):
            moves(table, stream)
    machine.passed(stream)
    rows = sent.reshape(-1, page_bytes)[host_slots], back.reshape(-1, page_bytes)[host_slots]
    return int(np.count_nonzero(rows[0] != rows[1]))
