"""What somebody meets who tries the command for the first time: pipes, signals, moved folders, too small tiers."""

from __future__ import annotations

import gzip
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hicache.analytics.run import ReplayOptions
from hicache.analytics.run import replay as replay_trace
from hicache.analytics.traces import Trace, open_trace

ENDS = 60  # seconds a command may take before the test gives up on it
COMMAND = [sys.executable, "-m", "hicache"]


def hicache(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[Any]:
    options = {"text": True, "capture_output": True} | options
    return subprocess.run([*COMMAND, *map(str, arguments)], timeout=ENDS, check=False, **options)


def one_line(done: subprocess.CompletedProcess[Any], *words: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


def test_a_trace_may_be_piped_in(small_trace: Path) -> None:
    """Its head is looked at to know the format, and must not be lost."""
    named = json.loads(hicache("replay", small_trace, "--requests", "200", "--json").stdout)
    piped = hicache("replay", "-", "--requests", "200", "--json", input=small_trace.read_text())
    assert (piped.returncode, piped.stderr) == (0, "")
    result = json.loads(piped.stdout)
    for changing in ("seconds", "requests_per_second"):
        named.pop(changing)
        result.pop(changing)
    assert result == named


def test_a_session_may_be_piped_in(tmp_path: Path) -> None:
    turns = [{"t": float(t), "type": "n", "in": 128, "out": 1, "hash_ids": [1, 2]} for t in range(3)]
    text = json.dumps({"block_size": 64, "hash_id_scope": "local", "requests": turns})
    done = hicache("replay", "-", "--json", input=text)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["pages_device"] == 4


def test_what_is_wrong_with_standard_input_is_said() -> None:
    one_line(hicache("replay", "-", input="hello\n"), "standard input: this is no trace")
    one_line(hicache("replay", "-", "-", input=""), "name - once")
    done = hicache("replay", "-", input='{"timestamp": 0, "input_length": 5, "output_length": 1}\n')
    assert done.returncode == 2
    assert "standard input, line 1: the field hash_ids is missing" in done.stderr
    one_line(subprocess_with_closed_input("replay", "-"), "standard input: it is closed")


def subprocess_with_closed_input(*arguments: str) -> subprocess.CompletedProcess[Any]:
    line = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=ENDS, check=False)


def test_pipes_by_name_are_refused_with_what_to_do(tmp_path: Path, small_trace: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    one_line(hicache("replay", tmp_path / "pipe"), "no regular file", "name -")
    one_line(hicache("replay", "/dev/stdin", input=small_trace.read_text()), "no regular file", "name -")


def test_wrapped_traces_say_how_to_unwrap_them(tmp_path: Path, small_trace: Path) -> None:
    text = small_trace.read_bytes()[:20_000]
    for content, words in (
        (gzip.compress(gzip.compress(text)), "compressed again; unpack it once"),
        (b"PK\x03\x04" + bytes(9), "a zip archive; unpack it"),
        (b"\xef\xbb\xbf" + text, "byte order mark; save it as UTF-8 without one"),
        (text.decode().encode("utf-16"), "UTF-16 text; save it as UTF-8"),
    ):
        path = tmp_path / "trace.jsonl"
        path.write_bytes(content)
        one_line(hicache("replay", path), str(path), words)
        one_line(hicache("replay", path, "--format", "mooncake", "--skip-bad"), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["replay", "T", "--devic", "10"],
            "--devic 10: no such option here, or too many arguments; see hicache replay --help",
        ),
        (["replay"], "TRACE: is missing"),
        (["replay", "T", "--host"], "--host: needs a value"),
        (["replay", "T", "--json=1"], "--json '1': takes no value"),
        (["nonsense"], "COMMAND nonsense: use one of"),
    ],
)
def test_usage_errors_name_the_option_and_the_value(arguments: list[str], words: str) -> None:
    done = hicache(*arguments)
    one_line(done, words, "--help")
    assert "argument " not in done.stderr


def test_help_shows_the_choices() -> None:
    text = hicache("replay", "--help").stdout
    for choices in (
        "lru|lfu|slru|priority",
        "write_through|write_through_selective|write_back",
        "auto, access-log, mooncake",
    ):
        assert choices in " ".join(text.split())


def test_choices_of_the_command_are_those_of_the_library() -> None:
    from hicache.cli import replay
    from hicache.core.config import WRITE_POLICIES
    from hicache.core.eviction import POLICIES
    from hicache.runtime.options import PREFETCH_MODES

    assert set(replay.EVICTION) <= set(POLICIES)  # there may be some of somebody's own
    assert set(replay.WRITE_POLICIES) == set(WRITE_POLICIES)
    assert set(replay.PREFETCH) == set(PREFETCH_MODES)


def test_a_device_smaller_than_one_prompt_is_said_and_counted(small_trace: Path) -> None:
    done = hicache("replay", small_trace, "--device", "10", "--requests", "3", "--json")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert result["requests_refused"] == 3
    assert result["misses_by_reason"]["over_budget"] == result["pages_missed"] == result["pages_asked"]
    need = max(len(json.loads(line)["hash_ids"]) for line in small_trace.read_text().splitlines()[:3])
    assert done.stderr == (
        f"hicache: --device 10: 3 of 3 requests refused, as one prompt needs up to {need} pages at once; "
        f"they are missed as over_budget: give at least {need}\n"
    )
    enough = hicache("replay", small_trace, "--device", str(need), "--requests", "3", "--json")
    assert enough.stderr == ""
    assert json.loads(enough.stdout)["requests_refused"] == 0


def slow_trace(small_trace: Path, folder: Path) -> Path:
    """Two requests, the later one a day after the first."""
    first = small_trace.read_text().splitlines()[0]
    trace = folder / "trace.jsonl"
    trace.write_text(first + "\n" + first.replace('"timestamp": 0', '"timestamp": 86400000') + "\n")
    return trace


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_replay_and_what_was_reached_is_printed(small_trace: Path, tmp_path: Path, number: int) -> None:
    arguments = [*COMMAND, "replay", str(slow_trace(small_trace, tmp_path)), "--speed", "real", "--json"]
    screen, terminal = pty.openpty()  # a terminal, so that the progress bar tells when it has begun
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=terminal, text=True)
    os.close(terminal)
    try:
        assert select.select([screen], [], [], ENDS)[0], "nothing on the terminal"
        process.send_signal(number)
        output, _ = process.communicate(timeout=ENDS)
    finally:
        process.kill()
        process.wait()
        os.close(screen)
    assert process.returncode == 130
    assert json.loads(output)["interrupted"] is True


def test_termination_outside_a_replay_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hicache.cli import main, replay

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(replay, "run", lambda options: signal.raise_signal(signal.SIGTERM))
    assert main(["replay", "-"]) == 130
    assert capsys.readouterr().err == "hicache: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is before


def small(storage: str) -> ReplayOptions:
    return ReplayOptions(device_pages=40, host_pages=40, page_bytes=512, storage=storage, requests=6)


def test_a_folder_that_is_moved_away_is_named_with_what_to_do(tmp_path: Path, small_trace: Path) -> None:
    folder = tmp_path / "store"
    moved = threading.Event()

    def move(done: int, total: int) -> None:
        if not moved.is_set() and folder.exists():
            folder.rename(tmp_path / "elsewhere")
            moved.set()

    trace: Trace = open_trace([small_trace])
    result = replay_trace(trace, small(f"file://{folder}"), progress=move)
    assert moved.is_set()
    said = [*result.warnings, result.bad_input]
    assert any(f"--storage file://{folder}: " in line and "name another place" in line for line in said)
    assert sum(result.storage_trouble_by_reason.values()) > 0
    assert not result.problems


@pytest.mark.case("STAT-1")
def test_damaged_objects_are_counted_and_said(tmp_path: Path, small_trace: Path) -> None:
    url = f"file://{tmp_path}/store"
    first = replay_trace(open_trace([small_trace]), small(url))
    assert not first.storage_trouble_by_reason
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size >= 4608]
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        data[4096 + 5] ^= 0xFF
        path.write_bytes(data)
    again = replay_trace(open_trace([small_trace]), small(url))
    assert again.pages_wrong == 0
    assert again.storage_trouble_by_reason.get("payload_checksum", 0) > 0
    assert any("damaged objects were found (payload_checksum" in line for line in again.warnings)
    assert not again.problems
