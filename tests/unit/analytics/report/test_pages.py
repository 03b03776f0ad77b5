"""The page itself: well-formed, alone, readable by everybody, and safe against what sources call themselves."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache.analytics.analysis.report import AnalyzeOptions, analyze
from hicache.analytics.report.build import Source, build
from hicache.analytics.report.content import LinePlot, plots_of, tables_of
from hicache.analytics.report.html import to_html
from hicache.analytics.report.markdown import to_markdown
from hicache.analytics.traces import open_trace

KINDS = ("analyze", "simulate", "sweep", "stats")
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&`|*_[x](http://evil.example)\u202e\x00\ud800\n# <b>"


def both(sources: dict[str, Source], kind: str, number: int) -> Any:
    return build([sources[kind]] * number, token_bytes=1024)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_stands_alone_and_is_told_to_everybody(
    kind: str, number: int, sources: dict[str, Source], read_page: Callable[[str], Any]
) -> None:
    """Nothing is asked of a network; each plot has axes with units, its denominator, a drawing and a table."""
    report = both(sources, kind, number)
    text = to_html(report)
    page = read_page(text)
    for _, values in page.elements:
        assert not {"src", "srcset", "action", "style", "data", "onload"} & values.keys()
        assert values.get("href", "#").startswith("#")
    assert "http" not in re.sub(r"http-equiv", "", text)
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r"\b(NaN|Infinity|inf|nan|None)\b", page.text)
    plots = list(plots_of(report))
    assert plots
    assert len(page.all("figure")) == len(page.told) == len(plots)
    assert len(page.all("svg")) == 2 * len(plots)
    assert all(values["role"] == "img" and values["aria-label"] for values in page.all("svg"))
    assert len(page.all("table")) == len(page.all("caption")) == len(list(tables_of(report))) >= len(plots)
    assert {values["scope"] for values in page.all("th")} == {"col", "row"}
    targets = {values["id"] for _, values in page.elements if "id" in values}
    assert {values["href"][1:] for values in page.all("a")} <= targets
    for plot in plots:
        for axis in (plot.x, *([plot.y] if isinstance(plot, LinePlot) else [])):
            assert axis.label
            assert axis.unit
            assert axis.form != "percent" or axis.unit.startswith("% of ")
        assert plot.note
        assert plot.table.rows
        assert plot.table.caption
        assert all(len(row) == len(plot.table.columns) for row in plot.table.rows)


def test_a_browser_is_told_to_load_nothing(sources: dict[str, Source], read_page: Callable[[str], Any]) -> None:
    """The policy allows this style and this script by their digests, and nothing else."""
    text = to_html(build([sources["stats"]]))
    policy = next(values["content"] for values in read_page(text).all("meta") if "http-equiv" in values)
    assert policy.startswith("default-src 'none';")
    for tag in ("style", "script"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize("number", [1, 2])
def test_names_of_others_do_nothing(
    number: int, sources: dict[str, Source], service: Callable[..., dict[str, Any]], read_page: Callable[[str], Any]
) -> None:
    """Not in HTML, not in its data, not in Markdown: names of files, models, tenants, reasons and warnings."""
    document = service(HOSTILE)
    document["service"]["degraded"] = [HOSTILE]
    document["service"]["verbs"][0]["verb"] = HOSTILE
    document["pools"][0]["tenant"] = HOSTILE
    document["pools"][0]["prefixes"][0]["page_hash"] = HOSTILE
    document["pools"][0]["statistics"]["shed_by_reason"] = {HOSTILE: 1}
    missed = document["pools"][0]["statistics"]["tokens"]["missed"]
    missed[HOSTILE] = missed.pop("evicted")
    simulation = json.loads(json.dumps(sources["simulate"].documents["simulate"]))
    simulation["misses_by_reason"][HOSTILE] = simulation["misses_by_reason"].pop("evicted")
    simulation["shed_by_reason"] = {HOSTILE: 3}
    simulation["traffic"][0]["tier"] = simulation["settings"]["eviction"] = HOSTILE
    for source in (
        Source(HOSTILE, {"stats": document}, (HOSTILE,)),
        Source(HOSTILE, {"simulate": simulation}, (HOSTILE,)),
    ):
        report = build([source] * number)
        text = to_html(report)
        page = read_page(text)
        assert not page.all("img")
        assert not page.all("b")[len("AB") if number == 2 else 0 :]
        assert "\\u202e" in page.text
        markdown = to_markdown(report)
        for written in (text, markdown):
            written.encode()  # no half of a character
            assert not {"\u202e", "\x00"} & set(written)
        assert "<img" not in markdown.replace("\\<img", "")
        assert "\n# \\<b" not in markdown
        assert all(line.count("|") > 1 for line in markdown.splitlines() if line.startswith("| "))
        json.dumps(report.document(), allow_nan=False)


@pytest.mark.case("STAT-2")
def test_nothing_was_asked(
    tmp_path: Path, write_trace: Callable[..., Path], sources: dict[str, Source], read_page: Callable[[str], Any]
) -> None:
    """An empty trace, a service without requests: a page that says so, without a number that is none."""
    analysis = analyze(open_trace([write_trace(tmp_path / "empty.jsonl", [])]), AnalyzeOptions()).document()
    idle = {"service": {"uptime_seconds": 0.0, "degraded": []}, "pools": []}
    for document in ({"analyze": analysis}, {"stats": idle}):
        for number in (1, 2):
            report = build([Source("nothing", document)] * number)
            assert {figure for answer in report.answers for figure in answer.figures} == {"n/a"}
            page = read_page(to_html(report))
            assert "Nothing was asked" in page.text
            assert not re.search(r"\b(NaN|inf|nan)\b", page.text + to_markdown(report))


def test_two_sources_stand_side_by_side(sources: dict[str, Source], read_page: Callable[[str], Any]) -> None:
    """On the same axes, each named by its letter, with what differs first."""
    other = json.loads(json.dumps(sources["simulate"].documents["simulate"]))
    other["pages_host"], other["pages_missed"] = 0, other["pages_missed"] + other["pages_host"]
    other["misses_by_reason"]["late"] += sources["simulate"].documents["simulate"]["pages_host"]
    report = build([sources["simulate"], replace(sources["simulate"], name="two.json", documents={"simulate": other})])
    assert report.sections[0].key == "difference"
    assert "points less than A" in report.sections[0].text[0]
    asked = next(plot for plot in plots_of(report) if plot.key == "pages-sum")
    assert [bar.label[0] for bar in asked.bars] == ["A", "B"]  # type: ignore[union-attr]
    assert all(len(answer.figures) == 2 for answer in report.answers)
    assert "two.json" in read_page(to_html(report)).text


def test_markdown_says_what_the_page_says(sources: dict[str, Source]) -> None:
    """All questions, sentences and tables."""
    for kind in KINDS:
        report = build([sources[kind]])
        text = to_markdown(report)
        plain = re.sub(r"\\(.)", r"\1", text)
        assert plain.count("\n|---") == len(list(tables_of(report)))
        for answer in report.answers:
            assert answer.question in plain
            assert all(line in plain for line in answer.text)
        for table in tables_of(report):
            assert all(cell in plain for row in table.rows for cell in row)


def test_numbers_of_one_trace_are_told_in_words(
    tmp_path: Path, write_trace: Callable[..., Path], sources: dict[str, Source]
) -> None:
    """Where nothing comes twice nothing helps; where a sweep was cut nothing is recommended; where nothing is missed
    there is no gap."""
    once = write_trace(tmp_path / "once.jsonl", [[number, 100 + number] for number in range(5)])
    analysis = analyze(open_trace([once]), AnalyzeOptions()).document()
    answers = build([Source("it", {"analyze": analysis})]).answers
    assert answers[3].figures == ("nothing",)
    cut = dict(sources["sweep"].documents["sweep"]) | {"results": [], "recommendation": ["Stopped."]}
    report = build([Source("it", {"sweep": cut})] * 2)
    assert report.answers[0].figures == ("n/a", "n/a")
    assert "No point was simulated." in report.sections[-1].text
    whole = json.loads(json.dumps(sources["simulate"].documents["simulate"]))
    whole["pages_host"] += whole["misses_by_reason"].pop("evicted")
    whole["pages_missed"] = sum(whole["misses_by_reason"].values())
    assert build([Source("it", {"simulate": whole})]).answers[2].figures == ("none",)


def test_what_would_help_is_what_lost_the_pages(sources: dict[str, Source]) -> None:
    """Not more memory where storage is not full; documents that do not tell of it are answered as before."""
    plain = json.loads(json.dumps(sources["simulate"].documents["simulate"]))
    plain["settings"] |= {"host": 300, "storage": None, "admission": None}
    missed = plain["misses_by_reason"]
    plain["misses_by_reason"] = dict.fromkeys(missed, 0) | {"evicted": sum(missed.values())}

    def helps(**lost: int) -> str:
        return build([Source("it", {"simulate": plain | {"pages_lost": lost}})]).answers[3].figures[0]

    assert helps(device=1, host=9, storage=0) == "a longer queue to storage"
    assert helps(device=1, host=0, storage=9) == "a larger storage"
    assert helps(device=9, host=0, storage=0) == "more device memory"
    assert helps() == helps(elsewhere=5) == "more memory"
