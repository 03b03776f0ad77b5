from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

import hicache
from hicache.core.recorder import mark
from hicache.core.recordings import is_recording, read_segments, untorn
from hicache.core.replayer import Replayer
from hicache.errors import CacheClosed, ConfigError, HicacheInternalError
from hicache.runtime.flight import Flight, FlightRecorder, flight_recorder, remove_old
from hicache.storage.memory import MemoryBackend
from hicache.testing.engine import FakeEngine, prompt, small_namespace


def _open(recorder: object, **options: object) -> hicache.EmbeddedCache:
    defaults: dict[str, object] = {"device": 32, "host": 32, "storage": MemoryBackend()}
    return hicache.open(small_namespace(), flight_recorder=recorder, **(defaults | options))  # type: ignore[arg-type]


def _replayed(data: bytes) -> Replayer:
    replayer = None
    for header, entries in read_segments(data):
        replayer = replayer or Replayer(header)
        for entry in entries:
            replayer.repeat(entry)
    assert replayer is not None
    return replayer


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("given", [0, 1, 2.5, "", b"folder", [], object()])
def test_what_is_no_setting_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="flight_recorder="):
        flight_recorder(given)


@pytest.mark.parametrize(
    "fields", [{"segment_bytes": 100}, {"segment_bytes": 2.0}, {"keep": -1}, {"keep": True}, {"folder": 1}]
)
def test_bad_numbers_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        FlightRecorder(**fields)


def test_settings_by_value(tmp_path: Path) -> None:
    assert flight_recorder(None) is None
    assert flight_recorder(False) is None
    assert flight_recorder(True) == FlightRecorder()
    assert flight_recorder(str(tmp_path)) == flight_recorder(tmp_path) == FlightRecorder(folder=tmp_path)
    given = FlightRecorder(segment_bytes=9000)
    assert flight_recorder(given) is given


def test_off_is_the_default_and_says_so() -> None:
    with hicache.open(small_namespace(), device=8) as cache:
        assert cache.parts.flight is None
        with pytest.raises(ConfigError, match="flight_recorder=True"):
            cache.dump_recording("x.hcr")


@pytest.mark.parametrize("storage", [True, False])
def test_a_dump_replays_to_the_same_state(tmp_path: Path, storage: bool) -> None:
    with _open(True, **({} if storage else {"storage": None})) as cache:
        engine = FakeEngine(cache)
        for seed in range(30):
            engine.run(prompt(seed % 7, 4 * (seed % 5) + 9))
        cache.flush()
        cache.clear()
        engine.run(prompt(1, 30))
        cache.flush()
        cache.dump_recording(tmp_path / "dump.hcr")
        data = (tmp_path / "dump.hcr").read_bytes()
        assert is_recording(data[:256])
        replayer = _replayed(data)
        assert replayer.steps > 100
        assert mark(replayer.core) == mark(cache.parts.core)
        replayer.core.check()
    with pytest.raises(CacheClosed):
        cache.dump_recording(tmp_path / "dump.hcr")


def test_a_dump_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with _open(True) as cache, pytest.raises(ConfigError, match="No such file or directory"):
        cache.dump_recording(tmp_path / "absent" / "dump.hcr")


def test_a_folder_has_the_last_two_segments(tmp_path: Path) -> None:
    with _open(FlightRecorder(tmp_path, segment_bytes=4096)) as cache:
        engine = FakeEngine(cache)
        for seed in range(60):
            engine.run(prompt(seed, 30))
        cache.flush()
        names = _files(tmp_path)
        assert len(names) == 2
        assert all(name.startswith(f"flight-{os.getpid()}-") for name in names)
        first, second = sorted((untorn((tmp_path / name).read_bytes()) for name in names), key=_number)
        assert _number(second) == _number(first) + 1 > 2
        assert mark(_replayed(first + second).core) == mark(_replayed(second).core) == mark(cache.parts.core)
        assert (tmp_path / names[0]).stat().st_mode & 0o077 == 0  # hashes of prompts are nobody else's affair
    assert _files(tmp_path) == []  # it ended in order


def _number(data: bytes) -> int:
    return next(read_segments(data))[0].number


def test_two_caches_share_a_folder(tmp_path: Path) -> None:
    with _open(tmp_path) as one, _open(tmp_path) as other:
        FakeEngine(one).run(prompt(1, 30))
        FakeEngine(other).run(prompt(2, 30))
        assert len(_files(tmp_path)) == 2
    assert _files(tmp_path) == []


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"flight_recorder: .*file cannot be used"):
        _open(tmp_path / "file")


def test_a_full_disk_at_opening_is_one_line_and_later_it_goes_on_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    flight = Flight(FlightRecorder(tmp_path))
    flight.begin(5000)[:4] = b"\x01\0\0\0"
    monkeypatch.setattr(os, "posix_fallocate", full)
    buffer = flight.begin(5000)
    assert len(buffer) == 5000
    assert "goes on in memory" in caplog.text
    assert len(_files(tmp_path)) == 1  # what was begun and could not be had is gone
    flight.close()
    assert _files(tmp_path) == []
    with pytest.raises(ConfigError, match="No space left"):
        _open(tmp_path)
    assert _files(tmp_path) == []


def test_old_recordings_go_and_others_stay(tmp_path: Path) -> None:
    flight = Flight(FlightRecorder(tmp_path))
    flight.begin(5000)
    alive = _files(tmp_path)
    for age, name in enumerate(["flight-1-00000001-7.hcr", "failure-1-00000002.hcr", "flight-1-00000003-0.hcr"]):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / "flight-1-00000003-1.hcr").write_bytes(b"x")  # the newest of all, so its recording stays
    others = ["flight.hcr", "notes.txt", "flight-1-0000000g-7.hcr"]
    for name in others:
        (tmp_path / name).write_text("precious")
    os.utime(tmp_path / alive[0], (1, 1))
    remove_old(tmp_path, keep=2)
    kept = ["flight-1-00000001-7.hcr", "flight-1-00000003-0.hcr", "flight-1-00000003-1.hcr"]
    assert _files(tmp_path) == sorted([*alive, *kept, *others])
    remove_old(tmp_path, keep=0)
    assert _files(tmp_path) == sorted([*alive, *others])
    flight.close()


def test_a_broken_invariant_leaves_a_recording_and_says_how_to_repeat_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = _open(FlightRecorder(tmp_path, segment_bytes=1 << 16))
    FakeEngine(cache).run(prompt(1, 30))
    cache.flush()
    cache.parts.core.registry.tables[0].pins[3] += 1
    caplog.set_level(logging.ERROR)
    for _ in range(2):
        with pytest.raises(HicacheInternalError):
            cache.check()
    (failure,) = [name for name in _files(tmp_path) if name.startswith("failure-")]
    assert f"hicache replay {tmp_path / failure}" in caplog.text
    assert caplog.text.count("hicache replay") == 1
    cache.close()
    assert len(_files(tmp_path)) == 2  # the segments stay, too
    assert _replayed((tmp_path / failure).read_bytes()).steps > 10


def test_in_memory_a_failure_goes_to_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with _open(True) as cache:
        cache.parts.reducer.post(lambda: 1 / 0)  # what nobody can handle
        assert cache.statistics().internal_errors == 1
    (failure,) = _files(tmp_path)
    assert failure.startswith("failure-")
    assert f"ZeroDivisionError: division by zero; what led to it is in {tmp_path / failure}" in caplog.text


def test_a_failure_that_cannot_be_written_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with _open(True) as cache:
        cache.parts.reducer.post(lambda: 1 / 0)
        cache.statistics()
    assert "the recording cannot be written" in caplog.text
