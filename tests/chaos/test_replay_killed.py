"""A trace replayed through three tiers, killed again and again, and at last run to its end on what was left.

`python tests/chaos/test_replay_killed.py TRACE [REQUESTS [KILLS]]` does the same with a larger trace.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

ENDS = 600
PAGE_BYTES = 8192
PROGRAM = "import sys; from hicache.cli import main; sys.exit(main())"


def command(trace: Path, root: Path, *, requests: int, capacity: int) -> list[str]:
    sizes = ["--device", "400", "--host", "800", "--storage", f"file://{root}?capacity={capacity}&refresh=0.05"]
    what = ["--page-size", "trace", "--page-bytes", str(PAGE_BYTES), "--requests", str(requests), "--json"]
    return [sys.executable, "-c", PROGRAM, "replay", str(trace), *sizes, *what]


def whole(trace: Path, root: Path, **options: int) -> tuple[dict[str, Any], float]:
    """One run to its end: what it tells, and what it took."""
    start = time.monotonic()
    done = subprocess.run(command(trace, root, **options), capture_output=True, text=True, timeout=ENDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), time.monotonic() - start


def weigh(root: Path) -> int:
    """Bytes of objects and of what was being written."""
    total = 0
    for directory, _, names in os.walk(root):
        if directory not in (str(root), str(root / "writers")):
            total += sum(os.lstat(os.path.join(directory, name)).st_size for name in names if len(name) > 20)
    return total


def kill_again_and_again(trace: Path, folder: Path, *, requests: int, kills: int, seed: int = 1) -> dict[str, Any]:
    """Returns what the last run tells, which was on the folder that the killed ones left."""
    choice = random.Random(seed)
    first, seconds = whole(trace, folder / "whole", requests=requests, capacity=2**30)
    capacity = weigh(folder / "whole") // 2
    root, options = folder / "root", {"requests": requests, "capacity": capacity}
    for _ in range(kills):
        process = subprocess.Popen(command(trace, root, **options), stdout=subprocess.DEVNULL)
        try:
            process.wait(choice.uniform(0.1, 0.9) * seconds)  # it may be faster than the first was
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait(ENDS)
        assert weigh(root) <= capacity
    last, _ = whole(trace, root, **options)
    assert (first["pages_wrong"], last["pages_wrong"]) == (0, 0)
    assert last["requests"] == requests
    assert 0 < capacity // 2 < weigh(root) <= capacity
    assert not list(root.rglob("*.hicache-tmp"))
    assert not list((root / "writers").iterdir())
    return last


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.case("FILE-1", "FAIL-1", "FAIL-8")
def test_a_replay_that_is_killed_anywhere_leaves_nothing_wrong_behind(small_trace: Path, tmp_path: Path) -> None:
    last = kill_again_and_again(small_trace, tmp_path, requests=150, kills=4)
    assert last["pages_storage"] > 0, "what the killed ones stored is used"


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[2:]]
    with tempfile.TemporaryDirectory(prefix="hicache-killed-") as name:
        told = kill_again_and_again(
            Path(sys.argv[1]), Path(name), requests=([*numbers, 3000])[0], kills=([*numbers[1:], 20])[0]
        )
    print(json.dumps({key: told[key] for key in ("requests", "pages_wrong", "pages_verified", "pages_storage")}))
