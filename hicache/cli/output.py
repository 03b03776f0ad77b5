"""What commands print: tables, JSON, warnings, and progress on a terminal. `rich` is used where it is installed."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TextIO


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table; the first `texts` columns are text, the others are numbers, already formatted."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1


class Progress(Protocol):
    """Takes how much is done."""

    def __call__(self, done: int, total: int) -> None:
        """Show `done` of `total`, in any unit."""
        ...


def print_json(document: Mapping[str, Any]) -> None:
    """Print as JSON; a number that is not finite is a bug and raises ValueError."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_table(table: Table) -> None:
    """Print a table: with lines and colours on a terminal, aligned text elsewhere."""
    if sys.stdout.isatty() and has_rich():
        from rich.console import Console
        from rich.table import Table as RichTable

        pretty = RichTable(title=table.title, title_justify="left")
        for position, column in enumerate(table.columns):
            pretty.add_column(column, justify="left" if position < table.texts else "right")
        for row in table.rows:
            pretty.add_row(*row)
        Console().print(pretty)
        return
    lines = [table.columns, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.columns))]
    text = [table.title]
    for line in lines:
        cells = [
            cell.ljust(width) if i < table.texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  " + "  ".join(cells).rstrip())
    sys.stdout.write("\n".join(text) + "\n\n")


def say(text: str) -> None:
    """One line on stdout."""
    sys.stdout.write(f"{text}\n")


def warn(message: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"hicache: {message}\n")


@contextmanager
def progress(title: str, *, stream: TextIO | None = None) -> Iterator[Progress]:
    """A progress bar while the block runs, on a terminal; silent elsewhere."""
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield _say_nothing
    elif has_rich():
        yield from _rich_bar(title, stream)
    else:
        yield from _plain_bar(title, stream)


def _say_nothing(done: int, total: int) -> None:
    """Progress where nobody watches."""


def _rich_bar(title: str, stream: TextIO) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

    with RichProgress(console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(title, total=None)
        # What is piped in has no end that is known.
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def _plain_bar(title: str, stream: TextIO) -> Iterator[Progress]:
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        percent = math.floor(100 * done / total) if total else 0
        if percent != shown:
            shown = percent
            stream.write(f"\r{title} {percent:3d} %")
            stream.flush()

    try:
        yield show
    finally:
        stream.write("\r" + " " * (len(title) + 6) + "\r")
        stream.flush()


def has_rich() -> bool:
    """Whether `rich` is installed."""
    return importlib.util.find_spec("rich") is not None
