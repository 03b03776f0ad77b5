"""The root folder: made, refused, lost and found again."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import CacheClosed, ConfigError, StorageUnavailable
from hicache.storage.base import ObjectStatus, StorageUrl
from hicache.storage.registry import open_storage
from hicache.testing.faults import interpose
from hicache.testing.storage import NAMESPACE, make_chain, make_key, make_object, pattern, read, status_of
from hicache_file import FileBackend, FileSystem
from hicache_file.root import MARKER, Root

Open = Callable[..., FileBackend]
SIZE = 8192


def test_an_absent_or_empty_folder_becomes_a_root(open_root: Open, root: Path, tmp_path: Path) -> None:
    open_root()
    assert json.loads((root / MARKER).read_text())["format"] == 1
    empty = tmp_path / "empty"
    (empty / "lost+found").mkdir(parents=True)
    open_root(path=empty)
    assert (empty / MARKER).exists()


def test_a_folder_of_another_program_is_refused_and_untouched(root: Path) -> None:
    root.mkdir()
    (root / "photo.jpg").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"belongs to another program.*photo\.jpg.*empty or absent"):
        FileBackend(str(root))
    assert [path.name for path in root.iterdir()] == ["photo.jpg"]


@pytest.mark.parametrize(
    ("marker", "text"),
    [
        (b'{"format": 2, "fan_out": 256}', "newer.*upgrade"),
        (b'{"format": 1, "fan_out": 0}', "damaged"),
        (b'{"format": "1"}', "damaged"),
        (b"[]", "damaged"),
        (b"", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"[" * 50_000, "damaged"),
    ],
)
def test_a_marker_that_cannot_be_followed_is_refused(root: Path, marker: bytes, text: str) -> None:
    root.mkdir()
    (root / MARKER).write_bytes(marker)
    with pytest.raises(ConfigError, match=text):
        FileBackend(str(root))
    assert (root / MARKER).read_bytes() == marker


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in ("file", "file/below"):
        with pytest.raises(ConfigError, match="is not a folder"):
            FileBackend(str(tmp_path / path))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize("call", ["open", "mkdir"])
def test_an_unwritable_or_full_folder_is_refused_in_one_line(root: Path, code: int, call: str) -> None:
    def refuse(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == call and (call == "mkdir" or args[1] & os.O_CREAT):
            raise OSError(code, os.strerror(code))

    with pytest.raises(ConfigError, match=r"cannot be used.*writable folder") as caught:
        FileBackend(str(root), fs=interpose(FileSystem(), refuse))
    assert "\n" not in str(caught.value)


def test_urls(tmp_path: Path) -> None:
    backend = open_storage(f"file://{tmp_path}/with%20space?capacity=1MiB&fsync=1")
    assert (tmp_path / "with space" / MARKER).exists()
    assert backend.statistics().capacity == 2**20
    backend.close()
    for url in ("file://relative", "file://host/path", "file://", "file:///x?capacity=0", "file:///x?size=1"):
        with pytest.raises(ConfigError):
            FileBackend.from_url(StorageUrl.parse(url))


def test_the_fan_out_belongs_to_the_root_and_not_to_the_opening(open_root: Open, root: Path) -> None:
    first = open_root(capacity=10 * 2**20)
    objects = make_chain(5, SIZE)
    first.put(objects)
    first.close()
    again = open_root()
    assert again.contains([stored.key for stored in objects]) == [True] * 5
    assert json.loads((root / MARKER).read_text())["fan_out"] == 4


def test_a_vanished_folder_fails_quietly_and_is_used_again_when_it_is_back(
    open_root: Open, root: Path, tmp_path: Path
) -> None:
    backend = open_root()
    one, two = make_chain(2, SIZE)
    backend.put([one])
    root.rename(tmp_path / "away")
    result, _ = read(backend, one.key, SIZE)
    assert (result.status, result.reason) == (ObjectStatus.FAILED, "unavailable")
    assert backend.contains([one.key]) == [False]
    (put,) = backend.put([two])
    assert (put.status, put.reason) == (ObjectStatus.FAILED, "unavailable")
    with pytest.raises(StorageUnavailable):
        backend.clear(NAMESPACE, 1)
    assert not root.exists(), "a vanished folder is not made again: it may be an unmounted disk"
    (tmp_path / "away").rename(root)
    assert read(backend, one.key, SIZE)[0].status is ObjectStatus.OK
    assert status_of(backend.put([two])) == [ObjectStatus.OK]


def test_an_emptied_folder_starts_anew(open_root: Open, root: Path) -> None:
    backend = open_root(capacity=2**20)
    objects = make_chain(3, SIZE)
    backend.put(objects)
    shutil.rmtree(root)
    root.mkdir()
    assert status_of(backend.put(objects[2:])) == [ObjectStatus.OK]
    assert backend.statistics().objects == 1
    assert (root / MARKER).exists()
    backend.close()
    assert open_root().statistics().objects == 1


def test_an_empty_folder_of_another_device_is_not_taken_for_ours(open_root: Open, root: Path) -> None:
    backend = open_root()
    shutil.rmtree(root)
    root.mkdir()
    backend._root._device += 1  # as an unmounted disk shows its mount point
    (put,) = backend.put(make_chain(1, SIZE))
    assert (put.status, put.reason) == (ObjectStatus.FAILED, "unavailable")
    assert list(root.iterdir()) == []


def test_a_closed_backend_says_so(open_root: Open) -> None:
    backend = open_root()
    backend.close()
    backend.close()
    stored = make_object(make_key(1), pattern(1, SIZE))
    for call in (
        lambda: backend.put([stored]),
        lambda: backend.get_into([stored.key], [memoryview(bytearray(SIZE))]),
        lambda: backend.contains([stored.key]),
        lambda: backend.touch([stored.key]),
        lambda: backend.delete([stored.key]),
        lambda: backend.generation(NAMESPACE),
        lambda: backend.clear(NAMESPACE, 1),
    ):
        with pytest.raises(CacheClosed):
            call()
    assert backend.statistics().objects == 0


def test_a_clean_close_leaves_no_writer_and_says_how_much_is_used(open_root: Open, root: Path) -> None:
    backend = open_root()
    backend.put(make_chain(3, SIZE))
    backend.close()
    assert list((root / "writers").iterdir()) == []
    content = (root / "HICACHE-LEDGER").read_bytes()
    books = json.loads(content[18 : 18 + int(content[:8], 16)])
    assert (books["used"], books["writers"], books["doubt"]) == (3 * (4096 + SIZE + 256), {}, False)


def test_temporary_files_of_the_dead_are_swept_and_of_the_living_kept(open_root: Open, root: Path) -> None:
    first = open_root()
    first.put(make_chain(1, SIZE))
    leaf = next(path for path in root.rglob("*hg1-*")).parent
    living = Root(FileSystem(), str(root), capacity=None)
    for directory in (leaf, root, leaf.parents[2]):
        (directory / f"{living.token}-1.hicache-tmp").write_bytes(b"half")
        (directory / "00000000deadbeef-1.hicache-tmp").write_bytes(b"half")
    (root / "writers" / "00000000deadbeef.lock").write_bytes(b"")
    (leaf / "other.hicache-tmp").write_bytes(b"theirs")
    first.close()
    open_root()
    left = sorted(path.name for path in root.rglob("*.hicache-tmp"))
    assert left == [f"{living.token}-1.hicache-tmp"] * 3 + ["other.hicache-tmp"]
    assert not (root / "writers" / "00000000deadbeef.lock").exists()
    living.leave()


def test_two_on_one_root_do_not_spoil_each_other(open_root: Open) -> None:
    one, two = open_root(), open_root()
    objects = make_chain(20, SIZE)
    one.put(objects[:10])
    two.put(objects[5:])
    for backend in (one, two):
        assert all(read(backend, stored.key, SIZE)[1] == bytes(stored.payload) for stored in objects)
    assert one.statistics().objects == 20, "what another process wrote counts once it is read"
    two.delete([objects[0].key])
    assert read(one, objects[0].key, SIZE)[0].status is ObjectStatus.MISSING
