"""Models with a second pool of plain pages: what all pools can restore, and pages that are nobody else's."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache.errors import StorageUnavailable
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import FaultyStorage, fail
from hicache_sglang.hybrid import Asked, fold

PAGES = 4
KEYS = [sha256(bytes([page])).hexdigest() for page in range(PAGES)]

Plugin = Callable[..., Any]


def transfer(name: str, keys: list[str], first: int = 0, *, policy: str = "all_pages", size: int = 4) -> Any:
    indices = torch.arange(first * size, (first + len(keys)) * size)
    return SimpleNamespace(name=name, keys=keys, host_indices=indices, hit_policy=SimpleNamespace(value=policy))


def page(pool: Any, index: int) -> torch.Tensor:
    return pool.get_data_page(index * pool.page_size).clone().view(torch.uint8)


@pytest.fixture
def hybrid(plugin: Plugin, pools: Any) -> Callable[..., Any]:
    """A plug-in with a sliding-window pool beside the KV cache, of other heads and layers."""

    def make(layout: str = "page_first", *, name: str = "swa", layers: int = 2, **config: Any) -> Any:
        anchor, window = pools.mha(layout), pools.mha(layout, layers=layers, heads=2)
        one = plugin(anchor, **config)
        one.register_mem_host_pool_v2(anchor, "kv")
        one.register_mem_host_pool_v2(window, name)
        one.window = window
        return one

    return make


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_pages_of_both_pools_come_back_bit_exact(layout: str, hybrid: Callable[..., Any]) -> None:
    first, second = hybrid(layout), hybrid(layout)
    both = [transfer("kv", KEYS), transfer("swa", KEYS)]
    assert first.batch_get_v2(both) == {"kv": [False] * PAGES, "swa": [False] * PAGES}
    assert first.batch_set_v2(both) == {"kv": [True] * PAGES, "swa": [True] * PAGES}
    second.window.kv_buffer.zero_()
    second.mem_pool_host.kv_buffer.zero_()
    moved = [transfer("kv", KEYS, 2), transfer("swa", KEYS[::-1], 4)]
    assert second.batch_get_v2(moved) == {"kv": [True] * PAGES, "swa": [True] * PAGES}
    for at in range(PAGES):
        assert torch.equal(page(first.mem_pool_host, at), page(second.mem_pool_host, at + 2))
        assert torch.equal(page(first.window, at), page(second.window, 4 + PAGES - 1 - at))


def test_only_what_all_pools_have_is_restorable(release: str, hybrid: Callable[..., Any]) -> None:
    """A window stored at two ends of prompts: the lengths between them cannot be restored."""
    one = hybrid(release=release)
    assert all(one.batch_set_v2([transfer("kv", KEYS)])["kv"])
    assert all(one.batch_set_v2([transfer("swa", KEYS[:1])])["swa"])
    assert all(one.batch_set_v2([transfer("swa", KEYS[2:])])["swa"])
    asked = [transfer("swa", KEYS[:2], policy="trailing_pages")]
    result = one.batch_exists_v2([*KEYS, "f" * 64], asked)
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (4, {"kv": 4, "swa": 4})
    assert getattr(result, "restorable_prefix_pages", None) == (None if release == "0.5.12" else [1, 4])
    shorter = one.batch_exists_v2(KEYS[:3], asked)
    assert (shorter.kv_hit_pages, shorter.extra_pool_hit_pages) == (1, {"kv": 3, "swa": 1})
    whole = one.batch_exists_v2(KEYS, [transfer("swa", KEYS)])
    assert (whole.kv_hit_pages, whole.extra_pool_hit_pages) == (1, {"kv": 4, "swa": 1})
    unknown = one.batch_exists_v2(KEYS, [transfer("swa", KEYS, policy="block_groups")])
    assert (unknown.kv_hit_pages, unknown.extra_pool_hit_pages) == (0, {"kv": 4})
    assert one.batch_exists_v2(["f" * 64], asked).kv_hit_pages == 0
    assert one.batch_exists_v2(["no hash"], asked).kv_hit_pages == 0


def test_a_pools_pages_are_its_own(hybrid: Callable[..., Any]) -> None:
    """Another pool, stage, rank or shape under the same hashes finds nothing; a clear forgets all pools."""
    first = hybrid()
    assert all(first.batch_set_v2([transfer("swa", KEYS)])["swa"])
    others = [
        hybrid(name="auxiliary_swa"),
        hybrid(layers=3),
        hybrid(pp_rank=1, pp_size=2),
        hybrid(pp_rank=0, pp_size=2),
        hybrid(tp_rank=1, tp_size=2),
    ]
    for other in others:
        name = next(name for name in other.registered_pools if name != "kv")
        assert not any(other.batch_get_v2([transfer(name, KEYS)])[name])
    assert not any(first.batch_get_v2([transfer("kv", KEYS)])["kv"])
    assert all(hybrid().batch_get_v2([transfer("swa", KEYS)])["swa"])
    assert first.clear()
    assert not any(first.batch_get_v2([transfer("swa", KEYS)])["swa"])


def test_what_is_wrong_with_a_call_is_a_miss(hybrid: Callable[..., Any]) -> None:
    one = hybrid()
    unknown, short = transfer("draft", KEYS), transfer("swa", KEYS)
    short.host_indices = short.host_indices[:-1]
    nowhere = transfer("kv", KEYS)
    nowhere.host_indices = None
    wanted = {"draft": [False] * PAGES, "swa": [False] * PAGES, "kv": [False] * PAGES}
    assert one.batch_set_v2([unknown, short, nowhere]) == one.batch_get_v2([unknown, short, nowhere]) == wanted


def test_a_pool_of_other_pages_is_refused(plugin: Plugin, pools: Any) -> None:
    one = plugin(pools.mha())
    one.register_mem_host_pool_v2(pools.mha(page=8), "swa")
    assert "pages have 8 tokens, those of the KV cache 4" in one.statistics().disabled


def test_pools_of_a_storage_that_is_away_are_opened_with_it(
    plugin: Plugin, pools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is away only when the second pool is registered."""
    memory = MemoryBackend()
    monkeypatch.setattr(memory, "close", lambda: None)  # it is opened a second time
    storage = FaultyStorage(memory)
    for answers in (0, 1):
        storage.script("generation", *[None] * answers)
        storage.always("generation", fail(StorageUnavailable("no server")))
        one = plugin(pools.mha(), backend=storage)
        one.register_mem_host_pool_v2(pools.mha(layers=2), "swa")
        assert not any(one.batch_set_v2([transfer("swa", KEYS)])["swa"])
        storage.always("generation", None)
        one._open_again_at = 0.0
        assert all(one.batch_set_v2([transfer("swa", KEYS)])["swa"])
        assert one.statistics().disabled == ""


def test_lengths_are_those_that_every_pool_has() -> None:
    """Against the plain definition, for random pools."""
    chance = random.Random(5)
    for _ in range(300):
        pages = chance.randrange(8)
        pools = []
        for _ in range(chance.randrange(3)):
            policy = chance.choice(["all_pages", "trailing_pages"])
            there = [chance.random() < 0.7 for _ in range(pages)]
            pools.append((Asked("x", policy, chance.randint(1, 3)), there))

        def restores(length: int, asked: Asked, there: list[bool]) -> bool:
            first = 0 if asked.policy == "all_pages" else max(0, length - asked.window)
            return all(there[first:length])

        longest, common = fold(pages, pools)
        lengths = range(1, pages + 1)
        assert common == [n for n in lengths if all(restores(n, *pool) for pool in pools)]
        assert longest == [max((n for n in lengths if restores(n, *pool)), default=0) for pool in pools]
