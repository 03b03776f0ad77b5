"""What `fsck` says of a store, and what it removes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache.errors import ConfigError
from hicache.storage import codec
from hicache.storage.base import ListedObject, ObjectKey, StoredObject
from hicache.storage.codec import Verdict
from hicache.storage.fsck import check_storage
from hicache.storage.memory import MemoryBackend
from hicache.storage.registry import configured
from hicache.testing.faults import DamageableMemory
from hicache.testing.objects import NAMESPACE, make_chain, make_key, make_object, pattern

SIZE = 1000


class ListedMemory(DamageableMemory):
    """Lists what it has, a foreign name too, and each name twice, as a scan may."""

    def list_objects(self) -> Iterator[ListedObject]:
        for key, entry in list(self._entries.items()):
            yield from [ListedObject(key.name, entry.size, key)] * 2
        yield ListedObject("somebody's", 5)

    def check_object(self, key: ObjectKey) -> Verdict | None:
        entry = self._entries.get(key)
        return None if entry is None else codec.verify(key, entry.header, memoryview(entry.payload))


def chain(pages: int, *, generation: int = 0) -> list[StoredObject]:
    """Pages that name each other as parents."""
    made, parent = [], None
    for depth in range(pages):
        key, payload = make_key(depth, generation=generation), pattern(depth, SIZE)
        header = codec.encode_header(key, parent_hash=parent, depth=depth, tokens=b"", payload=payload)
        made.append(StoredObject(key, header, memoryview(payload)))
        parent = key.page_hash
    return made


@pytest.fixture
def store() -> ListedMemory:
    return ListedMemory()


def test_a_store_that_is_well(store: ListedMemory) -> None:
    objects = chain(4)
    store.put(objects)
    store.write_manifest(NAMESPACE, b'{"model": "llama\\u0007"}')
    told: list[tuple[int, int]] = []
    result = check_storage(configured(store), progress=lambda done, total: told.append((done, total)))
    assert (result.objects, result.checked, result.ok, result.foreign) == (4, 4, 4, 1)
    assert (result.corrupt, result.cleared, result.unreachable, result.removed) == (0, 0, 0, 0)
    (use,) = result.namespaces
    assert (use.namespace, use.model, use.objects) == (NAMESPACE.hex(), "llama", 4)
    assert use.bytes == result.bytes == store.statistics().bytes_used
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4), (5, 5)]
    assert result.document()["namespaces"][0]["objects"] == 4


def test_damage_is_told_and_removed_only_when_asked(store: ListedMemory) -> None:
    one, two, foreign = chain(3)
    store.put([one, two])
    store.damage(one.key)
    store.plant(foreign.key, two.header, bytes(two.payload))
    result = check_storage(store)
    assert (result.corrupt, result.ok, result.foreign, result.removed) == (1, 1, 2, 0)
    assert result.unreachable == 1
    assert any("payload_checksum" in line for line in result.examples)
    assert store.contains([one.key]) == [True]
    result = check_storage(store, repair=True)
    assert (result.corrupt, result.removed) == (1, 1)
    assert store.contains([one.key, two.key, foreign.key]) == [False, True, True]
    assert check_storage(store).corrupt == 0


def test_what_lies_behind_a_hole_is_unreachable(store: ListedMemory) -> None:
    objects = chain(6)
    store.put(objects)
    store.delete([objects[2].key])
    result = check_storage(store, repair=True)
    assert (result.unreachable, result.removed) == (3, 0), "the next commit may heal the hole"
    assert result.namespaces[0].unreachable == 3


def test_remains_of_cleared_generations(store: ListedMemory) -> None:
    store.clear(NAMESPACE, 2)
    store.put(chain(3, generation=2))
    for late in chain(2):
        store.plant(late.key, late.header, bytes(late.payload))
    result = check_storage(store)
    assert (result.objects, result.cleared, result.unreachable) == (5, 2, 0)
    result = check_storage(store, repair=True)
    assert result.removed == 2
    assert check_storage(store).objects == 3


def test_a_sample_reads_a_share(store: ListedMemory) -> None:
    store.put(make_chain(200, SIZE))
    result = check_storage(store, sample=0.25)
    assert 20 < result.checked < 80
    assert (result.objects, result.unreachable) == (200, None)


def test_newer_objects_are_left_alone(store: ListedMemory) -> None:
    stored = make_object(make_key(1), pattern(1, SIZE))
    newer = bytearray(stored.header)
    newer[8] += 1
    store.plant(stored.key, _with_checksum(bytes(newer)), bytes(stored.payload))
    result = check_storage(store, repair=True)
    assert (result.newer, result.removed) == (1, 0)


def _with_checksum(header: bytes) -> bytes:
    import xxhash

    return header[:-8] + xxhash.xxh3_64_intdigest(header[:-8]).to_bytes(8, "little")


def test_a_store_that_cannot_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot list"):
        check_storage(MemoryBackend())
