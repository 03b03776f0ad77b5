"""`hicache convert TRACE... --to FORMAT --out FILE`: the same requests in another format."""

from __future__ import annotations

import argparse
from pathlib import Path

from hicache.cli.output import progress, warn
from hicache.cli.trace_options import add_trace_arguments, add_trace_paths, opening
from hicache.cli.values import stop_on_interrupt, whole
from hicache.errors import ConfigError

HELP = "write a request trace in another format, and say what that cannot carry"

TARGETS = ("mooncake", "bailian", "kv-cache-tester", "dynamo", "tokens", "oracle-general", "csv")
_MOST_UNIT = 2**24

_EPILOG = """\
What the target cannot carry is said on stderr. Blocks are split and put together where the target's have another size:
splitting loses nothing; what is shorter than a larger block is no common begin any more. The file is there when all of
it is written, or not at all.

  hicache convert sessions/ --to mooncake --out sessions.jsonl
  hicache convert dynamo-trace.*.jsonl.gz --to bailian --out trace.jsonl.gz
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_trace_paths(parser)
    parser.add_argument("--to", required=True, metavar="FORMAT", help=f"one of {', '.join(TARGETS)}")
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="FILE",
        help="the new file, compressed if it ends with .gz, .bz2 or .xz; - is standard output",
    )
    parser.add_argument(
        "--to-unit",
        metavar="TOKENS",
        help="tokens a block of the new file (default: mooncake 512, bailian 16, else the trace's own); whoever reads "
        "another size than the format's own needs --unit",
    )
    add_trace_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Convert, say what is lost, and return the exit code."""
    from hicache.analytics.convert.run import check_target, convert
    from hicache.cli.main import EXIT_FINE, EXIT_INTERRUPTED, EXIT_WRONG

    check_target(options.to)
    unit = _unit(options.to_unit)
    trace = opening(options).open(options.trace)
    with stop_on_interrupt() as stop, progress("convert") as show:
        done = convert(trace, options.to, options.out, unit=unit, stopped=stop.is_set, progress=show)
    if done is None:
        warn("interrupted; nothing was written")
        return EXIT_INTERRUPTED
    if done.skipped:
        warn(f"{done.skipped:,} broken entries of the trace were skipped")
    if not done.requests:
        warn(f"{', '.join(map(str, trace.paths)):.200}: {trace.why_nothing}")
    if done.losses:
        warn(f"--to {options.to}: {'; '.join(done.losses)}")
    return EXIT_FINE if done.requests else EXIT_WRONG


def _unit(text: str | None) -> int | None:
    if text is None:
        return None
    tokens = whole("--to-unit", text)
    if not 1 <= tokens <= _MOST_UNIT:
        raise ConfigError(f"--to-unit {text:.40}: must be 1 to {_MOST_UNIT} tokens")
    return tokens
