"""The parts that are other programs: the tests that are marked `gpu`, and a small copy under `compute-sanitizer`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.replay import ROOT

_TESTS: Final[tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = (
    ((), ("tests/unit/cuda", "tests/property/test_cuda_ordering.py")),
    (("torch",), ("tests/unit/memory/test_device.py",)),
    (("torch", "transformers"), ("tests/connectors/hicache_transformers",)),
)
"""All that have tests marked `gpu`, and the packages without which they cannot even be looked at. Each has a run of its
own, so that none is lost with another."""
_TEST_SECONDS: Final = 45
"""Of one test, before it counts as hanging and says where."""
_TOOLS: Final = ("memcheck", "racecheck", "initcheck")
_FOUND: Final = 9
"""Exit code of compute-sanitizer where it has found something. It has others, 0 among them, where it could not run."""
_PROGRAM: Final = "compute-sanitizer"
_SAID: Final = 4000
"""Characters of a program's last words."""


def tests(machine: Machine, seconds: float) -> dict[str, Any]:
    """The tests that need a GPU; in a dry run they skip themselves."""
    end = time.monotonic() + seconds
    rows = []
    for needed, paths in _TESTS:
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        rows.append(
            {"paths": paths, "ok": True, "left_out": f"no {', '.join(missing)} here"}
            if missing
            else _tested(paths, end - time.monotonic())
        )
    counts: dict[str, int] = {}
    for row in rows:
        for word, count in row.get("counts", {}).items():
            counts[word] = counts.get(word, 0) + count
    passed = counts.get("passed", 0) > 0 or machine.fake
    found = {"ok": passed and all(row["ok"] for row in rows), "counts": counts, "rows": rows}
    if not found["ok"]:
        found["error"] = "; ".join(row["error"] for row in rows if not row["ok"]) or f"no test ran: {counts}"
    return found


def _tested(paths: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """One run of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-m", "gpu"]
    command += ["--continue-on-collection-errors", "-o", f"faulthandler_timeout={_TEST_SECONDS}", *paths]
    # Plugins that happen to be installed there are not those that the tests were written with.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HYPOTHESIS_PROFILE": "dev"}
    done = _run(command, seconds, environment) if seconds > 1 else None
    row: dict[str, Any] = {"paths": paths, "ok": False}
    if done is None:
        return row | {"error": f"{paths[0]} did not end in the {max(seconds, 0):.0f} s that were left"}
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    row |= {"ok": done.returncode == 0, "exit": done.returncode, "counts": counts}
    row["skipped"] = re.findall(r"^SKIPPED .*$", done.stdout, re.MULTILINE)
    if not row["ok"]:
        said = (done.stdout + done.stderr).strip()
        row |= {"said": said[-_SAID:], "error": f"{paths[0]}: {said.rpartition(chr(10))[2]}"}
    return row


def sanitizer(machine: Machine, seconds: float) -> dict[str, Any]:
    """What each tool finds in a small copy; in a dry run the copy runs without it."""
    program = shutil.which(_PROGRAM) or shutil.which(_PROGRAM, path="/usr/local/cuda/bin")
    if program is None and not machine.fake:
        said = f"{_PROGRAM} is neither on the PATH nor in /usr/local/cuda/bin: it comes with the CUDA toolkit"
        return {"ok": False, "not_run": True, "error": said}
    end = time.monotonic() + seconds
    rows = [_checked(machine, program, tool, end - time.monotonic()) for tool in _TOOLS]
    found = {"ok": all(row["ok"] for row in rows), "rows": rows}
    wrong = [f"{row['tool']}: {row['error']}" for row in rows if not row["ok"]]
    if wrong:
        found |= {"error": "; ".join(wrong), "not_run": all(row["ok"] or row["not_run"] for row in rows)}
    return found


def _checked(machine: Machine, program: str | None, tool: str, seconds: float) -> dict[str, Any]:
    """One tool: whether it ran, and what it found."""
    row: dict[str, Any] = {"tool": tool, "ok": False, "not_run": True, "exit": None, "summary": "", "said": ""}
    with tempfile.TemporaryDirectory(prefix="hicache-gpu-") as folder:
        command = [sys.executable, "-m", "benchmarks.gpu.check", "small", "--out", folder]
        command += ["--fake"] if machine.fake else []
        if program is not None and not machine.fake:
            # Calls that fail as they must, such as looking for functions of a newer driver, are no findings: the copy
            # looks at each answer itself.
            options = ["--report-api-errors", "no"] if tool == "memcheck" else []
            command = [program, "--tool", tool, "--error-exitcode", str(_FOUND), *options, *command]
        done = _run(command, seconds) if seconds > 1 else None
        if done is None:
            return row | {"error": f"it did not end in the {max(seconds, 0):.0f} s that were left"}
        result = Path(folder) / "gpu-small.json"
        copied = json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
    summary = [line for line in done.stdout.splitlines() if re.search(r"SUMMARY: ", line)]
    row |= {"exit": done.returncode, "summary": summary[-1] if summary else "", "said": _said(done)}
    if done.returncode == _FOUND:
        return row | {"not_run": False, "error": row["summary"] or "it has found something"}
    if copied is None or (not summary and not machine.fake):
        return row | {"error": f"it could not run here (exit code {done.returncode}); `said` has its words"}
    ok = bool(copied["ok"]) and done.returncode == 0
    return row | {
        "ok": ok,
        "not_run": False,
        "error": "" if ok else f"the copy itself failed: {copied.get('error', '')}",
    }


def _run(
    command: list[str], seconds: float, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """A program that has ended; None where it did not in time, and was ended with all that it had started."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-_SAID:]
