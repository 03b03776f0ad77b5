"""Generations, clearing and manifests: only this namespace, only our files, and for good."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.core.keys import ObjectKey
from hicache.errors import InvalidInput, StorageUnavailable
from hicache.storage.base import ObjectStatus
from hicache.testing.faults import interpose
from hicache.testing.gates import Gate
from hicache.testing.storage import NAMESPACE, make_chain, make_key, make_object, pattern, read, status_of
from hicache_file import FileBackend, FileSystem

Open = Callable[..., FileBackend]
PathOf = Callable[[FileBackend, ObjectKey], Path]
SIZE = 8192
OTHER = bytes(16)


def snapshot(folder: Path) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.case("FILE-7")
def test_clear_removes_one_namespace_and_nothing_else(
    open_root: Open, root: Path, path_of: PathOf, tmp_path: Path
) -> None:
    backend = open_root()
    mine = make_chain(20, SIZE)
    others = [make_object(make_key(i, namespace=OTHER), pattern(i, SIZE)) for i in range(20)]
    backend.put(mine + others)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / path_of(backend, mine[0].key).name).write_bytes(b"precious")
    leaf = path_of(backend, mine[0].key).parent
    (root / "notes.txt").write_bytes(b"theirs")
    (leaf / "notes.txt").write_bytes(b"theirs")
    (leaf / "link").symlink_to(outside)
    linked = path_of(backend, mine[1].key)
    linked.unlink()
    linked.symlink_to(outside / path_of(backend, mine[0].key).name)
    before = snapshot(outside)

    backend.clear(NAMESPACE, 1)
    assert backend.wait_swept(30)

    assert backend.contains([stored.key for stored in mine]) == [False] * 20
    assert all(read(backend, stored.key, SIZE)[1] == bytes(stored.payload) for stored in others)
    assert snapshot(outside) == before
    assert (root / "notes.txt").read_bytes() == b"theirs"
    assert (leaf / "notes.txt").read_bytes() == b"theirs"
    assert (leaf / "link").is_symlink()
    assert linked.is_symlink()
    assert backend.statistics().objects == 20


def test_clear_leaves_no_directories_of_its_own_behind(open_root: Open, root: Path) -> None:
    backend = open_root()
    backend.put(make_chain(20, SIZE))
    backend.clear(NAMESPACE, 1)
    assert backend.wait_swept(30)
    namespace = root / NAMESPACE.hex()[:2] / NAMESPACE.hex()
    assert [path.name for path in namespace.iterdir()] == ["GENERATION"]


def test_a_generation_survives_and_old_objects_are_swept_at_the_next_start(open_root: Open, path_of: PathOf) -> None:
    backend = open_root()
    chain = make_chain(5, SIZE)
    backend.put(chain)
    content = path_of(backend, chain[0].key).read_bytes()
    backend.clear(NAMESPACE, 7)
    assert backend.wait_swept(30)
    backend.close()
    late = path_of(backend, chain[0].key)  # a writer that died between its rename and its look at the generation
    late.parent.mkdir(parents=True)
    late.write_bytes(content)
    again = open_root()
    assert again.generation(NAMESPACE) == 7
    assert not late.exists()
    assert again.statistics().objects == 0


def test_a_write_that_a_clear_overtakes_leaves_nothing(open_root: Open, root: Path) -> None:
    gate, armed = Gate(), [True]

    def hold(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "rename_new" and "hg1-" in args[1] and armed:
            armed.clear()
            gate.enter()

    backend = open_root(fs=interpose(FileSystem(), hold))
    stored = make_object(make_key(1), pattern(1, SIZE))
    results: list[Any] = []
    writing = threading.Thread(target=lambda: results.extend(backend.put([stored])))
    writing.start()
    gate.until_arrived()
    backend.clear(NAMESPACE, 1)
    gate.open()
    writing.join(30)
    assert (results[0].status, results[0].reason) == (ObjectStatus.FAILED, "cleared")
    assert backend.wait_swept(30)
    assert not list(root.rglob("*hg1-*"))
    assert backend.statistics().bytes_used == 0
    assert backend._space.usage() == (0, 0)
    assert backend._space.standing().idle == backend._space.standing().held


def test_clearing_an_empty_or_unknown_namespace_is_fine(open_root: Open) -> None:
    backend = open_root()
    backend.clear(OTHER, 0)
    assert backend.generation(OTHER) == 0
    backend.clear(OTHER, 2**64 - 1)
    assert backend.generation(OTHER) == 2**64 - 1
    assert backend.wait_swept(30)


def test_an_unreadable_generation_never_brings_back_what_was_cleared(open_root: Open, root: Path) -> None:
    backend = open_root()
    backend.clear(NAMESPACE, 3)
    assert backend.wait_swept(30)
    backend.put([make_object(make_key(1, generation=3), pattern(1, SIZE))])
    (root / NAMESPACE.hex()[:2] / NAMESPACE.hex() / "GENERATION").write_bytes(b"\0\0")
    assert backend.generation(NAMESPACE) == 4
    assert backend.generation(NAMESPACE) == 4
    backend.clear(NAMESPACE, 5)
    assert backend.generation(NAMESPACE) == 5


def test_a_generation_that_cannot_be_written_is_an_error(open_root: Open) -> None:
    broken = [False]

    def refuse(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name in ("rename", "rename_new") and broken[0]:
            raise OSError(5, "broken")

    backend = open_root(fs=interpose(FileSystem(), refuse))
    broken[0] = True
    with pytest.raises(StorageUnavailable, match="cannot be written"):
        backend.clear(NAMESPACE, 1)
    assert backend.generation(NAMESPACE) == 0
    assert status_of(backend.put([make_object(make_key(1), pattern(1, SIZE))])) == [ObjectStatus.FAILED]


def test_manifests_have_a_limit_and_survive(open_root: Open, root: Path) -> None:
    backend = open_root()
    with pytest.raises(InvalidInput, match="above"):
        backend.write_manifest(NAMESPACE, bytes(65_537))
    backend.write_manifest(NAMESPACE, b"x" * 65_536)
    backend.clear(NAMESPACE, 1)
    assert backend.wait_swept(30)
    backend.close()
    again = open_root()
    assert again.read_manifests() == {NAMESPACE: b"x" * 65_536}
    (root / "zz").mkdir()
    assert len(again.read_manifests()) == 1
