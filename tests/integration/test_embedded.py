"""The embedded cache in one process, with bytes: what a request may take, what it leaves behind, what is counted."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

import hicache
from hicache.core.symbols import page_extras
from hicache.records import MissReason
from hicache.testing.engine import SMALL, FakeEngine, prompt, small_namespace, small_pool

P = 4


@pytest.fixture
def cache() -> Iterator[hicache.EmbeddedCache]:
    with hicache.open(small_namespace(), device=64, host=64) as cache:
        yield cache
        cache.check()
        assert cache.statistics().internal_errors == 0
    assert cache.close().complete


def test_what_one_request_computes_the_next_one_gets(cache: hicache.EmbeddedCache) -> None:
    engine = FakeEngine(cache)
    tokens = prompt(1, 21)
    assert engine.run(tokens).missed == {MissReason.COLD: 5}
    counts = engine.run(tokens)
    assert (counts.asked, counts.device, counts.missed) == (5, 5, {})
    assert engine.verified == 5
    assert engine.computed == 6 + 1  # the unaligned tail is computed both times


@pytest.mark.case("PAGE-1")
def test_a_request_for_logits_always_leaves_its_last_token_to_compute() -> None:
    namespace = small_namespace(page_size=16)
    with hicache.open(namespace, device=32) as cache:
        engine = FakeEngine(cache)
        tokens = prompt(1, 80)
        engine.run(tokens[:64])
        usable = {}
        for n in (64, 63, 65, 16, 15, 17):
            with cache.request(tokens[:n]) as request:
                usable[n] = len(request.load()) * 16
                assert cache.match(tokens[:n]).pages * 16 == usable[n]
        assert usable == {64: 48, 63: 48, 65: 64, 16: 0, 15: 0, 17: 16}
        with cache.request(tokens[:64], logits=False) as request:
            assert len(request.load()) == 4
        # The fourth page is computed again: it keeps its name, and its child still hangs on it.
        engine.run(tokens[:64])
        engine.run(tokens)
        engine.run(tokens[:64])
        assert cache.match(tokens, logits=False).device == 5
        assert engine.run([*tokens, 1]).device == 5
        cache.check()


@pytest.mark.case("PAGE-3")
def test_only_whole_pages_are_kept_while_decoding() -> None:
    namespace = small_namespace(page_size=16)
    with hicache.open(namespace, device=32, events=True) as cache:
        engine = FakeEngine(cache)
        stored = cache.events()
        tokens = prompt(1, 48)
        with cache.request(tokens[:40]) as request:
            engine.prefill(request, tokens[:40])
            assert [len(event.page_hashes) for event in stored.drain()] == [2]
            for n in range(41, 49):
                request.extend(tokens[n - 1 : n])
                engine.compute(tokens[:48], request.allocate(), first=3)  # the tail page was allocated with the prompt
                if n == 48:
                    engine.compute(tokens, request._lease.own[-1:], first=2)
                request.commit()
                assert len(stored.drain()) == (n == 48)
            assert cache.match(tokens[:45], logits=False).pages == 2
            assert cache.match(tokens, logits=False).pages == 3
        assert engine.run([*tokens, 7]).device == 3


@pytest.mark.case("PAGE-7")
@pytest.mark.parametrize("chunk", [1000, 100, 7])
def test_what_is_kept_does_not_depend_on_how_the_prompt_was_cut(chunk: int) -> None:
    with hicache.open(small_namespace(), device=300, host=300, storage="memory://", events=True) as cache:
        engine = FakeEngine(cache)
        events = cache.events()
        tokens = prompt(1, 1000)
        with cache.request(tokens) as request:
            assert len(request.load()) == 0
            engine.compute(tokens, request.allocate(), first=0)
            for end in range(chunk, 1000 + chunk, chunk):
                request.commit(upto=min(end, 1000))
        assert cache.flush()
        stored: dict[hicache.Tier, list[bytes]] = {tier: [] for tier in hicache.Tier}
        for event in events.drain():
            assert isinstance(event, hicache.Stored)
            stored[event.tier] += event.page_hashes
        assert [len(stored[tier]) for tier in hicache.Tier] == [250, 250, 250]
        assert all(len(set(hashes)) == 250 for hashes in stored.values())
        statistics = cache.statistics()
        assert statistics.bytes_to_storage == 250 * cache.device.page_bytes
        assert (statistics.requests, statistics.pages.hits, statistics.pages.asked) == (1, 0, 249)


def test_looking_changes_nothing(cache: hicache.EmbeddedCache) -> None:
    engine = FakeEngine(cache)
    engine.run(prompt(1, 20))
    assert cache.flush()
    before = cache.statistics()
    for _ in range(3):
        assert cache.match(prompt(1, 20)).device == 4
        assert cache.match(prompt(1, 20), tenant="other").pages == 0
        assert cache.match(prompt(2, 20)) == hicache.Match()
    assert cache.statistics() == before


@pytest.mark.case("STAT-1")
@pytest.mark.case("STAT-5")
def test_counts_move_once_a_request_and_add_up_in_tokens(cache: hicache.EmbeddedCache) -> None:
    engine = FakeEngine(cache)
    tokens = prompt(1, 20)
    engine.run(tokens)
    with cache.request(tokens) as request:
        for _ in range(3):
            cache.match(tokens)
            request.load()
        with pytest.raises(hicache.InvalidInput, match="closed"):
            _ = request.counts
    assert request.close() is request.counts
    statistics = cache.statistics()
    assert statistics.requests == 2
    assert (statistics.pages.asked, statistics.pages.device) == (8, 4)
    totals = statistics.tokens
    assert totals.asked == 40 == totals.hits + sum(totals.missed.values())
    assert totals.missed == {MissReason.COLD: 16, MissReason.UNALIGNED_TAIL: 8}
    assert totals.hit_rate == 16 / 40


@pytest.mark.case("STAT-2")
def test_rates_of_nothing_are_nothing(cache: hicache.EmbeddedCache) -> None:
    assert cache.statistics().pages.hit_rate is None
    for tokens in ([], [1], [1, 2, 3]):
        with cache.request(tokens) as request:
            assert len(request.load()) == 0
            request.allocate()
            request.commit()
    assert cache.statistics().pages.hit_rate is None
    assert cache.statistics().tokens.missed == {MissReason.UNALIGNED_TAIL: 4}


@pytest.mark.case("KEY-2")
def test_equal_pages_after_different_pasts_are_different_pages(cache: hicache.EmbeddedCache) -> None:
    engine = FakeEngine(cache)
    a, b, x = prompt(1, 4), prompt(2, 4), prompt(3, 4)
    engine.run([*a, *x, 0])
    assert engine.run([*b, *x, 0]).device == 0
    assert engine.run([*a, *x, 0]).device == 2


@pytest.mark.case("KEY-3")
def test_tenants_salts_and_adapters_share_nothing(cache: hicache.EmbeddedCache) -> None:
    tokens = prompt(1, 20)
    one = hicache.Adapter("lora", b"1" * 16)
    two = hicache.Adapter("lora", b"2" * 16)
    whose = [{}, {"tenant": "a"}, {"tenant": "b"}, {"salt": "a"}, {"adapter": one}, {"adapter": two}]
    for i, options in enumerate(whose):
        engine = FakeEngine(cache, variant=str(i))
        assert engine.run(tokens, **options).device == 0
        assert engine.run(tokens, **options).device == 4
        assert cache.match(tokens, **options).device == 4
    assert FakeEngine(cache, variant="x").run(tokens, tenant="c").missed == {MissReason.OTHER_NAMESPACE: 4}


@pytest.mark.case("KEY-6")
def test_other_images_under_equal_tokens_are_other_pages() -> None:
    with hicache.open(small_namespace(page_size=16), device=64, extras=True) as cache:
        tokens = prompt(1, 64)
        pictures = {
            "none": (),
            "one": ((b"h" * 16, 32, 32),),
            "two": ((b"i" * 16, 32, 32),),
            "later": ((b"h" * 16, 33, 31),),
        }
        for i, (name, extras) in enumerate(pictures.items()):
            engine = FakeEngine(cache, variant="")
            with cache.request([*tokens, 0], extras=extras) as request:
                assert len(request.load()) == (2 if i else 0), name
                engine.compute([*tokens, 0], request.allocate(), first=len(request.load()))
                request.commit()
            assert cache.match([*tokens, 0], extras=extras).device == 4
        assert page_extras(pictures["one"], 16, 4) != page_extras(pictures["later"], 16, 4)


def test_an_image_may_come_while_the_prompt_grows() -> None:
    with hicache.open(small_namespace(), device=64, extras=True) as cache:
        tokens = prompt(1, 12)
        with cache.request(tokens[:6]) as request:
            request.load()
            request.extend(tokens[6:], extras=((b"h" * 16, 8, 4),))
            request.allocate()
            request.commit()
        assert cache.match(tokens, logits=False).device == 2
        assert cache.match(tokens, logits=False, extras=((b"h" * 16, 8, 4),)).device == 3
        cache.check()


def test_images_need_a_cache_that_knows_of_them(cache: hicache.EmbeddedCache) -> None:
    with pytest.raises(hicache.InvalidInput, match="extras=True"):
        cache.request([1, 2], extras=((b"h" * 16, 0, 1),))
    with cache.request([1, 2]) as request, pytest.raises(hicache.InvalidInput, match="extras=True"):
        request.extend([1], extras=((b"h" * 16, 0, 1),))


def test_an_adapter_without_a_digest_goes_past_the_cache(cache: hicache.EmbeddedCache) -> None:
    unknown = hicache.Adapter("lora")
    tokens = prompt(1, 18)
    for _ in range(2):
        with cache.request(tokens, adapter=unknown) as request:
            assert request.bypassed
            assert len(request.load()) == 0
            assert len(request.allocate()) == 5
            request.commit()
            request.extend([1, 2, 3])
            assert len(request.allocate()) == 1
            request.commit()
        assert request.counts.missed == {MissReason.BYPASSED: 4}
    assert cache.match(tokens, adapter=unknown).pages == 0
    statistics = cache.statistics()
    assert (statistics.bypassed, statistics.core.device.free) == (2, 64)
    assert statistics.tokens.missed == {MissReason.BYPASSED: 32, MissReason.UNALIGNED_TAIL: 4}


@pytest.mark.parametrize("kind", [np.uint32, np.int64, np.uint8, list, tuple])
def test_tokens_come_in_any_form_of_integers(cache: hicache.EmbeddedCache, kind: type) -> None:
    FakeEngine(cache).run([1, 2, 3, 4, 5, 6, 7, 8, 9])
    given = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9])
    tokens = given.astype(kind) if isinstance(kind, type) and issubclass(kind, np.generic) else kind(given.tolist())
    with cache.request(tokens) as request:
        assert len(request.load()) == 2
        request.extend(tokens[:3])
        assert request.tokens == 12


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([1, -1], "position 1"),
        ([2**32], "position 0"),
        ([1.5], "position 0"),
        ("abc", "str"),
        (np.zeros((2, 2), np.int64), "dimensions"),
        (np.zeros(2), "float64"),
        ([True], "position 0"),
    ],
)
def test_what_is_no_token_is_refused_and_nothing_is_held(
    cache: hicache.EmbeddedCache, tokens: object, text: str
) -> None:
    with pytest.raises(hicache.InvalidInput, match=text):
        cache.request(tokens)  # type: ignore[arg-type]
    with cache.request([1, 2]) as request, pytest.raises(hicache.InvalidInput, match=text):
        request.extend(tokens)  # type: ignore[arg-type]
    assert cache.statistics().open_requests == 0


@pytest.mark.parametrize("upto", [-1, 9, True])
def test_commit_must_be_within_the_prompt(cache: hicache.EmbeddedCache, upto: int) -> None:
    with cache.request(prompt(1, 8)) as request:
        request.allocate()
        with pytest.raises(hicache.InvalidInput, match="upto"):
            request.commit(upto=upto)


def test_commit_needs_slots(cache: hicache.EmbeddedCache) -> None:
    with cache.request(prompt(1, 8)) as request:
        with pytest.raises(hicache.InvalidInput, match="slots"):
            request.commit()
        request.allocate(1)
        with pytest.raises(hicache.InvalidInput, match="slots"):
            request.commit()
        request.commit(upto=4)


@pytest.mark.parametrize("pages", [-1, 1.5, True])
def test_allocate_takes_whole_numbers(cache: hicache.EmbeddedCache, pages: int) -> None:
    with cache.request(prompt(1, 8)) as request, pytest.raises(hicache.InvalidInput, match="pages="):
        request.allocate(pages)


@pytest.mark.case("LEAK-2")
def test_every_pin_ends_with_its_request_even_a_forgotten_one(cache: hicache.EmbeddedCache) -> None:
    engine = FakeEngine(cache)
    for seed in range(4):
        engine.run(prompt(seed, 40))
    assert cache.flush()
    for i in range(300):
        request = cache.request(prompt(i % 4, 40))
        if i % 3 == 0:
            request.load()
            request.close()
        elif i % 3 == 1:
            request.close(aborted=True)
        else:
            request.load()
            request.allocate()
        del request
    gc.collect()
    statistics = cache.statistics()
    assert statistics.core.device.pinned == statistics.core.host.pinned == 0
    assert statistics.core.device.private == statistics.open_requests == 0
    assert (statistics.dropped, statistics.aborted) == (100, 200)
    cache.check()
    with cache.request(prompt(9, 64 * P)) as request:
        assert len(request.allocate()) == 64  # the tier can be emptied


def test_an_exception_in_the_engine_frees_everything(cache: hicache.EmbeddedCache) -> None:
    requests = []

    def engine() -> None:
        with cache.request(prompt(1, 40)) as request:
            requests.append(request)
            request.load()
            request.allocate()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine()
    assert requests[0].counts.aborted
    assert cache.statistics().core.device.free == 64


def test_a_closed_request_does_nothing_any_more(cache: hicache.EmbeddedCache) -> None:
    request = cache.request(prompt(1, 8))
    request.close()
    for verb in (request.load, request.allocate, request.commit, lambda: request.extend([1])):
        with pytest.raises(hicache.CacheClosed):
            verb()


@pytest.mark.case("EVICT-5")
def test_too_large_an_allocation_evicts_nothing(cache: hicache.EmbeddedCache) -> None:
    engine = FakeEngine(cache)
    engine.run(prompt(1, 41))
    assert cache.flush()
    with cache.request(prompt(2, 65 * P)) as request, pytest.raises(hicache.OutOfSlots) as caught:
        request.allocate()
    assert (caught.value.asked, caught.value.capacity, caught.value.evictable) == (65, 64, 10)
    with cache.request(prompt(2, 65 * P)) as request, pytest.raises(hicache.OutOfSlots):
        request.allocate(deadline=60)  # it can never be had, so nobody waits
    assert engine.run(prompt(1, 41)).device == 10


def test_a_commit_without_proof_of_the_write_is_refused_where_writes_may_be_under_way() -> None:
    namespace = small_namespace()
    pool = small_pool(namespace, 8)
    pool.synchronous = False
    with hicache.open(namespace, device=pool) as cache, cache.request(prompt(1, 8)) as request:
        request.allocate()
        with pytest.raises(hicache.InvalidInput, match="ready="):
            request.commit()
        request.commit(ready=hicache.READY)


def test_events_replayed_are_residency() -> None:
    with hicache.open(small_namespace(), device=16, host=24, events=True) as cache:
        engine = FakeEngine(cache)
        listener = cache.events()
        held: dict[hicache.Tier, set[bytes]] = {tier: set() for tier in hicache.Tier}
        for i in range(60):
            engine.run(prompt(i % 7, 8 + i % 25))
            if i == 30:
                cache.clear()
        assert cache.flush()
        for event in listener.drain():
            assert not isinstance(event, hicache.Gap)
            if isinstance(event, hicache.Stored):
                assert held[event.tier].isdisjoint(event.page_hashes)
                held[event.tier].update(event.page_hashes)
            elif isinstance(event, hicache.Removed):
                assert held[event.tier].issuperset(event.page_hashes)
                held[event.tier].difference_update(event.page_hashes)
            else:
                for pages in held.values():
                    pages.clear()
        core = cache.statistics().core
        assert [len(held[tier]) for tier in hicache.Tier] == [core.device.resident, core.host.resident, 0]


def test_events_must_be_asked_for(cache: hicache.EmbeddedCache) -> None:
    with pytest.raises(hicache.ConfigError, match="events=True"):
        cache.events()


def test_all_engine_layouts_and_owned_tensors_work() -> None:
    torch = pytest.importorskip("torch")
    namespace = small_namespace()
    tensor = torch.zeros(2, 2, 8, 4, 2, 4, dtype=torch.float16)
    pool = hicache.TensorDevicePool.attach(tensor, SMALL, page_size=4, layout="layer_first")
    with hicache.open(namespace, device=pool, host=64) as cache:
        engine = FakeEngine(cache)
        for i in range(12):
            engine.run(prompt(i % 4, 17))
        assert engine.verified > 0
        assert cache.flush()
    assert tensor.any()


def test_a_pool_of_another_geometry_is_refused() -> None:
    pool = small_pool(small_namespace(page_size=8), 8)
    with pytest.raises(hicache.GeometryError):
        hicache.open(small_namespace(), device=pool)


def test_simulation_starts_no_thread_and_decides_the_same() -> None:
    namespace = small_namespace()
    results = []
    for with_bytes in (True, False):
        with hicache.open(namespace, device=24, bytes=with_bytes) as cache:
            for i in range(100):
                with cache.request(prompt(i % 9, 8 + i % 31)) as request:
                    request.load()
                    request.allocate(deadline=10)
                    request.commit(ready=hicache.READY)
            results.append(cache.statistics().pages)
            assert (cache._pump is None) is not with_bytes
    assert results[0] == results[1]
