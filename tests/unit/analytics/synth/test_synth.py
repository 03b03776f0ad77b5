"""Made traces: what is known of them by how they were made is what analyze and simulate find."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.analytics.analysis.columns import read_columns
from hicache.analytics.analysis.report import AnalyzeOptions, analyze
from hicache.analytics.simulate.run import Simulation
from hicache.analytics.simulate.settings import Costs, SimulationSettings
from hicache.analytics.synth import workload as workloads
from hicache.analytics.synth.misses import Misses
from hicache.analytics.synth.run import FORMS, Making, make
from hicache.analytics.synth.segments import Known, Text
from hicache.analytics.synth.workload import KINDS, Workload
from hicache.analytics.traces import Opening
from hicache.cli import main, synth
from hicache.errors import ConfigError
from hicache.records import MissReason

FullDisk: TypeAlias = Callable[[int], AbstractContextManager[None]]


def agrees(known: dict[str, Any], found: dict[str, Any]) -> None:
    for name, value in known.items():
        if name != "unit":
            assert found[name] == pytest.approx(value, abs=1e-12), name


@settings(max_examples=20)
@given(
    unit=st.sampled_from([1, 7, 16, 64, 512]),
    kinds=st.lists(st.sampled_from([0.0, 1.0]), min_size=4, max_size=4).filter(any),
    zipf=st.sampled_from([0.0, 1.0, 3.0]),
    seed=st.integers(0, 1000),
    tokens=st.integers(1, 60),
    branch=st.sampled_from([0.0, 0.3]),
    form=st.sampled_from(FORMS),
    diurnal=st.sampled_from([0.0, 1.0]),
)
def test_analyze_finds_what_is_known(
    tmp_path_factory: pytest.TempPathFactory,
    unit: int,
    kinds: list[float],
    tokens: int,
    form: str,
    **more: Any,
) -> None:
    lengths = dict.fromkeys((name for name in Workload.__dataclass_fields__ if name.endswith("_tokens")), tokens)
    small = {"systems": 3, "tasks": 2, "examples": 3, "documents": 4, "chunks": 2, "requests": 60, "rate": 0.5}
    making = Making(Workload(**lengths, **small, **dict(zip(KINDS, kinds, strict=True)), **more), unit)
    path = tmp_path_factory.mktemp("synth") / "trace"
    assert make(making, form, path, unit=unit)
    known = making.known.document()
    trace = Opening(form=form, unit=unit).open([path])
    found = analyze(trace, AnalyzeOptions()).document()
    assert known["requests"] == 60
    agrees(known, found)
    assert found["out_of_order"] == 0


def test_a_prompt_by_hand() -> None:
    """Pages of 4 tokens: 6 of a system prompt, then 3 and 6 of two users; then the first prompt again."""
    text, known = Text(4), Known(4)
    system = text.begin(6)
    first, second = system.then(3), system.then(6)
    prompts = [node.ask() for node in (first, second, first)]
    assert [(prompt.tokens, prompt.hits, prompt.hit_tokens) for prompt in prompts] == [(9, 0, 0), (12, 1, 4), (9, 3, 9)]
    assert [len(prompt.ids) for prompt in prompts] == [3, 3, 3]
    assert prompts[0].ids == prompts[2].ids
    assert prompts[0].ids[0] == prompts[1].ids[0] != prompts[1].ids[1]
    for prompt in prompts:
        known.add(prompt, 1)
    document = known.document()
    assert (document["ideal_pages_hit"], document["pages_asked"], document["pages_different"]) == (4, 9, 5)
    assert document["ideal_hit_rate_requests"] == pytest.approx((0 + 1 / 3 + 1) / 3)
    assert document["ideal_hit_rate_tokens"] == pytest.approx(13 / 30)


def test_the_same_seed_is_the_same_trace(tmp_path: Path) -> None:
    contents = []
    for seed in (1, 1, 2):
        make(Making(Workload(requests=50, seed=seed), 64), "kv-cache-tester", tmp_path / "t", unit=64)
        contents.append((tmp_path / "t").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_sessions_are_what_was_asked_for() -> None:
    making = Making(Workload(requests=3000, chat=1, few_shot=1, agents=0, rag=0, turns=3, rate=0.5), 64)
    requests = list(making)
    kinds = Counter(request.details.kind for request in requests if request.details is not None)
    assert set(kinds) == {"chat", "few-shot"}
    assert 2.5 < kinds["chat"] / kinds["few-shot"] < 3.5
    assert all(a.time <= b.time for a, b in itertools.pairwise(requests))


def test_agents_branch() -> None:
    lengths = {"tools_tokens": 30, "user_tokens": 2, "call_tokens": 2, "result_tokens": 3}
    straight, bushy = (
        read_columns(Making(Workload(requests=200, chat=0, few_shot=0, rag=0, branch=branch, **lengths), 1))
        for branch in (0.0, 0.5)
    )
    forks = [np.count_nonzero(np.bincount(columns.parent + 1) > 1) for columns in (straight, bushy)]
    assert forks[0] == 1  # behind the tools
    assert forks[1] > 20


def test_zipf_makes_some_popular() -> None:
    even, popular = (
        Making(Workload(requests=300, chat=0, few_shot=1, agents=0, rag=0, tasks=2000, examples=0, zipf=zipf), 16)
        for zipf in (0.0, 2.0)
    )
    rates = [(list(making), making.known.document()["requests_with_hits_share"])[1] for making in (even, popular)]
    assert rates[0] + 0.2 < rates[1]


def test_days_go_up_and_down() -> None:
    making = Making(Workload(requests=4000, chat=0, agents=0, rag=0, diurnal=1.0, day=1000.0, rate=2.0), 512)
    phases = [request.time % 1000 for request in making if request.time < 2000]
    night = sum(phase < 250 or phase >= 750 for phase in phases)
    day = len(phases) - night
    assert 2.5 < day / night < 8  # (pi + 2) / (pi - 2) = 4.5


def test_sessions_end_before_they_are_longer_than_any_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.analytics.synth.run.LONGEST", 3000)
    making = Making(Workload(requests=300, few_shot=0, agents=0, rag=0, turns=100, rate=0.01), 64)
    assert max(request.input_tokens for request in making) <= 3000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"requests": -1}, "--requests -1: must be 0 to"),
        ({"rate": 0}, "--rate 0"),
        ({"rate": float("nan")}, "--rate nan"),
        ({"zipf": float("inf")}, "--zipf inf"),
        ({"user_tokens": 0}, "--user-tokens 0: must be 1 to"),
        ({"few_shot": -1}, "--few-shot -1"),
        (dict.fromkeys(KINDS, 0), "one of them must be above 0"),
        ({"branches": 1}, "--branches 1: must be 2 to"),
    ],
)
def test_workloads_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Workload(**given)


# ---- known misses


@pytest.mark.parametrize(("rounds", "pages", "unit"), [(1, 1, 1), (7, 8, 512), (3, 5, 7), (2, 256, 16), (0, 4, 16)])
def test_every_reason_of_a_miss_is_counted_exactly(tmp_path: Path, rounds: int, pages: int, unit: int) -> None:
    making = Misses(rounds, pages, unit)
    path = tmp_path / "misses"
    assert make(making, "mooncake", path, unit=unit)
    columns = read_columns(Opening(form="mooncake", unit=unit).open([path]))
    seen: Counter[str] = Counter()
    for part in making.simulations():
        given = dict(part["settings"])
        costs = Costs(token_bytes=given.pop("token_bytes"))
        given = {name: None if value == "unlimited" else value for name, value in given.items()}
        simulation = Simulation(columns, SimulationSettings(**given, costs=costs))
        result = simulation.run()
        simulation.check()
        assert result.problems == ()
        expected = dict(part["expected"])
        missed = expected.pop("misses_by_reason")
        # all reasons, those that a simulation cannot have too, which are nobody's
        reasons = {*(reason.value for reason in MissReason), "other_instance"}
        assert result.misses_by_reason == {reason: missed.get(reason, 0) for reason in reasons}
        for name, value in expected.items():
            assert getattr(result, name) == pytest.approx(value), name
        seen.update(missed)
    if rounds:
        assert {name for name, count in seen.items() if count} == {
            *("cold", "evicted", "late", "over_budget", "other_instance"),
        }
    agrees(
        making.known.document(), analyze(Opening(form="mooncake", unit=unit).open([path]), AnalyzeOptions()).document()
    )


# ---- the command


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main([*map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_stores_what_it_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.jsonl"
    code, text, err = run(capsys, "synth", "--out", out, "--requests", "40", "--preset", "chat", "--unit", "64")
    assert (code, err) == (0, "hicache: --unit 64: who reads it has to be told the same\n")
    assert "what an unlimited cache hits, by how the trace was made" in text
    known = json.loads(out.with_name("t.jsonl.known.json").read_text())
    assert (known["workload"]["chat"], known["workload"]["rag"], known["unit"]) == (1.0, 0.0, 64)
    assert run(capsys, "analyze", out, "--unit", "64", "--json")[0] == 0
    code, text, err = run(capsys, "synth", "--out", out, "--requests", "40", "--json", "--to", "dynamo")
    assert json.loads(text)["known"]["requests"] == 40
    code, text, _ = run(capsys, "analyze", out, "--json")
    agrees(json.loads(out.with_name("t.jsonl.known.json").read_text())["known"], json.loads(text))


def test_known_misses_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, known = tmp_path / "m.jsonl", tmp_path / "k.json"
    code, text, _ = run(capsys, "synth", "--out", out, "--known", known, "--preset", "misses", "--rounds", "2")
    assert code == 0
    assert "missed: other_instance" in text
    for part in json.loads(known.read_text())["simulations"]:
        flags = [word for name, value in part["settings"].items() for word in (f"--{name.replace('_', '-')}", value)]
        code, text, _ = run(capsys, "simulate", out, *flags, "--json")
        found = json.loads(text)
        missed = {name: pages for name, pages in found["misses_by_reason"].items() if pages}
        assert (code, missed) == (0, part["expected"]["misses_by_reason"])


def test_what_is_piped_out(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["synth", "--out", "-", "--requests", "3", "--known", str(tmp_path / "k")]) == 0
    said = capfdbinary.readouterr()
    assert len(said.out.splitlines()) == 3
    assert b"3 requests; an unlimited cache hits" in said.err
    assert (tmp_path / "k").exists()


def test_the_trace_and_what_is_known_of_it_are_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, link, hard = (tmp_path / name for name in ("t.jsonl", "link", "hard"))
    link.symlink_to("t.jsonl")
    for known in (out, link, tmp_path / "." / "away" / ".." / "t.jsonl"):
        code, _, err = run(capsys, "synth", "--requests", "5", "--out", out, "--known", known)
        assert (code, err) == (2, f"hicache: --known {known}: the trace itself goes there; name another file\n")
        assert not out.exists()
    assert run(capsys, "synth", "--requests", "5", "--out", out)[0] == 0
    hard.hardlink_to(out)
    before = out.read_bytes()
    assert run(capsys, "synth", "--requests", "5", "--out", out, "--known", hard)[0] == 2
    assert run(capsys, "synth", "--requests", "5", "--out", "-", "--known", "-")[0] == 2
    assert out.read_bytes() == before
    assert run(capsys, "synth", "--requests", "5", "--out", "/dev/null", "--known", "/dev/null")[0] == 0


@pytest.mark.parametrize("name", ["s.jsonl", "s.jsonl.gz"])
def test_a_full_disk_leaves_nothing_and_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    full_disk: FullDisk,
    name: str,
) -> None:
    out, known = tmp_path / name, tmp_path / "k.json"
    with full_disk(100):
        code, text, err = run(capsys, "synth", "--requests", "5", "--out", out)
    assert (code, text) == (2, "")
    assert err == f"hicache: --out {out}: File too large; make room there, or name another file\n"
    assert list(tmp_path.iterdir()) == []
    with full_disk(100):
        code, _, err = run(capsys, "synth", "--requests", "0", "--out", out, "--known", known)
    assert (code, err) == (2, f"hicache: --known {known}: File too large; make room there, or name another file\n")
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--to", "csv"], "--to csv: use one of mooncake"),
        (["--preset", "all"], "--preset all: use one of mixed"),
        (["--requests", "many"], "--requests many: is not a whole number"),
        (["--rate", "fast"], "--rate fast: is not a number"),
        (["--preset", "misses", "--zipf", "1"], "--zipf: --preset misses has --rounds"),
        (["--preset", "misses", "--pages", "100000", "--unit", "512"], "--pages 100000: prompts of 51200000 tokens"),
        (["--rounds", "2"], "--rounds: only --preset misses has it"),
        (["--unit", "0"], "--unit 0: must be 1 to"),
        (["--out", "-", "--json"], "--json: the trace itself goes to standard output"),
    ],
)
def test_options_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    code, text, err = run(capsys, "synth", "--out", tmp_path / "t", *words)
    assert (code, text) == (2, "")
    assert problem in err
    assert not list(tmp_path.iterdir())


def test_names_are_those_of_the_library() -> None:
    assert synth.FORMS == FORMS
    assert {name for name, *_ in synth._PARAMETERS} == set(Workload.__dataclass_fields__)
    for name, _, text in synth._PARAMETERS:
        told = text.rpartition("(default: ")[2].rstrip(")")
        assert float(told) == Workload.__dataclass_fields__[name].default
    assert {preset.replace("-", "_") for preset in synth.PRESETS} - {"mixed", "misses"} == set(workloads.KINDS)
    floats = {name for name, entry in Workload.__dataclass_fields__.items() if entry.type == "float"}
    assert floats == synth._FLOATS
