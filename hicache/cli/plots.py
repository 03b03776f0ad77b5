"""Plots in a terminal: what `--plot` adds to the tables. Drawn by plotext, of the extra `cli`."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.analytics.analysis.report import Analysis
    from hicache.analytics.simulate.result import SimulationResult

__all__ = ["Bars", "Plot", "add_plot_argument", "analysis_plots", "check_plot", "drawn", "print_plots", "result_bars"]

_WIDEST: Final = 110
_NARROWEST: Final = 40
_HEIGHT: Final = 16
_TICKS: Final = 5
_MOST_BARS: Final = 40
_MARKERS: Final = ("braille", "dot")
_SOLID: Final = "█▓▒░·"


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over an axis; `lines` are names, places and heights. `across` and `up` name the axes with their units."""

    title: str
    across: str
    up: str
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]]
    logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars under each other, each of `parts`: their names, and of each bar how long they are, in percent."""

    title: str
    names: Sequence[str]
    parts: Sequence[tuple[str, Sequence[float]]]


def add_plot_argument(parser: argparse.ArgumentParser) -> None:
    """The option."""
    parser.add_argument("--plot", action="store_true", help="draw plots below the tables (needs the extra cli)")


def check_plot(options: argparse.Namespace) -> None:
    """See that plots can be drawn, before anything is computed.

    Raises:
        ConfigError: they cannot; says what to do.
    """
    if not options.plot:
        return
    if options.json:
        raise ConfigError("--plot and --json: JSON has the numbers, and no plots; leave one out")
    if importlib.util.find_spec("plotext") is None:
        raise ConfigError("--plot needs plotext: pip install 'hicache[cli]'")
    try:
        f"┌⣿•{_SOLID}".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        raise ConfigError(
            f"--plot: {sys.stdout.encoding} has no characters to draw with; set PYTHONIOENCODING=utf-8"
        ) from None


def print_plots(plots: Iterator[Plot | Bars]) -> None:
    """Draw them as wide as the terminal, with colours where it is one."""
    columns = shutil.get_terminal_size((80, 24)).columns
    width = max(_NARROWEST, min(columns, _WIDEST))
    for plot in plots:
        sys.stdout.write(f"{plot.title}\n{drawn(plot, width, colours=sys.stdout.isatty())}\n\n")


def drawn(plot: Plot | Bars, width: int, *, colours: bool) -> str:
    """The plot's text, `width` columns wide."""
    if isinstance(plot, Bars):
        return _bars(plot, width)
    import plotext

    plotext.clear_figure()
    plotext.theme("default" if colours else "clear")
    plotext.plot_size(width, _HEIGHT)
    if plot.logarithmic:
        plotext.xscale("log")
    several = len(plot.lines) > 1
    for (name, places, heights), marker in zip(plot.lines, _MARKERS, strict=False):
        plotext.plot(list(places), list(heights), marker=marker, label=name if several else None)
    places = [place for _, line, _ in plot.lines for place in line]
    ticks = _ticks(min(places), max(places), logarithmic=plot.logarithmic)
    plotext.xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    plotext.ylim(0, max(height for *_, line in plot.lines for height in line) or 1)
    plotext.xlabel(plot.across)
    plotext.ylabel(plot.up)
    return _text(plotext, colours=colours)


def _bars(plot: Bars, width: int) -> str:
    """Bars of characters, one kind a part, so that no colour is needed."""
    parts = [(name, lengths) for name, lengths in plot.parts if any(lengths)]
    marks = [*_SOLID, *(chr(ord("a") + place) for place in range(len(parts)))]
    most = max(map(len, plot.names), default=0)
    room = max(_NARROWEST // 2, width - most - 2)
    lines = []
    for at, name in enumerate(plot.names):
        ends = [0.0]
        for _, lengths in parts:
            ends.append(ends[-1] + lengths[at])
        cells = [min(room, round(end * room / 100)) for end in ends]
        bar = "".join(mark * (end - begin) for mark, begin, end in zip(marks, cells, cells[1:], strict=False))
        lines.append(f"{name.ljust(most)}  {bar}".rstrip())
    legend = "   ".join(f"{mark} {name}" for mark, (name, _) in zip(marks, parts, strict=False))
    return "\n".join((*lines, legend)) if parts else "  nothing"


def _text(plotext: Any, *, colours: bool) -> str:
    text: str = plotext.build()
    if not colours:
        text = plotext.uncolorize(text)
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def _ticks(least: float, most: float, *, logarithmic: bool) -> list[float]:
    """Places of ticks, the ends among them."""
    if most <= least:
        return [least]
    steps = [step / (_TICKS - 1) for step in range(_TICKS)]
    if logarithmic and least > 0:
        return [least * (most / least) ** step for step in steps]
    return [least + (most - least) * step for step in steps]


def analysis_plots(analysis: Analysis) -> Iterator[Plot]:
    """What `hicache analyze` draws."""
    points = analysis.curve.points
    if points:
        sizes = [point.pages for point in points]
        yield Plot(
            "hit rate of one LRU pool of a size",
            "pages of the pool, logarithmic",
            "% of pages, or of tokens, asked",
            (
                ("pages", sizes, [100 * point.hit_rate_pages for point in points]),
                ("tokens", sizes, [100 * point.hit_rate_tokens for point in points]),
            ),
            logarithmic=True,
        )
    for title, across, spread in (
        ("time since the use before", "seconds", analysis.reuse_seconds),
        ("different pages since the use before", "pages", analysis.reuse_distance_pages),
    ):
        if spread.count:
            shares = [(0, spread.least), *spread.percentiles, (100, spread.most)]
            yield Plot(
                title, across, "% of pages hit", (("", [at for _, at in shares], [share for share, _ in shares]),)
            )
    spans = analysis.working_set
    if len(spans) > 1:
        starts = [span.begin for span in spans]
        yield Plot(
            "ideal hit rate over time",
            "seconds of trace time",
            "% of pages asked then",
            (("", starts, [100 * span.ideal_hit_rate_pages for span in spans]),),
        )


def result_bars(results: Sequence[SimulationResult], names: Sequence[str], *, what: str = "") -> Iterator[Bars]:
    """What `hicache simulate` and `hicache sweep` draw: what became of the pages asked.

    Args:
        results: a bar each.
        names: of the bars.
        what: the names are of.
    """
    shown = results[:_MOST_BARS]
    left = f"; the first {_MOST_BARS} of {len(results):,}" if len(results) > len(shown) else ""
    asked = [result.pages_asked or 1 for result in shown]
    parts = [
        (
            f"in {tier}",
            [100 * getattr(result, f"pages_{tier}") / all_ for result, all_ in zip(shown, asked, strict=True)],
        )
        for tier in ("device", "host", "storage")
    ]
    reasons = sorted({reason for result in shown for reason in result.misses_by_reason})
    parts += [
        (
            f"missed: {reason}",
            [100 * result.misses_by_reason[reason] / all_ for result, all_ in zip(shown, asked, strict=True)],
        )
        for reason in reasons
    ]
    of_what = f", by {what}" if what else ""
    yield Bars(f"what became of the pages asked, in % of them{of_what}{left}", names[: len(shown)], parts)
