"""Two JSON documents of one kind, figure by figure, and why their hit rates differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Final

from hicache.analytics.compare.kinds import kind_of
from hicache.analytics.simulate.settings import SimulationSettings

__all__ = ["Change", "Comparison", "Part", "Split", "compare", "page_warnings", "warnings"]

_NAMES: Final = ("tier", "reason", "factor", "page_size", "verb", "policy", "seconds", "namespace", "model", "name")
"""Fields by which records of a list are the same in both documents; a list of others is compared by places."""

_PLACES: Final = {"points": "pages", "hottest": "first_page", "prefixes": "page_hash", "quotas": "tenant"}
"""The same for lists by their own names."""

_OF_PAGES: Final = ("analyze", "simulate")
"""Commands whose documents tell how many tokens a page has; those of a sweep have one of each point."""

_NOT_FIGURES: Final = frozenset({"definitions", "name", "boot"})
_CURVE: Final = "miss_ratio_curve"
_TIERS: Final = ("device", "host", "storage")


@dataclass(frozen=True, slots=True)
class Change:
    """A value that differs.

    Attributes:
        path: where it stands, such as "prompt_tokens.p50" or "what_if[host].pages".
        a, b: the values; None where there is none.
        relative: (b - a) / |a| for two numbers; None where that says nothing.
    """

    path: str
    a: Any
    b: Any
    relative: float | None


@dataclass(frozen=True, slots=True)
class Part:
    """A share of what was asked, in both documents.

    Attributes:
        name: a tier, or "missed" and a reason.
        a, b: its share of what was asked.
        points: b - a, in points of 100.
    """

    name: str
    a: float
    b: float
    points: float


@dataclass(frozen=True, slots=True)
class Split:
    """Where a change of the hit rate comes from: the parts' points add up to 0, those of the tiers to `points`.

    Attributes:
        path: where it stands; "pages" or "tokens" at its end tells of what the shares are.
        asked_a, asked_b: the denominators.
        hit_rate_a, hit_rate_b: from any tier.
        points: how much the hit rate has changed, in points of 100.
        parts: tiers and reasons, the largest change first.
    """

    path: str
    asked_a: int
    asked_b: int
    hit_rate_a: float
    hit_rate_b: float
    points: float
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All of it.

    Attributes:
        splits: of every count of hits and misses that both have and of which something was asked.
        changes: values that differ: numbers before texts and before what only one has; figures of the whole before
            those of its parts, and those before the rows of lists; the largest relative change first.
        same: values that do not differ.
    """

    splits: tuple[Split, ...]
    changes: tuple[Change, ...]
    same: int

    def document(self) -> dict[str, Any]:
        """Of JSON's types."""
        return asdict(self)


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Compare two documents that `--json` of one command has printed; what one of them lacks is None there.

    Miss-ratio curves are compared at sizes that both have.
    """
    a, b = _alike(a, b)
    left, right = dict(_leaves("", a)), dict(_leaves("", b))
    changes, same = [], 0
    for path in dict.fromkeys((*left, *right)):
        old, new = left.get(path), right.get(path)
        if old == new:
            same += 1
        else:
            changes.append(Change(path, old, new, _relative(old, new)))
    changes.sort(key=lambda change: (_rank(change), change.path))
    ours, theirs = dict(_counts("", a)), dict(_counts("", b))
    splits = [_split(path, ours[path], theirs[path]) for path in ours if path in theirs]
    return Comparison(tuple(split for split in splits if split is not None), tuple(changes), same)


def _alike(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The same documents, with curves of the sizes that both have, where both have a curve."""
    curves = [_sizes(each) for each in (a, b)]
    if not all(curves):
        return a, b
    both = curves[0].keys() & curves[1].keys()
    left, right = (
        {**each, _CURVE: {**each[_CURVE], "points": [point for pages, point in sizes.items() if pages in both]}}
        for each, sizes in zip((a, b), curves, strict=True)
    )
    return left, right


def _sizes(document: Mapping[str, Any]) -> dict[int, Any]:
    """The points of an analysis' curve by their sizes; empty where it has none."""
    curve = document.get(_CURVE)
    points = curve.get("points") if isinstance(curve, Mapping) else None
    if not isinstance(points, list):
        return {}
    return {
        point["pages"]: point for point in points if isinstance(point, Mapping) and isinstance(point.get("pages"), int)
    }


def warnings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """What makes figures of two documents hard to compare, in words."""
    yield from page_warnings(a, b)
    sizes = [_sizes(each).keys() for each in (a, b)]
    if all(sizes) and sizes[0] != sizes[1]:
        both = len(sizes[0] & sizes[1])
        at = f"at the {both} sizes that both have" if both else "at no size: they have none in common"
        yield f"the miss-ratio curves have different sizes and are compared {at}; give both analyses the same --sizes"


def page_warnings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Where pages of two documents have different sizes, or nobody knows, in words."""
    units = [_units(each) for each in (a, b)]
    if all(units) and units[0] != units[1]:
        told = " and ".join("/".join(map(str, each)) for each in units)
        yield (
            f"pages of A and B have {told} tokens, so their counts of pages are of different things and their hit "
            "rates of pages do not compare; compare those of tokens, or convert one with `hicache convert --to-unit`"
        )
    unknown = [name for name, each in zip("AB", (a, b), strict=True) if not _tells_units(each)]
    if unknown:
        yield (
            f"{' and '.join(unknown)} {'does' if len(unknown) == 1 else 'do'} not tell how many tokens a page has, as "
            "documents of older versions, so it cannot be known whether counts and hit rates of pages compare: make "
            "them anew, or compare tokens"
        )


def _tells_units(document: Mapping[str, Any]) -> bool:
    """Whether a document that should tell its pages' sizes does."""
    kind = kind_of(document)
    if kind == "sweep":
        return all("page_tokens" in each for each in _results(document))
    return kind not in _OF_PAGES or "page_tokens" in document


def _units(document: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens of a page, all that there are; empty where that is not told."""
    found = document.get("page_tokens")
    if results := _results(document):
        return tuple(sorted({unit for each in results for unit in _units(each)}))
    units = found if isinstance(found, list | tuple) else (found,)
    return tuple(unit for unit in units if isinstance(unit, int))


def _results(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The points of a sweep; none of another document."""
    found = document.get("results")
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def _rank(change: Change) -> tuple[bool, int, float]:
    """Numbers before what is none, figures of the whole before those of its parts, large changes before small ones."""
    deep = 2 if "[" in change.path else int("." in change.path)
    return change.relative is None, deep, 0.0 if change.relative is None else -abs(change.relative)


def _relative(old: Any, new: Any) -> float | None:
    if not (_is_number(old) and _is_number(new)) or not old:
        return None
    found = (new - old) / abs(old)
    return found if isfinite(found) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values of a document by their paths."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name not in _NOT_FIGURES:
                yield from _leaves(f"{path}.{name}" if path else name, item)
    elif isinstance(value, list):
        yield from _listed(path, value)
    else:
        yield path, value


def _listed(path: str, items: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    key = _PLACES.get(path.rpartition(".")[2])
    points = _points(items)
    seen: dict[Any, int] = {}
    for place, item in enumerate(items):
        name: Any = place
        if isinstance(item, Mapping):
            found = [
                item[each] for each in ((key,) if key else _NAMES) if isinstance(item.get(each), str | int | float)
            ]
            name = points[place] if points else found[0] if found else place
        seen[name] = seen.get(name, 0) + 1
        label = f"{name}" if seen[name] == 1 else f"{name} {seen[name]}"
        yield from _leaves(f"{path}[{label}]", item)


def _points(items: Sequence[Any]) -> list[str]:
    """Names of a sweep's points, the same in every sweep: their tiers, and settings that are not the defaults.

    Empty for other records.
    """
    settings = [item.get("settings") if isinstance(item, Mapping) else None for item in items]
    if not all(isinstance(each, Mapping) for each in settings):
        return []
    return [", ".join(f"{name} {value}" for name, value in _told(each)) for each in settings if each is not None]


def _told(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, entry in SimulationSettings.__dataclass_fields__.items():
        if name != "costs" and name in settings and (name in _TIERS or settings[name] != entry.default):
            yield name, settings[name]


# ---- hits and misses


def _counts(path: str, value: Any) -> Iterator[tuple[str, dict[str, int]]]:
    """Counts of what was asked, by tier and reason, with the places where they stand."""
    if isinstance(value, list):
        for name, item in zip(_points(value) or range(len(value)), value, strict=True):
            yield from _counts(f"{path}[{name}]", item)
    if not isinstance(value, Mapping):
        return
    missed = value.get("missed")
    if isinstance(missed, Mapping) and "asked" in value:
        yield path, _figures(value, "", missed)
    reasons = value.get("misses_by_reason")
    if isinstance(reasons, Mapping) and "pages_asked" in value:
        yield f"{path}.pages" if path else "pages", _figures(value, "pages_", reasons)
    for name, item in value.items():
        yield from _counts(f"{path}.{name}" if path else name, item)


def _figures(counts: Mapping[str, Any], prefix: str, missed: Mapping[str, Any]) -> dict[str, int]:
    found = {name: counts.get(prefix + name) for name in ("asked", *_TIERS)}
    found |= {f"missed {reason}": count for reason, count in missed.items()}
    return {name: int(count) for name, count in found.items() if count is not None and _is_number(count)}


def _split(path: str, a: dict[str, int], b: dict[str, int]) -> Split | None:
    asked_a, asked_b = a.pop("asked", 0), b.pop("asked", 0)
    if not asked_a or not asked_b:
        return None
    parts = []
    for name in dict.fromkeys((*a, *b)):
        old, new = a.get(name, 0) / asked_a, b.get(name, 0) / asked_b
        if old or new:
            parts.append(Part(name, old, new, 100 * (new - old)))
    parts.sort(key=lambda part: (-abs(part.points), part.name))
    rate_a, rate_b = (sum(counts.get(t, 0) for t in _TIERS) / asked for counts, asked in ((a, asked_a), (b, asked_b)))
    return Split(path, asked_a, asked_b, rate_a, rate_b, 100 * (rate_b - rate_a), tuple(parts))
