"""Plots in a terminal: what they show, how wide they are, and what is said where they cannot be drawn."""

from __future__ import annotations

import argparse
import importlib.util
import io
import sys
from pathlib import Path

import pytest

from hicache.cli.main import main
from hicache.cli.plots import Bars, Plot, check_plot, drawn
from hicache.errors import ConfigError

CURVE = Plot("title", "pages", "% of pages", (("a", [10, 100, 1000], [0.0, 50.0, 100.0]),), logarithmic=True)


def trace_of(folder: Path) -> str:
    path = folder / "trace.jsonl"
    lines = [
        f'{{"timestamp": {at * 1000}, "input_length": 1024, "output_length": 1, "hash_ids": [{at % 3}, {at % 5 + 10}]}}'
        for at in range(40)
    ]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize("width", [40, 80, 110])
def test_a_curve_fits_and_has_both_axes(width: int) -> None:
    text = drawn(CURVE, width, colours=False)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in text
    assert {"10", "1,000"} <= set(lines[-2].split())
    assert "% of pages" in lines[-1]
    assert lines[-1].split()[-1] == "pages"
    assert any(line.startswith("100.0") for line in lines)
    assert any(line.lstrip().startswith("0.0") for line in lines)


def test_colours_are_for_terminals() -> None:
    assert "\x1b[" in drawn(CURVE, 60, colours=True)


def test_two_lines_differ_without_colours() -> None:
    lines = (("up", [1, 2], [0.0, 9.0]), ("down", [1, 2], [9.0, 0.0]))
    text = drawn(Plot("title", "x", "y", lines), 60, colours=False)
    assert "up" in text
    assert "down" in text
    assert text.count("•") > 10


@pytest.mark.parametrize("heights", [[0.0, 0.0], [5.0]])
def test_flat_and_single_points_are_drawn(heights: list[float]) -> None:
    places = list(range(len(heights)))
    assert "x" in drawn(Plot("title", "x", "y", (("", places, heights),)), 40, colours=False)


def test_bars_are_as_long_as_their_parts() -> None:
    bars = Bars("title", ["one", "another"], [("hit", [25.0, 50.0]), ("none", [0.0, 0.0]), ("missed", [75.0, 50.0])])
    one, other, legend = drawn(bars, 89, colours=False).splitlines()
    assert (one.count("█"), one.count("▓")) == (20, 60)
    assert (other.count("█"), other.count("▓")) == (40, 40)
    assert one.index("█") == other.index("█")
    assert legend == "█ hit   ▓ missed"


def test_bars_of_nothing_say_so() -> None:
    assert drawn(Bars("title", ["one"], [("hit", [0.0])]), 80, colours=False) == "  nothing"


@pytest.mark.parametrize("command", ["analyze", "simulate", "sweep"])
def test_commands_draw(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, trace_of(tmp_path), "--plot"]) == 0
    text = capsys.readouterr().out
    if command == "analyze":
        assert "% of pages, or of tokens, asked" in text
        assert text.count("└") == 4
    else:
        assert "what became of the pages asked, in % of them" in text
        assert "█ in device   ▓ missed: cold" in text


def test_an_empty_trace_has_no_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    assert main(["analyze", str(path), "--plot"]) == 1
    assert "└" not in capsys.readouterr().out


def given(*, json: bool = False) -> argparse.Namespace:
    return argparse.Namespace(plot=True, json=json)


def test_plots_and_json_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="--plot and --json"):
        check_plot(given(json=True))


def test_without_plotext_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"hicache\[cli\]"):
        check_plot(given())


def test_an_encoding_without_characters_to_draw_with_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    with pytest.raises(ConfigError, match="latin-1 has no characters to draw with"):
        check_plot(given())
