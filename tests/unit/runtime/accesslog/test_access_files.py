"""Files of the access log: bounded, and whatever becomes of the disk, what is whole stays readable."""

from __future__ import annotations

import logging
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hicache.runtime.accesslog.files import LogFiles, is_log


def open_files(folder: Path, *, file_bytes: int = 100, total_bytes: int = 350, at: float = 0.0) -> LogFiles:
    return LogFiles(folder, file_bytes=file_bytes, total_bytes=total_bytes, wall=lambda: at)


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.iterdir())]


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Files take no more than so many bytes: a write behind that is cut, then refused, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_files_end_at_their_size_and_the_oldest_go(tmp_path: Path) -> None:
    """All of them stay within the bound, also while the newest one grows; what is not ours is left alone."""
    (tmp_path / "notes.jsonl.gz").write_bytes(bytes(1000))
    files = open_files(tmp_path)
    for number in range(10):
        assert files.append(bytes([number]) * 60)
        ours = [path for path in tmp_path.iterdir() if is_log(path.name)]
        assert sum(path.stat().st_size for path in ours) <= 350
    files.close()
    assert contents(tmp_path) == [bytes([number]) * 60 for number in (5, 6, 7, 8, 9)] + [bytes(1000)]
    assert (files.files, files.bytes) == (10, 600)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir() if is_log(path.name))


def test_a_restart_begins_behind_what_is_there(tmp_path: Path) -> None:
    """Nothing that an earlier process has left is written to, and all of it counts for the bound."""
    for life in range(8):
        files = open_files(tmp_path, at=1000.0 * life)
        files.append(bytes([life]) * 90)
        files.close()
    assert contents(tmp_path) == [bytes([life]) * 90 for life in (5, 6, 7)]


def test_several_processes_share_a_folder(tmp_path: Path) -> None:
    """They rotate at the same time, and remove each other's old files; each goes on writing."""
    first, second = open_files(tmp_path, at=1.0), open_files(tmp_path, at=2.0)
    for number in range(20):
        assert first.append(b"a" * 60)
        assert second.append(b"b" * 60)
        assert len(list(tmp_path.iterdir())) <= 6, number
    first.close()
    second.close()
    assert contents(tmp_path)[-1] == b"b" * 60


def test_a_full_disk_loses_blocks_and_leaves_no_half(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A block that is cut is taken back; it is told once, and writing goes on when there is room again."""
    files = open_files(tmp_path, file_bytes=1000, total_bytes=3000)
    assert files.append(b"a" * 60)
    with disk_of(100), caplog.at_level(logging.WARNING):
        assert not files.append(b"b" * 60)
        assert not files.append(b"c" * 60)
    assert files.trouble == "File too large"
    assert caplog.text.count("cannot be written") == 1
    assert files.append(b"d" * 60)
    assert files.trouble == ""
    files.close()
    assert contents(tmp_path) == [b"a" * 60 + b"d" * 60]


def test_a_file_that_was_removed_or_moved_is_begun_anew(tmp_path: Path) -> None:
    files = open_files(tmp_path, file_bytes=1000, total_bytes=3000)
    files.append(b"a")
    (path,) = tmp_path.iterdir()
    path.unlink()
    assert files.append(b"b")
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / "kept")
    assert files.append(b"c")
    files.close()
    assert contents(tmp_path) == [b"c", b"b"]


def test_a_folder_that_goes_and_comes_back(tmp_path: Path) -> None:
    """Removed, it is made again; where another thing stands in its place, blocks are lost until that is gone."""
    folder = tmp_path / "log"
    files = open_files(folder)
    files.append(b"a")
    shutil.rmtree(folder)
    assert files.append(b"b")
    shutil.rmtree(folder)
    folder.touch()
    assert not files.append(b"c")
    assert files.trouble in ("File exists", "Not a directory")
    folder.unlink()
    assert files.append(b"d")
    files.close()
    files.close()
    assert contents(folder) == [b"d"]
