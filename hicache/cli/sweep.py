"""`hicache sweep TRACE`: many simulations of one trace, side by side, and which of them to take."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hicache.cli.output import Table, print_json, print_table, progress, say, warn
from hicache.cli.simulation import add_simulation_arguments, choices_of, costs_of, given_settings, read_trace
from hicache.cli.values import stop_on_interrupt, whole
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.analytics.simulate.result import SimulationResult

HELP = "simulate a request trace over a grid of sizes and policies, in parallel, and recommend a point"

_MOST_JOBS = 4096
_EPILOG = """\
Each setting takes values with commas between them; all combinations are simulated, as `hicache simulate` does it. With
--out each result is kept as soon as it is done, and the same command goes on where an earlier one was ended.

  hicache sweep trace.jsonl --device 1000,2000,4000 --host 0,8000,16000 --eviction lru,slru --out sweep.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_simulation_arguments(parser, several=True)
    parser.add_argument("--jobs", metavar="N", help="processes (default: one a core)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep results there, and take those that are there")


def run(options: argparse.Namespace) -> int:
    """Simulate all, print, and return the exit code."""
    from hicache.analytics.simulate.advice import recommend
    from hicache.analytics.simulate.result import DEFINITIONS
    from hicache.analytics.simulate.sweep import grid, sweep
    from hicache.cli.main import EXIT_FINE, EXIT_INTERRUPTED, EXIT_WRONG

    jobs = _jobs(options.jobs)
    given = given_settings(options)
    costs = costs_of(given)
    columns = read_trace(options)
    points = grid(choices_of(given, columns, costs, several=True), costs)
    with stop_on_interrupt() as stop, progress("sweep") as show:
        results = sweep(columns, points, jobs=jobs, kept=options.out, stopped=stop.is_set, progress=show)
    told = list(recommend(results))
    if options.json:
        plain = [result.document(definitions=False) for result in results]
        print_json({"points": len(points), "results": plain, "recommendation": told, "definitions": DEFINITIONS})
    else:
        print_table(table(results, len(points)))
        for line in told:
            say(line)
    problems = [problem for result in results for problem in result.problems]
    for problem in problems:
        warn(problem)
    if problems:
        return EXIT_WRONG
    return EXIT_INTERRUPTED if len(results) < len(points) else EXIT_FINE


def table(results: list[SimulationResult], points: int) -> Table:
    """All points under each other, with what they differ in."""
    from hicache.analytics.simulate.advice import shown, varied

    names = varied([result.settings for result in results])
    rows = []
    for result in results:
        ids = [shown(getattr(result.settings, name), name) for name in names]
        tiers = [getattr(result, f"hit_rate_pages_{tier}") for tier in ("device", "host", "storage")]
        evicted = result.misses_by_reason["evicted"] / result.pages_asked if result.pages_asked else 0.0
        elsewhere = result.misses_by_reason["other_instance"] / result.pages_asked if result.pages_asked else 0.0
        rows.append(
            [
                *ids,
                f"{result.hit_rate_pages:.4f}",
                *(f"{rate:.4f}" for rate in tiers),
                f"{result.hit_rate_tokens:.4f}",
                f"{evicted:.4f}",
                f"{elsewhere:.4f}",
                f"{result.first_token_seconds.mean:.3f}",
                f"{result.gpu_seconds_saved:,.0f}",
            ]
        )
    columns = [
        *(name.replace("_", " ") for name in names),
        "hits of pages",
        "device",
        "host",
        "storage",
        "hits of tokens",
        "evicted",
        "other instance",
        "first token, s",
        "GPU s saved",
    ]
    done = f"{len(results):,} of {points:,} points" if len(results) < points else f"{points:,} points"
    return Table(f"{done}; rates and misses are shares of the pages asked", columns, rows, texts=0)


def _jobs(text: str | None) -> int:
    if text is None:
        return len(os.sched_getaffinity(0))
    jobs = whole("--jobs", text)
    if not 1 <= jobs <= _MOST_JOBS:
        raise ConfigError(f"--jobs {text:.40}: must be 1 to {_MOST_JOBS}")
    return jobs
