"""The section on what differs between two sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hicache.analytics.compare.documents import Change, Split, compare
from hicache.analytics.report.content import Section, Table
from hicache.analytics.report.words import count, percent, points, significant, visible

__all__ = ["difference_section"]

_MOST_CHANGES: Final = 40
_MOST_SPLITS: Final = 6


def difference_section(a: Mapping[str, Any], b: Mapping[str, Any]) -> Section:
    """What differs between two documents of one kind."""
    found = compare(a, b)
    splits = found.splits[:_MOST_SPLITS]
    text = [line for split in splits for line in _words(split)]
    text.append(f"{count(len(found.changes))} values differ, {count(found.same)} do not.")
    rows = tuple(
        (visible(change.path, 80), _value(change.a), _value(change.b), _relative(change))
        for change in found.changes[:_MOST_CHANGES]
    )
    more = f", the first {len(rows)} of {len(found.changes):,}" if len(found.changes) > len(rows) else ""
    changes = Table(f"Values that differ, the largest change first{more}", ("what", "A", "B", "change"), rows)
    tables = [_split(split) for split in splits]
    return Section("difference", "What differs", tuple(text), (), (*tables, *([changes] if rows else [])))


def _words(split: Split) -> Iterator[str]:
    moved = (
        "as many as"
        if not round(split.points, 2)
        else f"{abs(split.points):.2f} points {'more' if split.points > 0 else 'less'} than"
    )
    causes = [part for part in split.parts if part.name.startswith("missed") and abs(part.points) >= 0.01][:3]
    why = ", ".join(f"{visible(part.name, 60)} {part.points:+.2f}" for part in causes)
    yield (
        f"Of what was asked ({visible(split.path, 60)}), B hits {percent(split.hit_rate_b)} and A "
        f"{percent(split.hit_rate_a)}: {moved} A{f' ({why} points)' if why else ''}."
    )


def _split(split: Split) -> Table:
    rows = [
        (visible(part.name, 60), percent(part.a), percent(part.b), points(part.points / 100)) for part in split.parts
    ]
    rows.append(("asked", count(split.asked_a), count(split.asked_b), ""))
    return Table(f"Shares of what was asked: {visible(split.path, 60)}", ("part", "A", "B", "points"), tuple(rows))


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return visible(str(value), 40)
    return count(value) if isinstance(value, int) else significant(value)


def _relative(change: Change) -> str:
    return "" if change.relative is None else f"{100 * change.relative:+,.1f} %"
