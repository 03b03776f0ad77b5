from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache.core.layout import KVGeometry
from hicache.core.partition import ShardPlan, plan_shards
from hicache.core.prompt import PageIdentity
from hicache.memory.host import MmapHostPool
from hicache.records import PageResult
from hicache.runtime import objects
from hicache.runtime.objects import PageObjects
from hicache.runtime.tokens import SymbolTokens
from hicache.storage.base import StorageBackend
from hicache.storage.memory import MemoryBackend
from hicache.storage.registry import open_storage
from hicache.storage.wrappers import GuardedBackend
from hicache.testing.faults import FaultyStorage, fail

P = 4
GEOMETRY = KVGeometry.mha(layers=4, kv_heads=8, head_dim=4, dtype="bfloat16", head_group=1, layer_partition=2)
OK, FAILED, BAD, GONE = PageResult


def _identity(page: int, *, tokens: bytes | None = None, extras: bytes = b"") -> PageIdentity:
    own = bytes([page + 1]) * 16
    parent = bytes([page]) * 16 if page else None
    return PageIdentity(own, parent, page, (tokens or bytes([page]) * 4 * P) + extras)


def _transfer(pages: Sequence[PageIdentity], **fields: Any) -> Any:
    slots = np.arange(len(pages), dtype=np.int64)
    tree = SimpleNamespace(namespace=b"n" * 16, generation=0)
    defaults = {"id": 1, "tree": tree, "pages": tuple(pages), "count": len(pages), "cancelled": False}
    return SimpleNamespace(**(defaults | {"source_slots": slots, "target_slots": slots} | fields))


class _Rank:
    """One rank's host pool and the objects it holds."""

    def __init__(self, backend: StorageBackend, plan: ShardPlan, *, pages: int = 8) -> None:
        self.plan = plan
        self.host = MmapHostPool(pages, plan.page_bytes)
        self.objects = PageObjects(
            GuardedBackend(backend), buffer=self.host.buffer, plan=plan, tokens=SymbolTokens(4 * P)
        )

    def fill(self, whole: Any, geometry: KVGeometry) -> None:
        """Take this rank's part of whole pages."""
        full = {part.shard: part for part in plan_shards(geometry, P).parts}
        for slot in range(len(whole)):
            for part in self.plan.parts:
                at = full[part.shard].offset
                self.host.page(slot)[part.offset : part.offset + part.length] = whole[slot][at : at + part.length]

    def holds(self, whole: Any, geometry: KVGeometry) -> bool:
        full = {part.shard: part for part in plan_shards(geometry, P).parts}
        return all(
            np.array_equal(
                self.host.page(slot)[part.offset : part.offset + part.length],
                whole[slot][full[part.shard].offset : full[part.shard].offset + part.length],
            )
            for slot in range(len(whole))
            for part in self.plan.parts
        )


def _whole(backend: StorageBackend) -> _Rank:
    return _Rank(backend, plan_shards(GEOMETRY, P))


def _random_pages(count: int, geometry: KVGeometry = GEOMETRY) -> Any:
    return np.random.default_rng(1).integers(0, 256, (count, geometry.page_bytes(P)), np.uint8)


TOPOLOGIES = {
    "tp1": [{}],
    "tp2": [{"tp_rank": rank, "tp_size": 2} for rank in range(2)],
    "tp4": [{"tp_rank": rank, "tp_size": 4} for rank in range(4)],
    "tp16": [{"tp_rank": rank, "tp_size": 16} for rank in range(16)],
    "pp2": [{"pp_layers": layers} for layers in ((0, 2), (2, 4))],
    "tp2pp2": [
        {"tp_rank": rank, "tp_size": 2, "pp_layers": layers} for rank in range(2) for layers in ((0, 2), (2, 4))
    ],
}


@pytest.mark.case("PLUG-4")
@pytest.mark.parametrize("writer", TOPOLOGIES)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_put_under_one_topology_are_read_back_under_every_other(writer: str, kind: str, tmp_path: Any) -> None:
    geometry = GEOMETRY
    if kind == "mla":
        geometry = KVGeometry.mla(layers=4, latent_dim=12, rope_dim=4, dtype="bfloat16", layer_partition=2)
    pages = [_identity(page) for page in range(3)]
    whole = _random_pages(3, geometry)
    store = open_storage(f"file://{tmp_path}/store")
    counting = FaultyStorage(store)
    for place in TOPOLOGIES[writer]:
        rank = _Rank(counting, plan_shards(geometry, P, **place))
        rank.fill(whole, geometry)
        assert rank.objects.write(_transfer(pages)) == [OK] * 3
    puts = [key for verb, keys in counting.calls if verb == "put" for key in keys]
    assert len(puts) == len(set(puts)) == 3 * len(plan_shards(geometry, P).parts)  # one elected writer an object
    for places in TOPOLOGIES.values():
        for place in places:
            rank = _Rank(store, plan_shards(geometry, P, **place))
            assert rank.objects.contains(b"n" * 16, 0, [page.hash for page in pages]) == 3
            assert rank.objects.read(_transfer(pages)) == [OK] * 3
            assert rank.holds(whole, geometry)
    store.close()


@pytest.mark.case("PLUG-4")
def test_a_missing_part_is_a_miss_for_those_who_need_it() -> None:
    store = MemoryBackend()
    rank = _whole(store)
    pages = [_identity(0)]
    assert rank.objects.write(_transfer(pages)) == [OK]
    upper = plan_shards(GEOMETRY, P, tp_rank=1, tp_size=2)
    lost = next(key for key in store._entries if key.shard == upper.parts[0].shard)
    store.delete([lost])
    lower = _Rank(store, plan_shards(GEOMETRY, P, tp_rank=0, tp_size=2))
    assert lower.objects.read(_transfer(pages)) == [OK]
    assert _Rank(store, upper).objects.read(_transfer(pages)) == [GONE]
    assert rank.objects.read(_transfer(pages)) == [GONE]


def test_the_anchor_is_put_after_all_others_of_its_page() -> None:
    store = FaultyStorage(MemoryBackend())
    rank = _whole(store)
    rank.objects.write(_transfer([_identity(0), _identity(1)]))
    first, last = (keys for verb, keys in store.calls if verb == "put")
    assert {key.shard for key in last} == {GEOMETRY.anchor(P)}
    assert GEOMETRY.anchor(P) not in {key.shard for key in first}


def test_the_anchor_alone_tells_whether_a_page_is_there() -> None:
    store = MemoryBackend()
    rank = _whole(store)
    pages = [_identity(0), _identity(1)]
    rank.objects.write(_transfer(pages))
    hashes = [page.hash for page in pages]
    store.delete([key for key in store._entries if key.shard != GEOMETRY.anchor(P)])
    assert rank.objects.contains(b"n" * 16, 0, hashes) == 2
    assert rank.objects.write(_transfer(pages)) == [OK, OK]
    store.delete([key for key in store._entries if key.shard == GEOMETRY.anchor(P) and key.page_hash == hashes[0]])
    assert rank.objects.contains(b"n" * 16, 0, hashes) == 0


def test_a_page_whose_siblings_failed_gets_no_anchor() -> None:
    store = FaultyStorage(MemoryBackend())
    rank = _whole(store)
    store.script("put", fail(OSError("full")))
    assert rank.objects.write(_transfer([_identity(0)])) == [FAILED]
    assert store.count("put") == 1
    assert rank.objects.contains(b"n" * 16, 0, [_identity(0).hash]) == 0


@pytest.mark.case("FAIL-2")
def test_reading_stops_at_the_first_page_that_is_not_whole() -> None:
    store = MemoryBackend()
    rank = _whole(store)
    pages = [_identity(page) for page in range(6)]
    assert rank.objects.write(_transfer(pages)) == [OK] * 6
    store.delete([key for key in store._entries if key.page_hash == pages[3].hash][-1:])
    assert rank.objects.read(_transfer(pages)) == [OK, OK, OK, GONE, FAILED, FAILED]


def test_trouble_blames_nobody() -> None:
    store = FaultyStorage(MemoryBackend())
    rank = _whole(store)
    pages = [_identity(0)]
    rank.objects.write(_transfer(pages))
    store.script("get_into", fail(TimeoutError()))
    assert rank.objects.read(_transfer(pages)) == [FAILED]


@pytest.mark.case("KEY-2")
@pytest.mark.parametrize(
    "asked",
    [
        _identity(1, tokens=b"\7" * 4 * P),
        _identity(1)._replace(parent=b"p" * 16),
        _identity(1)._replace(depth=2),
        _identity(1, extras=b"e" * 16),
    ],
    ids=["tokens", "parent", "depth", "extras"],
)
def test_an_object_of_another_page_under_this_ones_hash_is_no_hit(asked: PageIdentity) -> None:
    store = MemoryBackend()
    rank = _whole(store)
    rank.objects.write(_transfer([_identity(1)]))
    assert rank.objects.read(_transfer([asked])) == [BAD]
    assert rank.objects.read(_transfer([_identity(1)])) == [OK]


def test_extras_are_kept_and_compared() -> None:
    rank = _whole(MemoryBackend())
    page = _identity(0, extras=b"e" * 16)
    rank.objects.write(_transfer([page]))
    assert rank.objects.read(_transfer([page])) == [OK]
    assert rank.objects.read(_transfer([_identity(0, extras=b"f" * 16)])) == [BAD]
    assert rank.objects.read(_transfer([_identity(0)])) == [BAD]


def test_pages_without_extras_are_shared_with_those_who_do_not_know_any() -> None:
    rank = _whole(MemoryBackend())
    rank.objects.write(_transfer([_identity(0, extras=bytes(16))]))
    assert rank.objects.read(_transfer([_identity(0)])) == [OK]
    assert rank.objects.read(_transfer([_identity(0, extras=bytes(16))])) == [OK]


def test_a_cancelled_transfer_does_no_io() -> None:
    store = FaultyStorage(MemoryBackend())
    rank = _whole(store)
    pages = [_identity(0)]
    assert rank.objects.write(_transfer(pages, cancelled=True)) == [FAILED]
    assert rank.objects.read(_transfer(pages, cancelled=True)) == [FAILED]
    assert store.calls == []


@pytest.mark.case("PLUG-1")
def test_bytes_come_back_bit_for_bit_in_any_order_of_slots() -> None:
    store = MemoryBackend()
    rank = _whole(store)
    whole = _random_pages(6)
    rank.fill(whole, GEOMETRY)
    pages = [_identity(page) for page in range(6)]
    assert rank.objects.write(_transfer(pages)) == [OK] * 6
    reader = _whole(store)
    order = random.Random(3).sample(range(8), 6)
    assert reader.objects.read(_transfer(pages, target_slots=np.array(order, np.int64))) == [OK] * 6
    for page, slot in enumerate(order):
        assert np.array_equal(reader.host.page(slot), whole[page])


# ---- touching


def test_a_touch_goes_page_by_page_with_the_anchor_last() -> None:
    storage = FaultyStorage(MemoryBackend())
    rank = _whole(storage)
    pages = [_identity(i) for i in (2, 1, 0)]
    assert rank.objects.write(_transfer(list(reversed(pages)))) == [OK] * 3
    assert rank.objects.touch(_transfer(pages)) == [OK] * 3
    ((_, keys),) = [call for call in storage.calls if call[0] == "touch"]
    shards = len(rank.plan.parts)
    assert [key.page_hash for key in keys[::shards]] == [page.hash for page in pages]
    assert {key.shard for key in keys[shards - 1 :: shards]} == {rank.plan.anchor}
    assert len(set(keys)) == 3 * shards


def test_a_page_that_lacks_any_shard_is_gone_and_the_others_are_not() -> None:
    storage = MemoryBackend()
    rank = _whole(storage)
    pages = [_identity(i) for i in range(3)]
    rank.objects.write(_transfer(pages))
    storage.delete([next(key for key in storage._entries if key.page_hash == pages[1].hash)])
    assert rank.objects.touch(_transfer(pages)) == [OK, GONE, OK]


def test_where_storage_cannot_tell_a_touch_has_failed_from_there_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "TOUCH_OBJECTS", 1)  # a page a call
    storage = FaultyStorage(MemoryBackend())
    rank = _whole(storage)
    pages = [_identity(i) for i in range(4)]
    rank.objects.write(_transfer(pages))
    storage.script("touch", None, fail(OSError("frozen")))
    assert rank.objects.touch(_transfer(pages)) == [OK, FAILED, FAILED, FAILED]
