"""The soak itself: it runs, it stops at a failure, and what it says then repeats that failure."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ENDS = 110

# A core that forgets to take a page out of what is believed, now and then, and so breaks an invariant.
BUG = """
from hicache.core import copies

right = copies.Copies.raise_belief

def wrong(self, node):
    right(self, node)
    if node.believed >= 2 and node.stamp > 40:
        node.believed = node.pages + 1

copies.Copies.raise_belief = wrong
"""


def soak(repository: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "tests" / "soak.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=ENDS, check=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["core", "cache", pytest.param("threads", marks=pytest.mark.alone)])
def test_one_round_of_each_kind(repository: Path, mode: str) -> None:
    done = soak(repository, "--once", "--mode", mode, "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["mode"], told["seed"]) == (mode, 7)
    assert sum(told["seen"].values()) > 100


@pytest.mark.slow
def test_a_failure_ends_it_and_is_repeated_by_what_it_says(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BUG)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    done = soak(repository, "--seconds", "60", "--processes", "2", "--mode", "core", "--seed", "3", env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED in core" in done.stdout
    found = re.search(r"what led to it: hicache replay (\S+)", done.stdout)
    assert found
    recording = Path(found[1])
    program = "import sys; from hicache.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "replay", str(recording), "--json"]
    again = subprocess.run(command, capture_output=True, text=True, timeout=ENDS, check=False, env=environment)
    recording.unlink()
    assert again.returncode == 1
    assert json.loads(again.stdout)["outcome"] == "failed"
    seed = re.search(r"--once --mode core --seed (\d+)", done.stdout)
    assert seed
    once = soak(repository, "--once", "--mode", "core", "--seed", seed[1], env=environment)
    recording.unlink()
    assert once.returncode == 1
