"""`hicache replay --prefill-rate`: what pays is brought up, and the modelled times are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    from hicache.cli import main

    code = main(["replay", *map(str, arguments)])
    return code, *capsys.readouterr()


@pytest.fixture
def replayed(small_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Replays with three tiers on one folder."""

    def replay(*options: str) -> dict[str, Any]:
        sizes = ["--device", "300", "--host", "700", "--page-bytes", "4096", "--requests", "60"]
        storage = f"file://{tmp_path}/store?capacity=1GiB"
        code, out, err = run(capsys, small_trace, *sizes, "--storage", storage, *options, "--json")
        assert (code, err) == (0, "")
        result: dict[str, Any] = json.loads(out)
        assert result["pages_wrong"] == 0
        return result

    return replay


@pytest.mark.slow
def test_a_slow_engine_loads_and_a_fast_one_computes(replayed: Any) -> None:
    assert replayed()["prefill"] is None
    slow = replayed("--prefill-rate", "1")  # so slow that loading pays on any machine
    assert slow["prefill"]["tokens_per_second"] == 1
    assert slow["prefill"]["pages_planned"] > 0
    assert 0 < slow["prefill"]["seconds"] < slow["prefill"]["seconds_without"]
    fast = replayed("--prefill-rate", "1e12")
    assert fast["pages_storage"] == 0
    assert fast["prefill"]["seconds"] <= fast["prefill"]["seconds_without"] < 1
    assert fast["misses_by_reason"]["over_budget"] > 0
    assert slow["pages_storage"] + slow["pages_host"] > fast["pages_storage"] + fast["pages_host"]


def test_people_get_a_table(small_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--requests", "5", "--prefill-rate", "2000"]
    code, out, _ = run(capsys, small_trace, *options)
    assert code == 0
    assert "modelled times of an engine that computes 2,000 tokens/s" in out


@pytest.mark.parametrize("rate", ["0", "-5", "nan", "inf", "fast", ""])
def test_a_bad_rate_is_one_line(small_trace: Path, capsys: pytest.CaptureFixture[str], rate: str) -> None:
    code, out, err = run(capsys, small_trace, f"--prefill-rate={rate}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--prefill-rate" in err
