"""Storage in trouble, pages of a past that is not ours, and clears: misses, never an exception in the engine."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
import torch

from hicache.errors import StorageUnavailable
from hicache.storage.base import ObjectStatus
from hicache.storage.memory import MemoryBackend
from hicache.testing.clients import until
from hicache.testing.faults import FaultyStorage, delay, fail, refuse
from hicache.testing.gates import Gate
from hicache_sglang.calls import Complaints, TimedCalls
from hicache_sglang.counters import Counters
from hicache_sglang.store import GENERATION_SECONDS, StoragePages

PAGES = 3
KEYS = [sha256(bytes([page])).hexdigest() for page in range(PAGES)]
VERBS = ("get_into", "put", "contains", "delete", "generation", "clear")

Plugin = Callable[..., Any]


def slots(first: int = 0) -> torch.Tensor:
    return torch.arange(first * 4, (first + PAGES) * 4)


@pytest.mark.case("FAIL-4")
@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("a bug"), MemoryError(), KeyError("x")])
def test_nothing_is_raised_into_the_engine(error: Exception, plugin: Plugin, pools: Any) -> None:
    """Whatever a backend raises in whatever verb, each method answers that there is nothing."""
    storage = FaultyStorage(MemoryBackend())
    pool = pools.mha()
    one = plugin(pool, backend=storage)
    for verb in VERBS:
        storage.always(verb, fail(error))
    assert one.batch_set_v1(KEYS, slots()) == [False] * PAGES
    assert one.batch_get_v1(KEYS, slots()) == [False] * PAGES
    assert one.batch_set(KEYS, [pool.get_data_page(0)] * PAGES) is False
    assert one.batch_get(KEYS) == [None] * PAGES
    assert one.batch_exists(KEYS) == 0
    assert one.exists(KEYS[0]) is False
    assert one.get(KEYS[0]) is None
    assert one.set(KEYS[0], pool.get_data_page(0)) is False
    assert one.clear() is False
    assert one.get_stats() is not None
    assert sum(one.statistics().read_failures.values()) >= PAGES


def test_a_storage_that_comes_late_is_opened_late(
    plugin: Plugin, pools: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Away when the engine starts: misses and one warning, no try before its time, and pages once it is there."""
    memory = MemoryBackend()
    monkeypatch.setattr(memory, "close", lambda: None)  # it is opened a second time
    storage = FaultyStorage(memory)
    storage.always("generation", fail(StorageUnavailable("no server")))
    one = plugin(pools.mha(), backend=storage)
    assert one.batch_set_v1(KEYS, slots()) == [False] * PAGES
    assert "the storage cannot be opened, and is tried again: " in caplog.text
    tries = storage.count("generation")
    storage.always("generation", None)
    assert one.batch_exists(KEYS) == 0
    assert storage.count("generation") == tries
    one._open_again_at = 0.0
    assert one.batch_set_v1(KEYS, slots()) == [True] * PAGES
    assert one.batch_exists(KEYS) == PAGES
    assert one.statistics().disabled == ""


def test_trouble_ends_with_its_cause(plugin: Plugin, pools: Any) -> None:
    """A call that failed costs its own pages: the next one works."""
    storage = FaultyStorage(MemoryBackend())
    one = plugin(pools.mha(), backend=storage)
    storage.script("put", fail(OSError("for once")))
    assert one.batch_set_v1(KEYS, slots()) == [True] * PAGES  # tried again
    storage.script("get_into", refuse("no_space"))
    assert one.batch_get_v1(KEYS, slots(4)) == [False] * PAGES
    assert one.batch_get_v1(KEYS, slots(4)) == [True] * PAGES


def test_a_call_that_hangs_is_given_up_and_touches_nothing_later(plugin: Plugin, pools: Any) -> None:
    """The engine waits no longer than the time of a call, and a read that ends late writes into none of its slots."""
    gate = Gate()
    storage = FaultyStorage(MemoryBackend())
    pool = pools.mha()
    one = plugin(pool, backend=storage, extra={"timeout": 0.05})
    assert one.batch_set_v1(KEYS, slots()) == [True] * PAGES
    before = pool.kv_buffer.clone()
    storage.always("get_into", delay(gate))
    try:
        assert one.batch_get_v1(KEYS, slots(4)) == [False] * PAGES
        assert one.statistics().hung == 1
        assert one.statistics().read_failures == {"DeadlineExceeded": PAGES}
    finally:
        storage.always("get_into", None)
        gate.open()
    gate.until_passed()
    assert pool.kv_buffer.view(torch.uint8).equal(before.view(torch.uint8))


def test_calls_that_hang_are_bounded() -> None:
    """With so many hung calls a further one is refused at once; when one comes back, calls are begun again."""
    gate = Gate()
    calls = TimedCalls(0.02, most_hung=2)
    try:
        for _ in range(2):
            with pytest.raises(Exception, match="did not end within"):
                calls.run(gate.enter)
        with pytest.raises(Exception, match="2 storage calls hang"):
            calls.run(lambda: None)
    finally:
        gate.open()
    gate.until_passed(2)
    until(lambda: not calls.hung)  # the threads are past the gate, and have a few instructions to go
    assert calls.run(lambda: 7) == 7


def test_an_error_of_a_call_is_the_callers() -> None:
    """What a call raises comes out where it was made."""
    with pytest.raises(ZeroDivisionError):
        TimedCalls(5.0).run(lambda: 1 // 0)


def test_the_log_is_not_flooded(caplog: pytest.LogCaptureFixture) -> None:
    """One line about one thing in an interval, and the next says how many there were."""
    now = [0.0]
    complaints = Complaints(interval=60.0, now=lambda: now[0])
    for _ in range(5):
        complaints.say("storage read failed", "gone")
    complaints.say("storage write failed", "full")
    now[0] = 61.0
    complaints.say("storage read failed", "gone")
    assert [record.getMessage() for record in caplog.records] == [
        "hicache: storage read failed: gone",
        "hicache: storage write failed: full",
        "hicache: storage read failed: gone (4 more since the last such line)",
    ]


def test_parents_are_stored_and_compared(plugin: Plugin, pools: Any, extra_info: Any) -> None:
    """A known past is in the object; a reader that knows another one misses, one that knows none reads."""
    storage = FaultyStorage(MemoryBackend())
    one = plugin(pools.mha(), backend=storage)
    past = [sha256(b"a").hexdigest(), sha256(b"b").hexdigest()]
    assert one.batch_set_v1(KEYS, slots(), extra_info(prefix_keys=past)) == [True] * PAGES
    seen: list[Any] = []

    def look(call: Any) -> Any:
        seen.extend(call.apply())
        return seen[-PAGES:]

    storage.script("get_into", look)
    assert one.batch_get_v1(KEYS, slots(4), extra_info(prefix_keys=past)) == [True] * PAGES
    assert [result.header.depth for result in seen] == [2, 3, 4]
    assert [result.header.parent_hash.hex() for result in seen] == [past[1], *KEYS[:2]]
    assert one.batch_get_v1(KEYS, slots(4), None) == [True] * PAGES
    assert one.batch_get_v1(KEYS, slots(4), extra_info(prefix_keys=past[:1]))[0] is False
    assert one.statistics().read_failures == {"parent": 1}


def test_a_first_page_has_no_parent_and_flat_pages_have_none(plugin: Plugin, pools: Any, extra_info: Any) -> None:
    """With an empty prefix the chain begins at depth 0; without prefix keys all pages are flat."""
    storage = FaultyStorage(MemoryBackend())
    one = plugin(pools.mha(), backend=storage)
    for info, expected in ((extra_info(prefix_keys=[]), [0, 1, 2]), (None, [0, 0, 0]), (extra_info(), [0, 0, 0])):
        seen: list[Any] = []

        def look(call: Any, seen: list[Any] = seen) -> Any:
            seen.extend(call.apply())
            return list(seen)

        storage.script("get_into", look)
        assert one.clear()
        assert one.batch_set_v1(KEYS, slots(), info) == [True] * PAGES
        assert one.batch_get_v1(KEYS, slots(4), info) == [True] * PAGES
        assert [result.header.depth for result in seen] == expected


def test_a_page_is_there_only_with_all_its_shards(plugin: Plugin, pools: Any) -> None:
    """One object a layer: where one is gone the page misses, is no longer found, and the next put heals it."""
    memory = MemoryBackend()
    storage = FaultyStorage(memory)
    one = plugin(pools.mha(), backend=storage, extra={"layer_partition": 1})
    assert one.batch_set_v1(KEYS, slots()) == [True] * PAGES
    keys = [key for verb, keys in storage.calls if verb == "put" for key in keys]
    assert len(keys) == 3 * PAGES
    assert [key.shard.layers for key in keys[-PAGES:]] == [(0, 1)] * PAGES  # what tells for a page is put last
    (lost,) = (key for key in keys if key.page_hash.hex() == KEYS[1] and key.shard.layers == (2, 3))
    memory.delete([lost])
    assert one.batch_exists(KEYS) == PAGES
    assert one.batch_get_v1(KEYS, slots(4)) == [True, False, True]
    assert one.batch_exists(KEYS) == 1
    assert one.batch_set_v1(KEYS, slots()) == [True] * PAGES
    assert one.batch_get_v1(KEYS, slots(4)) == [True] * PAGES


@pytest.mark.case("FAIL-1")
def test_a_page_whose_sibling_was_not_stored_is_not_found(plugin: Plugin, pools: Any) -> None:
    """Where one layer's object fails, the first one is not put: no look-up promises the page."""
    storage = FaultyStorage(MemoryBackend())
    one = plugin(pools.mha(), backend=storage, extra={"layer_partition": 1})
    storage.always("put", refuse("no_space"))
    assert one.batch_set_v1(KEYS, slots()) == [False] * PAGES
    storage.always("put", None)
    assert one.batch_exists(KEYS) == 0


def test_clear_forgets_for_all_ranks(plugin: Plugin, pools: Any) -> None:
    """Ranks that clear together come to one generation, and none of them finds a page."""
    memory = MemoryBackend()
    first, second = pools.mha(), pools.mha()
    one, two = plugin(first, backend=FaultyStorage(memory)), plugin(second, backend=FaultyStorage(memory))
    assert one.batch_set_v1(KEYS, slots()) == [True] * PAGES
    assert two.batch_exists(KEYS) == PAGES
    assert one.clear() is True
    assert two.clear() is True
    assert (one.batch_exists(KEYS), two.batch_exists(KEYS)) == (0, 0)
    assert two.batch_set_v1(KEYS, slots()) == [True] * PAGES
    assert one.batch_exists(KEYS) == PAGES


def test_a_clear_by_somebody_else_is_seen(plugin: Plugin, pools: Any) -> None:
    """The generation is asked again after some seconds, by look-ups and by writes."""
    memory = MemoryBackend()
    one = plugin(pools.mha(), backend=FaultyStorage(memory))
    store = one._opened.store
    now = [0.0]
    store._now, store._asked_at = (lambda: now[0]), 0.0
    assert store.generation == 0
    memory.clear(store._namespace, 3)
    one.batch_exists(KEYS)
    assert store.generation == 0
    now[0] = GENERATION_SECONDS
    one.batch_exists(KEYS)
    assert store.generation == 3
    assert one.batch_set_v1(KEYS, slots()) == [True] * PAGES


def test_large_requests_go_in_batches(plugin: Plugin, pools: Any) -> None:
    """Reading ends with the batch in which a page is missing: the engine uses nothing behind it."""
    storage = FaultyStorage(MemoryBackend())
    one = plugin(pools.mha(), backend=storage)
    one._opened.store._batch = 1
    assert one.batch_set_v1(KEYS, slots()) == [True] * PAGES
    assert storage.count("put") == PAGES
    storage.script("get_into", None, refuse("absent", ObjectStatus.MISSING))
    assert one.batch_get_v1(KEYS, slots(4)) == [True, False, False]
    assert storage.count("get_into") == 2


def test_an_object_of_another_length_is_removed(plugin: Plugin, pools: Any) -> None:
    """A put would leave it as it is, so it goes when it is met, and the page can be stored again."""
    storage = FaultyStorage(MemoryBackend())
    one = plugin(pools.mha(), backend=storage)
    assert one.batch_set_v1(KEYS, slots()) == [True] * PAGES
    storage.script("get_into", refuse("size"))
    assert one.batch_get_v1(KEYS, slots(4)) == [False] * PAGES
    assert one.batch_exists(KEYS) == 0


def test_close_of_a_storage_that_hangs_ends() -> None:
    """The engine's detach waits for one call at most."""
    gate = Gate()

    class Hanging(MemoryBackend):
        def close(self) -> None:
            gate.enter()

    class Plan:
        parts = ()
        page_bytes = 1

    class Who:
        namespace = type("N", (), {"digest": bytes(16)})
        plan = Plan

    calls = TimedCalls(0.05)
    store = StoragePages(
        Hanging(),
        Who,  # type: ignore[arg-type]
        calls=calls,
        counters=Counters(),
        complaints=Complaints(),
    )
    try:
        store.close()
        assert calls.hung == 1
    finally:
        gate.open()
    gate.until_passed()
