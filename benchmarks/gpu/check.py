"""One part of the check: `python -m benchmarks.gpu.check PART --out FOLDER [--fake]`, or `report` for the table.

Exit codes: 0 fine; 1 something is wrong, was not run, or is slower than its bar; 2 bad usage; 3 no GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu import bandwidth, commands, overlap, replay, small
from benchmarks.gpu.machine import Machine, opened
from benchmarks.gpu.report import report
from hicache.cuda.driver import CudaError
from hicache.errors import ConfigError

PARTS: Final[dict[str, tuple[Callable[[Machine, float], dict[str, Any]], float]]] = {
    "tests": (commands.tests, 100.0),
    "sanitizer": (commands.sanitizer, 110.0),
    "bandwidth": (bandwidth.run, 110.0),
    "overlap": (overlap.run, 45.0),
    "replay": (replay.run, 110.0),
    "small": (small.run, 30.0),
}
"""Each with the seconds that it gets."""

NO_GPU: Final = 3
_GRACE: Final = 12.0
"""Seconds that a part may take beyond its own, before it counts as hanging."""


def main(arguments: list[str], *, watched: bool = False) -> int:
    """What the command line asks for; `watched` ends this whole process where a part hangs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "report"])
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where results go")
    parser.add_argument("--fake", action="store_true", help="try the part out on a fake device, at small sizes")
    parser.add_argument("--seconds", type=float, metavar="S", help="what the part gets; default: as much as is usual")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part == "report":
        return _report(given.out)
    seconds = PARTS[given.part][1]
    if given.seconds is not None:
        seconds = min(seconds, given.seconds)
    found: dict[str, Any] = {"ok": False, "device": None, "part": given.part, "revision": _revision()}
    start = time.perf_counter()
    watch = _Watch(given.out, found, seconds + _GRACE) if watched else None
    try:
        _work(found, given.part, seconds, fake=given.fake)
    except ConfigError as error:
        print(f"gpu_check: no GPU is measured: {error}", file=sys.stderr)
        return NO_GPU
    except CudaError as error:  # opening the device, or giving back what a failure has left
        found |= {"ok": False, "error": found.get("error") or f"CudaError: {error}"}
    finally:
        if watch is not None:
            watch.stop()
    found["seconds"] = time.perf_counter() - start
    _write(given.out, found)
    said = f" {found['error']}" if found.get("error") else ""
    print(f"{given.part}: {'ok' if found['ok'] else 'FAILED'} in {found['seconds']:.1f} s{said}", flush=True)
    return 0 if found["ok"] else 1


def _work(found: dict[str, Any], part: str, seconds: float, *, fake: bool) -> None:
    """Fill in what a part has found."""
    with opened(fake=fake) as machine:
        found["device"] = machine.facts()
        try:
            found |= PARTS[part][0](machine, seconds)
        except Exception as error:  # one part's trouble is a result, and the others go on
            traceback.print_exc()
            found |= {"ok": False, "error": f"{type(error).__name__}: {error}"}


class _Watch:
    """Ends this process where a part hangs, with a result that says so and where every thread was."""

    def __init__(self, out: Path, found: dict[str, Any], limit: float) -> None:
        self._out, self._found, self._limit = out, found, limit
        self._timer = threading.Timer(limit, self._give_up)
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(limit + 5, exit=True)  # where even the interpreter's lock is not to be had

    def stop(self) -> None:
        """The part has ended."""
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def _give_up(self) -> None:
        faulthandler.dump_traceback()
        error = f"it hung: not over after {self._limit:.0f} s; standard error has where"
        _write(self._out, self._found | {"ok": False, "error": error, "seconds": self._limit})
        print(f"{self._found['part']}: FAILED {error}", flush=True)
        os._exit(1)


def _write(out: Path, found: dict[str, Any]) -> None:
    (out / f"gpu-{found['part']}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


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
    sys.exit(main(sys.argv[1:], watched=True))
