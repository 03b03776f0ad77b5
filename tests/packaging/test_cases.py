"""Every failure case of the field has a test, or a reason why it comes later."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def cases(repository: Path) -> Any:
    sys.path.insert(0, str(repository / "tests"))
    try:
        return importlib.import_module("cases")
    finally:
        sys.path.pop(0)


def test_every_case_has_a_test_or_a_reason(whole_suite: list[pytest.Item] | None, repository: Path, cases: Any) -> None:
    """Of this run where it collected the whole suite; else of a collection for this test."""
    if whole_suite is None:
        tool = [sys.executable, repository / "tests" / "cases.py", "--json"]
        wrong = json.loads(subprocess.run(tool, capture_output=True, timeout=110, check=False).stdout)["wrong"]
    else:
        marks = cases.Marks()
        marks.note(whole_suite)
        wrong = cases.judge(cases.load_cases(), marks)
    assert wrong == []
    assert len(cases.load_cases()) == 82


def test_missing_and_unknown_cases_are_reported(cases: Any) -> None:
    known = {
        name: cases.Case(id=name, title="", later=later) for name, later in [("A-1", ""), ("A-2", "x"), ("A-3", "")]
    }
    marks = cases.Marks()
    marks.by_case = {"A-1": ["t::one"], "B-9": ["t::two"]}
    assert cases.judge(known, marks) == ["no such case: B-9, marked in t::two", "A-3 has no test and no reason"]
    assert known["A-1"].tests == ["t::one"]


def test_the_table_adds_up_and_names_a_shared_suite_once(cases: Any, capsys: pytest.CaptureFixture[str]) -> None:
    suites = [f"tests/conformance/test_x.py::Test{name}::test_a" for name in "ABC"]
    known = {
        "A-1": cases.Case(id="A-1", title="first", tests=[*suites, "tests/t.py::test_a"]),
        "A-2": cases.Case(id="A-2", title="second", tests=["tests/t.py::test_b"], later="a part"),
        "A-3": cases.Case(id="A-3", title="third", later="all of it"),
    }
    cases.print_table(known, every=False)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:3] == ["tests/conformance/...::test_a (3 suites)", "tests/t.py::test_a"]
    assert lines[-1] == "3 cases: 1 covered, 1 partly, 1 later"
    cases.print_table(known, every=True)
    assert all(name in capsys.readouterr().out for name in suites[:1])


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(repository: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, repository / "tests" / "cases.py", repository / "tests" / "packaging"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    error = process.stderr.read()
    process.stderr.close()
    assert (process.wait(110), error) == (0, "")
