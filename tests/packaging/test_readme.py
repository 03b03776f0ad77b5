"""Examples in guides are run, so that they stay true."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

_EXAMPLE = re.compile(r"^```python\n(.*?)^```$\n+^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("guide", ["README.md", "connectors/README.md"])
def test_examples_print_what_they_say(
    guide: str, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = (repository / guide).read_text()
    examples = _EXAMPLE.findall(text)
    assert len(examples) == text.count("```python\n") > 0
    for code, output in examples:
        exec(compile(code, guide, "exec"), {"__name__": "example"})
        assert capsys.readouterr().out == output
