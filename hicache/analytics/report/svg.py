"""Plots as SVG, which can be read without a script; the page's script finds its points by their `data-` names.

Every plot is drawn twice, wide and narrow: a drawing that is made smaller has letters that are too small to read. The
page shows the one that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from hicache.analytics.report.content import BarPlot, LinePlot, Mark, Plot, Series
from hicache.analytics.report.scales import Scale, scale_of, tick_text
from hicache.analytics.report.words import squeezed, visible

__all__ = ["drawings"]

_LETTER: Final = 6.9  # width of a letter of 12 pixels, of the widest of the usual fonts
_BOLD: Final = 8.3
_LINE: Final = 14
_ROW: Final = 46
_BAR: Final = 20
_BUSY: Final = 40  # points of a line from which on they have no dots of their own


@dataclass(frozen=True, slots=True)
class _Frame:
    """The size of a drawing, and where its inner part lies."""

    name: str
    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float

    def x(self, place: float) -> float:
        return self.left + place * (self.width - self.left - self.right)

    def y(self, place: float) -> float:
        return self.height - self.bottom - place * (self.height - self.top - self.bottom)


_WIDE: Final = ("wide", 680.0, 340.0, 7)
_NARROW: Final = ("narrow", 340.0, 290.0, 4)


def drawings(plot: Plot) -> str:
    """The plot, wide and narrow."""
    shapes = (_WIDE, _NARROW)
    if isinstance(plot, LinePlot):
        return "".join(_lines(plot, *shape) for shape in shapes)
    return "".join(_bars(plot, *shape) for shape in shapes)


# ---- lines


def _lines(plot: LinePlot, name: str, width: float, height: float, ticks: int) -> str:
    points = [point for series in plot.series for point in series.points]
    edges = [y for series in plot.series for bound in series.bounds for y in bound]
    at = {axis: [mark.at for mark in plot.marks if mark.axis == axis] for axis in "xy"}
    x = scale_of(plot.x, [*(point[0] for point in points), *at["x"]], ticks=ticks)
    y = scale_of(plot.y, [*(point[1] for point in points), *edges, *at["y"]], ticks=5)
    left = max(len(tick_text(tick, plot.y.form)) for tick in y.ticks) * _LETTER + 12
    frame = _Frame(name, width, height, left, 22, 30, 48)
    parts = [
        *_y_axis(frame, y, f"{plot.y.label}, {plot.y.unit}", plot.y.form),
        *_x_axis(frame, x, f"{plot.x.label}, {plot.x.unit}", plot.x.form),
        *(_series(frame, x, y, number, series) for number, series in enumerate(plot.series)),
        *_marks(frame, x, y, plot.marks),
        _across("cursor", (0, frame.top), (0, frame.height - frame.bottom)),
    ]
    return _svg(frame, plot.title, parts)


def _y_axis(frame: _Frame, scale: Scale, title: str, form: str) -> Iterator[str]:
    yield f'<text class="axis" x="2" y="14">{_text(squeezed(title, int(frame.width / _BOLD)))}</text>'
    for tick in scale.ticks:
        at = frame.y(scale(tick))
        yield _across("grid", (frame.left, at), (frame.width - frame.right, at))
        label = _text(tick_text(tick, form))
        yield f'<text class="tick end" x="{_px(frame.left - 7)}" y="{_px(at)}" dy="4">{label}</text>'


def _x_axis(frame: _Frame, scale: Scale, title: str, form: str) -> Iterator[str]:
    base = frame.height - frame.bottom
    yield _across("base", (frame.left, base), (frame.width - frame.right, base))
    free = -1e9  # the right end of the label before
    for tick in scale.ticks:
        x, label = frame.x(scale(tick)), tick_text(tick, form)
        yield _across("base", (x, base), (x, base + 4))
        half = len(label) * _LETTER / 2
        middle = min(max(x, half), frame.width - half)
        if middle - half < free + 6:
            continue  # it would lie on the one before
        free = middle + half
        yield f'<text class="tick mid" x="{_px(middle)}" y="{_px(base + 18)}">{_text(label)}</text>'
    yield (
        f'<text class="axis end" x="{_px(frame.width - frame.right)}" y="{_px(frame.height - 8)}">'
        f"{_text(squeezed(title, int((frame.width - frame.right) / _BOLD)))}</text>"
    )


def _series(frame: _Frame, x: Scale, y: Scale, number: int, series: Series) -> str:
    places = [(frame.x(x(a)), frame.y(y(b))) for a, b in series.points]
    parts = []
    if series.bounds and any(low < high for low, high in series.bounds):
        low = [(place[0], frame.y(y(bound[0]))) for place, bound in zip(places, series.bounds, strict=True)]
        high = [(place[0], frame.y(y(bound[1]))) for place, bound in zip(places, series.bounds, strict=True)]
        parts.append(f'<path class="band" d="{_path([*low, *reversed(high)])}Z"/>')
    if not series.dots and len(places) > 1:
        parts.append(f'<path class="line" d="{_path(places, step=series.step)}"/>')
    radius = 4 if series.dots else 1.5 if len(places) > _BUSY else 2.75
    for at, (left, top) in enumerate(places):
        parts.append(f'<circle class="pt" data-i="{at}" cx="{_px(left)}" cy="{_px(top)}" r="{radius:g}"/>')
    style = " dashed" if series.dashed else ""
    return f'<g class="series c-{series.color}{style}" data-s="{number}">{"".join(parts)}</g>'


def _path(places: Sequence[tuple[float, float]], *, step: bool = False) -> str:
    parts: list[str] = []
    for at, (x, y) in enumerate(places):
        if step and at:
            parts.append(f"H{_px(x)}V{_px(y)}")
        else:
            parts.append(f"{'L' if at else 'M'}{_px(x)} {_px(y)}")
    return "".join(parts)


def _marks(frame: _Frame, x: Scale, y: Scale, marks: Sequence[Mark]) -> Iterator[str]:
    taken: list[tuple[float, float, float]] = []
    right, base = frame.width - frame.right, frame.height - frame.bottom
    for mark in marks:
        label = squeezed(visible(mark.label), int((right - frame.left - 12) / _LETTER))
        size = len(label) * _LETTER
        if mark.axis == "y":
            at = frame.y(y(mark.at))
            yield _across("mark", (frame.left, at), (right, at))
            left, begin = right - 2 - size, at - 6
        else:
            at = frame.x(x(mark.at))
            yield _across("mark", (at, frame.top), (at, base))
            # Behind the line where there is room, else before it.
            left, begin = at + 6 if at + 6 + size <= right else max(frame.left, at - 6 - size), base - 10
        top = _free(taken, left, size, (begin, frame.top + 8, base - 6))
        if top is not None:
            yield f'<text class="note" x="{_px(left)}" y="{_px(top)}">{_text(label)}</text>'


def _free(
    taken: list[tuple[float, float, float]], left: float, size: float, heights: tuple[float, float, float]
) -> float | None:
    """A height at which nothing else is written, from the one wanted up and then down; None where there is none."""
    wanted, least, most = heights
    for step in (*range(0, -200, -15), *range(15, 200, 15)):
        top = float(wanted + step)
        if least <= top <= most and not any(
            abs(top - y) < _LINE and left < x + w and x < left + size for x, w, y in taken
        ):
            taken.append((left, size, top))
            return top
    return None


# ---- bars


def _bars(plot: BarPlot, name: str, width: float, _height: float, ticks: int) -> str:
    longest = max((sum(part.value for part in bar.parts) for bar in plot.bars), default=0.0)
    x = scale_of(plot.x, [0.0, longest], ticks=ticks)
    frame = _Frame(name, width, 56.0 + _ROW * len(plot.bars), 14, 24, 4, 48)
    parts = []
    for tick in x.ticks:
        left = frame.x(x(tick))
        parts.append(_across("grid", (left, frame.top), (left, frame.height - frame.bottom)))
    parts += _x_axis(frame, x, f"{plot.x.label}, {plot.x.unit}", plot.x.form)
    seen: dict[str, int] = {}
    for row, bar in enumerate(plot.bars):
        top = frame.top + row * _ROW
        label = _text(squeezed(visible(bar.label), int((width - frame.left) / _BOLD)))
        parts.append(f'<text class="label" x="{_px(frame.left)}" y="{_px(top + 14)}">{label}</text>')
        end = 0.0
        for at, part in enumerate(bar.parts):
            number = seen.setdefault(part.name, len(seen))
            left, right = frame.x(x(end)), frame.x(x(end + part.value))
            end += part.value
            parts.append(
                f'<rect class="seg series c-{part.color}" data-s="{number}" data-b="{row}" data-i="{at}" '
                f'x="{_px(left)}" y="{_px(top + 20)}" width="{_px(max(0.0, right - left - (right - left > 3)))}" '
                f'height="{_BAR}" rx="1.5"/>'
            )
    return _svg(frame, plot.title, parts)


# ---- text


def _svg(frame: _Frame, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="{frame.name}" viewBox="0 0 {_px(frame.width)} {_px(frame.height)}" role="img" '
        f'aria-label="{_text(title)}">{"".join(parts)}</svg>'
    )


def _across(kind: str, begin: tuple[float, float], end: tuple[float, float]) -> str:
    (x, y), (right, below) = begin, end
    return f'<line class="{kind}" x1="{_px(x)}" x2="{_px(right)}" y1="{_px(y)}" y2="{_px(below)}"/>'


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(text: str) -> str:
    return escape(visible(text))
