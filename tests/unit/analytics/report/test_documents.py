"""Documents that anybody may have written: read as they are meant, or refused in a line; and the JSON that goes out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.analytics.compare.kinds import kind_of
from hicache.analytics.report.build import Source, build
from hicache.analytics.report.documents import KINDS, require_kind
from hicache.errors import InvalidInput

HUGE = 10**400


def test_kinds_are_told_apart(sources: dict[str, Source]) -> None:
    """By what only one command writes."""
    for kind, source in sources.items():
        assert kind_of(source.documents[kind]) == kind
    assert kind_of(build([sources["stats"]]).document()) == "report"
    assert kind_of({}) is None
    for document, what in (({"layout": 1, "token_bytes": 2}, "hicache plan"), ({"x": 1}, "no command")):
        with pytest.raises(InvalidInput, match=what):
            require_kind(document, name="it")


@pytest.mark.parametrize("kind", ["analyze", "simulate", "sweep"])
def test_pages_that_do_not_compare_are_told(kind: str, sources: dict[str, Source]) -> None:
    """Beside each other: of other sizes, or of one that an old document does not tell."""
    source = sources[kind]
    assert build([source, source]).warnings == ()
    told = json.dumps(source.documents[kind])
    other, old = (json.loads(re.sub(r'"page_tokens": [^,]+,', new, told)) for new in ('"page_tokens": 7,', ""))
    (line,) = build([source, Source("other", {kind: other})]).warnings
    assert "7 tokens, so their counts of pages are of different things and their hit rates of pages do not" in line
    if kind == "analyze":  # the others cannot be read without it
        (line,) = build([source, Source("old", {kind: old})]).warnings
        assert line.startswith("B does not tell how many tokens a page has")


@pytest.mark.parametrize("value", [None, "7", -1, float("nan"), float("inf"), HUGE, [], {}, True])
@pytest.mark.parametrize(("kind", "path"), [
    ("analyze", ("pages_asked",)),
    ("analyze", ("miss_ratio_curve", "points", 0, "hit_rate_pages")),
    ("simulate", ("first_token_seconds", "count")),
    ("simulate", ("pages_host",)),
    ("sweep", ("results", 0, "gpu_seconds")),
    ("stats", ("service", "uptime_seconds")),
    ("stats", ("pools", 0, "statistics", "tokens", "missed", "cold")),
])  # fmt: skip
def test_what_is_no_figure_is_refused(kind: str, path: tuple[Any, ...], value: Any, sources: dict[str, Source]) -> None:
    """One line, with the source's name; never a number that cannot be drawn."""
    document = json.loads(json.dumps(sources[kind].documents[kind]))
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    if value is None and isinstance(place, list):
        return
    with pytest.raises(InvalidInput) as caught:
        build([Source("it.json", {kind: document})])
    assert "it.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "path"), [
    ("simulate", ("pages_device",)),
    ("simulate", ("tokens_missed",)),
    ("simulate", ("misses_by_reason", "cold")),
    ("stats", ("pools", 0, "statistics", "tokens", "asked")),
    ("stats", ("pools", 1, "statistics", "pages", "missed", "evicted")),
])  # fmt: skip
def test_counts_that_do_not_add_up_are_refused(kind: str, path: tuple[Any, ...], sources: dict[str, Source]) -> None:
    """A report never shows a sum that is none."""
    document = json.loads(json.dumps(sources[kind].documents[kind]))
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] += 1
    with pytest.raises(InvalidInput, match="add up to"):
        build([Source("it.json", {kind: document})])


def test_unlike_sources_are_refused(sources: dict[str, Source]) -> None:
    """A trace beside a service says nothing about either."""
    with pytest.raises(InvalidInput, match=r"is a trace, analysed, .* is a running service: give two alike"):
        build([sources["analyze"], sources["stats"]])


def test_what_both_have_is_compared(sources: dict[str, Source]) -> None:
    """A trace with a simulation beside a simulation: their simulations."""
    mixed = Source("mixed", {**sources["analyze"].documents, **sources["simulate"].documents})
    keys = [section.key for section in build([mixed, sources["simulate"]]).sections]
    assert keys == ["difference", "hits", "gap", "traffic", "times", "settings"]
    alone = [section.key for section in build([mixed]).sections]
    assert alone[0] == "simulate-hits"
    assert "analyze-memory" in alone


def test_the_json_is_what_the_readme_says(sources: dict[str, Source], repository: Path) -> None:
    """Its fields, of every kind, are those of the table there."""
    text = (repository / "hicache" / "analytics" / "README.md").read_text()
    section = text.partition("## hicache report\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall("`([^`]+)`", row)}
    found: set[str] = set()
    for kind in KINDS:
        document = build([sources[kind]]).document()
        assert json.loads(json.dumps(document, allow_nan=False)) == json.loads(json.dumps(document))
        assert document["sources"][0]["documents"] == {kind: sources[kind].documents[kind]}
        found |= set(fields_of("", document))
    assert found == documented
    assert document["hicache_report"] == 1


def fields_of(path: str, value: Any) -> Any:
    """Names of fields with the lists and objects that they are in, but for documents of other commands."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield f"{path}{name}"
            if name not in ("documents", "definitions"):
                yield from fields_of(f"{path}{name}.", item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from fields_of(path.removesuffix(".") + "[].", item)


def test_a_report_is_the_same_each_time(sources: dict[str, Source], service: Callable[..., dict[str, Any]]) -> None:
    """Also where counts come in another order."""
    document = service()
    pool = document["pools"][0]["statistics"]
    pool["tokens"]["missed"] = dict(reversed(pool["tokens"]["missed"].items()))
    first, second = (build([Source("it", {"stats": each})]) for each in (service(), document))
    assert first.sections == second.sections
    assert first.answers == second.answers
    for kind in KINDS:
        assert build([sources[kind]]).document() == build([sources[kind]]).document()


def test_a_sweep_of_many_points_can_be_read(sources: dict[str, Source]) -> None:
    """Bars, lines and rows are as many as can be seen; how many are left out is said, and the document has all."""
    document = json.loads(json.dumps(sources["sweep"].documents["sweep"]))
    point = document["results"][0]
    document["results"] = [
        point
        | {"settings": point["settings"] | {"device": 1_000_000 + number % 40, "host": number // 40, "speed": 1.5}}
        for number in range(1200)
    ]
    report = build([Source("it", {"sweep": document})])
    plots = {plot.key: plot for plot in report.sections[0].plots}
    assert len(plots["sweep-points"].bars) == 40  # type: ignore[union-attr]
    assert "The first 40 of 1,200 points" in plots["sweep-points"].note
    assert len(plots["sweep-lines"].series) == 8  # type: ignore[union-attr]
    assert plots["sweep-lines"].table.rows[0][1] == "1,000,000"
    assert all(len(plot.table.rows) == 1000 for plot in plots.values())
    assert "the first 1,000 of 1,200" in plots["sweep-points"].table.caption
    assert len(report.documents[0]["sweep"]["results"]) == 1200


def test_deep_and_endless_documents_are_refused(sources: dict[str, Source]) -> None:
    """Before they cost anything."""
    document = json.loads(json.dumps(sources["analyze"].documents["analyze"]))
    endless = document | {"page_sizes": document["page_sizes"][:1] * 20_000}
    with pytest.raises(InvalidInput, match="length"):
        build([Source("it", {"analyze": endless})])
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = document | {"each": [deep]}
    with pytest.raises(InvalidInput, match="too deeply"):
        build([Source("it", {"analyze": deep})])
