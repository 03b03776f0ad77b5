"""Asked = hits by tier + misses by reason, in every report, whatever was simulated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.analytics.analysis.columns import Columns, read_columns
from hicache.analytics.report.build import Source, build
from hicache.analytics.report.content import BarPlot, Report, Table, plots_of, tables_of
from hicache.analytics.simulate.run import Simulation
from hicache.analytics.simulate.settings import SimulationSettings
from hicache.analytics.trace import TraceRequest, pack_ids

SUMS = ("pages-sum", "tokens-sum", "gap", "ideal-sum", "recorded-sum", "recorded-gap", "pools-sum")


def columns_of(prompts: list[tuple[int, list[int]]], tail: int) -> Columns:
    return read_columns(
        TraceRequest(
            time=at / 4,
            ids=pack_ids(ids),
            unit=16,
            input_tokens=16 * len(ids) - tail,
            output_tokens=1,
            scope="",
            place=f"line {number}",
        )
        for number, (at, ids) in enumerate(prompts)
    )


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def see_sums(report: Report) -> int:
    """Every table with a sum adds up, column by column; returns how many there were."""
    totals = [table for table in tables_of(report) if table.total]
    for table in totals:
        for column in range(1, len(table.columns), 2):
            *parts, total = (number(row[column]) for row in table.rows)
            assert sum(parts) == total, table
    return len(totals)


PROMPTS = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(0, 6), min_size=1, max_size=6)), min_size=1, max_size=25
)


@pytest.mark.case("STAT-5")
@settings(max_examples=80)
@given(
    prompts=PROMPTS,
    tail=st.integers(0, 15),
    device=st.integers(1, 12),
    host=st.integers(0, 16),
    instances=st.integers(1, 3),
    instant=st.booleans(),
    decide=st.booleans(),
)
def test_every_report_of_a_simulation_adds_up(
    prompts: list[tuple[int, list[int]]], tail: int, instant: bool, decide: bool, **sizes: Any
) -> None:
    """Counts are those of the simulation, and bars are as long as their parts."""
    columns = columns_of(sorted(prompts, key=lambda prompt: prompt[0]), tail)
    result = Simulation(columns, SimulationSettings(instant=instant, decide=decide, **sizes)).run()
    report = build([Source("it", {"simulate": result.document()})])
    assert see_sums(report) == 3
    plots = {plot.key: plot for plot in plots_of(report)}
    asked = plots["pages-sum"]
    assert number(asked.table.rows[-1][1]) == result.pages_asked
    hits = {row[0]: number(row[1]) for row in asked.table.rows}
    for tier in ("device", "host", "storage"):
        assert hits[tier] == getattr(result, f"pages_{tier}")
    for reason, pages in result.misses_by_reason.items():
        assert hits.get(f"missed: {reason}", 0) == pages
    assert number(plots["tokens-sum"].table.rows[-1][1]) == result.tokens_asked
    assert number(plots["gap"].table.rows[-1][1]) == result.pages_asked - result.misses_by_reason["cold"]
    for plot in plots.values():
        if isinstance(plot, BarPlot) and plot.key in ("pages-sum", "tokens-sum"):
            assert sum(part.value for bar in plot.bars for part in bar.parts) == pytest.approx(1)


def test_every_kind_adds_up(sources: dict[str, Source]) -> None:
    """Also side by side."""
    for kind, least in (("analyze", 1), ("simulate", 3), ("stats", 4)):
        assert see_sums(build([sources[kind]])) == least
        assert see_sums(build([sources[kind], sources[kind]])) == least
    (table,) = (plot.table for plot in plots_of(build([sources["sweep"]])) if plot.key == "sweep-points")
    see_points(table)


def see_points(table: Table) -> None:
    end = table.columns.index("asked, the sum")
    assert len(table.rows) == 12
    for row in table.rows:
        *parts, total = map(number, row[1 : end + 1])
        assert sum(parts) == total
