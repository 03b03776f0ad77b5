"""What is found out about a file system: its kind, its locks, its names, and how it is written best."""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import ConfigError
from hicache.storage.base import ObjectStatus, StoredObject
from hicache.testing.storage import make_key, make_object, pattern, read
from hicache_file import FileBackend, FileSystem
from hicache_file.files import DIRECT_FROM
from hicache_file.locks import LockFile
from hicache_file.measuring import IoChoice, IoMode
from hicache_file.mounts import Mount, mount_of, parse_mounts
from hicache_file.root import Root

Open = Callable[..., FileBackend]
LARGE = 2 * 2**20

TABLE = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:45 / /data rw,relatime shared:9 - nfs4 server:/data rw,vers=4.2,local_lock=none
31 22 0:46 / /data/old rw,relatime - nfs server:/old rw,vers=3,nolock
32 22 0:47 / /with\040space rw,relatime - cifs //server/x rw,nobrl
33 22 0:48 / /home/me/s3 rw,nosuid - fuse.rclone rclone: rw
34 22 0:49 / /data/scratch rw - tmpfs tmpfs rw
35 34 0:50 / /data/scratch rw - ceph mon:/ rw
a broken line - x
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/", Mount("ext4")),
        ("/var/cache", Mount("ext4")),
        ("/database", Mount("ext4")),
        ("/data", Mount("nfs4", network=True)),
        ("/data/x/y", Mount("nfs4", network=True)),
        ("/data/old/x", Mount("nfs", network=True, locks_reach=False)),
        ("/with space/x", Mount("cifs", network=True, locks_reach=False)),
        ("/home/me/s3", Mount("fuse.rclone", network=True)),
        ("/data/scratch/x", Mount("ceph", network=True)),
    ],
)
def test_the_mount_of_a_path(path: str, mount: Mount) -> None:
    assert parse_mounts(TABLE, path) == mount


def test_an_unknown_mount_counts_as_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert mount_of(str(tmp_path)).locks_reach
    monkeypatch.setattr("hicache_file.mounts._MOUNTS", str(tmp_path / "nothing"))
    assert mount_of("/") == Mount()


# --- names that are given once --------------------------------------------------------------------------------------


@pytest.fixture(params=["renameat2", "link", "look"])
def fs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FileSystem:
    if request.param != "renameat2":
        monkeypatch.setattr("hicache_file.filesystem._renameat2", None)
    if request.param == "look":

        def no_links(source: str, target: str) -> None:
            raise PermissionError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", no_links)
    return FileSystem()


def test_a_new_name_is_given_once(fs: FileSystem, tmp_path: Path) -> None:
    one, two, name = (str(tmp_path / n) for n in ("one", "two", "name"))
    Path(one).write_bytes(b"1")
    Path(two).write_bytes(b"2")
    fs.rename_new(one, name)
    with pytest.raises(FileExistsError):
        fs.rename_new(two, name)
    assert sorted(os.listdir(tmp_path)) == ["name", "two"]
    assert Path(name).read_bytes() == b"1"
    with pytest.raises(FileNotFoundError):
        fs.rename_new(one, str(tmp_path / "other"))


# --- locks ----------------------------------------------------------------------------------------------------------


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    one, two = (LockFile(FileSystem(), str(tmp_path / "lock")) for _ in range(2))
    assert one.try_lock()
    assert one.try_lock()
    assert not two.try_lock()
    one.release()
    assert two.try_lock(shared=True)
    assert one.try_lock(shared=True)
    for lock in (one, two):
        lock.close()
        lock.close()


def test_a_lock_on_a_file_that_was_removed_is_worth_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    one, two = (LockFile(FileSystem(), str(path)) for _ in range(2))
    assert one.try_lock()
    path.unlink()
    assert two.try_lock()
    assert not one.check()
    assert not one.try_lock()
    two.close()


def test_a_lock_is_not_made_in_a_folder_that_is_not_ours_any_more(tmp_path: Path) -> None:
    lock = LockFile(FileSystem(), str(tmp_path / "lock"), lambda: False)
    with pytest.raises(FileNotFoundError):
        lock.try_lock()
    assert not (tmp_path / "lock").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_does_not_keep_the_locks_of_its_parent(tmp_path: Path) -> None:
    lock = LockFile(FileSystem(), str(tmp_path / "lock"))
    assert lock.try_lock()
    read_end, write_end = os.pipe()
    up_read, up_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.write(up_write, b"x")
        os.read(read_end, 1)  # lives until the parent lets it end
        os._exit(0)
    os.close(read_end)
    os.read(up_read, 1)
    os.close(up_read)
    os.close(up_write)
    lock.close()
    other = LockFile(FileSystem(), str(tmp_path / "lock"))
    taken = other.try_lock()
    os.close(write_end)
    os.waitpid(child, 0)
    other.close()
    assert taken


# --- direct or through the page cache -------------------------------------------------------------------------------


class Timed(FileSystem):
    """Takes as long as the test says, on a clock of its own; has direct writes or not."""

    def __init__(self, *, direct: dict[int, float], buffered: dict[int, float], has_direct: bool = True) -> None:
        self.seconds = 0.0
        self.costs = {True: direct, False: buffered}
        self.has_direct = has_direct
        self.opened: dict[int, bool] = {}
        self.written = 0

    def clock(self) -> float:
        return self.seconds

    def free(self, path: str) -> int:
        return 2**40

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        direct = bool(flags & os.O_DIRECT)
        if direct and not self.has_direct:
            raise OSError(errno.EINVAL, "no direct I/O")
        fd = super().open(path, flags & ~os.O_DIRECT, mode)
        self.opened[fd] = direct
        return fd

    def pwrite(self, fd: int, content: bytes | memoryview, offset: int) -> int:
        length = memoryview(content).nbytes
        if length >= DIRECT_FROM:
            self.seconds += self.costs[self.opened[fd]][length]
            self.written += length
        return super().pwrite(fd, content, offset)


SMALL = 256 * 1024
FAST, SLOW = {SMALL: 0.001, LARGE: 0.004}, {SMALL: 0.002, LARGE: 0.008}
MIXED = {SMALL: 0.003, LARGE: 0.004}


@pytest.mark.parametrize(
    ("direct", "buffered", "least"),
    [(FAST, SLOW, SMALL), (SLOW, FAST, None), (MIXED, SLOW, LARGE)],
    ids=["direct is faster", "the cache is faster", "direct is faster for large ones"],
)
def test_what_is_measured_is_done_and_kept(root: Path, direct: Any, buffered: Any, least: int | None) -> None:
    fs = Timed(direct=direct, buffered=buffered)
    opened = Root(fs, str(root), capacity=None)
    choice = IoChoice(fs, opened, IoMode.AUTO, clock=fs.clock)
    assert choice.first() == DIRECT_FROM
    assert not choice.measured
    assert choice.measure() == least
    assert fs.seconds < 0.35
    again = IoChoice(fs, opened, IoMode.AUTO, clock=fs.clock)
    assert again.first() == least
    assert again.measured
    assert not list(root.glob("*.hicache-tmp"))
    note = json.loads((root / "HICACHE-IO").read_text())
    note["device"] += 1  # the folder was moved to another disk
    (root / "HICACHE-IO").write_text(json.dumps(note))
    assert IoChoice(fs, opened, IoMode.AUTO).first() == DIRECT_FROM
    (root / "HICACHE-IO").write_text("{")
    assert IoChoice(fs, opened, IoMode.AUTO).first() == DIRECT_FROM
    opened.leave()


def test_a_very_slow_disk_is_measured_no_longer_than_it_must_be(root: Path) -> None:
    fs = Timed(direct={SMALL: 1.0, LARGE: 5.0}, buffered={SMALL: 2.0, LARGE: 10.0})
    opened = Root(fs, str(root), capacity=None)
    IoChoice(fs, opened, IoMode.AUTO, clock=fs.clock).measure()
    assert fs.written <= 2 * 4 * LARGE, "one file each way, then the time was over"
    stopped = IoChoice(fs, opened, IoMode.AUTO, clock=fs.clock)
    assert stopped.measure(stopped=lambda: True) == DIRECT_FROM
    opened.leave()


def test_without_direct_writes_the_cache_is_used_unless_they_were_asked_for(open_root: Open, root: Path) -> None:
    fs = Timed(direct=FAST, buffered=FAST, has_direct=False)
    opened = Root(fs, str(root), capacity=None)
    choice = IoChoice(fs, opened, IoMode.AUTO, clock=fs.clock)
    assert choice.measure() is None
    assert IoChoice(fs, opened, IoMode.AUTO).first() is None
    opened.leave()
    with pytest.raises(ConfigError, match="without direct I/O") as caught:
        open_root(io="direct", fs=fs)
    assert "\n" not in str(caught.value)
    assert not list((root / "writers").iterdir())


def test_a_nearly_full_disk_is_not_filled_for_a_measurement(root: Path) -> None:
    fs = Timed(direct=FAST, buffered=SLOW)
    fs.free = lambda path: 2**20  # type: ignore[method-assign]
    opened = Root(fs, str(root), capacity=None)
    assert IoChoice(fs, opened, IoMode.AUTO, clock=fs.clock).measure() == DIRECT_FROM
    assert fs.written == 0
    opened.leave()


@pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
@pytest.mark.parametrize("size", [8192, LARGE])
def test_each_way_of_writing_keeps_every_byte(open_root: Open, io: str, size: int) -> None:
    backend = open_root(io=io)
    memory = memoryview(mmap.mmap(-1, size))
    for number in range(3):
        memory[:] = pattern(number, 4096) * (size // 4096)
        stored = make_object(make_key(number), bytes(memory))
        (result,) = backend.put([StoredObject(stored.key, stored.header, memory)])
        assert result.status is ObjectStatus.OK
        assert read(backend, stored.key, size)[1] == bytes(memory)
    assert backend._files.direct_from == {"direct": 0, "buffered": None}.get(io, backend._files.direct_from)


def test_the_first_large_object_has_it_measured(open_root: Open, root: Path) -> None:
    backend = open_root()
    backend.put([make_object(make_key(1), pattern(1, 4096))])
    assert not backend._opened.io.measured
    backend.put([make_object(make_key(2), bytes(DIRECT_FROM))])
    backend.close()  # the thread ends what it does
    assert backend._opened.io.measured
