"""Grids, results that are kept and taken again, and what is recommended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from hicache.analytics.analysis.columns import Columns, read_columns
from hicache.analytics.analysis.knee import knee
from hicache.analytics.simulate.advice import recommend
from hicache.analytics.simulate.settings import Costs, SimulationSettings
from hicache.analytics.simulate.sweep import grid, sweep
from hicache.analytics.trace import TraceRequest, pack_ids
from hicache.errors import ConfigError

FullDisk: TypeAlias = Callable[[int], AbstractContextManager[None]]


@pytest.fixture
def columns() -> Columns:
    """Twenty prompts in turns, each of four pages."""
    return read_columns(
        TraceRequest(float(n), pack_ids([100 * (n % 20) + page for page in range(4)]), 16, 64, 1, "", f"line {n}")
        for n in range(100)
    )


def points(**choices: list[Any]) -> list[SimulationSettings]:
    given: dict[str, list[Any]] = {"device": [8], "host": [0], "storage": [0], "instant": [True]}
    return grid(given | choices, Costs())


def test_all_combinations_that_can_be() -> None:
    found = points(device=[4, 8], host=[0, 16], storage=[0, None], eviction=["lru", "slru"])
    assert len(found) == 2 * 3 * 2  # no storage without a host tier
    assert len(points(device=[4, 4, 8])) == 2
    with pytest.raises(ConfigError, match="--storage needs a host tier"):
        points(storage=[4])
    with pytest.raises(ConfigError, match="more than 100,000"):
        points(device=list(range(1, 1001)), host=list(range(1000)))


def test_processes_make_no_difference(columns: Columns, tmp_path: Path) -> None:
    wanted = points(device=[8, 80], host=[0, 40])
    shown: list[tuple[int, int]] = []
    alone = sweep(columns, wanted)
    together = sweep(columns, wanted, jobs=2, progress=lambda done, of: shown.append((done, of)))
    assert [result.settings for result in together] == wanted
    plain = [result.document() for results in (alone, together) for result in results]
    for document in plain:
        del document["seconds"], document["requests_per_second"]
    assert plain[:4] == plain[4:]
    assert shown == [(done, 4) for done in range(5)]
    assert [result.hit_rate_pages for result in alone] == [0.0, 0.0, 0.8, 0.8]


def test_a_sweep_goes_on_where_it_ended(columns: Columns, tmp_path: Path) -> None:
    kept = tmp_path / "sweep.jsonl"
    wanted = points(device=[8, 40, 80])
    done: list[int] = []
    first = sweep(columns, wanted, kept=kept, stopped=lambda: len(done) > 1, progress=lambda n, _: done.append(n))
    assert len(first) == 1
    kept.write_text(kept.read_text() + '{"key": "cut o')  # a process that died while it wrote
    lines = kept.read_text().splitlines()
    seen: list[int] = []
    whole = sweep(columns, wanted, kept=kept, progress=lambda n, _: seen.append(n))
    assert seen == [1, 2, 3]
    assert len(whole) == 3
    assert kept.read_text().splitlines()[:2] == lines[:2]
    again: list[int] = []
    assert sweep(columns, wanted, kept=kept, progress=lambda n, _: again.append(n)) == whole
    assert again == [3]
    assert all(json.loads(line) for line in kept.read_text().splitlines())


def test_two_sweeps_never_write_one_file(columns: Columns, tmp_path: Path) -> None:
    kept = tmp_path / "sweep.jsonl"
    busy: list[str] = []

    def meanwhile(done: int, _: int) -> None:
        if done == 1:
            with pytest.raises(ConfigError, match="another sweep is writing there; let it end") as raised:
                sweep(columns, points(), kept=kept)
            busy.append(str(raised.value))

    assert len(sweep(columns, points(device=[8, 80]), kept=kept, progress=meanwhile)) == 2
    assert len(busy) == 1
    assert len(kept.read_text().splitlines()) == 3
    assert len(sweep(columns, points(device=[8, 80, 90]), kept=kept)) == 3  # the first one has let go


def test_a_killed_sweep_leaves_no_lock(columns: Columns, tmp_path: Path) -> None:
    kept = tmp_path / "sweep.jsonl"
    holds = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(1, flush=True); input()"
    command = [sys.executable, "-Sc", holds, str(kept)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ConfigError, match="another sweep is writing there"):
            sweep(columns, points(), kept=kept)
        other.kill()
    assert len(sweep(columns, points(), kept=kept)) == 1


def test_a_full_disk_leaves_no_empty_file(columns: Columns, tmp_path: Path, full_disk: FullDisk) -> None:
    kept = tmp_path / "sweep.jsonl"
    with (
        full_disk(10),
        pytest.raises(ConfigError, match=r"sweep\.jsonl: File too large; make room, or name another file"),
    ):
        sweep(columns, points(), kept=kept)
    assert not kept.exists()
    with full_disk(2000), pytest.raises(ConfigError, match="make room"):
        sweep(columns, points(device=[8, 80]), kept=kept)
    assert len(sweep(columns, points(device=[8, 80]), kept=kept)) == 2  # it goes on behind what was cut off
    assert len([json.loads(line) for line in kept.read_text().splitlines()]) == 3
    with pytest.raises(ConfigError, match="name a regular file"):
        sweep(columns, points(), kept=Path("/dev/null"))


def test_results_of_another_trace_are_not_taken(columns: Columns, tmp_path: Path) -> None:
    kept = tmp_path / "sweep.jsonl"
    sweep(columns, points(), kept=kept)
    other = read_columns([TraceRequest(0.0, pack_ids([1]), 16, 16, 1, "", "line 1")])
    with pytest.raises(ConfigError, match="results of another trace"):
        sweep(other, points(), kept=kept)


@pytest.mark.parametrize("text", ["what is this\n", "[]\n", '{"hicache_sweep": 1}\n{"key": 1}\n'])
def test_files_that_are_none_of_a_sweep(columns: Columns, tmp_path: Path, text: str) -> None:
    kept = tmp_path / "sweep.jsonl"
    kept.write_text(text)
    with pytest.raises(ConfigError, match="name another file"):
        sweep(columns, points(), kept=kept)
    assert kept.read_text() == text
    with pytest.raises(ConfigError, match="No such file"):
        sweep(columns, points(), kept=tmp_path / "away" / "sweep.jsonl")


def test_a_kept_result_that_is_damaged(columns: Columns, tmp_path: Path) -> None:
    kept = tmp_path / "sweep.jsonl"
    sweep(columns, points(), kept=kept)
    head, line = kept.read_text().splitlines()
    kept.write_text(head + "\n" + line.replace('"requests"', '"request"') + "\n")
    with pytest.raises(ConfigError, match="is no file of a sweep"):
        sweep(columns, points(), kept=kept)


def test_the_least_memory_that_is_as_good_is_recommended(columns: Columns) -> None:
    results = sweep(columns, points(device=[8, 16, 80, 160], host=[0, 4]))
    told = list(recommend(results))
    assert told[0] == "Take --device 80, --host 0: it hits 0.8000 of the pages asked."
    assert "The knee of --device is at 80 pages: beyond it a doubling adds less than 1 point." in told
    small = list(recommend(sweep(columns, points(device=[8, 80]))))
    assert "The knee of --device is at 80 pages or beyond the sweep: its last doubling still paid." in small
    none = list(recommend(sweep(columns, points(device=[80, 160]))))
    assert any(line.startswith("No doubling of --device") for line in none)
    assert list(recommend([])) == ["No point of the sweep has an answer, so none can be recommended."]


def test_the_best_is_told_where_less_is_as_good(columns: Columns) -> None:
    more = [
        TraceRequest(200.0 + n, pack_ids([9000 + n % 3 * 10]), 16, 16, 1, "", f"line {n}") for n in range(6)
    ]  # a little that only a larger tier hits
    found = read_columns(
        [
            *(
                TraceRequest(float(n), pack_ids([100 * (n % 20) + page for page in range(40)]), 16, 640, 1, "", "line")
                for n in range(100)
            ),
            *more,
        ]
    )
    told = list(recommend(sweep(found, points(device=[800, 100_000]))))
    assert told[0].startswith("Take --device 800")


def test_knees() -> None:
    assert knee([1, 2, 4, 8, 16], [0.1, 0.2, 0.3, 0.305, 0.306]) == 2
    assert knee([1, 2, 4], [0.0, 0.0, 0.0]) is None
    assert knee([3, 100], [0.5, 0.9]) == 1
