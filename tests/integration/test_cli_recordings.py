"""Recordings of real caches, repeated by the real command: of runs that fail, and of processes that were killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hicache.core.cache import Core
from hicache.core.config import CoreConfig
from hicache.core.recorder import RecordedCore
from hicache.core.recordings import HEAD, MemorySegments, put_entry, read_segments, untorn
from hicache.errors import HicacheInternalError
from hicache.testing.choices import SeededChoices
from hicache.testing.coredriver import CoreDriver

ENDS = 60  # seconds a command may take before the test gives up on it

# A bug of the core that breaks an invariant now and then: one page too many is believed to be stored.
BUG = """
from hicache.core import copies

right = copies.Copies.raise_belief

def wrong(self, node):
    right(self, node)
    if node.believed >= 5 and node.stamp > 100:
        node.believed = node.pages + 1

copies.Copies.raise_belief = wrong
"""

FAILING = """
import random, sys
import hicache
from hicache.errors import HicacheInternalError
from hicache.runtime.flight import FlightRecorder
from hicache.storage.memory import MemoryBackend
from hicache.testing.engine import FakeEngine, prompt, small_namespace

recorder = FlightRecorder(sys.argv[1] or None, segment_bytes=int(sys.argv[2]))
cache = hicache.open(small_namespace(), device=40, host=40, storage=MemoryBackend(), flight_recorder=recorder)
engine = FakeEngine(cache)
choice = random.Random(5)
try:
    for _ in range(300):
        engine.run(prompt(choice.randrange(99), choice.randrange(60)))
        cache.check()
except HicacheInternalError as error:
    print(cache.parts.core._inputs, error, flush=True)
"""

ENDLESS = """
import random, sys
import hicache
from hicache.runtime.flight import FlightRecorder
from hicache.testing.engine import FakeEngine, prompt, small_namespace

recorder = FlightRecorder(sys.argv[1], segment_bytes=int(sys.argv[2]))
with hicache.open(small_namespace(), device=40, host=40, storage="memory://", flight_recorder=recorder) as cache:
    engine = FakeEngine(cache)
    choice = random.Random(int(sys.argv[3]))
    while True:
        engine.run(prompt(choice.randrange(99), choice.randrange(60)))
        print(end=".", flush=True)
"""


def python(program: str, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=ENDS, check=False, **options)


def hicache(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return python("import sys; from hicache.cli import main; sys.exit(main())", *arguments, **options)


@pytest.fixture
def with_bug(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python whose hicache has the bug."""
    folder = tmp_path / "bug"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BUG)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["memory", "folder"])
@pytest.mark.parametrize("segment_bytes", [4096, 1 << 20])
def test_a_failing_run_fails_at_the_same_step_again(
    tmp_path: Path, with_bug: dict[str, str], where: str, segment_bytes: int
) -> None:
    folder = tmp_path / "flight" if where == "folder" else tmp_path
    done = python(FAILING, folder if where == "folder" else "", str(segment_bytes), env=with_bug)
    assert done.returncode == 0, done.stderr
    step, _, error = done.stdout.strip().partition(" ")
    assert "believes" in error
    (recording,) = folder.glob("failure-*.hcr")
    assert f"hicache replay {recording}" in done.stderr

    again = hicache("replay", recording, "--json", env=with_bug)
    assert again.returncode == 1
    result = json.loads(again.stdout)
    assert (result["outcome"], result["operation"], result["failure"]) == ("failed", "check", error)
    assert result["last_step"] == int(step)
    assert (result["first_step"] > 1) == (segment_bytes == 4096)
    assert again.stderr == f"hicache: the recording failed at step {step} (check): {error}\n"

    repaired = hicache("replay", recording)
    assert repaired.returncode == 0, repaired.stderr
    assert repaired.stdout.startswith("OK: ")


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize(("segment_bytes", "requests"), [(4096, 40), (4096, 41), (1 << 20, 1), (1 << 20, 30)])
def test_what_a_killed_process_did_is_repeated(tmp_path: Path, segment_bytes: int, requests: int) -> None:
    folder = tmp_path / "flight"
    command = [sys.executable, "-c", ENDLESS, str(folder), str(segment_bytes), str(requests)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.read(requests) == b"." * requests
        finally:
            process.send_signal(signal.SIGKILL)
    files = list(folder.glob("flight-*.hcr"))
    assert len(files) == (2 if segment_bytes == 4096 else 1)
    done = hicache("replay", folder, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["outcome"] == "ok"
    assert result["inputs"] >= requests
    assert (result["first_step"] > 1) == (segment_bytes == 4096)
    for file in files:  # each segment can be repeated alone
        assert hicache("replay", file).returncode == 0
    assert hicache("replay", *files).returncode == 0


@pytest.fixture(scope="module")
def recorded() -> bytes:
    segments = MemorySegments()
    config = CoreConfig(8, 8, storage=True)
    driver = CoreDriver(SeededChoices(1), config, core=RecordedCore(config, segments, segment_bytes=2000))
    for _ in range(100):
        driver.step()
    return segments.dump()


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    from hicache.cli import main

    code = main(["replay", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_tables_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: bytes) -> None:
    path = tmp_path / "any name"
    path.write_bytes(recorded)
    code, out, err = run(capsys, path)
    assert (code, err) == (0, "")
    assert out.startswith("OK: ")
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["pages", "device", "host"]


@pytest.mark.parametrize("options", [["--device", "5"], ["--skip-bad"], ["--page-size", "64", "--seed", "2"]])
def test_options_of_a_trace_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: bytes, options: list[str]
) -> None:
    path = tmp_path / "a.hcr"
    path.write_bytes(recorded)
    code, out, err = run(capsys, path, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert options[0] in err


def test_a_recording_beside_a_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: bytes, small_trace: Path
) -> None:
    path = tmp_path / "a.hcr"
    path.write_bytes(recorded)
    code, out, err = run(capsys, small_trace, path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(small_trace) in err


def damaged(recorded: bytes, how: str) -> bytes:
    middle = len(recorded) // 2
    if how == "a bit":
        return recorded[:middle] + bytes([recorded[middle] ^ 4]) + recorded[middle + 1 :]
    if how == "cut":
        return recorded[:middle]
    if how == "its end":
        return recorded + b"x"
    if how == "its start":
        return b"x" + recorded
    if how == "nothing":
        return b""
    if how == "zeros":
        return bytes(5000)
    return b"\x00" * 8 + recorded


@pytest.mark.parametrize("how", ["a bit", "cut", "its end", "its start", "nothing", "zeros", "zeros before"])
def test_a_damaged_recording_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: bytes, how: str
) -> None:
    path = tmp_path / "a.hcr"
    path.write_bytes(damaged(recorded, how))
    code, out, err = run(capsys, path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "damaged" in err
    assert str(path) in err


def test_another_version_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.core.recorder.VERSION", 9)
    segments = MemorySegments()
    RecordedCore(CoreConfig(8), segments)
    path = tmp_path / "a.hcr"
    path.write_bytes(segments.dump())
    code, out, err = run(capsys, path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "version 9; this hicache reads version 3" in err


def test_more_than_one_recording_is_refused_with_the_newest_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: bytes
) -> None:
    for age, name in enumerate(["flight-7-0000000a-3.hcr", "flight-7-0000000a-4.hcr", "failure-8-0000000b.hcr"]):
        (tmp_path / name).write_bytes(recorded)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    code, out, err = run(capsys, tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{tmp_path}/flight-7-0000000a*.hcr" in err


class KeptSegments:
    def __init__(self) -> None:
        self.kept: list[bytearray] = []

    def begin(self, size: int) -> memoryview:
        self.kept.append(bytearray(size))
        return memoryview(self.kept[-1])


def test_a_gap_between_segments_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segments = KeptSegments()
    config = CoreConfig(8, 8, storage=True)
    driver = CoreDriver(SeededChoices(1), config, core=RecordedCore(config, segments, segment_bytes=2000))
    while len(segments.kept) < 4:
        driver.step()
    first, _, third, *_ = (untorn(bytes(raw)) for raw in segments.kept)
    for number, data in enumerate((first, third)):
        (tmp_path / f"flight-1-0000000a-{number}.hcr").write_bytes(data)
    code, out, err = run(capsys, tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "segment 2 does not follow segment 0" in err


def of_another_core(data: bytes) -> bytes:
    """The recording as if its core had had one page more."""
    header, _ = next(read_segments(data))
    size = HEAD.unpack_from(data)[0]
    value = msgspec.msgpack.encode(msgspec.structs.replace(header, config=CoreConfig(9, 8, storage=True)))
    buffer = bytearray(HEAD.size + len(value))
    put_entry(memoryview(buffer), 0, value)
    return bytes(buffer) + data[HEAD.size + size :]


def test_a_replay_that_goes_another_way_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segments = MemorySegments()
    config = CoreConfig(8, 8, storage=True)
    driver = CoreDriver(SeededChoices(1), config, core=RecordedCore(config, segments))
    for _ in range(20):
        driver.step()
    path = tmp_path / "a.hcr"
    path.write_bytes(of_another_core(segments.dump()))
    code, out, err = run(capsys, path)
    assert (code, err.count("\n")) == (1, 1)
    assert out.startswith("DIVERGED: ")
    assert err.startswith("hicache: the recording diverged at step 1: ")


def test_an_end_that_breaks_an_invariant_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(core: Core) -> None:
        raise HicacheInternalError(f"{core.config.device_pages} pages are too many")

    monkeypatch.setattr(Core, "check", broken)
    path = tmp_path / "a.hcr"
    path.write_bytes(recorded)
    code, out, err = run(capsys, path)
    assert code == 1
    assert out.startswith("FAILED: ")
    assert err == "hicache: the recording failed at its end: 8 pages are too many\n"


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, tmp_path / "absent.hcr")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "absent.hcr: No such file" in err
