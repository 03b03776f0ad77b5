"""Names: bounded, injective, stable, inside the root, spread over directories."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.core.identity import Namespace
from hicache.core.keys import ObjectKey, Shard
from hicache.core.layout import KVGeometry
from hicache.errors import NamespaceError
from hicache.storage.base import ObjectStatus
from hicache.testing.storage import SHARD, make_key, make_object, pattern, read
from hicache_file import FileBackend
from hicache_file.names import Names, temp_writer

Open = Callable[..., FileBackend]
PathOf = Callable[[FileBackend, ObjectKey], Path]
SIZE = 4096
GEOMETRY = KVGeometry.mha(layers=2, kv_heads=2, head_dim=8, dtype="float16")


def digest_of(model: str, salt: str | None = None) -> bytes:
    namespace = Namespace(model=model, revision="r", geometry=GEOMETRY, page_size=16)
    return namespace.derive(salt=salt).digest if salt else namespace.digest


def check_apart(backend: FileBackend, namespaces: list[bytes], root: Path, path_of: PathOf) -> None:
    """Each namespace keeps its own payload of one page, under the root."""
    assert len(set(namespaces)) == len(namespaces)
    objects = [
        make_object(make_key(1, namespace=namespace), pattern(i, SIZE)) for i, namespace in enumerate(namespaces)
    ]
    for stored in objects:
        assert backend.put([stored])[0].status is ObjectStatus.OK
    for stored in objects:
        result, payload = read(backend, stored.key, SIZE)
        assert result.status is ObjectStatus.OK
        assert payload == bytes(stored.payload)
        path = path_of(backend, stored.key)
        assert path.resolve().is_relative_to(root.resolve())
        assert len(path.name.encode()) <= 255


@pytest.mark.case("KEY-1")
def test_model_names_that_look_alike_are_apart(open_root: Open, root: Path, path_of: PathOf) -> None:
    models = [
        "meta-llama/Llama-3",
        "meta-llama-Llama-3",
        "meta-llama_Llama-3",
        "meta-llama-SEP-Llama-3",
        "meta-llama%2FLlama-3",
        "a/b",
        "a-b",
        "A/b",
    ]
    check_apart(open_root(), [digest_of(model) for model in models], root, path_of)


@pytest.mark.case("SEC-2")
def test_names_that_are_paths_stay_inside_the_root(open_root: Open, root: Path, path_of: PathOf) -> None:
    accepted = []
    for text in ("../../etc", "/etc/x", "a\0b", ".", "..", "", "CON", "x" * 10_000, "\ud800", "~", "$HOME", "a\nb"):
        for make in (digest_of, lambda t: digest_of("model", t)):
            try:
                accepted.append(make(text))
            except NamespaceError:
                continue  # refused in words is as good
    check_apart(open_root(), sorted(set(accepted)), root, path_of)
    assert sorted(p.name for p in root.parent.iterdir()) == ["root"]


@pytest.mark.case("FILE-2")
def test_long_names_work_in_every_verb_and_do_not_collide(open_root: Open, root: Path, path_of: PathOf) -> None:
    backend = open_root()
    namespaces = [
        digest_of("m" * 300),
        digest_of("m" * 299 + "n"),
        digest_of("é" * 200),
        digest_of("path/" * 30, "s" * 128),
    ]
    check_apart(backend, namespaces, root, path_of)
    for namespace in namespaces:
        key = make_key(1, namespace=namespace)
        assert backend.contains([key]) == [True]
        assert backend.touch([key]) == [True]
        assert backend.delete([key]) == [True]
        backend.clear(namespace, 1)
        backend.write_manifest(namespace, b"{}")
    assert len(backend.read_manifests()) == len(namespaces)


@pytest.mark.case("FILE-2")
def test_the_longest_name_is_far_from_the_limit() -> None:
    shard = Shard("hg1-" + "f" * 16, (65534, 65535), 65534)
    key = ObjectKey(b"\xff" * 16, 2**64 - 1, b"\xff" * 32, shard)
    place = Names("/root", 256).place(key)
    assert all(len(part) <= 120 for part in place.path.split("/"))


def test_names_are_stable() -> None:
    place = Names("/r", 16).place(make_key(1))
    assert place.path == (
        "/r/48/489eab8c489ec9b82d99fabac76a6397/0/06/05/0621a1c111cfd4554a172d9ecd490a9a_hg1-0123456789abcdef_L0-4_H0"
    )


def test_ids_lead_back_to_places() -> None:
    names = Names("/r", 256)
    for key in (
        make_key(1),
        make_key(2, generation=7),
        make_key(3, hash_size=32),
        make_key(1, shard=Shard(SHARD.geometry, (1, 2))),
    ):
        place = names.place(key)
        assert names.place_of(place.id) == place
        namespace, generation, name = key.name.split("/")
        assert names.parse(namespace, str(generation), place.leaf, name) == key
        assert names.parse(namespace, str(generation), place.leaf + 1, name) is None


def test_only_our_temporary_files_are_recognised() -> None:
    assert temp_writer("0123456789abcdef-1f.hicache-tmp") == "0123456789abcdef"
    for name in ("x.hicache-tmp", "0123456789abcdef-.hicache-tmp", "0123456789ABCDEF-1.hicache-tmp", "a.tmp", ""):
        assert temp_writer(name) is None


@pytest.mark.case("FILE-3")
def test_twenty_thousand_objects_spread_over_directories() -> None:
    names = Names("/r", 256)
    leaves: dict[str, int] = {}
    for number in range(20_000):
        key = ObjectKey(bytes(16), 0, hashlib.blake2b(number.to_bytes(8, "big"), digest_size=16).digest(), SHARD)
        leaves[names.place(key).path.rpartition("/")[0]] = leaves.get(names.place(key).path.rpartition("/")[0], 0) + 1
    firsts = {leaf.rpartition("/")[0] for leaf in leaves}
    assert max(leaves.values()) < 16
    assert len(firsts) <= 256


@pytest.mark.case("FILE-3")
def test_no_directory_of_a_full_store_is_large(open_root: Open, root: Path) -> None:
    backend = open_root(capacity=2 * 2**30)
    payload = pattern(1, 64)
    objects = [make_object(make_key(number), payload) for number in range(3_000)]
    backend.put(objects)
    assert backend.statistics().objects == 3_000
    assert max(len(list(directory.iterdir())) for directory in root.rglob("*") if directory.is_dir()) <= 300
    assert all(backend.contains([stored.key for stored in objects]))
    backend.close()
    again = open_root()
    assert again.statistics().objects == 3_000
    again.clear(objects[0].key.namespace, 1)
    assert again.wait_swept(60)
    assert again.statistics().objects == 0
    assert not [path for path in root.rglob("*hg1-*") if path.is_file()]
