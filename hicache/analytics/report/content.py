"""What a report holds, whatever it is written as: answers, and sections of text, plots and tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

__all__ = [
    "Answer",
    "Axis",
    "Bar",
    "BarPlot",
    "LinePlot",
    "Mark",
    "Part",
    "Plot",
    "Report",
    "Section",
    "Series",
    "Table",
]

VERSION: Final = 1
"""Of the JSON form: raised when a field goes or changes its meaning."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; each is named by its first `texts` columns, the others are numbers, already formatted.

    Attributes:
        caption: what it tells, with what its shares divide by.
        columns: their names.
        rows: as many cells as columns; the first one names the row.
        texts: columns of words.
        total: whether the last row is the sum of those before.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1
    total: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a plot.

    Attributes:
        label: what it measures.
        unit: in what; of a share, of what.
        form: how its values are written: "count", "percent" (of fractions of 1), "seconds", "bytes" or "number".
        log: whether its scale is logarithmic; 0 then stands at its begin, and is named there.
        least, most: ends that it has whatever the values are.
        each: whether each value has a tick, where they are few.
    """

    label: str
    unit: str
    form: str = "count"
    log: bool = False
    least: float | None = None
    most: float | None = None
    each: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """A line, or dots.

    Attributes:
        name: of it.
        color: which of the page's colours, a name or a number from 0.
        points: x and y, by x.
        bounds: lower and upper y of each point, where they are estimates; else empty.
        dashed: of the second source.
        dots: whether only the points themselves mean something, not the line between them.
        step: whether a value holds from its x up to the next one's.
        labels: names of the points, where they have some.
    """

    name: str
    color: str
    points: tuple[tuple[float, float], ...]
    bounds: tuple[tuple[float, float], ...] = ()
    dashed: bool = False
    dots: bool = False
    step: bool = False
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across the plot at a value of one axis ("x" or "y"), with its name."""

    axis: str
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class LinePlot:
    """Lines over a scale.

    Attributes:
        key: of it in the page and in JSON.
        title: what it shows.
        note: what is divided by what, and how to read it.
        x, y: the axes.
        series: what is drawn.
        marks: lines across it.
        table: the same as text.
    """

    key: str
    title: str
    note: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    table: Table
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar: its name, colour and length."""

    name: str
    color: str
    value: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of pieces behind each other."""

    label: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class BarPlot:
    """Lying bars below each other; see `LinePlot` for what both have."""

    key: str
    title: str
    note: str
    x: Axis
    bars: tuple[Bar, ...]
    table: Table


Plot = LinePlot | BarPlot


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report: its key and title, sentences, plots each with its table, and tables of their own."""

    key: str
    title: str
    text: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A question that everyone has.

    Attributes:
        question: it.
        figures: the answer in a number or a few words, one for each source.
        text: sentences with the reason.
    """

    question: str
    figures: tuple[str, ...]
    text: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All of it.

    Attributes:
        title: of the page.
        sources: names and kinds of what it tells of, one or two.
        answers: the summary.
        sections: in order.
        definitions: what each rate divides, by its name in `documents`.
        documents: what the other commands would have printed with --json, by source.
        warnings: what was odd about the sources.
    """

    title: str
    sources: tuple[tuple[str, str], ...]
    answers: tuple[Answer, ...]
    sections: tuple[Section, ...]
    definitions: dict[str, str] = field(default_factory=dict)
    documents: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Everything, of JSON's types."""
        return {
            "hicache_report": VERSION,
            "title": self.title,
            "sources": [
                {"name": name, "kind": kind, "documents": documents}
                for (name, kind), documents in zip(self.sources, self.documents, strict=True)
            ],
            "warnings": list(self.warnings),
            "answers": [asdict(answer) for answer in self.answers],
            "sections": [asdict(section) for section in self.sections],
            "definitions": self.definitions,
        }


def plots_of(report: Report) -> Iterator[Plot]:
    """All plots, in order."""
    for section in report.sections:
        yield from section.plots


def tables_of(report: Report) -> Iterator[Table]:
    """All tables, in order."""
    for section in report.sections:
        yield from (plot.table for plot in section.plots)
        yield from section.tables
