"""Sections on sweeps: all points side by side, and the one to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any, Final

from hicache.analytics.report.content import Axis, Bar, BarPlot, LinePlot, Mark, Part, Section, Series, Table
from hicache.analytics.report.shapes import color_of, labelled, letters
from hicache.analytics.report.simulation import page_misses, tier_hits
from hicache.analytics.report.simulation_documents import SimulationDocument, SweepDocument
from hicache.analytics.report.words import count, percent, visible
from hicache.analytics.simulate.advice import SIZES, choose, memory, shown, varied
from hicache.units import format_size

__all__ = ["point_name", "sweep_sections"]

_MOST_BARS: Final = 40
_MOST_LINES: Final = 8
_MOST_ROWS: Final = 1000
_NUMBERS: Final = (*SIZES, "page_size", "instances", "admission", "speed")
_UNITS: Final = {
    "device": "pages of an instance", "host": "pages of an instance", "storage": "pages that all share",
    "page_size": "tokens", "instances": "instances", "admission": "uses", "speed": "times the trace's own",
}  # fmt: skip


def sweep_sections(documents: Sequence[SweepDocument]) -> Iterator[Section]:
    """What sweeps tell."""
    text = [
        labelled(name, visible(line, 1000))
        for name, document in zip(letters(documents), documents, strict=True)
        for line in document.recommendation
    ]
    results = [result for document in documents for result in document.results]
    if not results:
        yield Section("sweep", "The points of the sweep", (*text, "No point was simulated."))
        return
    names = varied([result.settings for result in results])
    plots: list[LinePlot | BarPlot] = [*_lines(documents, names), *_memory(documents, names)]
    plots += _bars(documents, names)
    yield Section("sweep", "The points of the sweep", tuple(text), tuple(plots))


def point_name(result: SimulationDocument, names: Sequence[str]) -> str:
    """A point by the settings that it does not have in common with all others."""
    return ", ".join(f"{name.replace('_', ' ')} {_value(result, name)}" for name in names or ("device",))


def _value(result: SimulationDocument, name: str) -> str:
    value = getattr(result.settings, name)
    return count(value) if isinstance(value, int) and not isinstance(value, bool) else visible(shown(value, name), 60)


def _lines(documents: Sequence[SweepDocument], names: Sequence[str]) -> Iterator[LinePlot]:
    """Hit rate over the number that has most values, a line for each combination of all others."""
    results = [result for document in documents for result in document.results]
    sizes = {
        name: len({getattr(each.settings, name) for each in results} - {None}) for name in names if name in _NUMBERS
    }
    name = max(sizes, key=lambda name: sizes[name], default="")
    if not name or sizes[name] < 2:
        return
    others = [other for other in names if other != name]
    lines: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    rows = []
    for place, (letter, document) in enumerate(zip(letters(documents), documents, strict=True)):
        for result in document.results:
            value = getattr(result.settings, name)
            if value is None:
                continue
            label = labelled(letter, point_name(result, others) if others else "hit rate")
            lines.setdefault((place, label), []).append((float(value), result.hit_rate_pages))
            rows.append((label, float(value), result))
    series = [
        Series(label, str(number % 8), tuple(sorted(points)), dashed=place > 0)
        for number, ((place, label), points) in enumerate(lines.items())
    ]
    cells = tuple(
        (label, count(value) if value == int(value) else f"{value:g}", percent(result.hit_rate_pages))
        for label, value, result in sorted(rows, key=lambda row: (row[0], row[1]))
    )
    plain = name.replace("_", " ")
    more = f" The first {_MOST_LINES} of {len(series):,} lines are drawn." if len(series) > _MOST_LINES else ""
    title = f"Hit rate by {plain}"
    form = "number" if name == "speed" else "count"
    above = all(point[0] > 0 for line in series for point in line.points)
    yield LinePlot(
        "sweep-lines",
        title,
        f"Pages hit / pages asked of each point, a line for each combination of the other settings.{more}",
        Axis(plain, f"{_UNITS[name]}{', log scale' if above else ''}", form, log=above, each=True),
        Axis("hit rate", "% of pages asked", "percent", least=0),
        tuple(series[:_MOST_LINES]),
        _table(title, ("line", plain, "hit rate, of pages"), cells),
    )


def _memory(documents: Sequence[SweepDocument], names: Sequence[str]) -> Iterator[LinePlot]:
    """Hit rate over the memory of device and host, which is what is dear."""
    series, marks, rows = [], [], []
    for place, (letter, document) in enumerate(zip(letters(documents), documents, strict=True)):
        found = choose(document.results)
        known = [(sum(memory(each)[:2]), each) for each in document.results]
        known = sorted(((size, each) for size, each in known if isfinite(size)), key=lambda pair: pair[0])[:_MOST_ROWS]
        labels = tuple(point_name(each, names) for _, each in known)
        points = tuple((size, each.hit_rate_pages) for size, each in known)
        series.append(Series(labelled(letter, "points"), ("0", "2")[place], points, dots=True, labels=labels))
        taken = None if found is None else found[0]
        if taken is not None and isfinite(size := sum(memory(taken)[:2])):
            series.append(
                Series(
                    labelled(letter, "recommended"),
                    ("1", "4")[place],
                    ((size, taken.hit_rate_pages),),
                    dots=True,
                    labels=(point_name(taken, names),),
                )
            )
            marks.append(Mark("y", taken.hit_rate_pages, labelled(letter, "recommended")))
        rows += [
            (
                labelled(letter, label) + (", recommended" if each is taken else ""), format_size(round(size)),
                _storage(each), percent(each.hit_rate_pages),
            )
            for (size, each), label in zip(known, labels, strict=True)
        ]  # fmt: skip
    if not any(each.points for each in series):
        return
    title = "Hit rate by the memory it takes"
    yield LinePlot(
        "sweep-memory",
        title,
        "Pages hit / pages asked, over the memory of device and host of all instances; storage is in the table.",
        Axis("memory", "device and host, all in all", "bytes", least=0),
        Axis("hit rate", "% of pages asked", "percent", least=0),
        tuple(series),
        _table(title, ("point", "device and host", "storage", "hit rate, of pages"), rows),
        tuple(marks),
    )


def _table(caption: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    """So many rows as can be read; the sweep's own document has all."""
    more = f", the first {_MOST_ROWS:,} of {len(rows):,}" if len(rows) > _MOST_ROWS else ""
    return Table(caption + more, columns, tuple(rows[:_MOST_ROWS]))


def _storage(result: SimulationDocument) -> str:
    size = memory(result)[2]
    return format_size(round(size)) if isfinite(size) else "unlimited"


def _bars(documents: Sequence[SweepDocument], names: Sequence[str]) -> Iterator[BarPlot]:
    bars, rows = [], []
    every = [
        (letter, each)
        for letter, document in zip(letters(documents), documents, strict=True)
        for each in document.results
    ]
    reasons = sorted({reason for _, each in every for reason in page_misses(each)})
    for letter, each in every:
        label, whole = labelled(letter, point_name(each, names)), each.pages_asked
        parts = [(tier, tier, size) for tier, size in tier_hits(each).items()]
        parts += [(f"missed: {reason}", color_of(reason), each.misses_by_reason.get(reason, 0)) for reason in reasons]
        bars.append(Bar(label, tuple(Part(name, color, size / whole) for name, color, size in parts if size)))
        rows.append(
            (
                label, *(count(size) for *_, size in parts), count(whole), percent(each.hit_rate_pages),
                f"{each.first_token_seconds.mean:.3f}", f"{each.gpu_seconds_saved:,.0f}",
            )
        )  # fmt: skip
    tiers = ("device", "host", "storage")
    columns = (
        "point", *tiers, *(f"missed: {reason}" for reason in reasons), "asked, the sum", "hit rate, of pages",
        "first token, mean s", "GPU s saved",
    )  # fmt: skip
    more = f" The first {_MOST_BARS} of {len(bars):,} points are drawn." if len(bars) > _MOST_BARS else ""
    title = "Where pages came from at each point"
    yield BarPlot(
        "sweep-points",
        title,
        f"Shares of the pages asked; the pieces of a bar add up to all of them.{more}",
        Axis("share", "% of pages asked", "percent", least=0, most=1),
        tuple(bars[:_MOST_BARS]),
        _table(f"{title}: pages asked = hits by tier + misses by reason", columns, rows),
    )
