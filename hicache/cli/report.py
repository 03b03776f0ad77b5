"""`hicache report SOURCE [SOURCE2] --out FILE`: everything about a trace, a simulation or a service on one page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache.cli.analyze import add_analysis_arguments, read_token_bytes
from hicache.cli.output import warn
from hicache.cli.service import add_secret_arguments
from hicache.cli.simulation import add_setting_arguments
from hicache.cli.trace_options import add_trace_arguments
from hicache.cli.values import choice, stop_on_interrupt
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.analytics.report.content import Report

HELP = "write one page with plots and tables of a trace, a simulation or a running service, or of two side by side"

FORMATS: Final = ("html", "markdown", "json")
_ENDINGS: Final = {".md": "markdown", ".markdown": "markdown", ".json": "json"}
_MOST_SOURCES: Final = 2

_EPILOG = """\
SOURCE is a trace (a file, a folder, or - for what is piped in), which is analysed, and with a setting of tiers also
simulated, or swept where a setting has several values; or a document that analyze, simulate, sweep or stats wrote with
--json, or a file of `hicache sweep --out`. --address is a running service. Two sources stand side by side, with what
differs. The page needs no network and no script; with one its plots can be asked.

  hicache report trace.jsonl --device 40GiB --host 200GiB --out report.html
  hicache report monday.json tuesday.json --out compared.html
  hicache report --address unix:///run/hicache/hicache.sock --out service.html

JSON: see hicache/analytics/README.md. An existing FILE is replaced when all is done, never left half written.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("source", nargs="*", metavar="SOURCE", help="a trace or a document; one or two")
    parser.add_argument(
        "--address", action="append", default=[], metavar="ADDRESS", help="a running service as a source"
    )
    parser.add_argument("--out", metavar="FILE", help="write it there; - is standard output (default but for html)")
    parser.add_argument(
        "--format",
        dest="form",
        metavar="|".join(FORMATS),
        help="what to write (default: by the ending of --out, else html)",
    )
    parser.add_argument("--json", action="store_true", help="the same as --format json")
    parser.add_argument("--timeout", default="10", metavar="SECONDS", help="for one call to a service (default: 10)")
    add_trace_arguments(parser.add_argument_group("how traces are read"), format_option="--trace-format")
    told = parser.add_argument_group("what is told of traces")
    told.add_argument("--each", action="store_true", help="tell of each file of a folder too")
    add_analysis_arguments(told)
    tiers = parser.add_argument_group(
        "tiers that traces are simulated with", "Any of these but costs asks for it, several values for a sweep."
    )
    add_setting_arguments(tiers, several=True, but=frozenset({"token_bytes"}))
    tiers.add_argument("--jobs", metavar="N", help="processes of a sweep (default: one a core)")
    add_secret_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Read or ask, write, and return the exit code."""
    from hicache.analytics.report.build import build
    from hicache.cli.main import EXIT_FINE, EXIT_INTERRUPTED, EXIT_WRONG
    from hicache.cli.report_out import check, write
    from hicache.cli.report_sources import Reader

    form = _form(options)
    out = _out(options, form)
    if out is not None:
        check(out, [Path(name) for name in options.source if name != "-"])
    count = len(options.source) + len(options.address)
    if not 1 <= count <= _MOST_SOURCES:
        raise ConfigError(f"{count} sources: give one, or two to compare, as SOURCE or --address")
    with stop_on_interrupt() as stop:
        reader = Reader(options, stop.is_set)
        sources = [*map(reader.read, options.source), *map(reader.ask, options.address)]
        report = build(sources, token_bytes=read_token_bytes(options.token_bytes))
    write(_text(report, form), out)
    for line in (*report.warnings, *reader.problems):
        warn(line)
    if reader.problems or reader.empty:
        return EXIT_WRONG
    return EXIT_INTERRUPTED if reader.interrupted else EXIT_FINE


def _form(options: argparse.Namespace) -> str:
    if options.form is not None:
        choice("--format", options.form, FORMATS)
    if options.json and options.form not in (None, "json"):
        raise ConfigError(f"--json and --format {options.form}: give one of them")
    if options.json or options.form is not None:
        return "json" if options.json else str(options.form)
    return _ENDINGS.get(Path(options.out or "").suffix.lower(), "html")


def _out(options: argparse.Namespace, form: str) -> Path | None:
    """The file; None is standard output."""
    if options.out is None and form == "html":
        raise ConfigError("--out: name the file for the page, such as report.html; - is standard output")
    return None if options.out in (None, "-") else Path(options.out)


def _text(report: Report, form: str) -> str:
    import json

    if form == "html":
        from hicache.analytics.report.html import to_html

        return to_html(report)
    if form == "markdown":
        from hicache.analytics.report.markdown import to_markdown

        return to_markdown(report)
    return json.dumps(report.document(), indent=2, allow_nan=False) + "\n"
