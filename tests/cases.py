"""Lists the field's failure cases with the tests that cover each: `python tests/cases.py [--all] [--json] [PATH ...]`.

A suite that several backends inherit is named once, with how many run it; `--all` names each.

Coverage is what pytest collects: every `@pytest.mark.case("KEY-1")`. Exit code 1 when a case has neither a test nor a
reason for coming later, when a mark names a case that does not exist, or when tests cannot be collected. With paths
only the tests there are looked at, and cases without one are no error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "cases.toml"


@dataclass(slots=True)
class Case:
    """One failure case: `later` says what of it waits, and for what."""

    id: str
    title: str
    later: str = ""
    tests: list[str] = field(default_factory=list)


class Marks:
    """A pytest plug-in that notes the case marks of what is collected."""

    def __init__(self) -> None:
        self.by_case: dict[str, list[str]] = {}
        self.errors: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.note(session.items)

    def note(self, items: Iterable[pytest.Item]) -> None:
        """Add the marks of these tests."""
        for item in items:
            name = item.nodeid.split("[", maxsplit=1)[0]  # parameters of one test are one line
            for mark in item.iter_markers("case"):
                for case in mark.args:
                    tests = self.by_case.setdefault(case, [])
                    if name not in tests:
                        tests.append(name)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(f"cannot collect {report.nodeid}")


def load_cases(path: Path = DATA) -> dict[str, Case]:
    """All cases by id, in the order of the file."""
    with path.open("rb") as file:
        cases = [Case(**entry) for entry in tomllib.load(file)["case"]]
    return {case.id: case for case in cases}


def collect(paths: Sequence[str] = ()) -> Marks:
    """Collect the tests there, or the whole suite, silently."""
    marks = Marks()
    where = paths or [str(ROOT / "tests")]
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-q", "--rootdir", str(ROOT), *where], plugins=[marks])
    return marks


def judge(cases: dict[str, Case], marks: Marks, *, whole: bool = True) -> list[str]:
    """Put the tests into their cases and return what is wrong; `whole` where they are all tests that there are."""
    wrong = list(marks.errors)
    for name, tests in marks.by_case.items():
        if name in cases:
            cases[name].tests = tests
        else:
            wrong.append(f"no such case: {name}, marked in {', '.join(tests)}")
    if whole:
        missing = [case.id for case in cases.values() if not case.tests and not case.later]
        wrong += [f"{name} has no test and no reason" for name in missing]
    return wrong


def state_of(case: Case) -> str:
    """covered: tests for all of it; partly: for some of it, the rest waits; later: none yet; MISSING: neither."""
    if case.tests:
        return "partly" if case.later else "covered"
    return "later" if case.later else "MISSING"


def grouped(tests: list[str]) -> list[str]:
    """The tests, those of one name in several classes, such as suites for backends, as one line."""
    by_name: dict[str, list[str]] = {}
    for test in tests:
        name = test.rsplit("::", 1)[1]
        by_name.setdefault(name if test.count("::") > 1 else test, []).append(test)
    return [
        found[0] if len(found) == 1 else f"{Path(found[0]).parent}/...::{name} ({len(found)} suites)"
        for name, found in by_name.items()
    ]


def print_table(cases: dict[str, Case], *, every: bool) -> None:
    """One paragraph a case, and a sum."""
    for case in cases.values():
        print(f"{case.id:8} {state_of(case):8} {case.title}")
        for test in case.tests if every else grouped(case.tests):
            print(f"{'':18}{test}")
        if case.later:
            print(f"{'':18}later: {case.later}")
    states = Counter(map(state_of, cases.values()))
    kinds = ("covered", "partly", "later", "MISSING")
    print(f"\n{len(cases)} cases: {', '.join(f'{states[kind]} {kind}' for kind in kinds if states[kind])}")


def main() -> int:
    """Print the cases; see the module's text for the exit code."""
    parser = argparse.ArgumentParser(description="failure cases and the tests that cover them")
    parser.add_argument("--all", action="store_true", help="name each suite's tests")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("path", nargs="*", help="look only there")
    options = parser.parse_args()
    cases = load_cases()
    wrong = judge(cases, collect(options.path), whole=not options.path)
    if options.json:
        rows = [{"id": c.id, "title": c.title, "later": c.later, "tests": c.tests} for c in cases.values()]
        print(json.dumps({"cases": rows, "wrong": wrong}, indent=1))
    else:
        print_table(cases, every=options.all)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wanted; Python flushes once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
