"""Plots and tables that several sections draw: what was asked as a sum, distributions, and values side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from hicache.analytics.report.content import Axis, Bar, BarPlot, LinePlot, Part, Series, Table
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
    kinds = [*((name, name, name) for name in hits), *((name, _missed(name), color_of(name)) for name in reasons)]
    wholes = [sum(hit.values()) + sum(missed.values()) for _, hit, missed in sources]
    # No name is both a tier and a reason.
    counts = [{**hit, **missed} for _, hit, missed in sources]
    bars = tuple(
        Bar(
            f"{name}: {count(whole)} {what}" if name else f"{what}: {count(whole)}",
            tuple(Part(label, color, found[key] / whole) for key, label, color in kinds if found.get(key)),
        )
        for (name, _, _), found, whole in zip(sources, counts, wholes, strict=True)
    )
    rows = [
        _row(label, [(found.get(key, 0), whole) for found, whole in zip(counts, wholes, strict=True)])
        for key, label, _ in kinds
    ]
    rows.append(_row("asked, the sum", [(whole, whole) for whole in wholes]))
    heads = tuple(labelled(name, head) for name, _, _ in sources for head in (what_unit(what), "of asked"))
    table = Table(f"{title}: {what} = hits + misses by reason", ("from", *heads), tuple(rows), total=True)
    note = f"Shares of the {what}; the pieces add up to all of them, each miss has one reason."
    return BarPlot(key, title, note, Axis("share", f"% of {what}", "percent", least=0, most=1), bars, table)


def what_unit(what: str) -> str:
    """Pages or tokens, of "pages asked" or "prompt tokens"."""
    return "tokens" if "tokens" in what else "pages"


def _missed(reason: str) -> str:
    return reason if reason == "missed" else f"missed: {reason}"


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
        ("mean", *(_mean(spread.mean, axis.form) for *_, spread in found)),
        ("of how many", *(count(spread.count) for *_, spread in found)),
    ]
    table = Table(f"{title}: so much of {of} is not above", ("share", *(name for name, *_ in found)), tuple(rows))
    return LinePlot(key, title, note, axis, Axis("share", f"% of {of}", "percent", least=0, most=1), series, table)


def _mean(value: float, form: str) -> str:
    return shown(value, "number" if form == "count" else form)


def _percentile(at: int) -> str:
    return {0: "least", 100: "most"}.get(at, f"{at} %")


def side_by_side(
    caption: str, names: Sequence[str], documents: Sequence[T], rows: Sequence[tuple[str, Callable[[T], str]]]
) -> Table:
    """Figures of all sources, a row each."""
    columns = ("what", *(names if len(documents) > 1 else ("value",)))
    return Table(caption, columns, tuple((name, *(visible(told(each)) for each in documents)) for name, told in rows))
