"""The list of deliberate bugs follows the code: a bug whose place has moved would never be tried again."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants import MUTANTS, RUNTIME_MUTANTS, from_data  # noqa: E402  found by the line above

ALL = (*MUTANTS, *RUNTIME_MUTANTS, *from_data())


def test_every_bug_has_its_place() -> None:
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in {mutant.file for mutant in ALL}}
    counts = {mutant.name: texts[mutant.file].count(mutant.old) for mutant in ALL}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_every_bug_has_tests_and_a_name_of_its_own() -> None:
    paths = {(mutant.name, test.partition("::")[0]) for mutant in ALL for test in mutant.tests}
    assert [(name, path) for name, path in sorted(paths) if not (ROOT / path).exists()] == []
    assert [name for name, count in Counter(mutant.name for mutant in ALL).items() if count > 1] == []
