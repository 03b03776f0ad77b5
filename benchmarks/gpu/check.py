"""One part of the check: `python -m benchmarks.gpu.check PART --out FOLDER [--fake]`, or `report` for the table.

Exit codes: 0 fine; 1 something is wrong, or slower than its bar; 2 bad usage; 3 no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu import bandwidth, commands, overlap, replay, small
from benchmarks.gpu.machine import Machine, opened
from benchmarks.gpu.report import report
from hicache.errors import ConfigError

PARTS: Final[dict[str, tuple[Callable[[Machine, float], dict[str, Any]], float]]] = {
    "tests": (commands.tests, 100.0),
    "sanitizer": (commands.sanitizer, 40.0),
    "bandwidth": (bandwidth.run, 110.0),
    "overlap": (overlap.run, 40.0),
    "replay": (replay.run, 60.0),
    "small": (small.run, 20.0),
}
"""Each with the seconds that it gets; less than 8 minutes together."""

NO_GPU: Final = 3


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "report"])
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where results go")
    parser.add_argument("--fake", action="store_true", help="try the part out on a fake device, at small sizes")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part == "report":
        return _report(given.out)
    work, seconds = PARTS[given.part]
    try:
        with opened(fake=given.fake) as machine:
            start = time.perf_counter()
            try:
                found = work(machine, seconds)
            except Exception as error:  # one part's trouble is a result, and the others go on
                traceback.print_exc()
                found = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            found |= {"part": given.part, "seconds": time.perf_counter() - start, "device": machine.facts()}
    except ConfigError as error:
        print(f"gpu_check: no GPU is measured: {error}", file=sys.stderr)
        return NO_GPU
    found["revision"] = _revision()
    (given.out / f"gpu-{given.part}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{given.part}: {'ok' if found['ok'] else 'FAILED'} in {found['seconds']:.1f} s {found.get('error', '')}")
    return 0 if found["ok"] else 1


def _report(folder: Path) -> int:
    results = {}
    for name in PARTS:
        path = folder / f"gpu-{name}.json"
        if path.exists():
            results[name] = json.loads(path.read_text(encoding="utf-8"))
    if not results:
        print(f"gpu_check: no part has left a result in {folder}", file=sys.stderr)
        return 1
    text = report(results)
    (folder / "gpu.md").write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(one["ok"] for one in results.values()) else 1


def _revision() -> str:
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=replay.ROOT
        )
    except OSError:
        return "unknown"
    return said.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
