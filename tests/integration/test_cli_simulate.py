"""`hicache simulate` and `hicache sweep` as users run them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache.cli import main
from hicache.testing.waits import eventually


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == code
    result: dict[str, Any] = json.loads(
        capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} in JSON")
    )
    return result


def test_json_has_all_that_was_asked(small_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--device", "40GiB", "--host", "200GiB", "--storage", "unlimited", "--requests", "200"]
    found = as_json(capsys, "simulate", small_trace, *sizes, "--gpu-hour-price", "2.5")
    assert found["page_bytes"] == 512 * 131_072
    assert (found["settings"]["device"], found["settings"]["host"]) == (640, 3200)
    tiers = sum(found[f"pages_{tier}"] for tier in ("device", "host", "storage"))
    assert found["pages_asked"] == tiers + sum(found["misses_by_reason"].values())
    assert found["gpu_seconds_saved"] == pytest.approx(found["tokens_hit"] / found["settings"]["costs"]["prefill_rate"])
    assert found["money_saved"] == pytest.approx(found["gpu_seconds_saved"] / 3600 * 2.5)
    assert found["advice"]
    assert "write_amplification" in found["definitions"]


def test_tables_for_people(small_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--device", "500", "--host", "1000", "--storage", "5000", "--requests", "150"]
    assert main(["simulate", str(small_trace), *sizes, "--instances", "2", "--gpu-hour-price", "2"]) == 0
    text = capsys.readouterr().out
    for words in (
        "150 requests simulated",
        "hit rates",
        "why pages were missed",
        "bytes by tier; amplification",
        "of those never read",
        "time to first token, p99",
        "money saved",
        "instance",
        "were missed as cold",
    ):
        assert words in text


def test_settings_from_a_file(small_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tiers.toml"
    config.write_text('device = 500\nhost = "100GiB"\neviction = "slru"\ninstant = true\nspeed = 1.5\n')
    found = as_json(capsys, "simulate", small_trace, "--config", config, "--eviction", "lfu", "--requests", "20")
    settings = found["settings"]
    assert (settings["device"], settings["host"], settings["eviction"]) == (500, 1600, "lfu")
    assert (settings["instant"], settings["speed"]) == (True, 1.5)
    config.write_text("device = [500, 1000]\n")
    assert as_json(capsys, "sweep", small_trace, "--config", config, "--requests", "20", "--jobs", "1")["points"] == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("devise = 3", "'devise' is no setting; known are device, host"),
        ("device =", "is no valid TOML"),
        ("device = {a = 1}", "device must be text, a number or a list"),
        ("\x00", "is no valid TOML"),
    ],
)
def test_files_that_are_wrong(
    small_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    config = tmp_path / "tiers.toml"
    config.write_text(text)
    assert main(["simulate", str(small_trace), "--config", str(config)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "0"], "--device 0: must be 1 to"),
        (["--device", "1KiB"], "--device 1KiB: is less than one page of 64 MiB"),
        (
            ["--device", "much"],
            "--device much: is not a number with a unit: write it like 512MiB, ",
        ),
        (["--device", "1,2"], "--device 1,2: give one value; `hicache sweep` takes several"),
        (["--host", "unlimited"], "--host unlimited: only --device and --storage"),
        (["--storage", "5"], "--storage needs a host tier"),
        (["--page-size", "500"], "--page-size 500 does not divide the trace's blocks of 512 tokens"),
        (["--eviction", "best"], "--eviction best: use one of lru"),
        (["--admission", "0"], "--admission 0: must be 1 to"),
        (["--decide", "maybe"], "--decide maybe: use one of yes, no"),
        (["--prefill-rate", "0"], "--prefill-rate 0: must be 0.001 to 1e+15"),
        (["--prefill-rate", "1e-300"], "--prefill-rate 1e-300: must be 0.001 to 1e+15"),
        (["--speed", "1e-300"], "--speed 1e-300: must be 1e-06 to 1e+06"),
        (["--gpu-hour-price", "1e300"], "--gpu-hour-price 1e+300: must be 0 to 1e+09"),
        (["--write-bound", "0"], "--write-bound 0: must be 1 to"),
        (["--device-link", "0"], "--device-link 0: must be 1 or more"),
        (["--speed", "inf"], "--speed inf: is not a number above 0"),
        (["--config", "/away.toml"], "--config /away.toml: No such file"),
        (["--format", "parquet"], "--format parquet: use one of"),
    ],
)
def test_bad_options_are_one_line(
    small_trace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["simulate", str(small_trace), "--requests", "3", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.case("STAT-2")
def test_an_empty_trace_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "empty.jsonl"
    trace.write_text("")
    for command in ("simulate", "sweep"):
        assert main([command, str(trace)]) == 1
        out, err = capsys.readouterr()
        assert "nan" not in out.lower()
        assert "there are no requests in it" in err
        assert main([command, str(trace), "--json"]) == 1
        json.loads(capsys.readouterr().out)


def test_a_sweep_shows_what_differs(small_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--device", "300,600", "--host", "0,1200", "--eviction", "lru,slru", "--instant", "yes"]
    more = ["--requests", "60", "--jobs", "1", "--out", str(tmp_path / "sweep.jsonl")]
    assert main(["sweep", str(small_trace), *grid, *more]) == 0
    text = capsys.readouterr().out
    assert "8 points; hits and misses are shares of the pages asked" in text
    assert "Take --device" in text
    found = as_json(capsys, "sweep", small_trace, *grid, *more)
    assert len(found["results"]) == found["points"] == 8
    assert found["recommendation"]
    assert main(["sweep", str(small_trace), *grid, "--jobs", "0"]) == 2
    assert "--jobs 0: must be 1 to" in capsys.readouterr().err
    assert main(["sweep", str(small_trace), "--page-size", "256,512", "--device", "1GiB"]) == 2
    assert "bytes are another number of pages at each --page-size" in capsys.readouterr().err


def test_choices_are_those_of_the_library() -> None:
    from hicache.analytics.formats.known import FORMATS
    from hicache.analytics.simulate.settings import ROUTING
    from hicache.cli import simulation, trace_options
    from hicache.core.config import WRITE_POLICIES
    from hicache.core.eviction import POLICIES
    from hicache.runtime.options import PREFETCH_MODES

    assert set(simulation.EVICTION) <= set(POLICIES)
    assert set(simulation.WRITE_POLICIES) == set(WRITE_POLICIES)
    assert simulation.PREFETCH == PREFETCH_MODES
    assert simulation.ROUTING == ROUTING
    assert set(trace_options.FORMATS) == {"auto", *FORMATS}


def test_an_interrupted_sweep_keeps_what_is_done_and_goes_on(small_trace: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches all processes, as from a terminal."""
    kept = tmp_path / "sweep.jsonl"
    sizes = ",".join(str(200 + 10 * n) for n in range(40))
    command = [sys.executable, "-m", "hicache", "sweep", str(small_trace), "--device", sizes, "--jobs", "2"]
    command += ["--requests", "300", "--out", str(kept), "--json"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        eventually(lambda: kept.exists() and kept.read_bytes().count(b"\n") >= 4, "the first results", seconds=60)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    done = len(json.loads(out)["results"])
    assert err == ""
    assert process.returncode == 130
    assert 3 <= done < 40
    assert len(kept.read_text().splitlines()) == done + 1
