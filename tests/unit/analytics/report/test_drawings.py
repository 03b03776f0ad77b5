"""Scales, ticks and drawings: everything lies within the frame, and no text on another, whatever is drawn."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.analytics.analysis.report import AnalyzeOptions, analyze
from hicache.analytics.report.build import Source, build
from hicache.analytics.report.content import Axis, LinePlot, Mark, Series, Table, plots_of
from hicache.analytics.report.scales import scale_of, tick_text
from hicache.analytics.report.svg import drawings
from hicache.analytics.report.words import duration, ending, points, significant, squeezed, visible
from hicache.analytics.traces import open_trace

FORMS = st.sampled_from(["count", "percent", "seconds", "bytes", "number"])
VALUES = st.floats(0, 1e15, allow_nan=False, allow_subnormal=False).filter(lambda value: not 0 < value < 1e-9)
LETTER = {"label": 8.3, "axis": 8.3}


@given(FORMS, st.booleans(), st.booleans(), st.lists(VALUES, max_size=12), st.integers(1, 9))
def test_scales(form: str, log: bool, each: bool, values: list[float], ticks: int) -> None:
    """Places are in order and within 0 to 1; ticks are few, in order, on the scale, and each has another name."""
    scale = scale_of(Axis("x", "u", form, log=log, each=each), values, ticks=ticks)
    places = [scale(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= place <= 1 for place in places)
    assert 1 <= len(scale.ticks) <= max(3 * ticks, 13)
    assert list(scale.ticks) == sorted(set(scale.ticks))
    texts = [tick_text(tick, form) for tick in scale.ticks]
    assert all(text and "nan" not in text and "inf" not in text for text in texts)
    if not log and form != "bytes" and scale.most < 1e12:
        assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(("form", "values", "texts"), [
    ("percent", [0, 0.213], ["0 %", "5 %", "10 %", "15 %", "20 %", "25 %"]),
    ("count", [0, 3], ["0", "1", "2", "3"]),
    ("count", [0, 12_000], ["0", "2k", "4k", "6k", "8k", "10k", "12k"]),
    ("seconds", [0, 330], ["0", "1 min", "2 min", "3 min", "4 min", "5 min", "6 min"]),
    ("bytes", [0, 5 * 2**30], ["0", "1 GiB", "2 GiB", "3 GiB", "4 GiB", "5 GiB"]),
])  # fmt: skip
def test_ticks_are_round(form: str, values: list[float], texts: list[str]) -> None:
    """In the unit that is shown."""
    assert [tick_text(tick, form) for tick in scale_of(Axis("x", "u", form), values, ticks=6).ticks] == texts


def test_zero_has_a_place_on_a_logarithmic_scale() -> None:
    """At its begin, and by its name."""
    scale = scale_of(Axis("x", "u", "seconds", log=True), [0, 1, 100, 4000], ticks=7)
    assert [tick_text(tick, "seconds") for tick in scale.ticks] == ["0", "1 s", "10 s", "1 min", "10 min", "1 h"]
    assert scale(0) == 0 < scale(1) < scale(4000) == 1


# ---- drawings


def texts_of(svg: str) -> Iterator[tuple[str, float, float, float]]:
    """Text, left end, right end and base line of each text of a drawing, about."""
    for kind, attributes, text in re.findall(r'<text class="([^"]*)"([^>]*)>([^<]*)</text>', svg):
        where = {name: float(value) for name, value in re.findall(r'(x|y|dy)="([-0-9.]+)"', attributes)}
        plain = unescape(text)
        size = len(plain) * LETTER.get(kind.split()[0], 6.9)
        left = where["x"] - (size if "end" in kind else size / 2 if "mid" in kind else 0)
        yield plain, left, left + size, where["y"] + where.get("dy", 0)


def see_drawings(plot: Any) -> None:
    for svg in re.findall(r"<svg.*?</svg>", drawings(plot)):
        width, height = map(float, re.findall(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', svg)[0])
        texts = list(texts_of(svg))
        for text, left, right, base in texts:
            assert -1 <= left <= right <= width + 8, (plot.key, text, left, right)
            assert 8 <= base <= height, (plot.key, text)
        titles = re.findall(r'<text class="axis[^>]*>([^<]*)</text>', svg)
        assert titles
        assert not any("…" in title for title in titles), (plot.key, titles)
        for (one, *a), (other, *b) in itertools.combinations(texts, 2):
            apart = a[1] <= b[0] + 1 or b[1] <= a[0] + 1 or abs(a[2] - b[2]) >= 10
            assert apart, (plot.key, one, other)
        for name, value in re.findall(r' (c?x|c?y|x1|x2|y1|y2|width|height)="([^"]*)"', svg):
            most = width if name in ("x", "cx", "x1", "x2", "width") else height
            assert -1 <= float(value) <= most + 1, (plot.key, name)
        for value in re.findall(r"[-0-9.]+", "".join(re.findall(r' d="([^"]*)"', svg))):
            assert -1 <= float(value) <= max(width, height) + 1


@pytest.mark.parametrize("number", [1, 2])
def test_nothing_lies_on_anything(number: int, sources: dict[str, Source]) -> None:
    """Of all plots of all kinds, wide and narrow."""
    for source in sources.values():
        for plot in plots_of(build([source] * number)):
            see_drawings(plot)


def test_an_estimate_has_its_band_and_its_bound(trace: Path) -> None:
    """A sampled curve: in words, in the table, and in the drawing."""
    document = analyze(open_trace([trace]), AnalyzeOptions(sample=0.5)).document()
    report = build([Source("it", {"analyze": document})])
    (plot,) = (plot for plot in plots_of(report) if plot.key == "miss-ratio-curve")
    assert drawings(plot).count('<path class="band"') == 2
    see_drawings(plot)
    assert any(row[3].startswith("±") for row in plot.table.rows)
    (section,) = (section for section in report.sections if section.key == "memory")
    assert any("at 4 standard deviations" in line for line in section.text)


def test_long_names_and_many_pools(service: Callable[..., dict[str, Any]]) -> None:
    """Ends of names and figures stay; labels that have no room are left out, their lines are not."""
    document = service("organisation/" + "a-model-with-a-long-name-" * 5 + "w8a8")
    pool = json.loads(json.dumps(document["pools"][0]))
    for number in range(15):
        document["pools"].append(pool | {"model": f"{pool['model']}-{number}", "namespace": f"{number:032x}"})
    report = build([Source("it", {"stats": document})])
    for plot in plots_of(report):
        see_drawings(plot)
    (by_pool,) = (plot for plot in plots_of(report) if plot.key == "pools-sum")
    svg = drawings(by_pool)
    assert "1,650 prompt tokens</text>" in svg


@given(st.lists(st.tuples(st.sampled_from("xy"), st.floats(0, 1), st.text("ab", max_size=90)), max_size=8))
def test_marks_find_their_places(marks: list[tuple[str, float, str]]) -> None:
    """Every mark has its line, whatever else is marked."""
    plot = LinePlot(
        "k", "t", "n", Axis("x", "u", "number"), Axis("y", "u", "percent"),
        (Series("s", "0", ((0.0, 0.0), (1.0, 1.0))),), Table("c", ("a",), (("b",),)),
        tuple(Mark(*mark) for mark in marks),
    )  # fmt: skip
    assert drawings(plot).count('<line class="mark"') == 2 * len(marks)
    see_drawings(plot)


# ---- words


def test_words() -> None:
    """Figures in the unit that fits; names whole, or by the end that tells them apart."""
    assert [duration(value) for value in (0, 0.0000005, 0.0123, 3, 90, 7200, 200_000)] == [
        "0 s", "0.5 µs", "12.3 ms", "3 s", "1.5 min", "2 h", "2.31 d",
    ]  # fmt: skip
    assert [significant(value) for value in (0, 1234.5, 12.34, 0.12345)] == ["0", "1,234", "12.3", "0.123"]
    assert points(-0.00001) == "+0.00"
    assert squeezed("abcdefghij", 5) == "ab…ij"
    assert [squeezed("abc", most) for most in (0, 1, 2, 3)] == ["…", "…", "…c", "abc"]
    assert ending("/long/way/file", 6) == "…/file"
    assert visible("a\u202eb\n", 10) == "a\\u202eb\\u000a"
