"""A real trace through the cache with its device pages on the GPU and its host pages pinned; every byte verified."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.machine import Machine

ROOT: Final = Path(__file__).resolve().parent.parent.parent
TRACE: Final = ROOT / "benchmarks" / "traces" / "conversation_1000.jsonl"


def run(machine: Machine, seconds: float) -> dict[str, Any]:
    """What `hicache replay` says, twice on one folder: the second run finds in storage what the first has written."""
    runs: list[dict[str, Any]] = []
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="hicache-gpu-") as folder:
        for name in ("first", "second"):
            command = [
                *(sys.executable, "-m", "hicache", "replay", str(TRACE), "--page-size", "trace"),
                *("--page-bytes", str(machine.size(128 << 10, 4 << 10)), "--device", "800", "--host", "2400"),
                *("--storage", f"file://{folder}?capacity={machine.size(16, 1)}GiB"),
                *("--device-memory", "main" if machine.fake else "cuda", "--json"),
            ]
            start, left = time.perf_counter(), max(1.0, end - time.monotonic())
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left, cwd=ROOT)
            except subprocess.TimeoutExpired:
                return {"ok": False, "error": f"the {name} run did not end in {left:.0f} s", "runs": runs}
            taken = time.perf_counter() - start
            if done.returncode not in (0, 1) or not done.stdout:
                said = done.stderr.strip()[-2000:]
                return {"ok": False, "error": said, "command": " ".join(command[1:]), "runs": runs}
            runs.append({"name": name, "seconds": taken, "exit": done.returncode} | _facts(json.loads(done.stdout)))
    return {"ok": all(one["exit"] == 0 and one["pages_wrong"] == 0 for one in runs), "runs": runs}


def _facts(document: dict[str, Any]) -> dict[str, Any]:
    """The parts of the document that the table shows."""
    return {
        "pages_verified": document["pages_verified"],
        "pages_wrong": document["pages_wrong"],
        "document": document,
    }
