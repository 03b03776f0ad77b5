"""The table of JSON fields has them all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hicache.analytics.analysis.report import AnalyzeOptions, analyze
from hicache.analytics.analysis.spread import spread
from hicache.analytics.plan.footprint import Layout
from hicache.analytics.plan.presets import preset
from hicache.analytics.plan.report import Wish, plan
from hicache.analytics.simulate.run import Simulation
from hicache.analytics.simulate.settings import Costs, SimulationSettings
from hicache.analytics.traces import open_trace

# Names that are settings and options, which --help describes; and what is told once for all distributions.
_ELSEWHERE = {*SimulationSettings.__dataclass_fields__, *Costs.__dataclass_fields__, *spread([]).document()}


def names(document: Any) -> Iterator[str]:
    if isinstance(document, dict):
        for name, value in document.items():
            yield name
            if name not in ("definitions", "misses_by_reason", "shed_by_reason", "layout", "wish", "layers"):
                yield from names(value)
    elif isinstance(document, list | tuple) and document:
        yield from names(document[0])


def test_every_field_is_described(repository: Path, small_trace: Path) -> None:
    from hicache.analytics.analysis.columns import read_columns

    text = (repository / "hicache" / "analytics" / "README.md").read_text()
    described = set(re.findall(r"`([a-z_0-9]+)`", text))
    columns = read_columns(open_trace([small_trace]))
    documents = (
        analyze(open_trace([small_trace]), AnalyzeOptions()).document(),
        Simulation(columns, SimulationSettings(instances=2)).run().document(),
        plan(preset("jamba-v0.1"), Layout(), Wish(gpu_memory=2**40, tiers={"host": 2**30})).document(),
    )
    for document in documents:
        assert {*names(document)} - _ELSEWHERE - described == set()
