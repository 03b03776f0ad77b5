"""Pages up and down by every executor, each beside one pinned copy of as many bytes in the same minute.

Pages lie in random slots on both sides, either whole ("pages") or divided into 32 layers with keys and values apart
("layers", so that a run is a 64th of a page). Every executor's bytes are compared with what was sent. A copy moves 128
MiB, or less where that would be more runs than one by one can be asked for in a moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, TypeAlias

import numpy as np

from benchmarks.gpu.machine import Machine, bytes_at
from hicache.clock import MonotonicClock
from hicache.core.layout import KVGeometry
from hicache.cuda.choice import ChosenExecutors, choose
from hicache.cuda.driver import Stream
from hicache.cuda.executors import KernelExecutor
from hicache.cuda.regions import TensorMemory, regions_of
from hicache.cuda.runs import HostPart, PageRuns, RunTable
from hicache.memory.layout import PageLayout

PAGES: Final = tuple(kib << 10 for kib in (16, 34, 64, 128, 256, 1024, 4096, 16384))
"""34 KiB are those of a small model's pages of 16 tokens."""
LAYERS, TOKENS = 32, 16
BARS: Final = {34 << 10: 0.8, 128 << 10: 0.95}
"""Part of the pinned copy's rate that pages of this size and more must reach by what was chosen, where a run is a
page."""
SWEPT: Final = 128 << 10
BLOCKS: Final = (1, 2, 4, 8, 16, 32)
_ROOM: Final = 256 << 20
_MOST_RUNS: Final = 1 << 15
"""Of one copy: a call a run then takes a fifth of a second."""
_ROUNDS: Final = 9
_SHARE: Final = 0.5
"""Of the part's time that goes to timing; the rest is for comparing bytes."""

Method: TypeAlias = Callable[[RunTable, Stream], object]


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory for all cases: half of it is moved.

    Attributes:
        device, host, other: addresses.
        size: bytes of each.
    """

    device: int
    host: int
    other: int
    size: int


@dataclass(slots=True)
class _Case:
    """Pages of one size and layout, in one direction."""

    page_bytes: int
    layout: str
    to_device: bool
    room: _Room
    up: PageRuns = field(init=False)
    down: PageRuns = field(init=False)
    slots: Any = field(init=False)
    host_slots: Any = field(init=False)

    def __post_init__(self) -> None:
        runs = 1 if self.layout == "pages" else LAYERS * 2
        count = max(1, min(self.room.size // 2 // self.page_bytes, _MOST_RUNS // runs))
        random = np.random.default_rng(self.page_bytes)
        self.slots, self.host_slots = (random.permutation(2 * count)[:count].astype(np.int64) for _ in range(2))
        self.up, self.down = (
            _runs(self.page_bytes, self.layout, self.room.device, host, 2 * count)
            for host in (self.room.host, self.room.other)
        )

    @property
    def moved(self) -> int:
        """Bytes of one copy."""
        return len(self.slots) * self.page_bytes

    def tables(self, *, to_device: bool) -> list[RunTable]:
        """Up from where the pages were made, down to the other place."""
        side = self.up if to_device else self.down
        return list(side.tables(self.slots, self.host_slots, to_device=to_device))


def run(machine: Machine, seconds: float) -> dict[str, Any]:
    """All rates, and whether the bars were met and all bytes were right."""
    end = time.perf_counter() + seconds
    chosen = choose(machine.driver, machine.executors(), MonotonicClock())
    pages = PAGES[:1] if machine.fake else PAGES
    shapes = [(size, layout, up) for size in pages for layout in ("pages", "layers") for up in (True, False)]
    each = 0.0 if machine.fake else _SHARE * seconds / len(shapes)  # once, where times mean nothing
    size = machine.size(_ROOM, 1 << 18)
    rows: list[dict[str, Any]] = []
    left_out = 0
    try:
        with (
            machine.device_memory(size) as device,
            machine.host_memory(size) as host,
            machine.host_memory(size) as other,
        ):
            room = _Room(device, host, other, size)
            words = bytes_at(host, size).view(np.uint64)
            words[:] = np.random.default_rng(1).integers(0, 1 << 63, len(words), np.uint64)
            for number, shape in enumerate(shapes):
                if time.perf_counter() > end:
                    left_out = len(shapes) - number
                    break
                rows += _measured(machine, chosen, _Case(*shape, room), each)
                _tell(rows[-1])
            sweep = _sweep(machine, room) if "kernel" in chosen.executors.usable else []
    finally:
        chosen.close()
    for row in rows:
        row["bar"] = _bar(row)
        row["ok"] = row["wrong_pages"] == 0 and (machine.fake or row["ratio"] >= (row["bar"] or 0))
    found = {"ok": all(row["ok"] for row in rows), "choice": chosen.choice.describe(), "rows": rows, "sweep": sweep}
    slow = [f"{row['page_bytes']} B to {'device' if row['to_device'] else 'host'}" for row in rows if not row["ok"]]
    if slow:
        found["error"] = f"below their bars, or with wrong bytes: {', '.join(dict.fromkeys(slow))}"
    if left_out:
        found |= {"ok": False, "error": f"{left_out} of {len(shapes)} shapes were not reached in {seconds:.0f} s"}
    return found


def _tell(row: dict[str, Any]) -> None:
    """A line for who waits, and for who looks where it hung."""
    where = "to device" if row["to_device"] else "to host"
    print(f"bandwidth: {row['page_bytes']} B in runs of {row['run_bytes']} B {where}: measured", flush=True)


def _bar(row: dict[str, Any]) -> float | None:
    if row["layout"] != "pages" or row["method"] != "chosen":
        return None
    return max((bar for size, bar in BARS.items() if row["page_bytes"] >= size), default=None)


def _measured(machine: Machine, chosen: ChosenExecutors, case: _Case, seconds: float) -> list[dict[str, Any]]:
    driver, stream, room = machine.driver, machine.driver.stream(), case.room
    methods: dict[str, Method] = {"chosen": lambda table, on: chosen.run(table, on, to_device=case.to_device)}
    methods |= {name: one.run for name, one in chosen.executors.usable.items()}
    plain = chosen.executors.usable["plain"].run
    wrong = {name: _wrong_pages(machine, stream, method, plain, case) for name, method in methods.items()}
    target, source = (room.device, room.host) if case.to_device else (room.other, room.device)
    times: dict[str, list[float]] = {name: [] for name in ("reference", *methods)}
    whole: dict[str, list[float]] = {name: [] for name in methods}
    end = time.perf_counter() + seconds
    while not times["reference"] or (time.perf_counter() < end and len(times["reference"]) < _ROUNDS):
        copy = machine.seconds(lambda on: driver.memcpy_async(target, source, case.moved, on), stream)
        times["reference"].append(copy)
        for name, method in methods.items():
            start = time.perf_counter()
            tables = case.tables(to_device=case.to_device)
            times[name].append(machine.seconds(lambda on, t=tables, m=method: [m(one, on) for one in t], stream))
            whole[name].append(time.perf_counter() - start)
    base = case.moved / median(times["reference"])
    return [
        {
            "page_bytes": case.page_bytes,
            "layout": case.layout,
            "to_device": case.to_device,
            "method": name,
            "run_bytes": case.moved // sum(len(table) for table in case.tables(to_device=case.to_device)),
            "rate": case.moved / median(times[name]),
            "reference_rate": base,
            "ratio": case.moved / median(times[name]) / base,
            "with_table_rate": case.moved / median(whole[name]),
            "rounds": len(times[name]),
            "wrong_pages": wrong[name],
        }
        for name in methods
    ]


def _sweep(machine: Machine, room: _Room) -> list[dict[str, Any]]:
    """Rates of the kernel by the number of its blocks: how few fill the link."""
    rows = []
    for to_device in (True, False):
        case = _Case(SWEPT if not machine.fake else PAGES[0], "pages", to_device, room)
        tables, stream = case.tables(to_device=to_device), machine.driver.stream()
        for blocks in BLOCKS[:2] if machine.fake else BLOCKS:
            executor = KernelExecutor(machine.driver, blocks=blocks)
            rates = [
                case.moved
                / machine.seconds(lambda on, one=executor, of=tables: [one.run(table, on) for table in of], stream)
                for _ in range(1 if machine.fake else _ROUNDS)
            ]
            executor.close()
            rows.append({"blocks": blocks, "to_device": to_device, "rate": median(rates)})
    return rows


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


def _wrong_pages(machine: Machine, stream: Stream, method: Method, plain: Method, case: _Case) -> int:
    """Pages that did not come back as they were sent, by way of the device: one way by the method, one by `plain`."""
    sent, back = bytes_at(case.room.host, case.room.size), bytes_at(case.room.other, case.room.size)
    back[: 2 * case.moved] = 0  # all slots: half of them are moved
    for to_device in (True, False):
        moves = method if to_device == case.to_device else plain
        for table in case.tables(to_device=to_device):
            moves(table, stream)
    machine.passed(stream)
    starts = (case.host_slots * case.page_bytes).tolist()
    pages = (slice(start, start + case.page_bytes) for start in starts)
    return sum(not np.array_equal(sent[page], back[page]) for page in pages)
