"""Every failure case of the field has a test, or a reason why it comes later."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run_tool(repository: Path, *options: str) -> subprocess.CompletedProcess[str]:
    tool = repository / "tests" / "cases.py"
    return subprocess.run([sys.executable, tool, *options], capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.slow
def test_every_case_has_a_test_or_a_reason(repository: Path) -> None:
    done = run_tool(repository, "--json")
    report = json.loads(done.stdout)
    assert report["wrong"] == []
    assert done.returncode == 0
    assert len(report["cases"]) == 82


def test_missing_and_unknown_cases_are_reported(repository: Path) -> None:
    sys.path.insert(0, str(repository / "tests"))
    try:
        import cases
    finally:
        sys.path.pop(0)
    known = {
        name: cases.Case(id=name, title="", later=later) for name, later in [("A-1", ""), ("A-2", "x"), ("A-3", "")]
    }
    marks = cases.Marks()
    marks.by_case = {"A-1": ["t::one"], "B-9": ["t::two"]}
    assert cases.judge(known, marks) == ["no such case: B-9, marked in t::two", "A-3 has no test and no reason"]
    assert known["A-1"].tests == ["t::one"]
