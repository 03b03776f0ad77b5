"""Tables that are too wide for the terminal."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.cli.fitting import fitted, print_fitted
from hicache.cli.output import Table

WIDE = Table(
    "rates",
    ("tier", "size", *(f"rate number {n}" for n in range(8))),
    [("device", "1,000", *(f"{n}.123456" for n in range(8))), ("host", "20,000", *(f"{n}.654321" for n in range(8)))],
)


def test_a_table_that_fits_stays_whole() -> None:
    assert list(fitted(WIDE, 400)) == [Table("rates", list(WIDE.columns), [list(row) for row in WIDE.rows])]


@given(width=st.integers(1, 200), keys=st.integers(0, 3))
def test_every_column_is_in_one_part(width: int, keys: int) -> None:
    parts = list(fitted(WIDE, width, keys=keys))
    for part in parts:
        assert list(part.columns[:keys]) == list(WIDE.columns[:keys])
        assert [row[0] for row in part.rows] == (
            [row[0] for row in WIDE.rows] if keys else [row[0] for row in part.rows]
        )
    others = [column for part in parts for column in part.columns[keys:]]
    assert others == list(WIDE.columns[keys:])


def test_no_number_is_cut_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((60, 20)))
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    print_fitted(WIDE, keys=2)
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert "rates (1 of " in text
    assert "…" not in text
    for row in WIDE.rows:
        for cell in row:
            assert cell in text
    assert max(map(len, text.splitlines())) <= 60


def test_piped_tables_are_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_fitted(WIDE)
    assert capsys.readouterr().out.count("rates") == 1
