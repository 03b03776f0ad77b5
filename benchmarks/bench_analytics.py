"""Analysing and simulating a trace without bytes: seconds, and requests a second of one core's time.

`python -m benchmarks.bench_analytics` says where the time of the simulations goes instead.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, row
from hicache.analytics.analysis.columns import Columns, read_columns
from hicache.analytics.analysis.report import AnalyzeOptions, analyze
from hicache.analytics.simulate.run import Simulation
from hicache.analytics.simulate.settings import Costs, SimulationSettings
from hicache.analytics.simulate.sweep import grid, sweep
from hicache.analytics.traces import open_trace

SMALL = Path(__file__).parent / "traces" / "conversation_1000.jsonl"
RUNS = 5
_SHOWN = 25
_PACKAGE = "hicache/"
_CORE = "see `python -m benchmarks.bench_analytics` for where the time goes, and hicache/analytics/README.md"

ONE_TIER: dict[str, Any] = {"device": 1500}
THREE_TIERS: dict[str, Any] = {"device": 500, "host": 1500, "storage": 20_000}
SWEPT: dict[str, tuple[Any, ...]] = {
    "device": (250, 500, 1000, 1500, 2000),
    "host": (0, 1500, 3000, 6000),
    "eviction": ("lru", "lfu", "slru"),
    "instant": (True,),
}
"""60 points."""


def rows() -> list[Row]:
    return [
        _analyze(),
        _simulate("simulate_one_tier", 10_000.0, ONE_TIER),
        _simulate("simulate_three_tiers", 4_000.0, THREE_TIERS),
        _sweep(),
    ]


def _columns() -> Columns:
    return read_columns(open_trace([SMALL]))


def _analyze() -> Row:
    times = []
    for _ in range(RUNS):
        began = time.process_time()
        analyze(open_trace([SMALL]), AnalyzeOptions())
        times.append(time.process_time() - began)
    return row("analyze_1000_requests", min(times), "s", bar=5.0 / 12, reason="5 s for the 12,031 of the whole trace")


def _simulate(name: str, bar: float, tiers: dict[str, Any]) -> Row:
    columns = _columns()
    rates = []
    for _ in range(RUNS):
        simulation = Simulation(columns, SimulationSettings(instant=True, **tiers))
        began = time.process_time()
        simulation.run()
        rates.append(columns.requests / (time.process_time() - began))
    best = max(rates)
    return row(name, best, "requests/s", bar=bar, at_least=True, reason="" if best >= bar else _CORE)


def _sweep() -> Row:
    """The time of a sweep of 60 points on all cores, beside that of its points one after another / cores."""
    columns, points = _columns(), grid(SWEPT, Costs())
    cores = len(os.sched_getaffinity(0))
    alone, worked_alone = _seconds(lambda: sweep(columns, points))
    together, worked = _seconds(lambda: sweep(columns, points, jobs=cores))
    # Where other programs run, the cores that two processes get are not twice those of one: then this tells.
    reason = f"{cores} processes worked {worked / worked_alone:.2f} of the time that one works for all points"
    name = f"sweep_{len(points)}_points"
    return row(name, together, "s", reference=alone / cores, bar=1.2 * alone / cores, reason=reason)


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that passed, and that this process and those it began have worked."""
    began, worked = time.perf_counter(), _worked()
    work()
    return time.perf_counter() - began, _worked() - worked


def _worked() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def profile(tiers: dict[str, Any]) -> str:
    """Where the time of a simulation goes: shares by module, then by function."""
    columns = _columns()
    simulation = Simulation(columns, SimulationSettings(instant=True, **tiers))
    profiler = cProfile.Profile()
    profiler.runcall(simulation.run)
    functions = pstats.Stats(profiler).stats  # type: ignore[attr-defined]  # by (file, line, name)
    total = sum(entry[2] for entry in functions.values())
    modules: Counter[str] = Counter()
    named: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for (file, _, name), (_, count, own, _, _) in functions.items():
        module = file.rpartition(_PACKAGE)[2] if _PACKAGE in file else "Python and numpy"
        modules[module] += own
        named[f"{module}: {name}"] += own
        calls[f"{module}: {name}"] += count
    lines = [f"{tiers}, {columns.requests} requests, {len(columns.page) / columns.requests:.1f} pages each"]
    lines += [f"{100 * own / total:6.1f} %  {module}" for module, own in modules.most_common(_SHOWN)]
    lines += ["", " share    calls a request"]
    lines += [
        f"{100 * own / total:6.1f} %  {calls[name] / columns.requests:6.1f}  {name}"
        for name, own in named.most_common(_SHOWN)
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(profile(ONE_TIER), profile(THREE_TIERS), sep="\n\n")
