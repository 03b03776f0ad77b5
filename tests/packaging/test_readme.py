"""The README's examples are run, so that they stay true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(repository: Path) -> list[str]:
    return _BLOCK.findall((repository / "README.md").read_text())


def test_there_is_an_example(repository: Path) -> None:
    assert blocks(repository)


def test_examples_run(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, code in enumerate(blocks(repository)):
        exec(compile(code, f"README example {number}", "exec"), {"__name__": "example"})
