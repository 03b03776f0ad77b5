"""`hicache sweep TRACE`: many simulations of one trace, side by side, and which of them to take."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hicache.cli.fitting import print_fitted
from hicache.cli.output import Table, print_json, progress, say, warn
from hicache.cli.plots import add_plot_argument, check_plot, print_plots, result_bars
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
    add_plot_argument(parser)
    parser.add_argument("--jobs", metavar="N", help="processes (default: one a core)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep results there, and take those that are there")


def run(options: argparse.Namespace) -> int:
    """Simulate all, print, and return the exit code."""
    from hicache.analytics.simulate.advice import recommend
    from hicache.analytics.simulate.result import DEFINITIONS
    from hicache.analytics.simulate.sweep import grid, sweep
    from hicache.cli.main import EXIT_FINE, EXIT_INTERRUPTED, EXIT_WRONG

    check_plot(options)
    jobs = read_jobs(options.jobs)
    given = given_settings(options)
    costs = costs_of(given)
    columns = read_trace(options)
    points = grid(choices_of(given, columns, costs, several=True), costs)
    with stop_on_interrupt() as stop, progress("sweep") as show:
        results = sweep(columns, points, jobs=jobs, kept=options.out, stopped=stop.is_set, progress=show)
    told = list(recommend(results))
    if len(results) < len(points):
        told = [f"Stopped after {len(results)} of {len(points)} points, so none is recommended."]
    if options.json:
        plain = [result.document(definitions=False) for result in results]
        print_json({"points": len(points), "results": plain, "recommendation": told, "definitions": DEFINITIONS})
    else:
        shown, keys = table(results, len(points))
        print_fitted(shown, keys=keys)
        if options.plot:
            names = [" ".join(row[:keys]) or "all" for row in shown.rows]
            print_plots(result_bars(results, names, what=", ".join(shown.columns[:keys])))
        for line in told:
            say(line)
    problems = [problem for result in results for problem in result.problems]
    for problem in problems:
        warn(problem)
    if problems or not columns.requests:
        return EXIT_WRONG
    return EXIT_INTERRUPTED if len(results) < len(points) else EXIT_FINE


def table(results: list[SimulationResult], points: int) -> tuple[Table, int]:
    """All points under each other with what they differ in, and how many columns that are."""
    from hicache.analytics.simulate.advice import shown, varied

    names = varied([result.settings for result in results])
    columns: list[tuple[str, list[float], str]] = [
        ("hits of pages", [result.hit_rate_pages for result in results], ".4f"),
        *(
            (f"in {tier}", [getattr(result, f"hit_rate_pages_{tier}") for result in results], ".4f")
            for tier in ("device", "host", "storage")
        ),
        ("hits of tokens", [result.hit_rate_tokens for result in results], ".4f"),
        *(
            (f"missed: {reason}", [_share(result, reason) for result in results], ".4f")
            for reason in ("evicted", "other_instance", "late", "over_budget", "failed")
        ),
        # Where nothing takes time nobody waits, so that this would be the time of no cache that can be.
        *(
            [("first token, s", [result.first_token_seconds.mean for result in results], ".3f")]
            if not any(result.settings.instant for result in results)
            else []
        ),
        ("GPU s saved", [result.gpu_seconds_saved for result in results], ",.0f"),
    ]
    told = [column for place, column in enumerate(columns) if not place or any(column[1])]
    rows = [
        [
            *(shown(getattr(result.settings, name), name) for name in names),
            *(f"{values[at]:{form}}" for _, values, form in told),
        ]
        for at, result in enumerate(results)
    ]
    done = f"{len(results):,} of {points:,} points" if len(results) < points else f"{points:,} points"
    title = (
        f"{done}; hits and misses are shares of the pages asked, but for hits of tokens; what is 0 at all is left out"
    )
    heads = [*(name.replace("_", " ") for name in names), *(name for name, _, _ in told)]
    return Table(title, heads, rows, texts=0), len(names)


def _share(result: SimulationResult, reason: str) -> float:
    return result.misses_by_reason[reason] / result.pages_asked if result.pages_asked else 0.0


def read_jobs(text: str | None) -> int:
    """The value of `--jobs`.

    Raises:
        ConfigError: no number of processes.
    """
    if text is None:
        return len(os.sched_getaffinity(0))
    jobs = whole("--jobs", text)
    if not 1 <= jobs <= _MOST_JOBS:
        raise ConfigError(f"--jobs {text:.40}: must be 1 to {_MOST_JOBS}")
    return jobs
