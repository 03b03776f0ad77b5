"""The check for machines with a GPU: what it says without one, and that each of its parts runs on a fake device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.cuda.driver import CudaError
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


def test_a_device_that_cannot_be_opened_is_a_result(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened(*, fake: bool) -> Any:
        raise CudaError("cudaMalloc", "cudaErrorMemoryAllocation", 2)

    monkeypatch.setattr(check, "opened", opened)
    assert check.main(["small", "--out", str(tmp_path), "--fake"]) == 1
    assert check.main(["report", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "# A GPU that could not be opened" in said
    assert "FAILED CudaError: cudaMalloc: cudaErrorMemoryAllocation (2)" in said


def test_a_part_that_hangs_ends_with_a_result_that_says_so(repository: Path, tmp_path: Path) -> None:
    code = (
        "import pathlib, threading; from benchmarks.gpu.check import _Watch; "
        f"_Watch(pathlib.Path({str(tmp_path)!r}), {{'part': 'small', 'ok': True}}, 0.01); threading.Event().wait()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    result = json.loads((tmp_path / "gpu-small.json").read_text())
    assert not result["ok"]
    assert result["error"].startswith("it hung: not over after 0 s")
    assert "most recent call first" in done.stderr


SANITIZER = """#!/bin/bash
for argument; do [ "$before" = --out ] && out="$argument"; before="$argument"; done
"""


@pytest.mark.parametrize(
    ("does", "ok", "not_run", "error"),
    [
        ('echo \'{"ok": true}\' >"$out/gpu-small.json"; echo "== ERROR SUMMARY: 0 errors"', True, False, ""),
        (
            'echo \'{"ok": true}\' >"$out/gpu-small.json"; echo "== ERROR SUMMARY: 2 errors"; exit 9',
            False,
            False,
            "memcheck: == ERROR SUMMARY: 2 errors; ",
        ),
        ('echo "Device not supported"', False, True, "memcheck: it could not run here (exit code 0)"),
        ('echo \'{"ok": true}\' >"$out/gpu-small.json"', False, True, "memcheck: it could not run here"),
        (
            'echo \'{"ok": false, "error": "wrong"}\' >"$out/gpu-small.json"; echo "SUMMARY: 0 errors"; exit 1',
            False,
            False,
            "memcheck: the copy itself failed: wrong",
        ),
    ],
)
def test_what_a_sanitizer_found_is_told_from_one_that_did_not_run(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, ok: bool, not_run: bool, error: str
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(SANITIZER + does + "\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = check.commands.sanitizer(SimpleNamespace(fake=False), 60.0)
    assert (found["ok"], found.get("not_run", False)) == (ok, not_run)
    assert found.get("error", "").startswith(error)
    assert [row["tool"] for row in found["rows"]] == ["memcheck", "racecheck", "initcheck"]


def test_without_a_sanitizer_its_part_is_not_run_rather_than_passed(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check.commands.shutil, "which", lambda *_, **__: None)
    parts = {"small": (lambda machine, seconds: check.commands.sanitizer(SimpleNamespace(fake=False), seconds), 1.0)}
    monkeypatch.setattr(check, "PARTS", parts)
    assert check.main(["small", "--out", str(tmp_path), "--fake"]) == 1
    assert check.main(["report", "--out", str(tmp_path)]) == 1
    assert "| small | NOT RUN compute-sanitizer is neither on the PATH nor in " in capsys.readouterr().out


def test_the_tests_that_it_runs_are_all_that_need_a_gpu(check: Any, repository: Path) -> None:
    marked = {
        str(file.relative_to(repository))
        for file in (repository / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in file.read_text(encoding="utf-8") and file != Path(__file__)
    }
    assert marked
    paths = tuple(path for _, run in check.commands._TESTS for path in run)
    for path in paths:
        assert any(name.startswith(path) for name in marked), f"{path}: nothing there needs a GPU"
    assert not [name for name in marked if not name.startswith(paths)]


def test_tests_whose_packages_are_missing_are_left_out_and_one_run_does_not_end_the_others(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = (((), ("tests/nothing",)), (("no_such_package",), ("tests/unit",)), ((), ("tests/nothing_else",)))
    monkeypatch.setattr(check.commands, "_TESTS", runs)
    found = check.commands.tests(SimpleNamespace(fake=True), 60.0)
    assert not found["ok"]
    assert found["error"] == (
        "tests/nothing: ERROR: file or directory not found: tests/nothing; "
        "tests/nothing_else: ERROR: file or directory not found: tests/nothing_else"
    )
    assert [row.get("left_out") for row in found["rows"]] == [None, "no no_such_package here", None]


@pytest.mark.skipif(has_gpu(), reason="a GPU is here")
def test_a_part_without_a_device_names_what_is_missing(
    check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["small", "--out", str(tmp_path)]) == 3
    assert capsys.readouterr().err.startswith("gpu_check: no GPU is measured: ")
