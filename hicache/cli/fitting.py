"""Wide tables on narrow terminals: cut between columns, so that no number is cut."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence

from hicache.cli.output import Table, print_table

_BORDER = 3  # characters that a column takes besides its text: a line and two blanks


def print_fitted(table: Table, *, keys: int = 1) -> None:
    """Print a table, in parts where the terminal is too narrow for it.

    Args:
        table: what to print.
        keys: its first columns, which each part repeats.
    """
    if not sys.stdout.isatty():
        print_table(table)
        return
    for part in fitted(table, shutil.get_terminal_size().columns, keys=keys):
        print_table(part)


def fitted(table: Table, width: int, *, keys: int = 1) -> Iterator[Table]:
    """The table in parts of at most so many characters where that can be; its first `keys` columns are in each part."""
    parts: list[list[int]] = [[]]
    for column in range(keys, len(table.columns)):
        if parts[-1] and not _fits(table, [*range(keys), *parts[-1], column], width):
            parts.append([])
        parts[-1].append(column)
    for number, part in enumerate(parts, start=1):
        title = table.title if len(parts) == 1 else f"{table.title} ({number} of {len(parts)})"
        columns = [*range(keys), *part]
        yield Table(
            title,
            _chosen(table.columns, columns),
            [_chosen(row, columns) for row in table.rows],
            texts=sum(column < table.texts for column in columns),
        )


def _fits(table: Table, columns: Sequence[int], width: int) -> bool:
    """Whether columns fit without a word or number being cut.

    Where there is too little room the widest columns are made narrower first, down to one common width, and their text
    is broken between words.
    """
    room = width - 1 - _BORDER * len(columns)
    whole = [max(len(table.columns[column]), *(len(row[column]) for row in table.rows), 0) for column in columns]
    cap = max(whole)
    while cap and sum(min(size, cap) for size in whole) > room:
        cap -= 1
    return all(min(size, _least(table, column)) <= cap for size, column in zip(whole, columns, strict=True))


def _least(table: Table, column: int) -> int:
    """The least width of a column: headers break between words, and so does text, but numbers never."""
    texts = [table.columns[column], *(row[column] for row in table.rows if column < table.texts)]
    words = max((len(word) for text in texts for word in text.split()), default=0)
    return max(words, *(len(row[column]) for row in table.rows if column >= table.texts), 0)


def _chosen(values: Sequence[str], columns: Sequence[int]) -> list[str]:
    return [values[column] for column in columns]
