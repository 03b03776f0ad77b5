"""The plug-in against the interfaces of SGLang 0.5.12 and 0.5.23 as they were recorded."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
import torch

PAGES = 3
KEYS = [sha256(bytes([page])).hexdigest() for page in range(PAGES)]
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")

Plugin = Callable[..., Any]


def source(pool: Any) -> torch.Tensor:
    """Token slots of the pages that tests store."""
    return torch.arange(PAGES * pool.page_size)


def target(pool: Any) -> torch.Tensor:
    """Token slots of the pages that tests read into."""
    return torch.arange(4 * pool.page_size, (4 + PAGES) * pool.page_size)


def pages(pool: Any, slots: torch.Tensor) -> list[bytes]:
    firsts = slots[:: pool.page_size].tolist()
    return [bytes(pool.get_data_page(first).view(torch.uint8).numpy()) for first in firsts]


def config() -> SimpleNamespace:
    """An engine's configuration, as far as every release has it."""
    return SimpleNamespace(
        tp_rank=0, tp_size=1, is_mla_model=False, model_name="m", extra_config={"storage": "memory://"}
    )


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in every bit: a NaN equals itself."""
    return left.contiguous().view(torch.uint8).equal(right.contiguous().view(torch.uint8))


@pytest.mark.case("PLUG-3")
def test_every_method_takes_what_the_engine_gives(release: str, install: Callable[..., Any]) -> None:
    """Each call that binds to the recorded base class, by position or by name, binds to ours."""
    ours = install(release).HiCacheStorageBackend
    base = ours.__bases__[0]
    assert not inspect.isabstract(ours)
    for name, method in inspect.getmembers(base, inspect.isfunction):
        if name.startswith("_"):
            continue
        recorded = inspect.signature(method).parameters
        parameters = inspect.signature(getattr(ours, name)).parameters
        assert list(parameters) == list(recorded), name
        required = [one for one in parameters.values() if one.default is inspect.Parameter.empty]
        assert len(required) <= sum(one.default is inspect.Parameter.empty for one in recorded.values()), name


@pytest.mark.case("PLUG-3")
@pytest.mark.parametrize("change", ["two more", "renamed"])
def test_a_host_of_another_interface_runs_without_a_cache(
    change: str, install: Callable[..., Any], pools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What the installed base class asks for otherwise is named at load; no request fails for it, however it calls."""
    base = install("0.5.23").HiCacheStorage

    class Changed(base):  # type: ignore[misc, valid-type]
        if change == "two more":

            @abstractmethod
            def pin(self, keys: Any) -> Any: ...

            @abstractmethod
            def unpin(self, keys: Any) -> Any: ...

        else:

            def batch_get_v1(self, names: Any, host_indices: Any, extra_info: Any = None) -> Any:
                raise NotImplementedError

    module = install("0.5.23", base=Changed)
    one = module.HiCacheStorageBackend(config(), {})
    pool = pools.mha()
    one.register_mem_pool_host(pool)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    expected = {"two more": "it asks for pin, which is not known here", "renamed": "it calls batch_get_v1"}
    assert expected[change] in said
    assert "use SGLang 0.5.12 to 0.5.23" in said
    if change == "renamed":
        assert one.batch_get_v1(names=KEYS, host_indices=source(pool)) == [False] * PAGES
    else:
        assert one.pin(KEYS) is one.unpin(keys=KEYS) is None
    assert one.batch_exists(KEYS) == 0
    one.close()


class RecordedWithoutV1(ABC):
    """A host from before the zero-copy interface."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    @abstractmethod
    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    @abstractmethod
    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any: ...


def test_a_host_without_the_zero_copy_interface_uses_the_other(install: Callable[..., Any], pools: Any) -> None:
    """A base class that has less than we offer asks for nothing that is not here."""
    module = install("0.5.12", base=RecordedWithoutV1)
    one = module.HiCacheStorageBackend(config(), {})
    pool = pools.mha()
    one.register_mem_pool_host(pool)
    assert module.MISFITS == ()
    assert one.batch_set(KEYS[:1], [pool.get_data_page(0)])
    assert same(one.batch_get(KEYS[:1])[0], pool.get_data_page(0))
    one.close()


def test_the_factory_passes_two_positional_arguments(release: str, install: Callable[..., Any]) -> None:
    """`cls(storage_config, {})` works, before any pool is known; every answer is then a miss."""
    fields = SimpleNamespace(extra_config={"storage": "memory://", "backend_name": "hicache", "interface_v1": 1})
    one = install(release).HiCacheStorageBackend(fields, {})
    assert one.batch_exists(KEYS) == 0
    assert one.batch_get_v1(KEYS, torch.arange(12)) == [False] * PAGES
    assert one.batch_set_v1(KEYS, torch.arange(12)) == [False] * PAGES
    one.close()
    one.close()


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_pages_come_back_by_both_interfaces(layout: str, release: str, plugin: Plugin, pools: Any) -> None:
    """Stored from places or from flat tensors, read into places or flat tensors: the same bytes."""
    pool = pools.mha(layout)
    one = plugin(pool, release=release)
    assert one.batch_set_v1(KEYS[:2], source(pool)[: 2 * pool.page_size]) == [True, True]
    assert one.batch_set(KEYS[2:], [pool.get_data_page(2 * pool.page_size)])
    assert one.batch_exists(KEYS) == PAGES
    assert one.exists(KEYS[1])
    assert one.batch_get_v1(KEYS, target(pool)) == [True] * PAGES
    assert pages(pool, target(pool)) == pages(pool, source(pool))
    flat = one.batch_get(KEYS, [pool.get_dummy_flat_data_page() for _ in KEYS])
    assert [bytes(page.view(torch.uint8).numpy()) for page in flat] == pages(pool, source(pool))
    assert same(one.get(KEYS[0]), pool.get_data_page(0))


@pytest.mark.case("PLUG-1")
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8],
    ids=str,
)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype, plugin: Plugin, pools: Any) -> None:
    """Random bits, NaNs among them: a page has as many bytes as its elements, and comes back as it was."""
    pool = pools.mha(dtype=dtype)
    raw = pool.kv_buffer.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2)))
    one = plugin(pool, extra={"kv_dtype": "fp8_e4m3"})
    assert one.batch_set_v1(KEYS, source(pool)) == [True] * PAGES
    assert one.batch_get_v1(KEYS, target(pool)) == [True] * PAGES
    assert pages(pool, target(pool)) == pages(pool, source(pool))
    assert one._opened.store._page_bytes == pool.get_data_page(0).nbytes


@pytest.mark.parametrize("layout", MLA_LAYOUTS)
def test_latents_are_one_object_for_all_ranks(layout: str, plugin: Plugin, pools: Any) -> None:
    """What one MLA rank stores, a rank of another tensor-parallel size reads."""
    pool, other = pools.mla(layout), pools.mla("page_first_direct")
    assert plugin(pool, tp_rank=1, tp_size=2).batch_set_v1(KEYS, source(pool)) == [True] * PAGES
    assert plugin(other, tp_rank=0, tp_size=8).batch_get_v1(KEYS, target(other)) == [True] * PAGES
    for page in range(PAGES):
        stored = pool._page(page * pool.page_size)
        stored = stored.transpose(0, 1) if layout == "page_first" else stored.reshape(3, 4, 1, 16)
        assert same(other._page((4 + page) * pool.page_size)[0], stored)


@pytest.mark.case("PLUG-2")
@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_layouts_share_pages(layout: str, plugin: Plugin, pools: Any) -> None:
    """A page that one layout stored is read by another, element by element."""
    pool, other = pools.mha("page_first"), pools.mha(layout)
    assert plugin(pool).batch_set_v1(KEYS, source(pool)) == [True] * PAGES
    assert plugin(other).batch_get_v1(KEYS, target(other)) == [True] * PAGES
    orders = {"layer_first": "clphd", "page_first": "cplhd", "page_first_direct": "c1lphd", "page_head": "c1hpld"}
    page = other._page(4 * other.page_size)
    if "1" in orders[layout]:
        page = page[:, 0]
    axes = orders[layout].replace("1", "")
    assert same(page.permute(*(axes.index(axis) for axis in "cplhd")), pool._page(0))


def test_each_rank_holds_its_own_heads(plugin: Plugin, pools: Any) -> None:
    """Two ranks store under one hash without touching each other's objects, and neither serves the whole model."""
    both = [pools.mha(heads=2) for _ in range(2)]
    both[1].kv_buffer.view(torch.uint8).add_(1)
    ranks = [plugin(pool, tp_rank=rank, tp_size=2) for rank, pool in enumerate(both)]
    for one, pool in zip(ranks, both, strict=True):
        assert one.batch_set_v1(KEYS, source(pool)) == [True] * PAGES
    for one, pool in zip(ranks, both, strict=True):
        assert one.batch_get_v1(KEYS, target(pool)) == [True] * PAGES
        assert pages(pool, target(pool)) == pages(pool, source(pool))
    assert plugin(pools.mha(heads=4)).batch_exists(KEYS) == 0


@pytest.mark.case("PLUG-4")
def test_agreed_head_groups_serve_another_topology(plugin: Plugin, pools: Any) -> None:
    """With the same `head_group` two ranks of two heads read what one rank of four has stored."""
    whole = pools.mha(heads=4)
    assert plugin(whole, extra={"head_group": 2}).batch_set_v1(KEYS, source(whole)) == [True] * PAGES
    for rank in range(2):
        part = pools.mha(heads=2)
        one = plugin(part, extra={"head_group": 2}, tp_rank=rank, tp_size=2)
        assert one.batch_get_v1(KEYS, target(part)) == [True] * PAGES
        assert same(part._page(4 * part.page_size), whole._page(0)[:, :, :, 2 * rank : 2 * rank + 2])


def test_replicated_heads_are_shared_where_their_number_is_known(plugin: Plugin, pools: Any) -> None:
    """Four ranks over two kv heads: neighbours hold the same one, so what one of them stores the other reads."""
    config = {"extra": {"kv_heads": 2}, "tp_size": 4}
    pool, other = pools.mha(heads=1), pools.mha(heads=1)
    assert plugin(pool, tp_rank=0, **config).batch_set_v1(KEYS, source(pool)) == [True] * PAGES
    assert plugin(other, tp_rank=1, **config).batch_get_v1(KEYS, target(other)) == [True] * PAGES
    assert plugin(other, tp_rank=2, **config).batch_exists(KEYS) == 0


def test_stages_of_a_pipeline_are_apart(plugin: Plugin, pools: Any) -> None:
    """Layers 0 to 2 and 3 to 5 under one hash are two pages."""
    first, second = pools.mha(), pools.mha(first_layer=3)
    assert plugin(first, pp_size=2).batch_set_v1(KEYS, source(first)) == [True] * PAGES
    assert plugin(second, pp_size=2, pp_rank=1).batch_exists(KEYS) == 0


@pytest.mark.case("FAIL-5")
def test_results_are_per_page(plugin: Plugin, pools: Any) -> None:
    """The page that is absent is the one that is said to be absent; `exists` counts up to it."""
    pool = pools.mha()
    one = plugin(pool)
    size = pool.page_size
    kept = pages(pool, target(pool))
    assert one.batch_set_v1([KEYS[0], KEYS[2]], torch.cat([source(pool)[:size], source(pool)[2 * size :]])) == [
        True,
        True,
    ]
    assert one.batch_exists(KEYS) == 1
    assert one.batch_get_v1(KEYS, target(pool)) == [True, False, True]
    found = pages(pool, target(pool))
    assert found == [pages(pool, source(pool))[0], kept[1], pages(pool, source(pool))[2]]


def test_places_that_are_no_page_fail_alone(plugin: Plugin, pools: Any) -> None:
    """Slots that do not follow each other, begin inside a page, or lie behind the pool: that page is not moved."""
    pool = pools.mha()
    one = plugin(pool)
    size = pool.page_size
    good = torch.arange(size)
    for bad in (torch.arange(1, size + 1), torch.arange(pool.size, pool.size + size), torch.tensor([8, 9, 11, 10])):
        assert one.batch_set_v1(KEYS[:2], torch.cat([good, bad])) == [True, False]
    assert one.batch_set_v1(KEYS, good) == [False] * PAGES  # a wrong number of slots says nothing about any page
    assert one.statistics().write_failures == {"place": 3, "ConfigError": 1}


def test_tensors_that_are_no_page_are_misses(plugin: Plugin, pools: Any) -> None:
    """A value of another length or dtype, none, or too few of them: refused, and nothing is read into them."""
    pool = pools.mha()
    one = plugin(pool)
    page = pool.get_data_page(0)
    for bad in (page[:-1], torch.cat([page, page]), page.view(torch.float16), None, page.view(-1, 2).t()):
        assert one.set(KEYS[0], bad) is False
    assert one.batch_set(KEYS[:2], [page]) is False
    assert not one.exists(KEYS[0])
    assert one.set(KEYS[0], page)
    for bad in (page[:-1].clone(), page.view(torch.float16).clone()):
        before = bad.clone()
        assert one.get(KEYS[0], bad) is None
        assert bad.view(torch.uint8).equal(before.view(torch.uint8))


def test_keys_that_are_no_page_hash_are_misses(plugin: Plugin, pools: Any, extra_info: Any) -> None:
    """Names with a suffix, a path or in capitals name no page."""
    pool = pools.mha()
    one = plugin(pool)
    for key in ("", "../x", KEYS[0] + ".swa", KEYS[0].upper(), "z" * 64, "0" * 10**6, None, b"0" * 64):
        assert one.set(key, pool.get_data_page(0)) is False
        assert one.exists(key) is False
        assert one.get(key) is None
    assert one.set(KEYS[0], pool.get_data_page(0))
    for before in (["0" * 32] * 2, [None], ["../x"]):  # what stands before a page is such hashes too
        assert one.batch_exists(KEYS[:1], extra_info(prefix_keys=before)) == 0


def test_one_key_twice_in_a_call(plugin: Plugin, pools: Any) -> None:
    """A repeated page is stored, and read into both places."""
    pool = pools.mha()
    one = plugin(pool)
    size = pool.page_size
    same_page = torch.cat([torch.arange(size), torch.arange(size)])
    assert one.batch_set_v1([KEYS[0], KEYS[0]], same_page) == [True, True]
    assert one.batch_exists([KEYS[0], KEYS[0]]) == 2
    assert one.batch_get_v1([KEYS[0], KEYS[0]], target(pool)[: 2 * size]) == [True, True]
    assert pages(pool, target(pool)[: 2 * size]) == 2 * pages(pool, torch.arange(size))


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_pages_of_one_token(layout: str, plugin: Plugin, pools: Any) -> None:
    pool = pools.mha(layout, page=1)
    one = plugin(pool)
    assert one.batch_set_v1(KEYS, source(pool)) == [True] * PAGES
    assert one.batch_get_v1(KEYS, target(pool)) == [True] * PAGES
    assert pages(pool, target(pool)) == pages(pool, source(pool))


def test_statistics_are_the_engines_own_record(plugin: Plugin, pools: Any) -> None:
    """`get_stats` holds the transfers since the last call; `statistics` counts all pages."""
    pool = pools.mha()
    one = plugin(pool)
    one.batch_set_v1(KEYS, source(pool))
    one.batch_exists([*KEYS, "0" * 64])
    one.batch_get_v1([*KEYS, "0" * 64], torch.arange((PAGES + 1) * pool.page_size))
    record = one.get_stats()
    assert type(record).__name__ == "StorageMetrics"
    assert (record.backup_pgs, record.prefetch_pgs) == ([PAGES], [PAGES])
    assert all(speed > 0 for speed in record.backup_bandwidth + record.prefetch_bandwidth)
    assert one.get_stats().prefetch_pgs == []
    totals = one.statistics()
    assert (totals.given, totals.written, totals.asked, totals.read) == (3, 3, 4, 3)
    assert (totals.looked_up, totals.found, totals.read_failures) == (4, 3, {"absent": 1})


def test_a_model_with_a_pool_that_is_not_understood_runs_without_storage(
    plugin: Plugin, pools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a state is no hit: the log has one line, and questions about several pools are answered with none."""
    pool, other = pools.mha(), pools.mha()
    other.__class__ = type("MambaPoolHost", (type(pool),), {})
    one = plugin(pool)
    one.register_mem_host_pool_v2(pool, "kv")
    assert one.batch_set_v1(KEYS, source(pool)) == [True] * PAGES
    assert one.batch_exists_v2(KEYS).kv_hit_pages == PAGES
    transfers = [SimpleNamespace(name="mamba", keys=KEYS, host_indices=source(pool))]
    assert one.batch_exists_v2(KEYS, transfers).kv_hit_pages == 0
    one.register_mem_host_pool_v2(other, "mamba")
    assert [record.levelname for record in caplog.records if "without a cache" in record.message] == ["ERROR"]
    assert one.batch_get_v2(transfers) == one.batch_set_v2(transfers) == {"mamba": [False] * PAGES}
    assert one.batch_exists(KEYS) == 0
    assert "mamba beside its KV cache: host pool MambaPoolHost is not understood" in one.statistics().disabled
