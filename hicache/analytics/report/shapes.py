"""Plots and tables that several sections draw: what was asked as a sum, distributions, and values side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from hicache.analytics.report.content import Axis, Bar, BarPlot, LinePlot, Part, Series, Table, columns_for
from hicache.analytics.report.figures import Distribution
from hicache.analytics.report.words import count, share, shown, visible

__all__ = ["LETTERS", "asked_as_sum", "cumulative", "letters", "side_by_side"]

LETTERS: Final = ("A", "B")
_COLORS: Final = 8
_REASONS: Final = frozenset(
    (
        "cold", "evicted", "expired", "other_namespace", "failed", "late", "unaligned_tail", "over_budget", "bypassed",
        "other_instance",
    )
)  # fmt: skip

T = TypeVar("T")


def letters(sources: Sequence[object]) -> tuple[str, ...]:
    """What sources are called: nothing where there is one."""
    return LETTERS[: len(sources)] if len(sources) > 1 else ("",)


def labelled(letter: str, text: str) -> str:
    """A name with that of its source."""
    return f"{letter}: {text}" if letter and text else letter or text


def color_of(reason: str, number: int = 7) -> str:
    """The colour of a miss, by its reason; that of a number for one that nobody knows."""
    return reason if reason in _REASONS else str(number % _COLORS)


def asked_as_sum(
    key: str, title: str, what: str, sources: Sequence[tuple[str, Mapping[str, int], Mapping[str, int]]]
) -> BarPlot:
    """Asked = hits + misses, as a bar for each source, and as a sum that can be added up.

    Args:
        key: of the plot.
        title: what it shows.
        what: of what the counts are, such as "pages asked".
        sources: name, hits and misses of each.
    """
    hits = list(dict.fromkeys(name for _, found, _ in sources for name in found))
    reasons = sorted(
        {name for _, _, found in sources for name, size in found.items() if size},
        key=lambda name: (-sum(found.get(name, 0) for _, _, found in sources), name),
    )
    bars, wholes = [], []
    for name, hit, missed in sources:
        whole = sum(hit.values()) + sum(missed.values())
        wholes.append(whole)
        parts = [(each, each, hit.get(each, 0)) for each in hits]
        parts += [(f"missed: {each}", color_of(each), missed.get(each, 0)) for each in reasons]
        shares = tuple(Part(each, color, size / whole if whole else 0.0) for each, color, size in parts if size)
        bars.append(Bar(f"{name or what}: {count(whole)} {what if name else ''}".strip(), shares))
    rows = [
        *(
            _row(each, [(hit.get(each, 0), whole) for (_, hit, _), whole in zip(sources, wholes, strict=True)])
            for each in hits
        ),
        *(
            _row(
                f"missed: {each}",
                [(miss.get(each, 0), whole) for (_, _, miss), whole in zip(sources, wholes, strict=True)],
            )
            for each in reasons
        ),
        _row("asked, the sum", [(whole, whole) for whole in wholes]),
    ]
    names = [name for name, _, _ in sources]
    columns = ("from", *columns_for(names if len(names) > 1 else [""], (what.split(maxsplit=1)[0], "of asked")))
    table = Table(f"{title}: {what} = hits + misses by reason", columns, tuple(rows), total=True)
    note = f"Shares of the {what}; the pieces add up to all of them, each miss has one reason."
    return BarPlot(key, title, note, Axis("share", f"% of {what}", "percent", least=0, most=1), tuple(bars), table)


def _row(name: str, figures: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    return (name, *(cell for part, whole in figures for cell in (count(part), share(part, whole))))


def cumulative(
    key: str, title: str, note: str, axis: Axis, of: str, found: Sequence[tuple[str, str, bool, Distribution]]
) -> LinePlot:
    """Distributions as the share that is not above a value, through the percentiles that are known.

    Args:
        key: of the plot.
        title: of it.
        note: of it.
        axis: of the values.
        of: what the shares divide by.
        found: name, colour, whether it is of the second source, and the distribution of each.
    """
    known = [each for each in found if each[3].count]
    series = tuple(
        Series(name, color, tuple((value, at / 100) for at, value in spread.percentiles), dashed=dashed)
        for name, color, dashed, spread in known
    )
    rows = [
        *(
            (_percentile(at), *(shown(dict(spread.percentiles)[at], axis.form) for *_, spread in found))
            for at in (0, 1, 10, 25, 50, 75, 90, 99, 100)
        ),
        ("mean", *(shown(spread.mean, axis.form) for *_, spread in found)),
        ("of how many", *(count(spread.count) for *_, spread in found)),
    ]
    table = Table(f"{title}: so much of {of} is not above", ("share", *(name for name, *_ in found)), tuple(rows))
    return LinePlot(key, title, note, axis, Axis("share", f"% of {of}", "percent", least=0, most=1), series, table)


def _percentile(at: int) -> str:
    return {0: "least", 100: "most"}.get(at, f"{at} %")


def side_by_side(
    caption: str, names: Sequence[str], documents: Sequence[T], rows: Sequence[tuple[str, Callable[[T], str]]]
) -> Table:
    """Figures of all sources, a row each."""
    columns = ("what", *(names if len(documents) > 1 else ("value",)))
    return Table(caption, columns, tuple((name, *(visible(told(each)) for each in documents)) for name, told in rows))
