"""A report as Markdown: answers, sentences and tables; plots are their tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from hicache.analytics.report.content import Report, Section, Table
from hicache.analytics.report.words import visible

__all__ = ["to_markdown"]

_LONG: Final = 100_000
_SPECIAL: Final = re.compile(
    r"([\\`*{}\[\]<>#|~&$@]|:(?=//)|(?<=www)\.|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))", re.IGNORECASE
)
"""What means something in Markdown, and what makes a link of words."""


def to_markdown(report: Report) -> str:
    """The whole text, which ends with a newline."""
    return "\n".join(_lines(report)).rstrip("\n") + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# {_text(report.title)}"
    yield ""
    several = len(report.sources) > 1
    for letter, (name, kind) in zip("AB", report.sources, strict=False):
        yield f"- {f'{letter}. ' if several else ''}{_text(name)}: {_text(kind)}"
    yield ""
    for warning in report.warnings:
        yield f"> {_text(warning)}"
        yield ""
    for answer in report.answers:
        figures = [
            f"{letter + ' ' if several else ''}{figure}" for letter, figure in zip("AB", answer.figures, strict=False)
        ]
        yield f"## {_text(answer.question)}"
        yield ""
        yield f"**{_text(', '.join(figures))}**"
        yield ""
        yield from (f"- {_text(line)}" for line in answer.text)
        yield ""
    for section in report.sections:
        yield from _section(section)
    if report.definitions:
        yield "## What the figures mean"
        yield ""
        yield from (f"- **{_text(name)}**: {_text(text)}" for name, text in report.definitions.items())


def _section(section: Section) -> Iterator[str]:
    yield f"## {_text(section.title)}"
    yield ""
    for line in section.text:
        yield _text(line)
        yield ""
    for plot in section.plots:
        yield f"### {_text(plot.title)}"
        yield ""
        yield _text(plot.note)
        yield ""
        yield from _table(plot.table)
    for table in section.tables:
        yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    yield f"{_text(table.caption)}:"
    yield ""
    yield f"| {' | '.join(_text(column) for column in table.columns)} |"
    yield f"|{'|'.join('---' if at < table.texts else '---:' for at in range(len(table.columns)))}|"
    yield from (f"| {' | '.join(_text(cell) for cell in row)} |" for row in table.rows)
    yield ""


def _text(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", visible(text, _LONG))
