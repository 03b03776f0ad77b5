"""What lies under a name: whole, torn, damaged, foreign, newer, or no file at all."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hicache.core.keys import ObjectKey
from hicache.errors import StorageUnavailable
from hicache.storage import codec
from hicache.storage.base import ObjectStatus, StoredObject
from hicache.testing.faults import interpose
from hicache.testing.storage import NAMESPACE, make_chain, make_key, make_object, pattern, read, status_of
from hicache_file import FileBackend, FileSystem

Open = Callable[..., FileBackend]
PathOf = Callable[[FileBackend, ObjectKey], Path]
SIZE = 8192


def flip(path: Path, offset: int, bit: int = 3) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def newer(stored: StoredObject) -> bytes:
    """The object as a later version would write it: another version number, checksums right."""
    header = bytearray(stored.header)
    struct.pack_into("<H", header, 8, codec.VERSION + 1)
    struct.pack_into("<Q", header, len(header) - 8, xxhash.xxh3_64_intdigest(bytes(header[:-8])))
    return bytes(header).ljust(4096, b"\0") + bytes(stored.payload)


@pytest.fixture
def stored() -> StoredObject:
    return make_object(make_key(1), pattern(1, SIZE), depth=2)


def test_a_file_is_header_and_payload_in_whole_4_kib(open_root: Open, path_of: PathOf) -> None:
    backend = open_root()
    for number, length in enumerate((1, 4096, 5000, 300_000)):
        thing = make_object(make_key(number), pattern(number, length))
        backend.put([thing])
        content = path_of(backend, thing.key).read_bytes()
        assert len(content) == 4096 + codec.padded(length)
        assert content[: len(thing.header)] == thing.header
        assert content[4096 : 4096 + length] == bytes(thing.payload)
        assert not any(content[4096 + length :])
        assert not any(content[len(thing.header) : 4096])


def test_a_header_longer_than_one_block_is_read_back(open_root: Open, path_of: PathOf) -> None:
    backend, payload = open_root(), pattern(1, 300_000)
    key = make_key(1)
    tokens = pattern("tokens", 4 * 4096)
    header = codec.encode_header(key, parent_hash=None, depth=0, tokens=tokens, payload=payload)
    assert len(header) > 4096
    assert status_of(backend.put([StoredObject(key, header, memoryview(payload))])) == [ObjectStatus.OK]
    result, back = read(backend, key, len(payload))
    assert result.header is not None
    assert (result.header.tokens, back) == (tokens, payload)
    assert path_of(backend, key).stat().st_size == codec.padded(len(header)) + codec.padded(len(payload))
    again = open_root()
    assert again.statistics().objects == 1
    assert backend.delete([key]) == [True]


@pytest.mark.case("FILE-4")
@pytest.mark.parametrize("offset", [0, 5, 8, 12, 20, 64, 80, 120, 4096, 4096 + SIZE - 1])
def test_one_flipped_bit_is_corrupt_removed_counted_and_healed(
    open_root: Open, path_of: PathOf, stored: StoredObject, offset: int
) -> None:
    backend = open_root()
    backend.put([stored])
    path = path_of(backend, stored.key)
    flip(path, offset)
    result, _ = read(backend, stored.key, SIZE)
    assert result.status is ObjectStatus.CORRUPT
    assert not path.exists()
    assert backend.statistics().by_reason[result.reason] == 1
    assert (backend.statistics().objects, backend.statistics().bytes_used) == (0, 0)
    assert status_of(backend.put([stored])) == [ObjectStatus.OK]
    assert read(backend, stored.key, SIZE)[1] == bytes(stored.payload)


@pytest.mark.case("FILE-4")
def test_two_swapped_files_are_foreign_and_left_alone_until_a_put(open_root: Open, path_of: PathOf) -> None:
    backend = open_root()
    one, two = make_chain(2, SIZE)
    backend.put([one, two])
    first, second = path_of(backend, one.key), path_of(backend, two.key)
    os.rename(first, first.with_suffix(".swap"))
    os.rename(second, first)
    os.rename(first.with_suffix(".swap"), second)
    for thing, path in ((one, first), (two, second)):
        before = path.read_bytes()
        result, _ = read(backend, thing.key, SIZE)
        assert (result.status, result.reason) == (ObjectStatus.MISSING, "foreign")
        assert path.read_bytes() == before
    assert backend.delete([one.key]) == [False]
    assert status_of(backend.put([one, two])) == [ObjectStatus.OK] * 2
    assert read(backend, one.key, SIZE)[1] == bytes(one.payload)
    assert read(backend, two.key, SIZE)[1] == bytes(two.payload)


@pytest.mark.case("FILE-1")
@pytest.mark.parametrize("length", [0, 10, 64, 200, 4096, 4097, 4096 + SIZE - 1])
def test_a_truncated_file_is_a_miss_and_removed(
    open_root: Open, path_of: PathOf, stored: StoredObject, length: int
) -> None:
    backend = open_root()
    backend.put([stored])
    path = path_of(backend, stored.key)
    os.truncate(path, length)
    assert read(backend, stored.key, SIZE)[0].status is ObjectStatus.CORRUPT
    assert not path.exists()


@pytest.mark.case("FILE-1")
@pytest.mark.parametrize("start", [0, 4096])
def test_a_zero_filled_file_is_a_miss_and_removed(
    open_root: Open, path_of: PathOf, stored: StoredObject, start: int
) -> None:
    backend = open_root()
    backend.put([stored])
    path = path_of(backend, stored.key)
    path.write_bytes(path.read_bytes()[:start].ljust(4096 + SIZE, b"\0"))
    assert read(backend, stored.key, SIZE)[0].status is ObjectStatus.CORRUPT
    assert not path.exists()


@pytest.mark.case("FILE-1")
def test_torn_files_are_removed_by_the_scan_too(open_root: Open, path_of: PathOf) -> None:
    backend = open_root()
    things = make_chain(3, SIZE)
    backend.put(things)
    backend.close()
    os.truncate(path_of(backend, things[0].key), 4096 + 100)
    path_of(backend, things[1].key).write_bytes(bytes(4096 + SIZE))
    again = open_root()
    assert again.statistics().objects == 1
    assert again.contains([thing.key for thing in things]) == [False, False, True]


def test_a_newer_version_is_a_miss_and_never_touched(open_root: Open, path_of: PathOf, stored: StoredObject) -> None:
    backend = open_root()
    backend.put([stored])
    path = path_of(backend, stored.key)
    content = newer(stored)
    path.write_bytes(content)
    result, _ = read(backend, stored.key, SIZE)
    assert (result.status, result.reason) == (ObjectStatus.MISSING, "newer")
    (put,) = backend.put([stored])
    assert (put.status, put.reason) == (ObjectStatus.FAILED, "newer")
    assert backend.delete([stored.key]) == [False]
    backend.clear(NAMESPACE, 1)
    assert backend.wait_swept(30)
    assert path.read_bytes() == content


@pytest.mark.case("SEC-1")
def test_another_programs_file_under_our_name_is_never_touched(
    open_root: Open, path_of: PathOf, stored: StoredObject, tmp_path: Path
) -> None:
    backend = open_root()
    backend.put([stored])
    path = path_of(backend, stored.key)
    marker = tmp_path / "marker"
    bomb = b"cposix\nsystem\n(S'touch " + os.fsencode(marker) + b"'\ntR."
    path.write_bytes(bomb)
    result, _ = read(backend, stored.key, SIZE)
    assert (result.status, result.reason) == (ObjectStatus.MISSING, "foreign")
    (put,) = backend.put([stored])
    assert (put.status, put.reason) == (ObjectStatus.FAILED, "foreign_file")
    assert path.read_bytes() == bomb
    assert not marker.exists()


def test_a_corrupt_file_is_not_removed_when_it_was_replaced_meanwhile(
    open_root: Open, path_of: PathOf, stored: StoredObject
) -> None:
    backend = open_root()
    backend.put([stored])
    path = path_of(backend, stored.key)
    good = path.read_bytes()
    flip(path, 5000)
    seen = path.stat()
    path.rename(path.with_suffix(".old"))  # keeps the inode in use, so that it is not given out again
    path.write_bytes(good)
    backend._removal.withdraw(backend._names.place(stored.key), seen)
    assert read(backend, stored.key, SIZE)[0].status is ObjectStatus.OK


@pytest.mark.case("FAIL-3")
def test_a_file_deleted_behind_its_back_is_a_miss_and_stored_again(
    open_root: Open, path_of: PathOf, stored: StoredObject
) -> None:
    backend = open_root()
    backend.put([stored])
    path_of(backend, stored.key).unlink()
    assert backend.contains([stored.key]) == [False]
    assert read(backend, stored.key, SIZE)[0].status is ObjectStatus.MISSING
    assert backend.statistics().bytes_used == 0
    backend.put([stored])
    path_of(backend, stored.key).unlink()
    assert status_of(backend.put([stored])) == [ObjectStatus.OK]
    assert read(backend, stored.key, SIZE)[0].status is ObjectStatus.OK


@pytest.mark.case("FILE-8")
@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "dangling", "socketless"])
def test_what_is_no_file_is_a_miss_at_once_and_stays(
    open_root: Open, path_of: PathOf, stored: StoredObject, tmp_path: Path, kind: str
) -> None:
    backend = open_root()
    backend.put([stored])
    path = path_of(backend, stored.key)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    make = {
        "fifo": lambda: os.mkfifo(path),
        "directory": path.mkdir,
        "link": lambda: path.symlink_to(elsewhere),
        "dangling": lambda: path.symlink_to(tmp_path / "nothing"),
        "socketless": lambda: os.mknod(path, 0o010600),
    }
    make[kind]()
    assert read(backend, stored.key, SIZE)[0].status is ObjectStatus.MISSING
    assert backend.contains([stored.key]) == [False]
    (put,) = backend.put([stored])
    assert (put.status, put.reason) == (ObjectStatus.FAILED, "foreign_file")
    assert backend.delete([stored.key]) == [False]
    assert os.path.lexists(path)
    assert elsewhere.read_bytes()[4096:] == bytes(stored.payload)


@pytest.mark.case("FILE-7", "SEC-2")
@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_a_linked_directory_leads_nowhere(
    open_root: Open, path_of: PathOf, root: Path, stored: StoredObject, tmp_path: Path, level: int
) -> None:
    first = open_root()
    first.put([stored])
    path = path_of(first, stored.key)
    first.close()
    directory = [path.parents[n] for n in range(5)][::-1][level - 1]
    outside = tmp_path / "outside"
    directory.rename(outside)
    directory.symlink_to(outside)
    before = sorted(outside.rglob("*"))
    backend = open_root()
    assert backend.statistics().objects == 0
    assert read(backend, stored.key, SIZE)[0].status is ObjectStatus.MISSING
    assert backend.contains([stored.key]) == [False]
    (put,) = backend.put([stored])
    assert put.status is ObjectStatus.FAILED
    assert backend.delete([stored.key]) == [False]
    assert sorted(outside.rglob("*")) == before


@pytest.mark.case("FAIL-4")
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_what_the_file_system_does_not_tell_is_not_called_absent(open_root: Open, code: int) -> None:
    broken: list[OSError] = []

    def refuse(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "lstat" and broken and "hg1-" in args[0]:
            raise broken[0]

    backend = open_root(fs=interpose(FileSystem(), refuse))
    stored = make_object(make_key(1), pattern(1, 5000))
    backend.put([stored])
    broken.append(OSError(code, "no"))
    for look in (backend.contains, backend.touch):
        with pytest.raises(StorageUnavailable, match="cannot be told"):
            look([make_key(2), stored.key])
    broken.clear()
    assert backend.contains([make_key(2), stored.key]) == backend.touch([make_key(2), stored.key]) == [False, True]
