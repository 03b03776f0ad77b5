"""`hicache replay` as users run it: real processes, real files, real bytes."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ENDS = 60  # seconds a command may take before the test gives up on it


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-c", "import sys; from hicache.cli import main; sys.exit(main())", *map(str, arguments)]


def hicache(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=ENDS, check=False, **options)


def replay(*arguments: str | Path) -> dict[str, Any]:
    done = hicache("replay", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # nothing but the result when piped, no progress bar either
    result: dict[str, Any] = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    tiers = sum(result[f"pages_{tier}"] for tier in ("device", "host", "storage"))
    assert result["pages_asked"] == tiers + result["pages_missed"]
    assert sum(result["misses_by_reason"].values()) == result["pages_missed"]
    return result


def unlimited_hits(trace: Path, requests: int | None = None) -> tuple[int, int]:
    """Pages hit and asked with a cache that keeps everything, counted from the trace alone."""
    seen: set[int] = set()
    hits = asked = 0
    for line in trace.read_text().splitlines()[:requests]:
        ids = json.loads(line)["hash_ids"]
        asked += len(ids)
        hits += next((at for at, name in enumerate(ids) if name not in seen), len(ids))
        seen.update(ids)
    return hits, asked


def files_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_unlimited_cache_has_the_known_hit_rate(small_trace: Path) -> None:
    result = replay(small_trace, "--page-size", "trace", "--device", "unlimited")
    hits, asked = unlimited_hits(small_trace)
    assert (result["pages_device"], result["pages_asked"]) == (hits, asked)
    assert result["hit_rate_pages"] == pytest.approx(hits / asked)
    assert result["requests"] == 1000
    assert result["misses_by_reason"]["cold"] == result["pages_missed"]


@pytest.mark.parametrize("eviction", ["lru", "lfu", "slru", "priority"])
def test_small_device_evicts_and_says_so(small_trace: Path, eviction: str) -> None:
    result = replay(small_trace, "--device", "2000", "--eviction", eviction)
    assert 0 < result["pages_device"] < unlimited_hits(small_trace)[0]
    assert result["misses_by_reason"]["evicted"] > 0


def test_same_seed_same_numbers(small_trace: Path) -> None:
    first, second = (replay(small_trace, "--device", "1500", "--host", "2000", "--requests", "400") for _ in range(2))
    for changing in ("seconds", "requests_per_second"):
        first.pop(changing)
        second.pop(changing)
    assert first == second


@pytest.mark.case("FAIL-8")
@pytest.mark.case("KEY-4")
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_three_tiers_keep_every_byte_over_processes(small_trace: Path, tmp_path: Path, policy: str) -> None:
    sizes = ["--device", "300", "--host", "700", "--storage", f"file://{tmp_path}/store?capacity=1GiB"]
    options = [*sizes, "--page-bytes", "8192", "--requests", "200", "--write-policy", policy]
    first = replay(small_trace, *options)
    assert first["pages_wrong"] == 0
    assert first["pages_verified"] == first["pages_asked"] - first["pages_missed"] > 0
    assert first["bytes_device_to_host"] > 0
    assert first["bytes_to_storage"] > 0

    again = replay(small_trace, *options[:-3], "1", "--write-policy", policy)
    assert again["pages_wrong"] == 0
    if policy == "write_through":  # others store what was used again, or evicted in time
        assert again["pages_storage"] == again["pages_asked"]
    assert again["pages_storage"] > 0
    assert again["bytes_from_storage"] == 8192 * again["pages_storage"]


def test_another_seed_shares_nothing(small_trace: Path, tmp_path: Path) -> None:
    sizes = ["--device", "100", "--host", "200", "--storage", f"file://{tmp_path}/store"]
    options = [*sizes, "--page-bytes", "4096", "--requests", "5"]
    assert replay(small_trace, *options)["bytes_to_storage"] > 0
    assert replay(small_trace, *options, "--seed", "1")["pages_storage"] == 0
    assert replay(small_trace, *options)["pages_storage"] > 0


def test_folder_stays_within_its_capacity(small_trace: Path, tmp_path: Path) -> None:
    capacity, in_flight = 2 * 2**20, 2**20
    sizes = ["--device", "300", "--host", "300", "--storage", f"file://{tmp_path}/store?capacity={capacity}"]
    result = replay(small_trace, *sizes, "--page-bytes", "4096", "--requests", "100")
    assert result["bytes_to_storage"] > capacity
    assert files_below(tmp_path / "store") <= capacity + in_flight


@pytest.mark.parametrize(("page", "requests"), [("64", "12"), ("512", "40"), ("1024", "300")])
def test_pages_of_tokens(small_trace: Path, tmp_path: Path, page: str, requests: str) -> None:
    sizes = ["--device", "8MiB", "--host", "8MiB", "--storage", f"file://{tmp_path}/store"]
    result = replay(small_trace, "--page-size", page, *sizes, "--page-bytes", "1KiB", "--requests", requests)
    lines = small_trace.read_text().splitlines()[: int(requests)]
    assert result["pages_asked"] == sum(json.loads(line)["input_length"] // int(page) for line in lines)
    assert result["pages_verified"] > 0
    assert result["pages_wrong"] == 0


@pytest.mark.case("STAT-2")
@pytest.mark.parametrize(
    "text",
    ["", "\n", '{"timestamp": 0, "input_length": 0, "output_length": 0, "hash_ids": []}\n'],
    ids=["empty", "blank", "no tokens"],
)
def test_nothing_to_replay_is_told(tmp_path: Path, text: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    done = hicache("replay", trace, "--json")
    warning = "" if "{" in text else f"hicache: {trace}: there are no requests in it; check the trace\n"
    assert (done.returncode, done.stderr) == (1 if warning else 0, warning)  # a script has seldom meant it
    result = json.loads(done.stdout)
    assert result["pages_asked"] == 0
    assert result["hit_rate_pages"] == result["hit_rate_tokens"] == 0
    assert hicache("replay", trace).returncode == done.returncode


def test_session_files_and_tables(tmp_path: Path) -> None:
    turns = [
        {"t": float(t), "type": "n", "in": 64 * (t + 2) + 3, "out": 1, "hash_ids": list(range(t + 2))} for t in range(5)
    ]
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps({"block_size": 64, "hash_id_scope": "local", "requests": turns}))
    done = hicache("replay", tmp_path)
    assert done.returncode == 0
    assert "10 requests" in done.stdout
    assert "answered by" in done.stdout
    assert replay(tmp_path)["pages_device"] == 2 * (2 + 3 + 4 + 5)


BAD_OPTIONS = {
    "negative device": (["--device", "-1"], "--device -1"),
    "no device": (["--device", "0"], "--device 0"),
    "absurd device": (["--device", "1000000000000"], "--device 1000000000000"),
    "absurd host": (["--host", "9999EiB", "--page-bytes", "4096"], "--host"),
    "device size is no size": (["--device", "lots"], "--device lots: is not a number with a unit"),
    "unlimited host": (["--host", "unlimited"], "--host unlimited: only --device"),
    "requests are no number": (["--requests", "ten"], "--limit ten: is not a whole number"),
    "seed is no number": (["--seed", "1.5"], "--seed 1.5: is not a whole number"),
    "storage room for less than a page": (
        ["--storage", "memory://?capacity=1000", "--host", "10", "--page-bytes", "4096", "--device", "10"],
        "--storage memory://?capacity=1000: its capacity of 1000 B is less than one page",
    ),
    "storage without slashes": (
        ["--storage", "file:s2", "--host", "10", "--page-bytes", "4096", "--device", "10"],
        "lacks '//'",
    ),
    "device bytes without page bytes": (["--device", "1GiB"], "--page-bytes"),
    "less than a page": (["--device", "1KiB", "--page-bytes", "4096"], "needs at least 1 page"),
    "unlimited bytes": (["--device", "unlimited", "--page-bytes", "4096"], "--device unlimited"),
    "negative page bytes": (["--page-bytes", "-4096"], "--page-bytes"),
    "absurd page bytes": (["--page-bytes", "1TiB"], "--page-bytes 1TiB"),
    "page size is no number": (["--page-size", "big"], "--page-size big"),
    "page size 0": (["--page-size", "0"], "--page-size 0"),
    "page size does not divide": (["--page-size", "100"], "use 64"),
    "unknown eviction": (["--eviction", "random"], "--eviction random: use one of lru, lfu, slru, priority"),
    "unknown write policy": (["--write-policy", "sometimes"], "--write-policy sometimes: use one of"),
    "unknown prefetch": (["--prefetch", "maybe"], "--prefetch maybe: use one of"),
    "negative requests": (["--requests", "-3"], "--limit -3"),
    "absurd requests": (["--requests", "1" + "0" * 30], "--limit 1e+30"),
    "speed 0": (["--speed", "0"], "--speed 0"),
    "speed is NaN": (["--speed", "nan"], "--speed nan"),
    "unknown format": (["--format", "parquet"], "--format parquet: use one of"),
    "storage without host": (["--storage", "memory://", "--page-bytes", "4096"], "--host"),
    "storage without bytes": (["--storage", "memory://", "--host", "10"], "--page-bytes"),
    "unknown scheme": (
        ["--storage", "s4://x", "--host", "10", "--page-bytes", "4096", "--device", "10"],
        "served by no installed package",
    ),
    "storage is no URL": (["--storage", "folder", "--host", "10", "--page-bytes", "4096", "--device", "10"], "folder"),
    "unknown storage parameter": (
        ["--storage", "memory://?speed=9", "--host", "10", "--page-bytes", "4096", "--device", "10"],
        "speed",
    ),
    "slot tables larger than memory": (["--device", "2147483648", "--host", "2147483648"], "does not fit"),
    "host larger than memory": (["--host", "900TiB", "--page-bytes", "1MiB", "--device", "10"], "TiB"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_one_line(small_trace: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    from hicache.cli import main

    options, hint = BAD_OPTIONS[name]
    assert main(["replay", str(small_trace), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert hint in captured.err


def bad_folder(name: str, folder: Path) -> Path:
    if name == "a file":
        path = folder / "file"
        path.write_text("x")
    elif name == "another program's":
        path = folder / "foreign"
        path.mkdir()
        (path / "data.db").write_text("precious")
    else:
        path = Path("/proc/hicache")  # nobody can write there, not even root
    return path


@pytest.mark.parametrize("name", ["a file", "another program's", "unwritable"])
def test_bad_folder_is_one_line_and_left_alone(small_trace: Path, tmp_path: Path, name: str) -> None:
    path = bad_folder(name, tmp_path)
    before = sorted(str(file) for file in tmp_path.rglob("*"))
    options = ["--host", "10", "--device", "10", "--page-bytes", "4096", "--storage", f"file://{path}"]
    done = hicache("replay", small_trace, *options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert str(path) in done.stderr
    assert sorted(str(file) for file in tmp_path.rglob("*")) == before


def test_storage_that_takes_nothing_is_bad_input(small_trace: Path) -> None:
    options = ["--host", "100", "--device", "100", "--page-bytes", "4096", "--requests", "5", "--json"]
    # Room for the page by itself and a short header, not for the header that it gets.
    done = hicache("replay", small_trace, *options, "--storage", "memory://?capacity=4170B")
    assert done.returncode == 2
    assert "--storage memory://?capacity=4170B: took none of" in done.stderr
    assert "too_large" in done.stderr
    assert "raise it" in done.stderr
    assert done.stderr.count("\n") == 1
    assert json.loads(done.stdout)["requests"] == 5  # what was reached is not lost


def test_broken_line_is_named_and_what_was_reached_is_kept(small_trace: Path, tmp_path: Path) -> None:
    lines = small_trace.read_text().splitlines()[:5]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join([*lines[:3], "{oops", *lines[3:]]))
    done = hicache("replay", trace, "--json")
    assert done.returncode == 2
    assert done.stderr.startswith(f"hicache: {trace}, line 4: ")
    assert done.stderr.count("\n") == 1
    assert json.loads(done.stdout)["requests"] == 3
    result = replay(trace, "--skip-bad")
    assert (result["requests"], result["entries_skipped"]) == (5, 1)


@pytest.mark.case("SEC-1")
def test_pickle_as_a_trace(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.")
    done = hicache("replay", trace)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not marker.exists()


def test_reader_that_leaves_early_is_no_error(small_trace: Path) -> None:
    process = subprocess.Popen(
        command("replay", small_trace, "--requests", "5"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(ENDS) == 0
    assert error == ""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_closed_streams_are_no_error(small_trace: Path, closed: str, form: list[str]) -> None:
    line = ["sh", "-c", f'exec "$@" {closed}', "sh", *command("replay", small_trace, "--requests", "5", *form)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=ENDS, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_does_not_fit_is_one_line(small_trace: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("replay", small_trace, "--requests", "5"),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=ENDS,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("hicache: the output cannot be written: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["a pipe", "a pipe named as a recording", "too long a name"])
def test_paths_that_are_no_files_are_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / {"a pipe": "t.jsonl", "too long a name": "x" * 300}.get(name, "t.hcr")
    if name != "too long a name":
        os.mkfifo(path)
    done = hicache("replay", path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"hicache: {path}: ")
    assert done.stderr.count("\n") == 1


def slow_trace(small_trace: Path, folder: Path) -> Path:
    """Three requests, the later ones a day after the first."""
    first = small_trace.read_text().splitlines()[0]
    later = first.replace('"timestamp": 0', '"timestamp": 86400000')
    trace = folder / "trace.jsonl"
    trace.write_text(f"{first}\n{later}\n{later}\n")
    return trace


def test_interrupt_ends_a_wait(small_trace: Path, tmp_path: Path) -> None:
    arguments = command("replay", slow_trace(small_trace, tmp_path), "--speed", "real", "--json")
    screen, terminal = pty.openpty()  # a terminal, so that the progress bar tells when it has begun
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=terminal, text=True)
    os.close(terminal)
    try:
        assert select.select([screen], [], [], ENDS)[0], "nothing on the terminal"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=ENDS)
    finally:
        process.kill()
        process.wait()
        os.close(screen)
    assert process.returncode == 130
    assert json.loads(output)["interrupted"] is True


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ctrl-C comes while the second request waits for its time: as often as the test says."""
    from hicache.analytics.pace import Pace

    times: list[int] = []

    def wait(pace: Pace, at: float, speed: float) -> None:
        if at:
            for _ in range(times[0]):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Pace, "_wait", wait)
    return times


def test_interrupt_keeps_what_was_reached(
    small_trace: Path, tmp_path: Path, interrupts: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    from hicache.cli import main

    interrupts.append(1)
    assert main(["replay", str(slow_trace(small_trace, tmp_path)), "--speed", "real", "--json"]) == 130
    result = json.loads(capsys.readouterr().out)
    assert (result["interrupted"], result["requests"], result["pages_asked"]) == (True, 1, 14)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_does_not_wait(
    small_trace: Path, tmp_path: Path, interrupts: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    from hicache.cli import main

    interrupts.append(2)
    assert main(["replay", str(slow_trace(small_trace, tmp_path)), "--speed", "real"]) == 130
    assert capsys.readouterr() == ("", "hicache: interrupted\n")
