"""All commands that read traces take the same options, formats, packings and standard input."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache.cli import main

LINES = 250
READERS = ("analyze", "simulate", "replay", "sweep")


def found(capsys: pytest.CaptureFixture[str], command: str, *words: str | Path) -> dict[str, Any]:
    more = ["--jobs", "1"] if command == "sweep" else []
    assert main([command, *map(str, words), *more, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document["results"][0] if command == "sweep" else document


@pytest.fixture
def packed(tmp_path: Path, small_trace: Path) -> Path:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(small_trace.read_bytes().splitlines(keepends=True)[:LINES])))
    return path


@pytest.mark.parametrize("command", READERS)
def test_parts_of_a_compressed_trace(
    packed: Path, small_trace: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    times = [json.loads(line)["timestamp"] / 1000 for line in small_trace.read_text().splitlines()[:LINES]]
    within = sum(30 <= at < 60 for at in times)
    assert within > 30
    assert found(capsys, command, packed, "--since", "0.5m", "--until", "60")["requests"] == within
    assert found(capsys, command, packed, "--since", "30", "--limit", "20")["requests"] == 20


@pytest.mark.parametrize("command", READERS)
def test_what_is_piped_in(
    packed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(packed.read_bytes())))
    assert found(capsys, command, "-", "--limit", "15")["requests"] == 15


@pytest.mark.case("STAT-2")
@pytest.mark.parametrize("command", [*READERS, "convert", "report"])
def test_traces_of_nothing_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Whatever the reason is: an empty file, a part without requests, or only broken entries; it is no success."""
    empty, broken, some = tmp_path / "empty", tmp_path / "broken", tmp_path / "some"
    empty.write_text("")
    broken.write_text('{"timestamp": -1, "input_length": 1}\n')
    some.write_text('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n')
    more = ["--to", "csv", "--out", str(tmp_path / "out")] if command == "convert" else ["--json"]
    more += ["--jobs", "1"] if command == "sweep" else []
    some.write_text(some.read_text() + some.read_text().replace('"timestamp": 1', '"timestamp": 330001'))
    ends = "the selection is empty: the trace ends at 330 s, and"
    for words, why in (
        ([empty], "check the trace"),
        ([broken, "--skip-bad"], "check the trace"),
        ([some, "--limit", "0"], "the selection is empty: --limit 0 reads no request; give 1 or more"),
        ([some, "--since", "1h"], f"{ends} --since is behind it; give an earlier time"),
        ([some, "--since", "10", "--until", "20"], f"{ends} no request is between --since and --until; give other"),
        ([some, "--until", "0"], "the selection is empty: --until is not behind the trace's begin; give a later time"),
    ):
        assert main([command, *map(str, words), *more]) == 1
        said = capsys.readouterr()
        assert why in said.err
        if command != "convert":
            json.loads(said.out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def test_diff_of_traces_in_two_formats(tmp_path: Path, packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sessions.json"
    assert main(["convert", str(packed), "--to", "kv-cache-tester", "--out", str(out), "--limit", "50"]) == 0
    assert main(["diff", str(packed), str(out), "--limit", "50", "--json"]) == 0
    changes = {change["path"] for change in json.loads(capsys.readouterr().out)["changes"]}
    assert changes <= {"name", "formats", "formats[0]"}
    assert main(["diff", "-", "--span", "0..1", "--span", "1..2"]) == 2
    assert "--span: standard input can be read only once" in capsys.readouterr().err


def test_convert_in_a_pipe(packed: Path) -> None:
    command = [sys.executable, "-m", "hicache", "convert", str(packed), "--to", "dynamo", "--out", "-", "--limit", "9"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert len(done.stdout.splitlines()) == 9
    again = subprocess.run(
        [sys.executable, "-m", "hicache", "analyze", "-", "--json"],
        input=gzip.compress(done.stdout),
        capture_output=True,
        check=True,
    )
    assert json.loads(again.stdout)["requests"] == 9
    assert json.loads(again.stdout)["formats"] == ["dynamo"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--to", "kv-events", "--out", "x"], "--to kv-events: a trace does not tell what a cache stored"),
        (["--to", "csv", "--out", "x", "--to-unit", "0"], "--to-unit 0: must be 1 to"),
        (["--to", "csv", "--out", "x", "--to-unit", "7"], "blocks of 512 tokens cannot be made into blocks of 7"),
        (["--to", "csv", "--out", "/nowhere/x"], "--out /nowhere/x: No such file or directory"),
        (["--to", "csv", "--out", "x", "--since", "2026-11-29"], "has no times of a wall clock"),
        (["--to", "csv"], "--out: is missing"),
    ],
)
def test_conversions_that_cannot_be(
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["convert", str(packed), *words])
    except SystemExit as error:
        code = error.code  # type: ignore[assignment]
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert problem in said.err
    assert said.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl.gz"]
