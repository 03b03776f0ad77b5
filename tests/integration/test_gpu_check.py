"""The check for machines with a GPU: what it says without one, and that each of its parts runs on a fake device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache.testing.nvrtc import find_compilers


def script(repository: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script, where no nvidia-smi is on the PATH."""
    return subprocess.run(
        ["/bin/bash", str(repository / "benchmarks" / "gpu_check.sh"), *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "HOME": os.environ.get("HOME", "/"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


@pytest.mark.skipif(has_gpu(), reason="a GPU is here")
def test_without_a_gpu_it_says_so_in_one_line_and_measures_nothing(repository: Path, tmp_path: Path) -> None:
    done = script(repository, OUT=str(tmp_path / "out"))
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("gpu_check: no GPU here (nvidia-smi shows none): nothing was measured;")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_part_that_there_is_not_is_bad_usage(repository: Path) -> None:
    done = script(repository, "everything")
    assert done.returncode == 2
    assert "gpu_check.sh [--again] [--dry-run] [PART ...]" in done.stderr


def test_a_dry_run_goes_through_a_part_leaves_its_result_and_does_not_repeat_it(
    repository: Path, tmp_path: Path
) -> None:
    first = script(repository, "--dry-run", "overlap", OUT=str(tmp_path))
    assert first.returncode == 0, first.stdout + first.stderr
    result = json.loads((tmp_path / "gpu-overlap.json").read_text())
    assert result["ok"]
    assert result["device"]["fake"]
    assert [row["method"] for row in result["hidden"]] == ["auto", "kernel"]
    assert "# A dry run without a GPU: its times mean nothing" in (tmp_path / "gpu.md").read_text()
    again = script(repository, "--dry-run", "overlap", OUT=str(tmp_path))
    assert f"overlap: done already, see {tmp_path}/gpu-overlap.json" in again.stdout


@pytest.fixture(scope="module")
def check(repository: Path) -> Any:
    """The module with the parts; benchmarks are no installed package."""
    sys.path.insert(0, str(repository))
    try:
        from benchmarks.gpu import check
    finally:
        sys.path.remove(str(repository))
    return check


@pytest.mark.parametrize("part", ["small", "bandwidth"])
def test_each_measurement_moves_the_right_bytes_on_a_fake_device(
    check: Any, tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main([part, "--out", str(tmp_path), "--fake"]) == 0
    result = json.loads((tmp_path / f"gpu-{part}.json").read_text())
    assert {row["method"] for row in result["rows"]} >= {"plain", "batch", "kernel"}
    assert all(row.get("wrong_bytes", row.get("wrong_pages")) == 0 for row in result["rows"])
    assert check.main(["report", "--out", str(tmp_path)]) == 0
    assert part in capsys.readouterr().out


def test_a_part_that_breaks_is_a_result_and_fails(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(*_: object) -> None:
        raise RuntimeError("a fan has stopped")

    monkeypatch.setitem(check.PARTS, "small", (breaks, 1.0))
    assert check.main(["small", "--out", str(tmp_path), "--fake"]) == 1
    assert json.loads((tmp_path / "gpu-small.json").read_text())["error"] == "RuntimeError: a fan has stopped"
    assert check.main(["report", "--out", str(tmp_path)]) == 1
    assert "FAILED RuntimeError: a fan has stopped" in capsys.readouterr().out


def test_the_kernels_that_keep_a_device_busy_compile(check: Any, tmp_path: Path) -> None:
    compilers = find_compilers()
    if not compilers:
        pytest.skip("neither nvcc nor NVRTC (pip install nvidia-cuda-nvrtc) is here: the kernels are not compiled")
    for compiler in compilers:
        code, said = compiler.compile(sys.modules["benchmarks.gpu.machine"].SOURCE, "sm_90", tmp_path)
        assert not said.strip()
        assert b"hicache_bench_busy" in code
        assert b"hicache_bench_read" in code


def test_without_results_there_is_no_report(check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["report", "--out", str(tmp_path)]) == 1
    assert "no part has left a result" in capsys.readouterr().err


@pytest.mark.skipif(has_gpu(), reason="a GPU is here")
def test_a_part_without_a_device_names_what_is_missing(
    check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["small", "--out", str(tmp_path)]) == 3
    assert capsys.readouterr().err.startswith("gpu_check: no GPU is measured: ")
