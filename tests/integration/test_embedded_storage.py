"""The storage tier behind the embedded cache: what comes back, what a failure costs, what a deadline keeps."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

import hicache
from hicache.core.keys import ObjectKey
from hicache.records import MissReason
from hicache.storage.base import StorageBackend
from hicache.storage.memory import MemoryBackend
from hicache.testing.clock import ManualClock
from hicache.testing.embedded import leave_in, open_small, settled
from hicache.testing.engine import FakeEngine, prompt, small_namespace
from hicache.testing.faults import (
    DamageableMemory,
    FaultyStorage,
    answer,
    apply_then_raise,
    chain,
    delay,
    fail,
    resize,
    stop_at,
)
from hicache.testing.gates import Gate
from hicache.testing.waits import eventually

P = 4


def _keys(storage: MemoryBackend) -> list[ObjectKey]:
    return list(storage._entries)


@pytest.mark.case("FAIL-8")
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_what_was_stored_is_found_by_the_next_process(kind: str, tmp_path: Any) -> None:
    storage: StorageBackend | str = MemoryBackend() if kind == "memory" else f"file://{tmp_path}/store?capacity=1GiB"
    tokens = prompt(1, 41)
    leave_in(storage, tokens)
    with open_small(storage) as cache:
        engine = FakeEngine(cache)
        assert cache.match(tokens) == hicache.Match()  # looking does not ask storage
        counts = engine.run(tokens)
        assert (counts.device, counts.host, counts.storage) == (0, 0, 10)
        assert engine.verified == 10
        assert engine.run(tokens).device == 10
        assert settled(cache).bytes_from_storage == 10 * cache.device.page_bytes


@pytest.mark.case("KEY-3")
def test_tenants_are_apart_in_storage_too() -> None:
    storage = MemoryBackend()
    tokens = prompt(1, 41)
    with open_small(storage) as cache:
        FakeEngine(cache).run(tokens, tenant="t1")
        assert cache.flush()
    with open_small(storage) as cache:
        engine = FakeEngine(cache)
        assert engine.run(tokens, tenant="t2").storage == 0
        assert engine.run(tokens).storage == 0
        assert engine.run(tokens, tenant="t1").storage == 10


@pytest.mark.case("KEY-5")
@pytest.mark.parametrize("change", ["dtype", "page_size", "layers", "heads", "revision", "hash"])
def test_another_model_reads_nothing_of_this_one(change: str) -> None:
    storage = MemoryBackend()
    tokens = prompt(1, 41)
    leave_in(storage, tokens)
    shape: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 4, "dtype": "float16"}
    fields: dict[str, Any] = {}
    if change == "page_size":
        fields["page_size"] = 8
    elif change == "revision":
        fields["revision"] = "2"
    elif change == "hash":
        fields["hash"] = "sha256"
    else:
        shape |= {"dtype": {"dtype": "bfloat16"}, "layers": {"layers": 1}, "heads": {"kv_heads": 1, "head_dim": 8}}[
            change
        ]
    geometry = hicache.KVGeometry.mha(**shape, head_group=1, layer_partition=1)
    namespace = small_namespace(geometry=geometry, **fields)
    with hicache.open(namespace, device=64, host=64, storage=storage, prefetch="wait_complete") as cache:
        assert FakeEngine(cache).run(tokens).storage == 0
        assert settled(cache).failed_pages == {}


@pytest.mark.case("PAGE-4")
def test_with_write_back_every_chain_in_storage_starts_at_its_root() -> None:
    storage = MemoryBackend()
    head = prompt(100, 2 * P)
    prompts = [[*head, *prompt(seed, 30)] for seed in range(20)]
    leave_in(storage, *prompts, write_policy="write_back", device=96, host=200)
    stored = len(_keys(storage)) // 4  # shards a page
    with open_small(storage, device=400, host=400) as cache:
        engine = FakeEngine(cache)
        # What the first life had no time to write was dropped; every page that it wrote can be reached from a root.
        assert sum(engine.run(tokens, logits=False).storage for tokens in prompts) == stored > 0


def test_write_back_writes_nothing_before_it_must() -> None:
    storage = MemoryBackend()
    with open_small(storage, write_policy="write_back") as cache:
        FakeEngine(cache).run(prompt(1, 41))
        assert cache.statistics().core.host.resident == 0
        assert cache.flush()
        assert cache.statistics().core.host.resident == 10
        assert len(_keys(storage)) == 40


def test_the_second_use_writes_where_policy_says_two() -> None:
    storage = MemoryBackend()
    with open_small(storage, write_policy=("write_through", "write_through_selective")) as cache:
        engine = FakeEngine(cache)
        engine.run(prompt(1, 41))
        assert cache.flush()
        assert _keys(storage) == []
        engine.run(prompt(1, 41))
        assert cache.flush()
        assert len(_keys(storage)) == 40


# ---- failures


@pytest.mark.case("FAIL-1")
@pytest.mark.parametrize("how", ["half", "false", "none", "raise", "too_few", "too_many"])
def test_a_put_that_failed_leaves_no_hit_and_can_be_repeated(how: str) -> None:
    inner = MemoryBackend()
    storage = FaultyStorage(inner)
    fault = {
        "half": stop_at(40),
        "false": answer(False),
        "none": answer(None),
        "raise": fail(OSError("no")),
        "too_few": resize(-1),
        "too_many": resize(1),
    }[how]
    storage.always("put", fault)
    tokens = prompt(1, 41)
    with open_small(storage, host=10) as cache:
        engine = FakeEngine(cache)
        engine.run(tokens)
        assert not cache.flush()  # it says that not everything is down
        assert settled(cache).failed_pages["put"] > 0
        engine.run(prompt(2, 41))  # takes the first one's place in HOST
        cache.flush()
        assert cache.match(tokens).storage == 0
        storage.always("put", None)
        engine.run(tokens)
        assert cache.flush()
    with open_small(inner) as cache:
        assert FakeEngine(cache).run(tokens).storage == 10


@pytest.mark.case("FAIL-2")
@pytest.mark.case("FAIL-5")
def test_a_hole_ends_what_is_taken_and_frees_what_is_behind_it() -> None:
    storage = DamageableMemory()
    tokens = prompt(1, 33)
    leave_in(storage, tokens)
    by_page = sorted(_keys(storage), key=lambda key: storage._entries[key].depth)
    with open_small(storage) as cache:
        engine = FakeEngine(cache)
        storage.damage(by_page[3 * 4 + 2])  # one of the four objects of page 3
        counts = engine.run(tokens)
        assert (counts.storage, counts.missed) == (3, {MissReason.FAILED: 5})
        statistics = settled(cache)
        assert statistics.core.host.resident == statistics.core.device.resident == 8
        assert statistics.failed_pages["fetch"] == 5
        assert engine.run(tokens).device == 8


@pytest.mark.case("FAIL-3")
def test_a_page_that_is_gone_is_not_asked_for_again_until_it_was_stored() -> None:
    inner = MemoryBackend()
    tokens = prompt(1, 25)
    leave_in(inner, tokens)
    lost = sorted({key.page_hash for key in _keys(inner)}, key=lambda h: _depth(inner, h))[3]
    storage = FaultyStorage(inner)
    with open_small(storage, clock=ManualClock()) as cache:
        engine = FakeEngine(cache)
        found: list[int] = []
        with cache.request(tokens) as request:
            assert len(request.load()) == 6
        cache.clear()
        # The same again under the new generation, now with a page that vanishes between the question and the read.
        engine.run(tokens)
        assert cache.flush()
    generation = max(key.generation for key in _keys(inner))
    with open_small(storage, clock=ManualClock()) as cache:
        engine = FakeEngine(cache)
        victims = [key for key in _keys(inner) if key.page_hash == lost and key.generation == generation]

        def vanish(call: Any) -> Any:
            answers = call.apply()
            inner.delete(victims)
            return answers

        storage.script("contains", vanish)
        storage.calls.clear()
        with cache.request(tokens) as request:
            found.append(len(request.load()))
        asked = len([key for _, keys in storage.calls for key in keys if key in victims])
        with cache.request(tokens) as request:
            found.append(len(request.load()))
        assert found == [3, 3]
        assert len([key for _, keys in storage.calls for key in keys if key in victims]) == asked
        engine.run(tokens)
        assert cache.flush()
    with open_small(inner) as cache:
        assert FakeEngine(cache).run(tokens).storage == 6


def _depth(storage: MemoryBackend, page_hash: bytes) -> int:
    return next(storage._entries[key].depth for key in _keys(storage) if key.page_hash == page_hash)


@pytest.mark.case("FAIL-6")
def test_a_refused_put_leaves_no_mark_behind() -> None:
    storage = FaultyStorage(MemoryBackend())
    tokens = prompt(1, 41)
    with open_small(storage) as cache:
        engine = FakeEngine(cache)
        for fault in (fail(OSError(28, "no space")), answer(None), apply_then_raise(RuntimeError("late"))):
            storage.script("put", *[fault] * 8)
            engine.run(tokens)
            cache.flush()
        storage._scripts.clear()
        engine.run(tokens)
        assert cache.flush()
        settled(cache)
    with open_small(storage.inner) as cache:
        assert FakeEngine(cache).run(tokens).storage == 10


@pytest.mark.case("FAIL-7")
@pytest.mark.case("THR-1")
def test_one_failed_put_of_many_costs_one_page() -> None:
    class OwnError(Exception):
        pass

    for error in (OSError("x"), TimeoutError(), ValueError("x"), OwnError()):
        storage = FaultyStorage(MemoryBackend())
        with open_small(storage, write_threads=1) as cache:
            engine = FakeEngine(cache)
            storage.script("put", None, None, None, None, fail(error))  # two calls a prompt: siblings, then anchors
            for seed in range(10):
                engine.run(prompt(seed, 5))
                cache.flush(0.0)
                eventually(lambda: cache.statistics().core.transfers == 0)
            statistics = settled(cache)
            assert statistics.failed_pages == {"put": 1}
            assert statistics.writes is not None
            assert (statistics.writes.waiting, statistics.writes.running) == (0, 0)
            engine.run(prompt(2, 5))
            assert cache.flush()
            assert len(_keys(storage.inner)) == 40  # type: ignore[arg-type]


def test_storage_that_is_wrong_about_everything_costs_only_hits() -> None:
    storage = FaultyStorage(MemoryBackend())
    for verb in ("get_into", "put", "contains", "touch", "delete"):
        storage.always(verb, fail(RuntimeError("down")))
    with open_small(storage) as cache:
        engine = FakeEngine(cache)
        for seed in range(10):
            engine.run(prompt(seed % 3, 41))
        assert engine.verified > 0
        settled(cache)


def test_a_missing_sibling_is_a_miss_and_the_page_heals() -> None:
    storage = MemoryBackend()
    tokens = prompt(1, 17)
    leave_in(storage, tokens)
    anchor = small_namespace().geometry.anchor(4)
    sibling = next(key for key in _keys(storage) if key.shard != anchor and storage._entries[key].depth == 1)
    storage.delete([sibling])
    with open_small(storage, absent_seconds=0.0) as cache:
        engine = FakeEngine(cache)
        assert engine.run(tokens).storage == 1
        assert cache.flush()
    with open_small(storage) as cache:
        assert FakeEngine(cache).run(tokens).storage == 4


def test_a_hash_that_collides_is_a_miss() -> None:
    storage = DamageableMemory()
    tokens, other = prompt(1, 9), prompt(2, 9)
    leave_in(storage, tokens, other)
    with open_small(storage) as cache:
        # Somebody else's tokens under our hash: plant the other prompt's objects under this one's names.
        from hicache.storage.codec import encode_header

        page_hash = next(key.page_hash for key in _keys(storage) if storage._entries[key].depth == 0)
        for key in [key for key in _keys(storage) if key.page_hash == page_hash]:
            payload = bytes(64)
            storage.plant(
                key, encode_header(key, parent_hash=None, depth=0, tokens=b"\1\0\0\0" * 4, payload=payload), payload
            )
        engine = FakeEngine(cache)
        engine.run(tokens)
        engine.run(other)
        assert settled(cache).failed_pages["fetch"] == 2
        assert engine.verified == 2  # the prompt whose hash was not touched


# ---- namespaces in storage


def test_a_manifest_is_written_once_for_each_namespace() -> None:
    storage = MemoryBackend()
    with open_small(storage) as cache:
        engine = FakeEngine(cache)
        for _ in range(2):
            engine.run(prompt(1, 41))
            engine.run(prompt(1, 41), tenant="secret", salt="pepper")
        assert cache.flush()
    documents = {digest: json.loads(text) for digest, text in storage.read_manifests().items()}
    assert len(documents) == 2
    base = small_namespace()
    assert documents[base.digest]["model"] == "tiny"
    assert "secret" not in str(documents)
    assert "pepper" not in str(documents)


def test_clear_is_remembered_by_storage() -> None:
    storage = MemoryBackend()
    tokens = prompt(1, 41)
    leave_in(storage, tokens)
    with open_small(storage) as cache:
        engine = FakeEngine(cache)
        assert engine.run(tokens).storage == 10
        engine.run(tokens, tenant="other")
        cache.clear()
        assert cache.match(tokens).pages == 0
        assert cache.match(tokens, tenant="other").device == 10
        assert engine.run(tokens).missed.keys() <= {MissReason.EXPIRED, MissReason.COLD}
        assert cache.flush()
        cache.clear()
    with open_small(storage) as cache:
        engine = FakeEngine(cache)
        assert engine.run(tokens).storage == 0
        assert engine.run(tokens, tenant="other").storage == 10


def test_a_clear_that_storage_did_not_take_says_so() -> None:
    storage = FaultyStorage(MemoryBackend())
    with open_small(storage) as cache:
        FakeEngine(cache).run(prompt(1, 41))
        storage.script("clear", fail(OSError("read only")))
        with pytest.raises(hicache.StorageError, match="call clear again"):
            cache.clear()
        assert cache.match(prompt(1, 41)).pages == 0
        cache.clear()
        settled(cache)


def test_a_namespace_whose_generation_is_unknown_goes_past_the_cache() -> None:
    storage, clock, gate = FaultyStorage(MemoryBackend()), ManualClock(), Gate()
    tokens = prompt(1, 41)
    with open_small(storage, clock=clock) as cache:
        storage.script("generation", chain(delay(gate), fail(OSError("down"))), None)
        engine = FakeEngine(cache)
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(engine.run(tokens, tenant="t", deadline=0.5)))
        thread.start()
        gate.until_arrived()
        clock.until_waiting()
        clock.advance(0.5)
        thread.join(30)
        assert results[0].missed == {MissReason.BYPASSED: 10}
        thread = threading.Thread(target=lambda: results.append(engine.run(tokens, tenant="t")))
        thread.start()
        thread.join(10)  # nobody waits a second time
        assert results[1:] == results[:1]
        gate.open()
        eventually(lambda: storage.count("generation") == 2 and cache.statistics().reads.running == 0)
        eventually(lambda: engine.run(tokens, tenant="t").device == 10)
        settled(cache)


def test_open_says_when_storage_cannot_be_asked() -> None:
    storage = FaultyStorage(MemoryBackend())
    storage.script("generation", fail(hicache.StorageUnavailable("gone")))
    with pytest.raises(hicache.StorageUnavailable, match="gone"):
        open_small(storage)
