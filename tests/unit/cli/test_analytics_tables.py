"""What tables of traces and sweeps leave out, and what they mark."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.analytics.analysis.columns import Columns, read_columns
from hicache.analytics.analysis.knee import enough
from hicache.analytics.analysis.report import AnalyzeOptions, analyze
from hicache.analytics.analysis.spread import spread
from hicache.analytics.report.build import Source, build
from hicache.analytics.simulate.run import Simulation
from hicache.analytics.simulate.settings import SimulationSettings
from hicache.analytics.traces import open_trace
from hicache.cli.analyze_tables import tables
from hicache.cli.sweep import table
from hicache.core.reasons import RequestCounts
from hicache.records import MissReason
from hicache.runtime.accesslog.settings import AccessLog
from hicache.runtime.accesslog.writer import AccessLogWriter
from hicache.testing.accesslog import ended

TRACE = Path(__file__).parents[3] / "benchmarks" / "traces" / "conversation_1000.jsonl"


@pytest.fixture
def recorded_log(tmp_path: Path) -> Path:
    """Two pages, asked for five times, that are there from the second time on."""
    log = AccessLogWriter(AccessLog(tmp_path), now=lambda: 0.0, wall=lambda: 1.5e9, background=False)
    for number in range(5):
        log.note(ended(1, 2, at=float(number), hits=2 if number else 0))
    log.work(last=True)
    log.close()
    return tmp_path


@pytest.fixture(scope="module")
def columns() -> Columns:
    return read_columns(itertools.islice(iter(open_trace([TRACE])), 40))


def test_no_more_is_pointed_at_than_reaches_the_ideal() -> None:
    analysis = analyze(open_trace([TRACE]), AnalyzeOptions(requests=200))
    assert analysis.knee_pages == 4272
    rates = {point.pages: point.hit_rate_pages for point in analysis.curve.points}
    assert rates[4272] >= analysis.ideal_hit_rate_pages - 0.001
    assert all(rate < analysis.ideal_hit_rate_pages - 0.001 for pages, rate in rates.items() if pages < 4272)
    [curve] = [each for each in tables(analysis, token_bytes=2**17) if each.title.startswith("hit rate of one LRU")]
    assert "of these, 4,272 pages are enough for the ideal" in curve.title
    assert [row[-1] for row in curve.rows][-1] == "knee, enough"
    assert curve.rows[-1][0] == "4,272"
    shown = [row[2:] for row in curve.rows]
    assert all(one != other for one, other in itertools.pairwise(shown)), "rows that repeat are left out"
    assert len(shown) < len(analysis.curve.points) == len(analysis.document()["miss_ratio_curve"]["points"])


def test_enough_is_the_smallest_within_a_tenth_of_a_point() -> None:
    assert enough([0.1, 0.2985, 0.2991, 0.3], 0.3) == 2
    assert enough([0.1, 0.2], 0.3) is None


def test_the_time_is_that_of_the_trace() -> None:
    analysis = analyze(open_trace([TRACE]), AnalyzeOptions(requests=200))
    assert next(iter(tables(analysis, token_bytes=None))).title.endswith(" over 72 s of trace time, 2.78 a second")


@pytest.mark.parametrize("instant", [False, True])
def test_a_sweep_in_no_time_has_no_first_token(columns: Columns, instant: bool) -> None:
    points = [SimulationSettings(device=pages, instant=instant) for pages in (300, 2000)]
    shown, _ = table([Simulation(columns, point).run() for point in points], 2)
    assert ("first token, s" in shown.columns) is not instant
    assert "GPU s saved" in shown.columns


def test_times_of_an_access_log_say_of_how_many(recorded_log: Path) -> None:
    analysis = analyze(open_trace([recorded_log]), AnalyzeOptions())
    assert analysis.recorded is not None
    few = replace(analysis.recorded, load_seconds=spread([0.1, 0.2]))
    [times] = [
        each
        for each in tables(replace(analysis, recorded=few), token_bytes=None)
        if each.title.startswith("how long requests took")
    ]
    assert times.rows[0][0] == "to the end of their load, 2"
    assert times.rows[1][0] == f"to their end, {analysis.recorded.request_seconds.count:,}"


def test_a_log_without_a_gap_advises_nothing(recorded_log: Path) -> None:
    document = analyze(open_trace([recorded_log]), AnalyzeOptions()).document()
    answers = build([Source("it", {"analyze": document})]).answers
    assert [answer.figures for answer in answers[2:]] == [("none",), ("nothing",)]
    assert document["recorded"]["pages_device"] + document["recorded"]["pages_host"] == 8
    lost = document["recorded"] | {"misses_by_reason": {"cold": 2, "evicted": 3}, "pages_host": 5, "pages_missed": 5}
    answers = build([Source("it", {"analyze": document | {"recorded": lost}})]).answers
    assert ("nothing",) not in [answer.figures for answer in answers[2:]]


def test_two_ideals_say_what_is_between_them(tmp_path: Path) -> None:
    """Of an access log: `analyze` and `report` show both, what each is of, and every step from one to the other."""
    log = AccessLogWriter(AccessLog(tmp_path), now=lambda: 0.0, wall=lambda: 1.5e9, background=False)
    for number in range(3):
        counts = RequestCounts(1, host=1) if number else RequestCounts(1, missed={MissReason.COLD: 1})
        log.note(ended(1, 2, at=float(number))._replace(tokens=32, counts=counts))
    log.close()
    analysis = analyze(open_trace([tmp_path]), AnalyzeOptions())
    shown = {table.title: table for table in tables(analysis, token_bytes=None)}
    assert "what an unlimited cache hits, of prompts alone, over all their whole pages" in shown
    ideals = shown["the two ideals, and what is between them; the curve is of the first"]
    assert [row[1:] for row in ideals.rows] == [("6", "4", "0.6667"), ("-3", "-2", ""), ("3", "2", "0.6667")]
    page = build([Source("it", {"analyze": analysis.document()})])
    [table] = [table for section in page.sections for table in section.tables if "two ideals" in table.caption]
    assert [row[:3] for row in table.rows] == [tuple(row[:3]) for row in ideals.rows]
    assert "of prompts alone, over all their whole pages: 66.67 %" in page.answers[1].text[1]
    old = {name: value for name, value in analysis.document()["recorded"].items() if not name.startswith("pages_not_")}
    page = build([Source("it", {"analyze": analysis.document() | {"recorded": old}})])
    assert not [table for section in page.sections for table in section.tables if "two ideals" in table.caption]
