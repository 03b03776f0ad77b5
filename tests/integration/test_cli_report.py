"""`hicache report` as users run it: every kind of source, every form, and what goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.cli import main, report, report_out
from hicache.errors import ConfigError
from hicache.testing.engine import FakeEngine, prompt, small_namespace
from hicache.testing.sidecars import ServiceProcess, namespace_of

SIZES = ("--device", "300", "--host", "600", "--requests", "100")


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Path]:
    """Runs a command with --json and keeps what it prints."""

    def write(name: str, *arguments: str | Path) -> Path:
        assert main([*map(str, arguments), "--json"]) == 0
        path = tmp_path / name
        path.write_text(capsys.readouterr().out)
        return path

    return write


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    assert main(["report", *map(str, arguments), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    return found


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line of a report that cannot be."""
    assert main(["report", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    return captured.err


def keys(document: dict[str, Any]) -> list[str]:
    return [section["key"] for section in document["sections"]]


def test_a_trace_in_every_form(small_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the ending of the file, whole, without traces of the writing, and with the mode that new files have."""
    for name, begin in (("r.html", "<!DOCTYPE html>"), ("r.md", "# hicache report"), ("r.json", "{")):
        out = tmp_path / name
        out.write_text("before")
        assert main(["report", str(small_trace), "--requests", "60", "--out", str(out)]) == 0
        assert out.read_text().startswith(begin)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "r.json", "r.md"]
    assert (tmp_path / "r.html").stat().st_mode & 0o777 == 0o666 & ~current_umask()
    assert capsys.readouterr().out == ""
    assert main(["report", str(small_trace), "--requests", "60", "--format", "markdown"]) == 0
    assert capsys.readouterr().out == (tmp_path / "r.md").read_text()
    assert main(["report", str(small_trace), "--requests", "60", "--out", "-"]) == 0
    assert capsys.readouterr().out == (tmp_path / "r.html").read_text()


def current_umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def test_a_trace_is_simulated_where_tiers_are_given(
    small_trace: Path, written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same documents as those of the commands themselves; of several values a sweep."""
    found = as_json(capsys, small_trace, *SIZES, "--token-bytes", "64KiB")
    documents = found["sources"][0]["documents"]
    simulated = json.loads(written("s.json", "simulate", small_trace, *SIZES, "--token-bytes", "64KiB").read_text())
    analysed = json.loads(written("a.json", "analyze", small_trace, "--requests", "100").read_text())
    for name in ("seconds", "requests_per_second"):
        documents["simulate"].pop(name), simulated.pop(name)
    assert documents == {"analyze": analysed, "simulate": simulated}
    assert {"analyze-memory", "simulate-gap"} <= set(keys(found))
    grid = ["--device", "100,200", "--host", "0,400", "--requests", "50", "--jobs", "1", "--instant", "yes"]
    swept = as_json(capsys, small_trace, *grid)
    assert swept["sources"][0]["documents"]["sweep"]["points"] == 4
    assert swept["answers"][3]["text"][0].startswith("Take --device")


def test_documents_of_all_commands(
    small_trace: Path, tmp_path: Path, written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """One alone, two side by side, and the file that a sweep keeps."""
    analysed = written("a.json", "analyze", small_trace, "--requests", "80")
    simulated = written("s.json", "simulate", small_trace, *SIZES)
    kept = tmp_path / "sweep.jsonl"
    grid = ["--device", "100,200", "--requests", "50", "--jobs", "1", "--instant", "yes", "--out", str(kept)]
    swept = written("w.json", "sweep", small_trace, *grid)
    assert keys(as_json(capsys, analysed))[0] == "ideal"
    assert keys(as_json(capsys, simulated))[0] == "hits"
    assert keys(as_json(capsys, kept)) == keys(as_json(capsys, swept)) == ["sweep"]
    both = as_json(capsys, analysed, small_trace, "--requests", "60")
    curves = [source["documents"]["analyze"]["miss_ratio_curve"]["points"] for source in both["sources"]]
    first, second = ([point["pages"] for point in curve] for curve in curves)
    assert first == second
    assert keys(both)[0] == "difference"


def test_unlike_documents_are_not_compared(
    small_trace: Path, written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither side by side nor by `hicache diff`: a line says what each of them is."""
    analysed = written("a.json", "analyze", small_trace, "--requests", "20")
    simulated = written("s.json", "simulate", small_trace, *SIZES)
    planned = written("p.json", "plan", "llama-3.1-8b")
    assert "is a trace, analysed" in complaint(capsys, analysed, simulated, "--out", "-")
    assert "a document of `hicache plan`" in complaint(capsys, planned, "--out", "-")
    assert main(["diff", str(analysed), str(simulated)]) == 2
    message = capsys.readouterr().err
    assert "a report of `hicache analyze`" in message
    assert "one of `hicache simulate`: give two of the same command" in message


def test_a_service_tells_what_stats_and_prometheus_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its counts, and the estimate for other sizes; beside itself nothing differs in them."""
    store = ("--storage", f"file://{tmp_path}/store?capacity=4MiB", "--metrics", "127.0.0.1:0")
    with ServiceProcess(tmp_path, *store) as service:
        cache = hicache.connect(service.address, namespace_of(8192, model="org/told"), required=True)
        for first in (0, 0, 500):
            with cache.request(np.arange(first, first + 75, dtype=np.uint32)) as request:
                request.load()
                request.write_from([bytes(cache.host.page_bytes)] * len(request.allocate()))
                request.commit(ready=hicache.READY)
        found = as_json(capsys, "--address", service.address)
        assert main(["stats", service.address, "--json"]) == 0
        (pool,) = json.loads(capsys.readouterr().out)["pools"]
        with urllib.request.urlopen(f"http://{service.ready['metrics']}/metrics") as page:
            lines = [line.rsplit(" ", 1) for line in page.read().decode().splitlines() if line[:8] == "hicache_"]
        both = as_json(capsys, "--address", service.address, "--address", service.address)
        assert main(["report", "--address", service.address, "--out", str(tmp_path / "r.html")]) == 0
        see_that_it_lies_between(service.address, cache, capsys)
        cache.close()
    tokens, metrics = pool["statistics"]["tokens"], {name: float(value) for name, value in lines}
    plots = {plot["key"]: plot for section in found["sections"] for plot in section["plots"]}
    rows = {row[0]: int(row[1].replace(",", "")) for row in plots["tokens-sum"]["table"]["rows"]}
    assert rows.pop("asked, the sum") == tokens["asked"] == 225 == total(metrics, "tokens_asked_total")
    for name, count in rows.items():
        missed = name.removeprefix("missed: ")
        assert count == (tokens["missed"][missed] if missed != name else tokens[name])
        label = f'reason="{missed}"' if missed != name else f'tier="{name}"'
        assert count == total(metrics, f"tokens_{'missed' if missed != name else 'hit'}_total", label)
    assert sum(rows.values()) == 225
    estimates = [row for row in plots["what-if-0"]["table"]["rows"] if row[0] == "org/told"]
    (ghost,) = (ghost for ghost in pool["what_if"] if ghost["tier"] == "host")
    for row, point in zip(estimates, ghost["points"], strict=True):
        size = f'size="{point["factor"]:g}"'
        assert row[-2:] == [f"{point['missed_pages']}", f"{ghost['asked_pages']}"]
        assert total(metrics, "what_if_missed_pages_total", 'tier="host"', size) == point["missed_pages"]
    assert keys(both)[0] == "difference"
    assert "B hits" in both["sections"][0]["text"][0]


def see_that_it_lies_between(address: str, cache: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Under load: no count is below that of an earlier `hicache stats`, or above that of a later one."""
    stop, busy = threading.Event(), threading.Event()

    def work() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            with cache.request(np.arange(number % 7, number % 7 + 64, dtype=np.uint32)) as request:
                request.load()
            busy.set()

    worker = threading.Thread(target=work)
    worker.start()
    looks = []
    try:
        for command in (["stats", address], ["report", "--address", address], ["stats", address]):
            busy.clear()
            assert busy.wait(30)
            assert main([*command, "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            document = found["sources"][0]["documents"]["stats"] if "sources" in found else found
            tokens = document["pools"][0]["statistics"]["tokens"]
            missed = [tokens["missed"].get(name, 0) for name in ("cold", "evicted")]
            looks.append([tokens["asked"], tokens["host"], *missed])
    finally:
        stop.set()
        worker.join()
    before, told, after = looks
    assert before[0] < told[0] < after[0]
    assert all(a <= b <= c for a, b, c in zip(before, told, after, strict=True))


def total(metrics: dict[str, float], name: str, *labels: str) -> float:
    return sum(
        value
        for key, value in metrics.items()
        if key.startswith(f"hicache_{name}{{") and all(label in key for label in labels)
    )


def test_what_cannot_be_is_said_in_a_line(
    small_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad usage, files that are none, and places where nothing can be written; a file is left as it was."""
    keep = tmp_path / "keep.html"
    keep.write_text("before")
    broken = tmp_path / "broken.json"
    broken.write_text('{"service": {"uptime_seconds": 1e999}, "pools": []}')
    cut = tmp_path / "cut.jsonl"
    cut.write_text('{"hicache_sweep": 1}\n{"key"')
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(small_trace.read_bytes()[:2000])
    page = tmp_path / "page.html"
    page.write_text("<!DOCTYPE html>\n<html>")
    few = ("--requests", "5")
    for arguments, words in (
        ((), "0 sources"),
        ((small_trace,) * 3, "3 sources"),
        ((small_trace, "--out", tmp_path / "none" / "r.html"), "its folder does not exist"),
        ((small_trace, "--out", tmp_path), "is a folder"),
        ((copy, "--out", copy), "is a source of the report"),
        ((broken,), "which is no figure"),
        ((cut,), "no whole file of"),
        ((page,), "is a page, as `hicache report` writes it for people; name what it was made of: a trace, a document"),
        ((tmp_path / "none.json",), "cannot be read"),
        ((small_trace, "--format", "pdf"), "use one of html, markdown, json"),
        ((small_trace, "--json", "--format", "html"), "give one of them"),
        ((small_trace, "--trace-format", "csvx"), "--trace-format csvx"),
        ((small_trace, "--device", "0"), "device"),
        ((small_trace, "--jobs", "0"), "--jobs"),
        (("-", "--device", "5"), "can be read only once"),
        (("--address", f"unix://{tmp_path}/none.sock"), "no service answers"),
    ):
        out = () if "--out" in arguments else ("--out", keep)
        assert words in complaint(capsys, *arguments, *few, *out)
    assert keep.read_text() == "before"
    assert "--out: name the file" in complaint(capsys, small_trace)
    monkeypatch.setattr(report_out.os, "replace", refuse)
    assert "No space left" in complaint(capsys, small_trace, *few, "--out", keep)
    assert keep.read_text() == "before"
    assert not list(tmp_path.glob(".*part"))


def refuse(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_names_and_places_of_every_kind(small_trace: Path, tmp_path: Path) -> None:
    """A link stays a link to what is replaced, a pipe is written to, a name that is no UTF-8 is shown by its codes."""
    real, link = tmp_path / "real.html", tmp_path / "link.html"
    link.symlink_to(real)
    report_out.write("text\n", link)
    assert (link.is_symlink(), real.read_text()) == (True, "text\n")
    with pytest.raises(ConfigError, match="name a file that can be written"):
        report_out.check(tmp_path / ("long" * 100), [small_trace])
    report_out.write("text\n", Path(os.devnull))
    odd = tmp_path / os.fsdecode(b"tr\xff<b>.jsonl")
    odd.write_bytes(small_trace.read_bytes()[:3000].rpartition(b"\n")[0])
    assert main(["report", str(odd), "--out", str(tmp_path / "odd.html")]) == 0
    text = (tmp_path / "odd.html").read_text()
    assert "tr\\udcff&lt;b&gt;.jsonl" in text


def test_a_folder_file_by_file_and_what_was_odd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file has a row; broken entries and an unordered trace are said on the page and on stderr."""
    folder = tmp_path / "traces"
    folder.mkdir()
    line = '{"timestamp": %d, "input_length": 512, "output_length": 1, "hash_ids": [%d]}\n'
    (folder / "a.jsonl").write_text(line % (5000, 1) + line % (1000, 1) + "broken\n" + line % (6000, 2))
    (folder / "b.jsonl").write_text(line % (0, 3))
    assert main(["report", str(folder), "--each", "--skip-bad", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert re.search("1 broken entr", " ".join(found["warnings"]))
    assert captured.err.count("\n") == len(found["warnings"])
    ideal = next(section for section in found["sections"] if section["key"] == "ideal")
    (files,) = (table for table in ideal["tables"] if table["columns"][0] == "trace")
    assert [Path(row[0]).name for row in files["rows"]] == ["a.jsonl", "b.jsonl"]


def test_interrupted_it_tells_what_it_has(
    small_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report of what was read, which says so, and exit code 130; nothing is simulated any more."""

    class Asked:
        looks = 0

        def is_set(self) -> bool:
            self.looks += 1
            return self.looks > 40

    monkeypatch.setattr(report, "stop_on_interrupt", lambda: contextlib.nullcontext(Asked()))
    out = tmp_path / "r.json"
    assert main(["report", str(small_trace), "--device", "300", "--out", str(out)]) == 130
    found = json.loads(out.read_text())
    assert list(found["sources"][0]["documents"]) == ["analyze"]
    assert found["sources"][0]["documents"]["analyze"]["requests"] == 40
    assert any("interrupted" in line for line in found["warnings"])
    assert "interrupted" in capsys.readouterr().err


def test_an_access_log_tells_what_really_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its counts are those of the cache that wrote it, by tier and reason; two of them stand side by side."""
    random = np.random.default_rng(5)
    with hicache.open(small_namespace(), device=24, host=40, access_log=tmp_path / "log") as cache:
        engine = FakeEngine(cache)
        for _ in range(40):
            engine.run(prompt(int(random.integers(3)), 20) + prompt(100 + int(random.integers(8)), 30))
        cache.flush()
        pages = cache.statistics().pages
    for found in (as_json(capsys, tmp_path / "log"), as_json(capsys, tmp_path / "log", tmp_path / "log")):
        section = next(section for section in found["sections"] if section["key"] == "recorded")
        rows = {row[0]: row[1:] for row in section["plots"][0]["table"]["rows"]}
        assert int(rows["asked, the sum"][0]) == pages.asked
        assert [int(rows[tier][0]) for tier in ("device", "host", "storage")] == [
            pages.device,
            pages.host,
            pages.storage,
        ]
        assert {name: int(row[0]) for name, row in rows.items() if name.startswith("missed")} == {
            f"missed: {reason}": count for reason, count in pages.missed.items()
        }
        assert found["answers"][0]["figures"][0] == f"{100 * (pages.device + pages.host) / pages.asked:.2f} %"
