"""A hosted cache with its storage threads: its own rules, and what it shares with others on one storage."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.core.symbols import page_extras
from hicache.errors import CacheClosed, ConfigError, GeometryError, HashMismatch, InvalidInput, NamespaceError
from hicache.events import Removed, Stored
from hicache.memory.host import MmapHostPool
from hicache.records import MissReason, Tier
from hicache.runtime.hosting import PREFETCHES, HostedCache, open_hosted
from hicache.storage.base import StorageBackend
from hicache.storage.codec import decode_header
from hicache.storage.memory import MemoryBackend
from hicache.testing.clock import ManualClock
from hicache.testing.engine import prompt, small_namespace
from hicache.testing.faults import FaultyStorage, delay, fail
from hicache.testing.gates import Gate
from hicache.testing.hosted import HostedLoop, content, page_hashes, token_bytes

NAMESPACE = small_namespace(hash="sha256")
SIZE = NAMESPACE.page_size
PAGE_BYTES = NAMESPACE.geometry.page_bytes(SIZE)

Open = Callable[..., HostedLoop]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens hosted caches and closes them, and sees that nothing was left."""
    loops: list[HostedLoop] = []

    def open_one(storage: StorageBackend | str | None = None, *, slots: int = 64, **options: Any) -> HostedLoop:
        defaults: dict[str, Any] = {"prefetch": "wait_complete", "retry": None, "canary": False, "events": True}
        words = np.zeros(slots, np.uint64)
        host = MmapHostPool(slots, PAGE_BYTES)
        cache = open_hosted(NAMESPACE, host=host, storage=storage, words=words, **(defaults | options))
        loops.append(HostedLoop(cache))
        return loops[-1]

    yield open_one
    for loop in loops:
        loop.close()
        loop.cache.host.close()
        assert loop.cache.statistics().internal_errors == 0


def _slots_in_use(cache: HostedCache) -> tuple[int, int, int]:
    host = cache.statistics().core.host
    return host.private, host.pinned, host.quarantined


def _empty(loop: HostedLoop) -> None:
    with loop.cache.parts.reducer.lock:
        loop.cache.parts.core.evict(Tier.HOST, 10_000)
    loop.cache.settle()


# ---- what it gives


def test_pages_are_found_by_hash_and_counted_as_host() -> None:
    cache = open_hosted(NAMESPACE, host=MmapHostPool(16, PAGE_BYTES))
    loop = HostedLoop(cache)
    tokens = prompt(1, 5 * SIZE + 3)
    assert [loop.run(tokens), loop.run(tokens)] == [0, 5]
    statistics = cache.statistics()
    assert (statistics.pages.host, statistics.pages.device, statistics.pages.storage) == (5, 0, 0)
    assert dict(statistics.tokens.missed) == {MissReason.COLD: 5 * SIZE, MissReason.UNALIGNED_TAIL: 6}
    assert statistics.core.device.capacity == 0
    assert "device   none" in str(statistics)
    loop.close()
    with pytest.raises(CacheClosed):
        loop.run(tokens)


@pytest.mark.case("FAIL-5")
def test_another_cache_on_the_storage_gets_pages_and_their_tokens(opened: Open) -> None:
    storage = MemoryBackend()
    first, tokens = opened(storage), prompt(1, 40)
    assert first.run(tokens) == 0
    assert first.elsewhere(lambda: first.cache.flush(5.0))
    second = opened(storage)
    request = second.request(tokens)
    assert request.match.storage == len(request.usable) == 10
    store = second.cache.parts.tokens
    assert store is not None
    assert store.tokens(request.usable) == token_bytes(tokens)
    assert request.close().storage == 10
    second.cache.settle()
    told = [event for event in second.events if isinstance(event, Stored) and event.tier is Tier.HOST]
    assert b"".join(event.tokens for event in told) == token_bytes(tokens)


@pytest.mark.case("FAIL-5")
@pytest.mark.parametrize("images", [False, True])
def test_an_embedded_cache_and_a_hosted_one_share_a_storage(opened: Open, images: bool) -> None:
    """One algorithm, one set of objects: each finds what the other stored, bytes and headers alike."""
    storage, spans = MemoryBackend(), [(b"an image", 6, 9)] if images else []
    extras = page_extras(spans, SIZE, 10) if images else b""
    hosted, (ours, theirs) = opened(storage), (prompt(1, 40), prompt(2, 40))
    assert hosted.run(ours, extras=extras) == 0
    assert hosted.elsewhere(lambda: hosted.cache.flush(5.0))

    options: dict[str, Any] = {"prefetch": "wait_complete", "extras": images, "retry": None}
    with hicache.open(NAMESPACE, device=32, host=32, storage=storage, **options) as cache:
        with cache.request(ours, logits=False, extras=spans) as request:
            for page, slot in enumerate(request.load().tolist()):
                assert bytes(cache.device.read_page(slot)) == content(ours[: (page + 1) * SIZE], PAGE_BYTES)
        assert request.counts.storage == 10
        with cache.request(theirs, logits=False, extras=spans) as request:
            for page, slot in enumerate(request.allocate().tolist()):
                cache.device.write_page(slot, content(theirs[: (page + 1) * SIZE], PAGE_BYTES))
            request.commit(ready=hicache.READY)
        assert cache.flush()
    assert hosted.run(theirs, extras=extras) == 10


def test_headers_that_it_writes_carry_tokens_and_extras(opened: Open) -> None:
    headers = []

    class Seen(MemoryBackend):
        def put(self, objects: Any) -> Any:
            headers.extend(decode_header(stored.header) for stored in objects)
            return super().put(objects)

    loop, tokens = opened(Seen()), prompt(1, 2 * SIZE)
    extras = page_extras([(b"an image", SIZE, 2)], SIZE, 2)
    loop.run(tokens, extras=extras)
    assert loop.elsewhere(lambda: loop.cache.flush(5.0))
    assert {(h.depth, h.tokens, h.extras) for h in headers} == {
        (0, token_bytes(tokens[:SIZE]), b""),
        (1, token_bytes(tokens[SIZE:]), extras[16:]),
    }


# ---- what it refuses


@pytest.mark.case("FAIL-2")
def test_tokens_that_are_not_those_of_the_hashes_publish_nothing(opened: Open) -> None:
    loop, tokens = opened(MemoryBackend()), prompt(1, 4 * SIZE)
    request = loop.request(tokens)
    slots = request.reserve(4)
    for slot in slots.tolist():
        loop.cache.host.page(slot)[:] = 7
    wrong = list(tokens)
    wrong[2 * SIZE] += 1
    with pytest.raises(HashMismatch, match=r"tokens of page 2 .* nothing was published"):
        request.commit(4, tokens=token_bytes(wrong), first=0)
    with pytest.raises(HashMismatch, match="tokens of page 0"):
        request.commit(4, tokens=token_bytes(tokens), first=0, extras=bytes(range(64)))
    loop.cache.settle()
    assert loop.events == []
    assert loop.cache.match(loop.scope(), page_hashes(loop.scope(), tokens)).pages == 0
    request.commit(2, tokens=token_bytes(tokens[: 2 * SIZE]), first=0)  # it goes on with the right ones
    request.close()
    assert loop.cache.match(loop.scope(), page_hashes(loop.scope(), tokens)).host == 2
    loop.until(lambda: _slots_in_use(loop.cache) == (0, 0, 0))  # a put may be under way


@pytest.mark.parametrize(
    ("commit", "text"),
    [
        ({"upto": 3, "first": 0, "pages": 3}, "page 3 is behind the last one that can be committed, 2"),
        ({"upto": 2, "first": 1, "pages": 1}, "begin at page 1, but those of pages 0 to 1 are missing"),
        ({"upto": 2, "first": 0, "pages": 1}, "16 bytes of tokens are not 2 pages of 4 tokens"),
        ({"upto": 2, "first": 0, "pages": 2, "extras": bytes(16)}, "16 bytes of extras, 2 pages need 16 each"),
        ({"upto": 1, "first": 2, "pages": 0}, "pages 2 to 1 are no range"),
    ],
)
def test_a_commit_that_cannot_be_says_why(opened: Open, commit: dict[str, Any], text: str) -> None:
    loop, tokens = opened(), prompt(1, 4 * SIZE)
    request = loop.request(tokens)
    request.reserve(2)
    first = commit["first"]
    given = token_bytes(tokens[first * SIZE : (first + commit["pages"]) * SIZE])
    with pytest.raises(InvalidInput, match=text):
        request.commit(commit["upto"], tokens=given, first=first, extras=commit.get("extras", b""))
    request.close()


def test_what_cannot_be_hosted_is_refused() -> None:
    host = MmapHostPool(4, PAGE_BYTES)
    with pytest.raises(NamespaceError, match=r'hash="xxh3_128".*give hash="sha256"'):
        open_hosted(small_namespace(), host=host)
    with pytest.raises(GeometryError, match="pages of 64 bytes, the namespace's have"):
        open_hosted(NAMESPACE, host=MmapHostPool(4, 64))
    with pytest.raises(ConfigError, match="one edge here"):
        open_hosted(NAMESPACE, host=host, write_policy=("write_back", "write_back"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="uint64 array of 4 slots"):
        open_hosted(NAMESPACE, host=host, words=np.zeros(3, np.uint64))


def test_requests_that_cannot_be_say_why(opened: Open) -> None:
    loop = opened()
    scope = loop.scope()
    for hashes, fields, text in (
        (bytes(33), {"tokens": 4}, "33 bytes, not a multiple of 32"),
        (bytes(64), {"tokens": 7}, "7 tokens has fewer than 2 pages of 4"),
        (bytes(64), {"tokens": 8, "limit": 3}, "limit 3 is above the prompt's 2"),
        (bytes(64), {"tokens": 8, "priority": 2**31}, "priority"),
    ):
        with pytest.raises(InvalidInput, match=text):
            loop.cache.request(scope, hashes, **fields)  # type: ignore[arg-type]
    assert loop.cache.statistics().open_requests == 0


def test_an_adapter_without_a_digest_goes_past_the_cache(opened: Open) -> None:
    loop, tokens = opened(), prompt(1, 3 * SIZE + 1)
    assert loop.cache.scope(hicache.Adapter("lora")) is None
    request = loop.cache.request(None, bytes(96), tokens=len(tokens))
    assert request.bypassed
    assert request.loading().step() is None
    request.commit(3, tokens=token_bytes(tokens[: 3 * SIZE]), first=0)
    assert request.counts_now().missed == request.close().missed == {MissReason.BYPASSED: 3}
    assert loop.cache.statistics().bypassed == 1


# ---- slots


@pytest.mark.case("LEAK-3", "RACE-4")
def test_the_word_of_a_slot_rises_when_it_is_given_to_another(opened: Open) -> None:
    loop = opened(slots=2)
    words = loop.cache.words
    assert words is not None
    loop.run(prompt(1, 2 * SIZE))
    request = loop.request(prompt(1, 2 * SIZE))
    before, held = words.copy(), request.usable
    assert (before > 0).all()
    assert (words == before).all()  # nothing of it is given away while it is leased
    with pytest.raises(hicache.OutOfSlots):
        loop.request(prompt(2, 2 * SIZE), load=False).reserve(2)
    request.close()
    loop.run(prompt(3, 2 * SIZE))
    assert (words[held] == before[held] + 1).all()


@pytest.mark.case("LEAK-3")
def test_slots_of_a_request_that_is_not_closed_stay_in_quarantine(opened: Open) -> None:
    """A clear takes its pages, other requests want its slots; neither gets one before it is closed."""
    loop = opened(slots=4)
    loop.run(prompt(1, 2 * SIZE))
    held = loop.request(prompt(1, 4 * SIZE))
    own = held.reserve(2)
    loop.elsewhere(loop.cache.clear)
    loop.until(lambda: not loop.cache.upkeep())
    assert _slots_in_use(loop.cache) == (2, 0, 2)
    other = loop.request(prompt(2, SIZE), load=False)
    with pytest.raises(hicache.OutOfSlots, match="1 slots asked, 0 free and 0 evictable of 4"):
        other.reserve(1)
    held.commit(4, tokens=token_bytes(prompt(1, 4 * SIZE)), first=0)  # of a life that has ended
    assert loop.cache.match(loop.scope(), page_hashes(loop.scope(), prompt(1, 4 * SIZE))).pages == 0
    slots = set(loop.slots(held).tolist()) | set(own.tolist())
    held.close()
    assert set(other.reserve(4).tolist()) == slots
    other.close()


def test_a_request_that_is_forgotten_is_released(opened: Open) -> None:
    loop = opened()
    request = loop.request(prompt(1, 3 * SIZE))
    request.reserve(3)
    del request
    gc.collect()
    loop.until(lambda: loop.cache.statistics().dropped == 1)
    assert _slots_in_use(loop.cache) == (0, 0, 0)


# ---- never waiting


@pytest.mark.case("THR-5")
def test_no_verb_waits_for_a_storage_that_hangs(opened: Open) -> None:
    """Reads hang; pages in HOST are served meanwhile, and what waits is given up in time."""
    gate, storage = Gate(), FaultyStorage(MemoryBackend())
    loop = opened(storage, call_timeout=0.2, prefetch="timeout", prefetch_timeout=0.1)
    hot, cold = prompt(1, 40), prompt(2, 40)
    loop.run(cold)
    assert loop.elsewhere(lambda: loop.cache.flush(5.0))
    _empty(loop)
    loop.run(hot)
    storage.always("get_into", delay(gate))
    try:
        took = []
        scope = loop.scope()
        request = loop.cache.request(scope, page_hashes(scope, cold), tokens=40)
        waiting = request.loading()
        assert waiting.step() is not None
        for _ in range(50):
            begun = time.perf_counter()
            other = loop.cache.request(scope, page_hashes(scope, hot), tokens=40)
            assert other.loading().step() is None
            assert len(other.usable) == 10
            other.close()
            took.append(time.perf_counter() - begun)
        assert sorted(took)[25] < 0.05
        loop.load(waiting)
        assert (len(request.usable), request.close().missed) == (0, {MissReason.LATE: 10})
        loop.until(lambda: any("hung" in reason for reason in loop.cache.statistics().degraded))
    finally:
        storage.always("get_into", None)
        gate.open()
    loop.until(lambda: not loop.cache.statistics().degraded and loop.cache.statistics().core.transfers == 0)
    assert _slots_in_use(loop.cache) == (0, 0, 0)


def test_a_load_can_be_cancelled_and_keeps_what_came(opened: Open) -> None:
    gate, storage = Gate(opened=True), FaultyStorage(MemoryBackend())
    loop, tokens = opened(storage, fetch_bytes=PAGE_BYTES * 4, read_threads=1), prompt(1, 40)
    loop.run(tokens)
    assert loop.elsewhere(lambda: loop.cache.flush(5.0))
    _empty(loop)
    storage.always("get_into", delay(gate))
    gate.close()
    gate.permit(1)
    request = loop.request(tokens, load=False)
    loading = request.loading()
    loop.until(lambda: loading.step() is not None and len(request.usable) == 4)
    loading.cancel()
    assert loading.step() is None
    gate.open()
    assert len(request.usable) == 4
    assert request.close().missed == {MissReason.LATE: 6}
    loop.until(lambda: loop.cache.statistics().core.transfers == 0)
    assert _slots_in_use(loop.cache) == (0, 0, 0)


def test_a_namespace_that_storage_does_not_tell_about_goes_past_until_it_does(opened: Open) -> None:
    storage = FaultyStorage(MemoryBackend())
    storage.always("generation", fail(OSError("no")))
    loop, tokens = opened(storage), prompt(1, 8)
    scope = loop.cache.scope(tenant="a")
    assert scope is not None
    loop.until(lambda: not scope.asking)
    assert scope.tree is None
    assert loop.cache.request(scope, page_hashes(scope, tokens), tokens=8).bypassed
    storage.always("generation", None)
    assert loop.run(tokens, scope=loop.scope(tenant="a")) == 0
    assert loop.run(tokens, scope=loop.scope(tenant="a")) == 2


def test_a_clear_by_another_process_is_met_before_the_next_request(opened: Open) -> None:
    """A generation that is due is asked for at the first request, which can wait a moment for the answer."""
    gate, storage, clock = Gate(opened=True), FaultyStorage(MemoryBackend()), ManualClock()
    loop, tokens = opened(storage, clock=clock, generation_seconds=1.0), prompt(1, 8)
    loop.run(tokens)
    scope = loop.scope()
    assert not loop.cache.unconfirmed(scope)
    storage.clear(scope.namespace.digest, 1)  # another process does that
    gate.close()
    storage.always("generation", delay(gate))
    clock.advance(2.0)
    assert loop.cache.scope() is scope
    gate.until_arrived()
    assert loop.cache.unconfirmed(scope)
    scope.slow = True  # a request has waited in vain: nobody waits any more
    assert not loop.cache.unconfirmed(scope)
    assert loop.cache.match(scope, page_hashes(scope, tokens)).pages == 2
    gate.open()
    loop.until(lambda: not scope.asking)
    assert not loop.cache.unconfirmed(scope)
    assert loop.run(tokens) == 0


@pytest.mark.case("THR-5")
def test_prefetches_end_by_themselves_and_are_bounded(opened: Open) -> None:
    gate, storage = Gate(), FaultyStorage(MemoryBackend())
    loop = opened(storage, slots=256)
    prompts = [prompt(seed, 2 * SIZE) for seed in range(PREFETCHES + 3)]
    for tokens in prompts:
        loop.run(tokens)
    assert loop.elsewhere(lambda: loop.cache.flush(5.0))
    _empty(loop)
    requests = loop.cache.statistics().requests
    scope = loop.scope()
    storage.always("get_into", delay(gate))
    matches = [loop.cache.prefetch(scope, page_hashes(scope, tokens)) for tokens in prompts]
    assert {match.storage for match in matches} == {2}
    assert loop.cache.prefetches_refused == 3
    gate.open()
    loop.until(lambda: loop.cache.statistics().core.leases == 0)
    found = [loop.cache.match(scope, page_hashes(scope, tokens)).host for tokens in prompts]
    assert found == [2] * PREFETCHES + [0] * 3
    assert loop.cache.statistics().requests == requests  # nobody's requests are counted
    assert _slots_in_use(loop.cache) == (0, 0, 0)


def test_the_loop_is_rung_by_other_threads_and_told_of_changes(opened: Open) -> None:
    loop = opened(MemoryBackend())
    rung, changed = threading.Event(), threading.Event()
    loop.cache.start(rung.set, loop.events.extend)
    loop.cache.on_change = changed.set
    rung.clear()
    request = loop.request(prompt(1, 8))
    request.reserve(2)
    request.commit(2, tokens=token_bytes(prompt(1, 8)), first=0)
    assert rung.wait(30)  # a storage thread has something to say, or there are events
    loop.until(changed.is_set)
    changed.clear()
    request.close()
    assert changed.is_set()  # slots may have come free


# ---- upkeep


def test_clear_forgets_and_frees_in_slices(opened: Open) -> None:
    storage = MemoryBackend()
    loop = opened(storage)
    tokens = prompt(1, 40)
    loop.run(tokens)
    assert loop.elsewhere(lambda: loop.cache.flush(5.0))
    loop.elsewhere(loop.cache.clear)
    assert loop.run(tokens) == 0
    other = opened(storage)
    assert other.scope().tree.generation == 1  # type: ignore[union-attr]
    loop.until(lambda: not loop.cache.upkeep())
    assert list(loop.cache.scopes_in_use()) == [(None, None)]


@pytest.mark.case("THR-5")
def test_storage_is_exchanged_while_the_loop_goes_on(opened: Open) -> None:
    first, second = MemoryBackend(), MemoryBackend()
    loop, tokens = opened(first), prompt(1, 40)
    loop.run(tokens)
    assert loop.elsewhere(lambda: loop.cache.flush(5.0))
    report = loop.elsewhere(lambda: loop.cache.detach_storage(5.0))
    assert (report.failed_pages, report.stuck_pages) == (0, 0)
    assert loop.run(tokens) == 10  # what is above goes on
    loop.until(lambda: not loop.cache.upkeep())
    loop.elsewhere(lambda: loop.cache.attach_storage(second))
    loop.run(tokens)
    assert loop.elsewhere(lambda: loop.cache.flush(5.0))
    assert second.statistics().objects == 40  # 10 pages of four shards
    assert loop.cache.statistics().degraded == ()


def test_closing_ends_what_is_open_and_leaves_the_pool_to_its_owner() -> None:
    host = MmapHostPool(16, PAGE_BYTES)
    loop = HostedLoop(open_hosted(NAMESPACE, host=host, storage=MemoryBackend(), canary=False))
    request = loop.request(prompt(1, 8))
    request.reserve(2)
    loading = loop.request(prompt(2, 8), load=False).loading()
    report = loop.elsewhere(lambda: loop.cache.close(5.0))
    assert (report.complete, report.aborted_requests, report.abandoned_pages) == (True, 2, 0)
    assert loop.cache.closed
    assert host.pages.shape == (16, PAGE_BYTES)
    for call in (lambda: request.reserve(1), loading.step, lambda: loop.cache.prefetch(None, b""), loop.cache.scope):
        with pytest.raises(CacheClosed):
            call()
    assert request.close().aborted
    loop.cache.settle()  # a loop that comes late finds nothing to do
    host.close()


def test_a_forked_child_is_refused() -> None:
    cache = open_hosted(NAMESPACE, host=MmapHostPool(4, PAGE_BYTES))
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            try:
                cache.scope()
            except CacheClosed:
                os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    cache.close()


def test_events_of_pages_that_go_are_told_too(opened: Open) -> None:
    loop = opened()
    loop.run(prompt(1, 8))
    _empty(loop)
    assert [type(event) for event in loop.events] == [Stored, Removed]
    assert loop.events[0].tokens == token_bytes(prompt(1, 8))  # type: ignore[union-attr]
