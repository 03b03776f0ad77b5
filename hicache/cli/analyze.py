"""`hicache analyze TRACE...`: what a trace could hit, with how much memory, and because of which prefixes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hicache.cli.fitting import print_fitted
from hicache.cli.output import print_json, progress, warn
from hicache.cli.plots import add_plot_argument, analysis_plots, check_plot, print_plots
from hicache.cli.trace_options import add_trace_arguments, add_trace_paths, opening
from hicache.cli.values import number, stop_on_interrupt, whole, whole_list
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.analytics.analysis.recorded import Recorded
    from hicache.analytics.analysis.report import Analysis, AnalyzeOptions
    from hicache.analytics.traces import Trace

HELP = "tell what a request trace could hit: ideal rates, reuse, memory needed, prefixes, sessions"

MOST_PAGES = 2**40
MOST_ROWS = 10_000

_EPILOG = """\
A page is one id of the trace (512 tokens in Mooncake's, 16 in Bailian's, 64 in kv-cache-tester's). Several traces are
analysed as one population, merged by time; with --each also one by one.

  hicache analyze benchmarks/traces/conversation_1000.jsonl --token-bytes 128KiB
  hicache analyze sessions/ --each --json > analysis.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_trace_paths(parser)
    add_trace_arguments(parser)
    add_plot_argument(parser)
    parser.add_argument(
        "--each", action="store_true", help="tell of each file too, and of all of them as one population"
    )
    add_analysis_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def add_analysis_arguments(parser: argparse._ActionsContainer) -> None:
    """What is to be told of a trace."""
    parser.add_argument(
        "--sizes", metavar="PAGES,...", help="cache sizes of the miss-ratio curve (default: 20 on a logarithmic scale)"
    )
    parser.add_argument(
        "--sample",
        default="auto",
        metavar="auto|SHARE",
        help="share of the pages for the curve, such as 0.01; 1 is exact (default: auto, exact up to 20 million pages)",
    )
    parser.add_argument(
        "--page-sizes",
        metavar="TOKENS,...",
        help="page sizes whose effect is told (default: 16,32,64,128,256,512)",
    )
    parser.add_argument(
        "--token-bytes",
        metavar="SIZE",
        help="KV bytes of a token, such as 128KiB, to show memory in bytes (see `hicache plan`)",
    )
    parser.add_argument("--top", default="10", metavar="N", help="hottest prefixes that are shown (default: 10)")
    parser.add_argument("--spans", default="12", metavar="N", help="parts of the trace's time (default: 12)")


def run(options: argparse.Namespace) -> int:
    """Analyse, print, and return the exit code."""
    from hicache.analytics.analysis.report import analyze
    from hicache.analytics.sources import STANDARD_INPUT
    from hicache.analytics.traces import expand
    from hicache.cli.analyze_tables import each_table, tables
    from hicache.cli.main import EXIT_FINE, EXIT_INTERRUPTED, EXIT_WRONG

    check_plot(options)
    wanted, way = read_options(options), opening(options)
    token_bytes = read_token_bytes(options.token_bytes)
    files = expand(options.trace)
    if options.each and STANDARD_INPUT in files:
        raise ConfigError("--each: standard input can be read only once; save it to a file and name that")
    whole_of = [(None, options.trace)]
    parts = [(str(file), [file]) for file in files] if options.each and len(files) > 1 else []
    found: list[Analysis] = []
    traces = []
    with stop_on_interrupt() as stop, progress("analyze") as show:
        for name, paths in (*whole_of, *parts):
            traces.append(way.open(paths))
            found.append(analyze(traces[-1], wanted, name=name, progress=show, stopped=stop.is_set))
            if found[-1].interrupted:
                break
    together, *each = found
    if options.json:
        more = {"each": [analysis.document() for analysis in each]} if options.each else {}
        print_json(together.document() | more)
    else:
        for table in tables(together, token_bytes=token_bytes):
            print_fitted(table)
        if each:
            print_fitted(each_table(found))
        if options.plot and together.requests:
            print_plots(analysis_plots(together))
    _warn(together, traces[0])
    if found[-1].interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FINE if together.requests else EXIT_WRONG


def read_options(options: argparse.Namespace) -> AnalyzeOptions:
    """The options, checked.

    Raises:
        ConfigError: one that cannot be.
    """
    from hicache.analytics.analysis.ideal import PAGE_SIZES
    from hicache.analytics.analysis.report import AnalyzeOptions

    return AnalyzeOptions(
        sample=_sample(options.sample),
        sizes=() if options.sizes is None else whole_list("--sizes", options.sizes, least=1, most=MOST_PAGES),
        page_sizes=PAGE_SIZES
        if options.page_sizes is None
        else whole_list("--page-sizes", options.page_sizes, least=1, most=2**24),
        top=_rows("--top", options.top, least=0),
        spans=_rows("--spans", options.spans, least=1),
    )


def _sample(text: str) -> float | None:
    if text == "auto":
        return None
    share = number("--sample", text, "a share of the pages such as 0.01, or auto")
    if share > 1:
        raise ConfigError(f"--sample {text:.60}: is above 1; give a share of the pages such as 0.01, or 1 for all")
    return share


def _rows(option: str, text: str, *, least: int) -> int:
    rows = whole(option, text)
    if not least <= rows <= MOST_ROWS:
        raise ConfigError(f"{option} {text:.40}: must be {least} to {MOST_ROWS}")
    return rows


def read_token_bytes(text: str | None) -> int | None:
    """The value of `--token-bytes`.

    Raises:
        ConfigError: no size, or none at all.
    """
    if text is None:
        return None
    from hicache.cli.sizes import parse_bytes

    size = parse_bytes(text, option="--token-bytes", most=2**40)
    if not size:
        raise ConfigError(f"--token-bytes {text}: a token has at least one byte; see `hicache plan`")
    return size


def _warn_of_log(recorded: Recorded) -> None:
    """Say where a log has not all that happened."""
    if recorded.requests_dropped:
        warn(
            f"{recorded.requests_dropped:,} of {recorded.requests_ended:,} requests were lost on the way to the log; "
            "see what `hicache stats` says of it"
        )
    if recorded.requests_gone:
        warn(
            f"{recorded.requests_gone:,} of {recorded.requests_ended:,} requests were written to files or blocks that "
            "are not there any more, or that cannot be read"
        )
    if recorded.sample < 1:
        told = {
            "prefix": "requests that begin alike are all in it or none, so memory sizes stand for "
            f"{1 / recorded.sample:,.3g} times as much",
            "request": "what requests share is told too low, and rates as they really were are right on average",
        }
        warn(f"the log has a sample of {recorded.sample:.3g} of the requests: {told.get(recorded.sample_by, '')}")
    if recorded.pages_hit_unknown:
        warn(
            f"{recorded.pages_hit_unknown:,} pages were hit that no request of the log had left: from before it, from "
            "other writers of the store, or of requests that are not in it"
        )


def _warn(analysis: Analysis, trace: Trace) -> None:
    if analysis.entries_skipped:
        warn(f"{analysis.entries_skipped:,} broken entries of the trace were skipped")
    if not analysis.requests and not analysis.interrupted:
        warn(f"{analysis.name:.200}: {trace.why_nothing}")
    if analysis.recorded is not None:
        _warn_of_log(analysis.recorded)
    if analysis.out_of_order:
        warn(f"{analysis.out_of_order:,} requests have a time before that of the request in front of them")
