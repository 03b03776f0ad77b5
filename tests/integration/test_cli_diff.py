"""`hicache diff` of reports, of traces, and of two parts of a trace's time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hicache.cli import main


def trace(path: Path, *prompts: list[int], step: float = 1000.0) -> str:
    """A trace in Mooncake's form: a prompt a second, 512 tokens an id."""
    lines = [
        {"timestamp": number * step, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for number, ids in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def diffed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["diff", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def changes(found: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {change["path"]: (change["a"], change["b"]) for change in found["changes"]}


def test_two_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both are analysed alike, at the same sizes; what differs is named with both values."""
    first = trace(tmp_path / "a.jsonl", [1, 2], [1, 2], [1, 3])
    second = trace(tmp_path / "b.jsonl", [1, 2], [5, 6], [7, 8, 9])
    found = diffed(capsys, first, second)
    assert (found["a"], found["b"]) == (first, second)
    told = changes(found)
    assert told["ideal_hit_rate_pages"] == (0.5, 0.0)
    assert told["pages_asked"] == (6, 7)
    assert not [path for path in told if path.startswith("miss_ratio_curve.points") and None in told[path]]
    assert main(["diff", first, second, "--top", "8"]) == 0
    shown = capsys.readouterr().out
    assert "more with --top" in shown
    assert "ideal_pages_hit" in shown
    same = diffed(capsys, first, first)
    assert (same["changes"], same["splits"]) == ([], [])
    capsys.readouterr()
    whole = tmp_path / "whole.jsonl"
    whole.write_text(json.dumps({"tokens": [*range(64)], "output_length": 1}) + "\n" + json.dumps({"tokens": [5]}))
    assert main(["diff", first, str(whole)]) == 0
    assert "pages of A and B have 512 and 64 tokens, so their counts of pages are of" in capsys.readouterr().err
    assert any(
        "their hit rates of pages do not compare" in line for line in diffed(capsys, first, str(whole))["warnings"]
    )
    assert same["warnings"] == []


def test_two_spans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts of one trace's time, and how much of the second the first has asked already."""
    file = trace(tmp_path / "t.jsonl", [1, 2], [1, 3], [1, 2, 4], [9])
    found = diffed(capsys, file, "--span", "..2", "--span", "2..")
    assert (found["a"], found["b"]) == (f"{file} 0..2", f"{file} 2..")
    assert found["overlap"] == {"pages_a": 3, "pages_b": 4, "pages_both": 2, "asked_b_known_share": 0.5}
    assert changes(found)["ideal_pages_hit"] == (1, 0)
    assert main(["diff", file, "--span", "0..2", "--span", "2..4"]) == 0
    assert "50.0 % of the pages that B asks are known from A" in capsys.readouterr().out
    assert main(["diff", file, "--span", "0..1", "--span", "100..200", "--json"]) == 1
    said = capsys.readouterr()
    assert f"{file} 100..200: there are no requests in it; check the trace, and --span" in said.err
    empty = json.loads(said.out)
    assert empty["overlap"]["asked_b_known_share"] == 0.0


def test_two_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a change of the hit rate comes from, in points that add up."""
    file = trace(tmp_path / "t.jsonl", *([[1, 2, 3], [4, 5, 6]] * 4))
    reports = []
    for pages in (3, 6):
        command = ["replay", file, "--page-size", "trace", "--page-bytes", "512", "--device", str(pages), "--json"]
        assert main(command) == 0
        reports.append(tmp_path / f"{pages}.json")
        reports[-1].write_text(capsys.readouterr().out)
    found = diffed(capsys, *map(str, reports))
    (split,) = found["splits"]
    assert (split["hit_rate_a"], split["points"]) == (0.0, 75.0)
    assert {part["name"]: part["points"] for part in split["parts"]}["device"] == 75.0
    assert main(["diff", *map(str, reports)]) == 0
    shown = capsys.readouterr().out
    assert "pages: hit rate 0.0 % to 75.0 %, up 75.0 points" in shown
    assert "missed evicted" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{folder}/t"], "compare with what"),
        (["{folder}/t", "{folder}/r"], "one of"),
        (["{folder}/t", "--span", "0..1"], "give it twice"),
        (["{folder}/t", "{folder}/t", "--span", "0..1", "--span", "1..2"], "give it twice"),
        (["{folder}/t", "--span", "1..0", "--span", "1..2"], "give seconds"),
        (["{folder}/t", "--span", "1.2.3..", "--span", "1..2"], "give seconds"),
        (["{folder}/t", "--span", "nan..", "--span", "1..2"], "give seconds"),
        (["{folder}/none", "{folder}/t"], "cannot be read"),
        (["{folder}/nan", "{folder}/r"], "holds NaN"),
        (["{folder}/deep", "{folder}/r"], "nested too deeply"),
        (["{folder}/pickle", "{folder}/t"], "no trace that is known"),
        (["{folder}/t", "{folder}/t", "--top", "-1"], "cannot be negative"),
        (["{folder}/t", "{folder}/t", "--format", "parquet"], "use one of"),
    ],
    ids=str,
)
def test_what_it_refuses(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each: what is wrong, and what to do."""
    trace(tmp_path / "t", [1, 2], [1])
    (tmp_path / "r").write_text('{"requests": 1}')
    (tmp_path / "nan").write_text('{"rate": NaN}')
    (tmp_path / "deep").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    (tmp_path / "pickle").write_bytes(b"\x80\x04\x95\x00\x00")
    assert main(["diff", *(each.replace("{folder}", str(tmp_path)) for each in arguments)]) == 2
    message = capsys.readouterr().err
    assert (message.count("\n"), words in message) == (1, True), message
