"""A report as one HTML page, which asks nobody for anything and says so to the browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from typing import Any, Final

from hicache.analytics.report.content import Answer, LinePlot, Plot, Report, Section, Table
from hicache.analytics.report.svg import drawings
from hicache.analytics.report.words import shown, visible

__all__ = ["to_html"]

_LONG: Final = 100_000
_LONG_FIGURE: Final = 18  # letters of an answer that no longer fit one line in large type
_BESIDE: Final = 6  # columns of a table up to which it has room beside its plot
_OPTION: Final = re.compile(r"(?<![\w-])(--[a-z][a-z-]*)")
_CODE: Final = re.compile("`([^`<>]{1,200})`")


def to_html(report: Report) -> str:
    """The page: style, script and data are in it, and its policy allows no others."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; "
        f"form-action 'none'"
    )
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{_text(report.title)}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            *_head(report),
            "<main>",
            *_answers(report),
            *(line for section in report.sections for line in _section(section)),
            *_definitions(report),
            "</main>",
            "<footer><p>Made by hicache report. Nothing in this page is loaded from anywhere.</p></footer>",
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        )
    )


def _asset(name: str) -> str:
    return files("hicache.analytics.report").joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _head(report: Report) -> Iterator[str]:
    yield "<header><div>"
    yield f"<h1>{_text(report.title)}</h1>"
    yield '<ul class="sources">'
    for letter, (name, kind) in zip("AB", report.sources, strict=False):
        mark = f"<b>{letter}</b> " if len(report.sources) > 1 else ""
        yield f"<li>{mark}<bdi>{_text(name)}</bdi>: {_text(kind)}</li>"
    yield "</ul>"
    yield '</div><button id="theme" type="button" hidden>Theme</button></header>'


def _answers(report: Report) -> Iterator[str]:
    for warning in report.warnings:
        yield f'<p class="warning">{_text(warning, _LONG)}</p>'
    yield '<div class="answers">'
    for answer in report.answers:
        yield from _answer(answer, several=len(report.sources) > 1)
    yield "</div>"
    yield '<nav aria-label="Sections"><ul>'
    yield from (f'<li><a href="#{section.key}">{_text(section.title)}</a></li>' for section in report.sections)
    yield "</ul></nav>"


def _answer(answer: Answer, *, several: bool) -> Iterator[str]:
    yield f'<div class="answer"><h2>{_text(answer.question)}</h2>'
    for letter, figure in zip("AB", answer.figures, strict=False):
        mark = f"<small>{letter}</small>" if several else ""
        yield f'<span class="figure{" long" * (len(figure) > _LONG_FIGURE)}">{mark}{_text(figure)}</span>'
    yield from (f"<p>{_sentence(line)}</p>" for line in answer.text)
    yield "</div>"


def _section(section: Section) -> Iterator[str]:
    yield f'<section id="{section.key}" aria-labelledby="{section.key}-title">'
    yield f'<h2 id="{section.key}-title">{_text(section.title)}</h2>'
    yield from (f"<p>{_sentence(line)}</p>" for line in section.text)
    for plot in section.plots:
        yield from _figure(plot)
    for table in section.tables:
        yield f'<div class="alone">{_table(table)}</div>'
    yield "</section>"


def _figure(plot: Plot) -> Iterator[str]:
    broad = ' class="broad"' if len(plot.table.columns) > _BESIDE else ""
    yield f'<figure id="plot-{plot.key}"{broad}><figcaption><h3>{_text(plot.title)}</h3>'
    yield f"<p>{_text(plot.note, _LONG)}</p></figcaption>"
    yield "<div>"
    yield _legend(plot)
    yield f'<div class="drawing">{drawings(plot)}</div></div>'
    yield f"<details open><summary>The same as a table</summary>{_table(plot.table)}</details>"
    yield f'<script type="application/json">{_data(_told(plot))}</script>'
    yield "</figure>"


def _legend(plot: Plot) -> str:
    if isinstance(plot, LinePlot):
        entries = [(series.name, series.color, series.dashed) for series in plot.series]
    else:
        first = {part.name: part.color for bar in plot.bars for part in bar.parts}
        entries = [(name, color, False) for name, color in first.items()]
    items = (
        f'<li data-s="{number}"><span><i class="key c-{color}{" dashed" * dashed}"></i>{_text(name)}</span></li>'
        for number, (name, color, dashed) in enumerate(entries)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _told(plot: Plot) -> dict[str, Any]:
    """What the script says about each point, ready to be shown."""
    if not isinstance(plot, LinePlot):
        bars = [
            [[visible(bar.label), f"{visible(part.name)}: {shown(part.value, plot.x.form)}"] for part in bar.parts]
            for bar in plot.bars
        ]
        return {"bars": bars}
    lines = []
    for series in plot.series:
        told = []
        for at, (x, y) in enumerate(series.points):
            label = f"{visible(series.labels[at])}: " if series.labels else ""
            line = f"{visible(series.name)}: {shown(y, plot.y.form)}"
            if series.bounds:
                low, high = series.bounds[at]
                line += f" ({shown(low, plot.y.form)} to {shown(high, plot.y.form)})" if low < high else ""
            told.append([f"{label}{plot.x.label}: {shown(x, plot.x.form)}", line])
        lines.append(told)
    return {"series": lines, "dots": any(series.dots for series in plot.series)}


def _table(table: Table) -> str:
    columns = "".join(
        f'<th scope="col"{_word(at, table)}>{_text(column)}</th>' for at, column in enumerate(table.columns)
    )
    rows = []
    for number, row in enumerate(table.rows):
        total = ' class="total"' if table.total and number == len(table.rows) - 1 else ""
        cells = "".join(
            f'<th scope="row"{_word(at, table)}>{_text(cell)}</th>'
            if not at
            else f"<td{_word(at, table)}>{_text(cell)}</td>"
            for at, cell in enumerate(row)
        )
        rows.append(f"<tr{total}>{cells}</tr>")
    caption = _text(table.caption, _LONG)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table><caption>{caption}</caption>'
        f"<thead><tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _word(column: int, table: Table) -> str:
    return ' class="word"' if column < table.texts else ""


def _definitions(report: Report) -> Iterator[str]:
    if not report.definitions:
        return
    yield '<section id="definitions" aria-labelledby="definitions-title">'
    yield '<h2 id="definitions-title">What the figures mean</h2><dl>'
    for name, text in report.definitions.items():
        yield f"<dt>{_text(name)}</dt><dd>{_text(text, _LONG)}</dd>"
    yield "</dl></section>"


def _data(value: Any) -> str:
    """JSON that ends no script, whatever it holds."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _sentence(text: str) -> str:
    """Words in which no option is broken at its dashes, and what is in backticks is code."""
    return _CODE.sub(r"<code>\1</code>", _OPTION.sub(r'<span class="option">\1</span>', _text(text, _LONG)))


def _text(text: str, most: int = 300) -> str:
    return escape(visible(text, most))
