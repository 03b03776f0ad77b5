"""`hicache diff A B`: what is different between two reports, two traces, or two parts of a trace's time."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hicache.cli.fitting import print_fitted
from hicache.cli.output import Table, print_json, progress, say, warn
from hicache.cli.trace_options import add_trace_arguments, opening
from hicache.cli.values import whole
from hicache.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from hicache.analytics.compare.documents import Comparison, Split
    from hicache.analytics.compare.spans import Overlap, Part

HELP = "say what changed between two reports, two traces, or two parts of a trace's time"

MOST_REPORT: Final = 256 * 2**20
"""Bytes of the largest report that is read."""

_EPILOG = """\
A and B are both reports, as --json of analyze, simulate, replay, plan, stats or top prints them, or both traces (files
or folders), which are analysed alike. With two --span it is one trace, and two parts of its time in seconds: what is
behind a part's begin, and before its end, which may be left out.

  hicache diff monday.json tuesday.json
  hicache diff old-trace.jsonl new-trace.jsonl
  hicache diff trace.jsonl --span 0..600 --span 600..1200

JSON: a, b (their names), splits (of each count of hits and misses: path, asked_a, asked_b, hit_rate_a, hit_rate_b,
points, and parts, each with name, a, b and points: shares of what was asked), changes (path, a, b, relative), same
(how many values do not differ) and warnings (what does not compare, in words); of two spans also overlap (pages_a,
pages_b, pages_both, asked_b_known_share).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("a", metavar="A", help="a report or a trace; - is a trace that is piped in")
    parser.add_argument("b", nargs="?", metavar="B", help="another one")
    parser.add_argument("--span", action="append", metavar="BEGIN..END", help="a part of A's time; twice, without B")
    add_trace_arguments(parser)
    parser.add_argument("--top", default="30", metavar="N", help="changes that are shown (default: 30)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Compare, print, and return the exit code: 0 also where much has changed, 1 where one is empty."""
    from hicache.analytics.compare.documents import compare, warnings
    from hicache.cli.main import EXIT_FINE, EXIT_WRONG

    top = whole("--top", options.top)
    if top < 0:
        raise ConfigError(f"--top {top}: cannot be negative")
    names, documents, common = _read(options)
    found = compare(*documents)
    odd = list(warnings(*documents))
    for line in odd:
        warn(line)
    empty = [name for name, document in zip(names, documents, strict=True) if document.get("requests") == 0]
    for name in empty:
        warn(f"{name:.200}: there are no requests in it; check the trace, and --span, --since, --until and --limit")
    code = EXIT_WRONG if empty else EXIT_FINE
    if options.json:
        more = {} if common is None else {"overlap": asdict(common)}
        print_json(dict(zip("ab", names, strict=True)) | found.document() | {"warnings": odd} | more)
        return code
    for line, name in zip("AB", names, strict=True):
        say(f"{line}: {name}")
    say("")
    if common is not None:
        _say_overlap(common)
    for split in found.splits:
        print_fitted(_split_table(split))
    print_fitted(_changes_table(found, top))
    return code


def _read(options: argparse.Namespace) -> tuple[tuple[str, str], tuple[dict[str, Any], dict[str, Any]], Overlap | None]:
    """Names, documents, and what two spans share."""
    from hicache.analytics.compare.spans import Part, overlap

    if options.span is not None:
        if options.b is not None or len(options.span) != 2:
            raise ConfigError("--span: give it twice, with one trace, as in --span 0..600 --span 600..1200")
        if options.a == "-":
            raise ConfigError("--span: standard input can be read only once; save it to a file and name that")
        spans = [Part((Path(options.a),), *_span(text)) for text in options.span]
        shared = overlap(spans, opening(options))
        return (spans[0].name, spans[1].name), _analysed(options, spans), shared
    if options.b is None:
        raise ConfigError("compare with what? give a second report or trace, or two --span of this one")
    reports = (read_report(Path(options.a)), read_report(Path(options.b)))
    if reports[0] is not None and reports[1] is not None:
        _see_alike(options, reports[0], reports[1])
        return (options.a, options.b), (reports[0], reports[1]), None
    if reports[0] is not None or reports[1] is not None:
        raise ConfigError(
            f"one of {options.a:.100} and {options.b:.100} is a report and the other is none: give two alike"
        )
    parts = [Part((Path(each),)) for each in (options.a, options.b)]
    return (options.a, options.b), _analysed(options, parts), None


def _see_alike(options: argparse.Namespace, *reports: dict[str, Any]) -> None:
    """See that one command wrote both: of two, values by the same name are not the same things."""
    from hicache.analytics.compare.kinds import kind_of

    a, b = (f"`hicache {kind}`" if kind else "no command of hicache" for kind in map(kind_of, reports))
    if a != b:
        raise ConfigError(
            f"{options.a:.100} is a report of {a}, {options.b:.100} is one of {b}: give two of the same command"
        )


def _analysed(options: argparse.Namespace, parts: list[Part]) -> tuple[dict[str, Any], dict[str, Any]]:
    from hicache.analytics.analysis.report import AnalyzeOptions
    from hicache.analytics.compare.spans import analyze_parts

    with progress("diff") as show:
        first, second = analyze_parts(parts, AnalyzeOptions(), opening(options), progress=show)
    return first.document(), second.document()


def _span(text: str) -> tuple[float, float]:
    found = re.fullmatch(r"([0-9.]{1,20})?\.\.([0-9.]{1,20})?", text)
    try:
        begin, end = (float(each) if each else None for each in found.groups()) if found else (None, None)
    except ValueError:
        found = None
    if not found or (begin or 0.0) >= (inf if end is None else end):
        raise ConfigError(f"--span {text:.40}: give seconds as BEGIN..END, such as 0..600 or 600..")
    return begin or 0.0, inf if end is None else end


def read_report(path: Path) -> dict[str, Any] | None:
    """A report; None for what is none, such as a trace.

    Raises:
        InvalidInput: it cannot be read, or holds what is no number.
    """
    try:
        if str(path) == "-" or path.is_dir() or path.stat().st_size > MOST_REPORT:
            return None
        with path.open("rb") as file:
            if not file.read(4096).lstrip().startswith(b"{"):
                return None
            file.seek(0)
            found = json.loads(file.read(), parse_constant=_no_number, parse_float=_number)
    except OSError as error:
        raise InvalidInput(f"{str(path)!r:.200} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise InvalidInput(f"{str(path)!r:.200} is nested too deeply to be a report") from None
    except InvalidInput as error:
        raise InvalidInput(f"{str(path)!r:.200}: {error}") from None
    except ValueError:
        return None  # several documents, as in a trace, or none
    # A session of kv-cache-tester has a list there; a line of a trace has a time.
    return None if isinstance(found.get("requests"), list) or "timestamp" in found else found


def _number(text: str) -> float:
    value = float(text)
    return value if isfinite(value) else _no_number(text[:40])


def _no_number(text: str) -> float:
    raise InvalidInput(f"it holds {text}, which is no figure: no report of this program has that")


# ---- for people


def _say_overlap(common: Overlap) -> None:
    say(f"pages: {common.pages_a:,} different ones in A, {common.pages_b:,} in B, {common.pages_both:,} in both")
    say(f"{100 * common.asked_b_known_share:.1f} % of the pages that B asks are known from A\n")


def _split_table(split: Split) -> Table:
    sign = "up" if split.points > 0 else "down"
    rates = f"{100 * split.hit_rate_a:.1f} % to {100 * split.hit_rate_b:.1f} %"
    moved = "unchanged" if round(split.points, 1) == 0 else f"{sign} {abs(split.points):.1f} points"
    rows = [
        (part.name, f"{100 * part.a:.1f} %", f"{100 * part.b:.1f} %", f"{part.points:+.1f}") for part in split.parts
    ]
    rows.append(("asked", f"{split.asked_a:,}", f"{split.asked_b:,}", ""))
    return Table(f"{split.path}: hit rate {rates}, {moved}", ("of what was asked", "A", "B", "points"), rows)


def _changes_table(found: Comparison, top: int) -> Table:
    shown = found.changes[:top]
    rows = [(change.path, _value(change.a), _value(change.b), _relative(change.relative)) for change in shown]
    left = len(found.changes) - len(shown)
    more = f", {left:,} more with --top" if left else ""
    title = f"{len(found.changes):,} values differ, {found.same:,} do not{more}"
    return Table(title, ("what", "A", "B", "change"), rows)


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)[:40]
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _relative(relative: float | None) -> str:
    return "" if relative is None else f"{100 * relative:+,.1f} %"
