"""The parts that are other programs: the tests that are marked `gpu`, and a small copy under `compute-sanitizer`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any, Final

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.replay import ROOT

_TESTS: Final = "tests/unit/cuda"
_TOOLS: Final = ("memcheck", "racecheck", "initcheck")


def tests(machine: Machine, seconds: float) -> dict[str, Any]:
    """The tests that need a GPU; in a dry run they skip themselves."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-m", "gpu", _TESTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds, cwd=ROOT)
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    passed = counts.get("passed", 0) > 0 or machine.fake
    found = {"ok": done.returncode == 0 and passed, "counts": counts, "exit": done.returncode}
    if not found["ok"]:
        said = (done.stderr + done.stdout).strip()
        found |= {"said": said[-4000:], "error": said.rpartition("\n")[2]}
    return found


def sanitizer(machine: Machine, seconds: float) -> dict[str, Any]:
    """What each tool finds in a small copy; in a dry run the copy runs without it."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None and not machine.fake:
        return {"ok": False, "error": "compute-sanitizer is not on the PATH: it comes with the CUDA toolkit"}
    rows = []
    for tool in _TOOLS:
        with tempfile.TemporaryDirectory(prefix="hicache-gpu-") as folder:
            command = [sys.executable, "-m", "benchmarks.gpu.check", "small", "--out", folder]
            command += ["--fake"] if machine.fake else []
            if program is not None and not machine.fake:
                command = [program, "--tool", tool, "--error-exitcode", "9", *command]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds, cwd=ROOT)
            said = [line for line in done.stdout.splitlines() if line.startswith("=====")]
        rows.append({"tool": tool, "exit": done.returncode, "summary": said[-1:] and said[-1], "said": _said(done)})
    return {"ok": all(row["exit"] == 0 for row in rows), "rows": rows}


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:]
