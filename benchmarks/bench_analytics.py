"""Analysing and simulating a trace without bytes: seconds, and requests a second of one core's time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, row
from hicache.analytics.analysis.columns import read_columns
from hicache.analytics.analysis.report import AnalyzeOptions, analyze
from hicache.analytics.simulate.run import Simulation
from hicache.analytics.simulate.settings import SimulationSettings
from hicache.analytics.traces import open_trace

SMALL = Path(__file__).parent / "traces" / "conversation_1000.jsonl"
RUNS = 3
_CORE = (
    "the production core's own work: about a third of it evicts, a sixth says why each page was missed, "
    "each transfer of further tiers pins, fills and completes"
)


def rows() -> list[Row]:
    return [_analyze(), _simulate("simulate_one_tier", 10_000.0, device=1500), _three()]


def _analyze() -> Row:
    times = []
    for _ in range(RUNS):
        began = time.process_time()
        analyze(open_trace([SMALL]), AnalyzeOptions())
        times.append(time.process_time() - began)
    return row("analyze_1000_requests", min(times), "s", bar=5.0 / 12, reason="5 s for the 12,031 of the whole trace")


def _three() -> Row:
    return _simulate("simulate_three_tiers", 4_000.0, device=500, host=1500, storage=20_000)


def _simulate(name: str, bar: float, **tiers: Any) -> Row:
    columns = read_columns(open_trace([SMALL]))
    rates = []
    for _ in range(RUNS):
        simulation = Simulation(columns, SimulationSettings(instant=True, **tiers))
        began = time.process_time()
        simulation.run()
        rates.append(columns.requests / (time.process_time() - began))
    best = max(rates)
    return row(name, best, "requests/s", bar=bar, at_least=True, reason="" if best >= bar else _CORE)
