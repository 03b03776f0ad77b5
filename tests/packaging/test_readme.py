"""The README's examples are run, so that they stay true."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

_EXAMPLE = re.compile(r"^```python\n(.*?)^```$\n+^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_examples_print_what_they_say(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = (repository / "README.md").read_text()
    examples = _EXAMPLE.findall(text)
    assert len(examples) == text.count("```python\n") > 0
    for code, output in examples:
        exec(compile(code, "README.md", "exec"), {"__name__": "example"})
        assert capsys.readouterr().out == output
