"""Tables, JSON and progress."""

from __future__ import annotations

import io
import json
import math
import sys
from typing import Any

import pytest

from hicache.cli import output
from hicache.cli.output import Table, print_json, print_table, progress, warn

TABLE = Table(title="hits", columns=("tier", "pages"), rows=[("device", "12"), ("host", "1,234")])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[True, False], ids=["rich", "plain"])
def rich(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(output, "has_rich", lambda: request.param)
    return bool(request.param)


def test_piped_table_is_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(TABLE)
    assert capsys.readouterr().out == "hits\n  tier    pages\n  device     12\n  host    1,234\n\n"


def test_table_on_a_terminal(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    print_table(TABLE)
    text = terminal.getvalue()
    assert all(word in text for word in ("hits", "tier", "device", "1,234"))
    assert ("│" in text) == rich


def test_json_is_valid_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1.5, None]})
    assert json.loads(capsys.readouterr().out) == {"a": [1.5, None]}
    with pytest.raises(ValueError, match="JSON"):
        print_json({"a": math.nan})


def test_progress_is_silent_when_piped(rich: bool) -> None:
    stream = io.StringIO()
    with progress("work", stream=stream) as show:
        show(1, 2)
    assert stream.getvalue() == ""


def test_progress_on_a_terminal(rich: bool) -> None:
    stream = Terminal()
    with progress("work", stream=stream) as show:
        show(0, 0)
        show(1, 2)
        show(2, 2)
    assert "work" in stream.getvalue()
    assert "100" in stream.getvalue() or rich


def test_plain_progress_writes_only_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "has_rich", lambda: False)
    stream = Terminal()
    with progress("work", stream=stream) as show:
        for done in range(1000):
            show(done, 1000)
    assert stream.getvalue().count("%") == 100


def test_progress_ends_when_the_work_fails(rich: bool) -> None:
    def work(show: Any) -> None:
        show(1, 2)
        raise KeyError

    stream = Terminal()
    with pytest.raises(KeyError), progress("work", stream=stream) as show:
        work(show)
    assert stream.getvalue().endswith("\r") or rich


def test_warning_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    warn("storage is full")
    assert capsys.readouterr().err == "hicache: storage is full\n"
