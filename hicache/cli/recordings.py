"""`hicache replay RECORDING`: repeat what a cache's flight recorder kept."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hicache.cli.output import Table, print_json, print_table, warn
from hicache.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from hicache.analytics.recording import RecordingResult

_ALLOWED = {"trace", "json"}  # of the command's options; all others say how to replay a trace


def find(options: argparse.Namespace, defaults: argparse.Namespace) -> list[Path]:
    """The recording among what was named; empty where these are traces.

    Args:
        options: the command's.
        defaults: what they are where nothing was given.

    Raises:
        ConfigError: a recording beside a trace, or with options of a trace.
    """
    from hicache.analytics.recording import recordings_among

    paths: list[Path] = options.trace
    found = recordings_among(paths)
    if not found:
        return []
    if len(found) < len(paths):
        other = next(path for path in paths if path not in found)
        raise ConfigError(f"{found[0]} is a recording and {other} is none: replay one at a time")
    given = [name for name, value in vars(options).items() if value != getattr(defaults, name, value)]
    wrong = ["--" + name.replace("_", "-") for name in given if name not in _ALLOWED]
    if wrong:
        raise ConfigError(f"{found[0]} is a recording, which has its own settings: leave out {', '.join(wrong)}")
    return found


def run(paths: list[Path], *, as_json: bool) -> int:
    """Repeat, print, and return the exit code."""
    from hicache.analytics.recording import read_recording, repeat
    from hicache.cli.main import EXIT_FINE, EXIT_WRONG

    data = read_recording(paths)
    try:
        result = repeat(data)
    except InvalidInput as error:
        raise InvalidInput(f"{paths[0]}: {error}") from error
    if as_json:
        print_json(result.document())
    else:
        for table in tables(result):
            print_table(table)
    if result.outcome == "ok":
        return EXIT_FINE
    where = "at its end" if result.operation == "end" else f"at step {result.last_step}"
    what = f" ({result.operation})" if result.operation not in ("", "end") else ""
    warn(f"the recording {result.outcome} {where}{what}: {' '.join(result.failure.split())}")
    return EXIT_WRONG


def tables(result: RecordingResult) -> Iterator[Table]:
    """The result for people."""
    steps = f"steps {result.first_step:,} to {result.last_step:,}" if result.inputs else "nothing"
    said = {"ok": "OK", "failed": "FAILED", "diverged": "DIVERGED"}[result.outcome]
    names = list(next(iter(result.tiers.values())))
    yield Table(
        title=f"{said}: {result.inputs:,} inputs repeated, {steps}; {result.requests:,} requests and "
        f"{result.transfers:,} transfers open",
        columns=("pages", *names),
        rows=[(tier, *(f"{pages[name]:,}" for name in names)) for tier, pages in result.tiers.items()],
    )
