"""`hicache analyze` as users run it."""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251  to see that it is not read
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache.cli import main


def analyze(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert main(["analyze", *map(str, arguments), "--json"]) == 0
    result: dict[str, Any] = json.loads(
        capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} in JSON")
    )
    return result


def test_json_has_rates_and_what_they_divide(small_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = analyze(capsys, small_trace)
    assert found["requests"] == 1000
    assert found["ideal_hit_rate_pages"] == pytest.approx(found["ideal_pages_hit"] / found["pages_asked"])
    assert found["ideal_hit_rate_tokens"] == pytest.approx(found["ideal_tokens_hit"] / found["input_tokens"])
    assert found["miss_ratio_curve"]["method"] == "exact"
    for point in found["miss_ratio_curve"]["points"]:
        assert point["hit_rate_pages"] + point["miss_ratio_pages"] == pytest.approx(1.0)
    assert {"ideal_hit_rate_pages", "ideal_hit_rate_tokens", "ideal_hit_rate_requests"} <= set(found["definitions"])


def test_tables_for_people(small_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(small_trace), "--token-bytes", "128KiB", "--sizes", "500,5000", "--top", "3"]) == 0
    text = capsys.readouterr().out
    for title in (
        "s of trace time, 3.03 a second",
        "what an unlimited cache hits",
        "hit rate of one LRU pool of a size",
        "pages used again",
        "keeping each page for some time",
        "working set over time",
        "page size: tokens of whole pages",
        "the tree of all prompts",
        "prefixes that are reused most",
        "sessions;",
    ):
        assert title in text
    assert "GiB" in text
    assert "nan" not in text.lower()


def test_a_sampled_curve_shows_its_error(small_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(small_trace), "--sample", "0.2"]) == 0
    text = capsys.readouterr().out
    assert "estimated from 20 % of the pages" in text
    assert "± 0." in text


@pytest.mark.case("STAT-2")
def test_an_empty_trace_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "empty.jsonl"
    trace.write_text("")
    assert main(["analyze", str(trace)]) == 1
    out, err = capsys.readouterr()
    assert "n/a" in out
    assert "nan" not in out.lower()
    assert "there are no requests in it" in err
    assert main(["analyze", str(trace), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ideal_hit_rate_pages"] == 0


def test_each_file_and_all_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        request = {"t": 1.0, "type": "n", "model": "m", "in": 128, "out": 1, "hash_ids": [1, 2]}
        document = {"block_size": 64, "hash_id_scope": "local", "requests": [request, request | {"t": 2.0}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    found = analyze(capsys, tmp_path, "--each")
    assert found["requests"] == 4
    assert [Path(each["name"]).name for each in found["each"]] == ["a.json", "b.json"]
    assert [each["ideal_hit_rate_pages"] for each in found["each"]] == [0.5, 0.5]
    assert main(["analyze", str(tmp_path), "--each"]) == 0
    assert "one by one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sample", "0"], "--sample 0: is not a number above 0; give a share of the pages such as 0.01"),
        (["--sample", "nan"], "--sample nan: is not a number above 0"),
        (["--sample", "2"], "--sample 2: is above 1"),
        (["--sizes", "10,x"], "--sizes x: is not a whole number"),
        (["--sizes", "0"], "--sizes 0: must be 1 to"),
        (["--page-sizes", "-16"], "--page-sizes -16: must be 1 to"),
        (["--top", "-1"], "--top -1: must be 0 to"),
        (["--spans", "0"], "--spans 0: must be 1 to"),
        (["--token-bytes", "0"], "--token-bytes 0: a token has at least one byte"),
        (["--token-bytes", "much"], "--token-bytes much"),
        (["--requests", "-1"], "--limit -1: cannot be negative"),
        (["--format", "parquet"], "--format parquet: use one of auto"),
    ],
)
def test_bad_options_are_one_line(
    small_trace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["analyze", str(small_trace), "=".join(arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_what_is_piped_in_is_read_once(small_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "--each", str(small_trace), "-"]) == 2
    assert "--each: standard input can be read only once" in capsys.readouterr().err


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("marker",))


HOSTILE = {
    "pickle": pickle.dumps(_Bomb()),
    "nan": b'{"timestamp": NaN, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n',
    "infinite": b'{"timestamp": 1e999, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n',
    "before time": b'{"timestamp": -5, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n',
    "negative": b'{"timestamp": 5, "input_length": -512, "output_length": 1, "hash_ids": []}\n',
    "deep": b'{"timestamp": 0, "input_length": 0, "output_length": 0, "hash_ids": ' + b"[" * 100_000 + b"\n",
    "cut": b'{"timestamp": 5, "input_length": 512, "output_le',
    "huge id": b'{"timestamp": 5, "input_length": 512, "output_length": 1, "hash_ids": [99999999999999999999]}\n',
    "text": b"what is this\n",
}


@pytest.mark.case("SEC-1")
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_traces_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_bytes(HOSTILE[name])
    assert main(["analyze", "trace.jsonl"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hicache: trace.jsonl")
    assert err.count("\n") == 1
    assert not Path("marker").exists()


def test_a_line_without_end_takes_no_memory(tmp_path: Path) -> None:
    """As long as a tenth of the memory that the process is allowed, in a pipe."""
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30));"
        "from hicache.cli import main; sys.exit(main(['analyze', 'long.jsonl']))"
    )
    with (tmp_path / "long.jsonl").open("wb") as file:
        file.write(b'{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [')
        file.truncate(4 * 2**30)  # a sparse file: no disk is used
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert "longer than 64 MiB, so it is no line of a trace" in done.stderr
    assert done.stderr.count("\n") == 1


def test_times_out_of_order_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"timestamp": at, "input_length": 512, "output_length": 1, "hash_ids": [1]} for at in (5000, 1000)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["analyze", str(trace), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "1 requests have a time before that of the request in front of them" in err
    assert json.loads(out)["out_of_order"] == 1
