"""Under SGLang's own factory, controller and host pools: bit-exact, and a miss wherever anything differs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from array import array
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageExtraInfo,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang_pools import DIM, HEADS, LAYERS, PAGE, bytes_at, fill, make_mha, make_mla

from hicache.storage.base import Listing, StoredObject
from hicache.storage.codec import encode_header
from hicache.storage.registry import open_storage

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
PAGES = 3
TOKENS = list(range(100, 100 + PAGES * PAGE))
KEYS = get_hash_str(TOKENS, None, page_size=PAGE)
SOURCE = torch.arange(0, PAGES * PAGE)  # slots of the pages as they are written
TARGET = torch.arange(8 * PAGE, (8 + PAGES) * PAGE)  # other slots, into which they are read


def written(pool: Any) -> list[torch.Tensor]:
    return [bytes_at(pool, page * PAGE) for page in range(PAGES)]


def loaded(pool: Any) -> list[torch.Tensor]:
    return [bytes_at(pool, (8 + page) * PAGE) for page in range(PAGES)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_keys_are_sglangs_sha256_chain() -> None:
    """What the controller passes as keys is the chain that our hasher computes too."""
    assert KEYS[0] == sha256(b"".join(t.to_bytes(4, "little") for t in TOKENS[:PAGE])).hexdigest()


@pytest.mark.parametrize("zero_copy", [True, False], ids=["zero-copy", "generic"])
@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_mha_pages_come_back_bit_exact(layout: str, zero_copy: bool, engine: Callable[..., Any]) -> None:
    """Set, exists and get in one process, then get in another engine over the same folder."""
    pool = make_mha(layout)
    first = engine(pool)
    assert first.backend.batch_exists(KEYS) == 0
    assert first.load(KEYS, TARGET, zero_copy=zero_copy) == 0
    assert first.store(KEYS, SOURCE, zero_copy=zero_copy)
    assert first.backend.batch_exists(KEYS) == PAGES
    untouched = [slot for slot in range(0, pool.size, PAGE) if slot not in TARGET]
    before = [bytes_at(pool, slot) for slot in untouched]
    assert first.load(KEYS, TARGET, zero_copy=zero_copy) == PAGES
    assert same(written(pool), loaded(pool))
    assert same([bytes_at(pool, slot) for slot in untouched], before)
    other = make_mha(layout)
    other.kv_buffer.zero_()
    assert engine(other).load(KEYS, TARGET, zero_copy=zero_copy) == PAGES
    assert same(written(pool), loaded(other))


@pytest.mark.parametrize("zero_copy", [True, False], ids=["zero-copy", "generic"])
@pytest.mark.parametrize("layout", MLA_LAYOUTS)
def test_mla_pages_come_back_bit_exact(layout: str, zero_copy: bool, engine: Callable[..., Any]) -> None:
    """Latents are whole in each rank: what rank 1 of 2 stores, rank 0 of 4 reads."""
    pool, other = make_mla(layout), make_mla(layout)
    other.kv_buffer.zero_()
    assert engine(pool, tp_rank=1, tp_size=2).store(KEYS, SOURCE, zero_copy=zero_copy)
    assert engine(other, tp_rank=0, tp_size=4).load(KEYS, TARGET, zero_copy=zero_copy) == PAGES
    assert same(written(pool), loaded(other))


def test_layouts_share_pages(engine: Callable[..., Any]) -> None:
    """Stored pages are in canonical order, so each layout reads what any other has written."""
    pool = make_mha("layer_first")
    assert engine(pool).store(KEYS, SOURCE, zero_copy=True)
    for layout in MHA_LAYOUTS:
        other = make_mha(layout)
        assert engine(other).load(KEYS, TARGET, zero_copy=True) == PAGES
        for page in range(PAGES):
            kept = pool.kv_buffer[:, :, page * PAGE : (page + 1) * PAGE].contiguous()
            found = other.get_data_page((8 + page) * PAGE, flat=False)
            if layout == "page_first":
                found = found.transpose(1, 2)
            elif layout == "page_first_direct":
                found = found[:, 0]
            elif layout == "page_head":
                found = found[:, 0].permute(0, 3, 2, 1, 4)
            assert torch.equal(found.contiguous().view(torch.uint8), kept.view(torch.uint8)), layout


@pytest.mark.parametrize(
    ("shape", "config", "extra"),
    [
        ({"dtype": torch.float16}, {}, {}),
        ({"heads": HEADS // 2}, {"tp_size": 2}, {}),
        ({"dim": DIM * 2}, {}, {}),
        ({"layers": 2}, {}, {}),
        ({"first_layer": 1}, {}, {}),
        ({}, {"model_name": "example/other"}, {}),
        ({}, {}, {"revision": "2"}),
        ({}, {}, {"numerics": "sglang/other/bfloat16"}),
    ],
    ids=["dtype", "tp-size", "head-dim", "layers", "stage", "model", "revision", "numerics"],
)
def test_another_identity_misses(
    shape: dict[str, Any], config: dict[str, Any], extra: dict[str, Any], engine: Callable[..., Any]
) -> None:
    """The same page hashes under another model or geometry: not found, not read, and the target left alone."""
    assert engine(make_mha()).store(KEYS, SOURCE, zero_copy=True)
    other = make_mha(**shape)
    before = loaded(other)
    second = engine(other, extra=extra, **config)
    assert second.backend.batch_exists(KEYS) == 0
    assert second.load(KEYS, TARGET, zero_copy=True) == 0
    assert same(loaded(other), before)


def test_another_page_size_misses(engine: Callable[..., Any]) -> None:
    """Even under one hash a page of twice the tokens is another page."""
    assert engine(make_mha()).store(KEYS, SOURCE, zero_copy=True)
    other = engine(make_mha(page=2 * PAGE))
    assert other.backend.batch_exists(KEYS) == 0
    assert other.load(KEYS[:1], torch.arange(2 * PAGE), zero_copy=True) == 0


def test_ranks_hold_their_own_heads(engine: Callable[..., Any]) -> None:
    """Two ranks store under one hash without touching each other, and agreed head groups serve another TP size."""
    agreed = {"head_group": HEADS // 2}
    pools = []
    for rank in range(2):
        pool = make_mha(heads=HEADS // 2)
        pool.kv_buffer.add_(rank)  # another content for each rank
        pools.append(pool)
        assert engine(pool, extra=agreed, tp_rank=rank, tp_size=2).store(KEYS, SOURCE, zero_copy=True)
    whole = make_mha()
    assert engine(whole, extra=agreed).load(KEYS, TARGET, zero_copy=True) == PAGES
    for page in range(PAGES):
        parts = [pool.get_data_page(page * PAGE, flat=False) for pool in pools]
        joined = torch.cat(parts, dim=3).contiguous().view(torch.uint8)
        found = whole.get_data_page((8 + page) * PAGE, flat=False).contiguous().view(torch.uint8)
        assert torch.equal(joined, found)


@pytest.mark.parametrize("change", ["cut", "flipped"])
def test_a_damaged_object_is_a_miss(change: str, engine: Callable[..., Any], tmp_path: Path) -> None:
    """A file that lost its end or changed: that page and what is behind it miss; a new put heals it."""
    pool = make_mha()
    first = engine(pool)
    assert first.store(KEYS, SOURCE, zero_copy=True)
    (path,) = (tmp_path / "kv").rglob(f"*{KEYS[1]}*")
    content = path.read_bytes()
    path.write_bytes(content[:-4096] if change == "cut" else content[:5000] + b"\xff\x00" * 4 + content[5008:])
    assert first.load(KEYS, TARGET, zero_copy=True) == 1
    assert same(loaded(pool)[:1], written(pool)[:1])
    assert first.store(KEYS, SOURCE, zero_copy=True)
    assert first.load(KEYS, TARGET, zero_copy=True) == PAGES
    assert same(written(pool), loaded(pool))


@pytest.mark.parametrize("change", [-16, 16])
def test_an_object_of_another_length_is_a_miss(change: int, engine: Callable[..., Any], storage: str) -> None:
    """A whole and sound object under a page's name, but shorter or longer than a page: not read, and replaced."""
    pool = make_mha()
    first = engine(pool)
    assert first.store(KEYS, SOURCE, zero_copy=True)
    backend = open_storage(storage)
    try:
        assert isinstance(backend, Listing)
        (key,) = (one.key for one in backend.list_objects() if one.key and one.key.page_hash.hex() == KEYS[1])
        payload = bytes(2 * LAYERS * HEADS * PAGE * DIM * 2 + change)
        header = encode_header(key, parent_hash=None, depth=0, tokens=b"", payload=payload)
        backend.delete([key])
        backend.put([StoredObject(key, header, memoryview(payload))])
        assert backend.contains([key]) == [True]
    finally:
        backend.close()
    assert first.load(KEYS, TARGET, zero_copy=True) == 1
    assert first.store(KEYS, SOURCE, zero_copy=True)
    assert first.load(KEYS, TARGET, zero_copy=True) == PAGES
    assert same(written(pool), loaded(pool))


def test_the_controllers_own_loops_agree(engine: Callable[..., Any]) -> None:
    """Write-back, look-up and prefetch as the controller's threads do them, in several batches with prefix keys."""
    pages = 150  # the controller takes 128 at a time
    tokens = list(range(pages * PAGE))
    pool = make_mha(tokens=2 * pages * PAGE)
    first = engine(pool)
    slots = torch.arange(pages * PAGE)
    keys = get_hash_str(tokens, None, page_size=PAGE)
    backup = StorageOperation(slots, tokens, hash_value=keys, prefix_keys=[])
    first.controller._page_backup(backup)
    assert backup.completed_tokens == len(tokens)

    wanted = [*tokens, *range(7, 7 + PAGE)]  # one page more than is there
    prefetch = PrefetchOperation("r", RadixKey(array("q", wanted)), None, prefix_keys=[])
    found, count = first.controller._storage_hit_query(prefetch)
    assert (found, count) == (keys, len(tokens))
    prefetch.hash_value, prefetch.host_indices = found, slots + pages * PAGE
    assert first.controller._page_transfer(prefetch) == pages
    for page in (0, 127, 128, 149):
        assert torch.equal(bytes_at(pool, page * PAGE), bytes_at(pool, (pages + page) * PAGE))


def test_another_process_reads_what_this_one_wrote(engine: Callable[..., Any], storage: str) -> None:
    """Nothing but the folder is shared: the bytes of a fresh process's pool are those that were stored."""
    pool = make_mha("page_head")
    assert engine(pool).store(KEYS, SOURCE, zero_copy=True)
    code = (
        "import sys, torch\nfrom hashlib import sha256\nfrom sglang_pools import *\n"
        "pool = make_mha('layer_first')\npool.kv_buffer.zero_()\n"
        "one = Engine(pool, {'storage': sys.argv[1]})\n"
        "done = one.load(sys.argv[2:], torch.arange(len(sys.argv[2:]) * PAGE), zero_copy=True)\n"
        "page = pool.get_data_page(0, flat=False).contiguous().view(torch.uint8)\n"
        "print(done, sha256(page.numpy()).hexdigest())\none.backend.close()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", code, storage, *KEYS],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=300,
    )
    stored = pool.get_data_page(0, flat=False)[:, 0].permute(0, 3, 2, 1, 4).contiguous().view(torch.uint8)
    assert done.stdout.split()[-2:] == [str(PAGES), sha256(stored.numpy()).hexdigest()]


def test_parents_are_kept_and_compared(engine: Callable[..., Any]) -> None:
    """With prefix keys the stored chain has parents: a page that claims another past is a miss."""
    first = engine(make_mha())
    known = HiCacheStorageExtraInfo(prefix_keys=[])
    assert first.store(KEYS, SOURCE, zero_copy=True, extra_info=known)
    assert first.load(KEYS, TARGET, zero_copy=True, extra_info=known) == PAGES
    behind = HiCacheStorageExtraInfo(prefix_keys=KEYS[:1])
    assert first.load(KEYS[1:], TARGET[:-PAGE], zero_copy=True, extra_info=behind) == PAGES - 1
    wrong = HiCacheStorageExtraInfo(prefix_keys=["0" * 64])
    assert first.load(KEYS[1:], TARGET[:-PAGE], zero_copy=True, extra_info=wrong) == 0


def test_injected_delays_and_failures_cost_hits_only(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under SGLang's own injector every page that is said to be loaded is right, and some are."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    pool = make_mha()
    tried = engine(pool)
    assert isinstance(tried.backend, HiCacheStorageFailureInjector)
    stored = [tried.store(KEYS, SOURCE, zero_copy=bool(i % 2)) for i in range(20)]
    outcomes = []
    for i in range(40):
        fill(pool)
        pool.kv_buffer[:, 8 * PAGE :].zero_()
        done = tried.load(KEYS, TARGET, zero_copy=bool(i % 2))
        assert same(loaded(pool)[:done], written(pool)[:done])
        outcomes.append(done)
    assert {True, False} == set(stored)
    assert {0, PAGES} == set(outcomes)


def test_statistics_are_what_the_scheduler_logs(engine: Callable[..., Any]) -> None:
    """`get_stats` gives the engine's own record with the transfers since the last call."""
    first = engine(make_mha())
    assert first.store(KEYS, SOURCE, zero_copy=True)
    assert first.load(KEYS, TARGET, zero_copy=True) == PAGES
    record = first.backend.get_stats()
    assert isinstance(record, StorageMetrics)
    assert (record.prefetch_pgs, record.backup_pgs) == ([PAGES], [PAGES])
    assert min(record.prefetch_bandwidth + record.backup_bandwidth) > 0
    assert first.backend.get_stats().prefetch_pgs == []


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_a_pool_of_pages_beside_the_cache_is_stored_too(layout: str, engine: Callable[..., Any]) -> None:
    """Through the interface for several pools: bit-exact, and restorable where SGLang's own backend says so."""
    pools = [make_mha(layout), make_mha(layout, layers=2, heads=2)]
    first = engine(pools[0])
    first.backend.register_mem_host_pool_v2(pools[0], PoolName.KV)
    first.backend.register_mem_host_pool_v2(pools[1], PoolName.SWA)
    both = [PoolTransfer(PoolName.KV, SOURCE, keys=KEYS), PoolTransfer(PoolName.SWA, SOURCE[PAGE:], keys=KEYS[1:])]
    assert first.backend.batch_set_v2(both) == {"kv": [True] * PAGES, "swa": [True] * (PAGES - 1)}
    window = PoolTransfer(PoolName.SWA, keys=KEYS[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = first.backend.batch_exists_v2(KEYS, [window])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (PAGES, list(range(2, PAGES + 1)))
    moved = [PoolTransfer(PoolName.KV, TARGET, keys=KEYS), PoolTransfer(PoolName.SWA, TARGET[PAGE:], keys=KEYS[1:])]
    assert first.backend.batch_get_v2(moved) == {"kv": [True] * PAGES, "swa": [True] * (PAGES - 1)}
    assert same(written(pools[0]), loaded(pools[0]))
    assert same(written(pools[1])[1:], loaded(pools[1])[1:])


def test_lengths_are_restorable_where_sglangs_own_backend_finds_them(
    engine: Callable[..., Any], tmp_path: Path
) -> None:
    """For random holes in both pools, both policies: the same answers as its file backend gives."""
    chance = random.Random(3)
    for turn in range(12):
        pools = [make_mha(), make_mha(layers=2)]
        ours = engine(pools[0], extra={"revision": str(turn)}).backend
        theirs = HiCacheFile(ours._config, str(tmp_path / f"theirs{turn}"))
        keys = get_hash_str(list(range(8 * PAGE)), None, page_size=PAGE)
        for one in (ours, theirs):
            one.register_mem_pool_host(pools[0])
            for name, pool in zip((PoolName.KV, PoolName.SWA), pools, strict=True):
                one.register_mem_host_pool_v2(pool, name)
        for name, there in ((PoolName.KV, 0.9), (PoolName.SWA, 0.6)):
            stored = [key for key in keys if chance.random() < there]
            transfers = [PoolTransfer(name, torch.arange(len(stored) * PAGE), keys=stored)]
            assert all(ours.batch_set_v2(transfers)[name])
            assert all(theirs.batch_set_v2(transfers)[name])
        for policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
            for window in (1, 2, 3):
                asked = [PoolTransfer(PoolName.SWA, keys=keys[:window], hit_policy=policy)]
                assert ours.batch_exists_v2(keys, asked) == theirs.batch_exists_v2(keys, asked)


def test_an_unknown_kind_of_pool_is_refused(engine: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    """A subclass may keep more than we see: it runs without a cache, and the log says why."""
    pool = make_mha()
    pool.__class__ = type("OtherPoolHost", (type(pool),), {})
    first = engine(pool)
    assert "OtherPoolHost is not understood" in caplog.text
    assert not first.store(KEYS, SOURCE, zero_copy=True)
