"""Options of all commands that read traces: which files, in which format, and which part of them."""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache.cli.values import choice, requests, whole
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.analytics.traces import Moment, Opening

FORMATS: Final = (
    "auto",
    "access-log",
    "mooncake",
    "bailian",
    "kv-cache-tester",
    "dynamo",
    "kv-events",
    "tokens",
    "oracle-general",
    "csv",
)
"""What --format takes. The formats themselves are in `hicache.analytics.formats`, which is not loaded for --help."""

_MOST_UNIT: Final = 2**24
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([smhd]?)")


def add_trace_paths(parser: argparse.ArgumentParser, *, more: str = "") -> None:
    """The traces themselves; `more` is what else may be named."""
    parser.add_argument(
        "trace",
        nargs="+",
        type=Path,
        metavar="TRACE",
        help=f"traces: files, also compressed, folders, or - for what is piped in{more}",
    )


def add_trace_arguments(parser: argparse._ActionsContainer, *, format_option: str = "--format") -> None:
    """How traces are read; `format_option` is for commands whose --format is another thing."""
    parser.add_argument(
        format_option,
        dest="format",
        default="auto",
        metavar="FORMAT",
        help=f"of the traces, one of {', '.join(FORMATS)} (default: auto, which looks at their content)",
    )
    parser.add_argument(
        "--unit",
        metavar="TOKENS",
        help="that an id stands for, where the format does not tell (default: mooncake 512, bailian 16, tokens and "
        "kv-events 64, objects 1)",
    )
    parser.add_argument(
        "--columns",
        default="",
        metavar="time=N,id=N",
        help="of csv, counted from 1 (default: by the first line's names; else time and id, or one column of ids)",
    )
    parser.add_argument(
        "--limit", "--requests", dest="limit", metavar="N", help="read N requests at most (default: all)"
    )
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="requests from then on: seconds since the trace's begin, also 90m or 2h, or 2026-11-29T12:00 (UTC) where "
        "a trace has times of a wall clock",
    )
    parser.add_argument("--until", metavar="TIME", help="requests before then")
    parser.add_argument("--skip-bad", action="store_true", help="count broken entries of the trace and go on")


def opening(options: argparse.Namespace) -> Opening:
    """How traces are to be opened.

    Raises:
        ConfigError: an option that cannot be.
    """
    from hicache.analytics.traces import Opening

    choice("--format", options.format, FORMATS)
    since, until = _moment("--since", options.since), _moment("--until", options.until)
    if since is not None and until is not None and since.absolute == until.absolute and since.seconds >= until.seconds:
        raise ConfigError(f"--until {options.until:.60}: is not behind --since {options.since:.60}")
    return Opening(
        form=options.format,
        skip_bad=options.skip_bad,
        unit=_unit(options.unit),
        columns=options.columns,
        limit=None if options.limit is None else requests(options.limit),
        since=since,
        until=until,
    )


def _unit(text: str | None) -> int | None:
    if text is None:
        return None
    tokens = whole("--unit", text)
    if not 1 <= tokens <= _MOST_UNIT:
        raise ConfigError(f"--unit {text:.40}: must be 1 to {_MOST_UNIT} tokens")
    return tokens


def _moment(option: str, text: str | None) -> Moment | None:
    from hicache.analytics.traces import Moment

    if text is None:
        return None
    if (found := _DURATION.fullmatch(text)) is not None:
        return Moment(float(found[1]) * _UNITS[found[2]])
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{option} {text:.60}: give seconds since the trace's begin, such as 600, 90m or 2h, or a time such as "
            "2026-11-29T12:00"
        ) from None
    return Moment((when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp(), absolute=True)
