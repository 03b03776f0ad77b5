"""`hicache simulate TRACE`: the production cache over a trace, with memory and time that cost nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hicache.cli.fitting import print_fitted
from hicache.cli.output import Table, print_json, progress, say, warn
from hicache.cli.plots import add_plot_argument, check_plot, print_plots, result_bars
from hicache.cli.simulation import add_simulation_arguments, choices_of, costs_of, given_settings, read_trace
from hicache.cli.values import stop_on_interrupt
from hicache.units import format_size

if TYPE_CHECKING:
    from hicache.analytics.simulate.result import SimulationResult

HELP = "simulate the cache over a request trace: hits by tier, misses by reason, bytes moved, time to first token"

_EPILOG = """\
It is the production cache over pools without bytes, in simulated time: each transfer takes its bytes / its link's
speed, one after another, each prefill its tokens / --prefill-rate; waiting for the engine itself is not simulated.
Defaults of costs are assumptions about one H100: give your own.

  hicache simulate trace.jsonl --device 40GiB --host 200GiB --storage 2TiB
  hicache simulate trace.jsonl --device 2000 --host 8000 --instances 4 --routing prefix_aware
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_simulation_arguments(parser, several=False)
    add_plot_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Simulate, print, and return the exit code."""
    from hicache.analytics.simulate.advice import advice
    from hicache.analytics.simulate.run import Simulation
    from hicache.analytics.simulate.settings import SimulationSettings
    from hicache.cli.main import EXIT_FINE, EXIT_INTERRUPTED, EXIT_WRONG

    check_plot(options)
    given = given_settings(options)
    costs = costs_of(given)
    columns = read_trace(options)
    choices = choices_of(given, columns, costs, several=False)
    settings = SimulationSettings(**{name: value for name, (value,) in choices.items()}, costs=costs)
    with stop_on_interrupt() as stop, progress("simulate") as show:
        result = Simulation(columns, settings).run(stopped=stop.is_set, progress=show)
    told = list(advice(result, columns))
    if options.json:
        print_json(result.document() | {"advice": told})
    else:
        for table in tables(result):
            print_fitted(table)
        if options.plot:
            print_plots(result_bars([result], ["all"]))
        for line in told:
            say(line)
    for problem in result.problems:
        warn(problem)
    if result.problems or not columns.requests:
        return EXIT_WRONG
    return EXIT_INTERRUPTED if result.interrupted else EXIT_FINE


def tables(result: SimulationResult) -> Iterator[Table]:
    """A result for people."""
    yield from _hits(result)
    yield Table(
        "bytes by tier; amplification: written / bytes of pages computed",
        ("tier", "written", "read", "amplification"),
        [
            (
                part.tier,
                format_size(part.bytes_written),
                format_size(part.bytes_read),
                f"{part.write_amplification:.2f}",
            )
            for part in result.traffic
        ],
    )
    yield _besides(result)
    yield _times(result)
    if len(result.instances) > 1:
        yield Table(
            "instances",
            ("instance", "requests", "pages asked", "hit rate of pages"),
            [
                (
                    f"{part.instance}",
                    f"{part.requests:,}",
                    f"{part.pages_asked:,}",
                    _rate(part.hit_rate_pages, part.pages_asked),
                )
                for part in result.instances
            ],
        )


def _rate(rate: float, of: int) -> str:
    return f"{rate:.4f}" if of else "n/a"


def _hits(result: SimulationResult) -> Iterator[Table]:
    def share(pages: int) -> str:
        return f"{100 * pages / result.pages_asked:.2f} %" if result.pages_asked else "n/a"

    tiers = [(name, getattr(result, f"pages_{name}")) for name in ("device", "host", "storage", "missed", "asked")]
    yield Table(
        f"{result.requests:,} requests simulated in {result.seconds:.2f} s, pages of {result.page_tokens} tokens and "
        f"{format_size(result.page_bytes)}" + (", interrupted" if result.interrupted else ""),
        ("answered by", "pages", "share"),
        [(name, f"{pages:,}", share(pages)) for name, pages in tiers],
    )
    asked = result.pages_asked
    yield Table(
        "hit rates",
        ("of", "rate"),
        [
            ("pages", _rate(result.hit_rate_pages, asked)),
            ("tokens", _rate(result.hit_rate_tokens, result.tokens_asked)),
            ("requests (mean of their page rates)", _rate(result.hit_rate_requests, asked)),
        ],
    )
    reasons = [(name, pages) for name, pages in result.misses_by_reason.items() if pages]
    if reasons:
        rows = [(name, f"{pages:,}", share(pages)) for name, pages in reasons]
        yield Table("why pages were missed", ("reason", "pages", "share"), rows)


def _besides(result: SimulationResult) -> Table:
    more = [("prompt tokens behind the last whole page", f"{result.tokens_unaligned_tail:,}")]
    more += [("requests refused", f"{result.requests_refused:,}")]
    more += [(f"pages shed: {reason}", f"{pages:,}") for reason, pages in sorted(result.shed_by_reason.items())]
    if result.pages_put:
        more.append(("pages put to storage", f"{result.pages_put:,}"))
        more.append(("of those never read", f"{result.pages_put_never_read:,}"))
    for tier, pages in result.pages_evicted.items():
        if pages:
            more.append((f"pages evicted from {tier}", f"{pages:,}"))
            more.append(("of those in no tier below", f"{result.pages_lost[tier]:,}"))
    return Table("besides", ("what", "count"), more)


def _times(result: SimulationResult) -> Table:
    with_cache, without = result.first_token_seconds, result.first_token_seconds_without
    rows = [
        (f"time to first token, {name}", f"{value:.3f} s", f"{other:.3f} s")
        for name, value, other in (
            ("mean", with_cache.mean, without.mean),
            *((f"p{percent}", with_cache.at(percent), without.at(percent)) for percent in (50, 90, 99)),
        )
    ]
    whole = result.gpu_seconds + result.gpu_seconds_saved
    rows.append(("GPU seconds of prefill", f"{result.gpu_seconds:,.0f} s", f"{whole:,.0f} s"))
    if result.money_saved is not None:
        rows.append(("money saved", f"{result.money_saved:,.2f}", ""))
    return Table("modelled times", ("what", "with the cache", "without"), rows)
