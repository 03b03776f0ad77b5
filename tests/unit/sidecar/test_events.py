from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from hashlib import sha256

import numpy as np
import pytest

import hicache
from hicache.errors import LimitExceeded
from hicache.events import Cleared, Event, Removed, Stored
from hicache.records import Tier
from hicache.rpc.service import EventBatch
from hicache.sidecar.events import SLICE_PAGES, EventLog, first_number
from hicache.testing.kvevents import EventMirror, places

GEOMETRY = hicache.KVGeometry.mha(2, kv_heads=2, head_dim=8, dtype="float16")
NAMESPACE = hicache.Namespace("example/m", geometry=GEOMETRY, page_size=8, hash="sha256").derive()
DIGEST = NAMESPACE.digest
NOW = 1_700_000_000.0
FIRST = first_number(NOW)


def describe(digest: bytes) -> hicache.DerivedNamespace | None:
    return NAMESPACE if digest == DIGEST else None


def chain(name: str, pages: int) -> tuple[bytes, ...]:
    hashes = [sha256(name.encode()).digest()]
    while len(hashes) < pages:
        hashes.append(sha256(hashes[-1]).digest())
    return tuple(hashes)


def token_bytes(pages: int) -> bytes:
    return np.arange(8 * pages, dtype="<u4").tobytes()


def stored(hashes: tuple[bytes, ...], tier: Tier = Tier.HOST, *, tokens: bytes = b"") -> Stored:
    return Stored(DIGEST, 0, tier, hashes, None, 0, b"", tokens)


def removed(hashes: tuple[bytes, ...], tier: Tier = Tier.HOST) -> Removed:
    return Removed(DIGEST, 0, tier, hashes[::-1], "evicted")


class Later:
    """Keeps what was to be called soon."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def __call__(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def run(self) -> int:
        """Call all of it, and what comes of that; returns how many calls that were."""
        done = 0
        while self.calls:
            self.calls.pop(0)()
            done += 1
        return done


def log_of(**options: object) -> EventLog:
    return EventLog(buckets=64, wall=lambda: NOW, **options)  # type: ignore[arg-type]


def batches(log: EventLog, at: int) -> list[EventBatch]:
    """All that a watcher gets from a number on, when the log has ended behind it."""
    log.close()

    async def collect() -> list[EventBatch]:
        return [batch async for batch in log.watch(at)]

    return asyncio.run(collect())


def events(log: EventLog, at: int = FIRST) -> list[Event]:
    return [event for batch in batches(log, at) for event in batch.events]


def test_events_are_numbered_without_gaps() -> None:
    a, b = chain("a", 3), chain("b", 2)
    log = log_of()
    log.append([stored(a)], describe=describe)
    log.append([stored(b), removed(b)], describe=describe)
    found = batches(log, FIRST)
    assert [(batch.sequence - FIRST, len(batch.events)) for batch in found] == [(0, 1), (1, 2)]
    assert [batch.timestamp_ms for batch in found] == [int(NOW * 1000)] * 2


def test_a_watcher_may_enter_in_the_middle_of_a_batch() -> None:
    a, b = chain("a", 3), chain("b", 2)
    log = log_of()
    log.append([stored(a), stored(b), removed(a)], describe=describe)
    assert batches(log, FIRST + 1) == [EventBatch(FIRST + 1, int(NOW * 1000), (stored(b), removed(a)))]


@pytest.mark.case("STAT-4")
def test_what_changes_nothing_has_no_number() -> None:
    """Told twice, removed twice, removed before it came, cleared when empty: nothing of it reaches a watcher."""
    a = chain("a", 4)
    log = log_of()
    log.append([removed(a), Cleared(DIGEST, 0), stored(a), stored(a), removed(a), removed(a), Cleared(DIGEST, 0)])
    assert events(log) == [stored(a), removed(a)]
    assert log.statistics().unchanged == 5


def test_only_the_news_of_an_event_is_told() -> None:
    """With two pages in the middle known already the rest comes as two runs, each with its own parent."""
    a = chain("a", 6)
    log = log_of()
    log.append(
        [Stored(DIGEST, 0, Tier.HOST, a[2:4], a[1], 2, b""), stored(a, tokens=token_bytes(6))], describe=describe
    )
    assert events(log)[1:] == [
        Stored(DIGEST, 0, Tier.HOST, a[:2], None, 0, b"", token_bytes(6)[:64]),
        Stored(DIGEST, 0, Tier.HOST, a[4:], a[3], 4, b"", token_bytes(6)[128:]),
    ]


@pytest.mark.case("STAT-3")
def test_tiers_are_apart() -> None:
    """Stored above and below, dropped above, loaded back, dropped below, dropped above."""
    a = chain("a", 2)
    log = log_of()
    steps = [
        (stored(a, Tier.DEVICE), {Tier.DEVICE}),
        (stored(a, Tier.HOST), {Tier.DEVICE, Tier.HOST}),
        (removed(a, Tier.DEVICE), {Tier.HOST}),
        (stored(a, Tier.DEVICE), {Tier.DEVICE, Tier.HOST}),
        (removed(a, Tier.HOST), {Tier.DEVICE}),
        (removed(a, Tier.DEVICE), set()),
    ]
    for event, tiers in steps:
        log.append([event])
        with log.lock:
            assert places(log.view()) == {(DIGEST, 0, tier, page) for tier in tiers for page in a}
    assert events(log) == [event for event, _ in steps]
    assert log.statistics().pages == 0


def test_tokens_are_told_once_and_known_in_every_tier() -> None:
    a = chain("a", 3)
    log = log_of()
    log.append([stored(a, tokens=token_bytes(3)), stored(a, Tier.STORAGE), stored(a, Tier.DEVICE)], describe=describe)
    assert [event.tokens for event in events(log) if isinstance(event, Stored)] == [token_bytes(3)] * 3


def test_tokens_of_a_namespace_that_nobody_describes_are_not_told() -> None:
    """Whose pages have another size than all tokens together say, neither: nobody could cut them."""
    a = chain("a", 3)
    log = log_of()
    log.append([stored(a, tokens=token_bytes(3))])
    log.append([stored(a[:2], Tier.STORAGE, tokens=token_bytes(3))], source="other", describe=describe)
    assert [event.tokens for event in events(log) if isinstance(event, Stored)] == [b"", b""]


def test_runs_with_and_without_tokens_are_apart() -> None:
    a = chain("a", 4)
    log = log_of()
    log.append([stored(a[:2], tokens=token_bytes(2)), stored(a, Tier.DEVICE)], describe=describe)
    assert events(log)[1:] == [
        Stored(DIGEST, 0, Tier.DEVICE, a[:2], None, 0, b"", token_bytes(2)),
        Stored(DIGEST, 0, Tier.DEVICE, a[2:], a[1], 2, b""),
    ]


def test_a_page_of_two_sources_is_gone_when_both_have_removed_it() -> None:
    a = chain("a", 2)
    log = log_of()
    log.append([stored(a)], source="tp1")
    log.append([stored(a)], source="tp2")
    log.append([removed(a)], source="tp1")
    log.append([removed(a)], source="tp2")
    assert events(log) == [stored(a), removed(a)]


def test_a_clear_of_one_source_takes_what_no_other_has() -> None:
    """Deepest first, since others still hold pages of this namespace."""
    a, b = chain("a", 2), chain("b", 3)
    log = log_of()
    log.append([stored(a), stored(b)], source="tp1")
    log.append([stored(a)], source="tp2")
    log.append([Cleared(DIGEST, 0)], source="tp1")
    log.append([Cleared(DIGEST, 0)], source="tp2")
    assert events(log)[2:] == [Removed(DIGEST, 0, Tier.HOST, b[::-1], "cleared"), Cleared(DIGEST, 0)]


def test_a_source_that_is_over_takes_its_pages_with_it() -> None:
    a, b = chain("a", 2), chain("b", 2)
    log = log_of()
    log.append([stored(a), stored(a, Tier.DEVICE)], source="one")
    log.append([stored(b)], source="two")
    log.forget("one")
    log.forget("three")
    with log.lock:
        assert places(log.view()) == {(DIGEST, 0, Tier.HOST, page) for page in b}
    assert log.statistics().pages == 2


def test_a_clear_leaves_other_generations_alone() -> None:
    """What was cleared may come back under the next generation at once, with the same hashes."""
    a = chain("a", 3)
    log = log_of()
    again = Stored(DIGEST, 1, Tier.HOST, a, None, 0, b"")
    log.append([stored(a), Cleared(DIGEST, 0), again])
    assert events(log) == [stored(a), Cleared(DIGEST, 0), again]
    mirror = EventMirror()
    for batch in batches(log, 0):
        mirror.apply(batch)
    assert mirror.pages == {(DIGEST, 1, Tier.HOST, page) for page in a}


def test_what_was_cleared_is_forgotten_in_slices() -> None:
    log = log_of()
    for number in range(30):
        log.append([stored(chain(str(number), 40))])
    log.append([Cleared(DIGEST, 0)])
    for _ in range(200):
        log.append([])
    assert not any(log.table._buckets)


def test_a_snapshot_is_that_of_its_moment() -> None:
    """What changes while it is read is not in it, and follows it."""
    prompts = [chain(str(number), 1) for number in range(600)]
    log = log_of()
    log.append([stored(prompt) for prompt in prompts])
    before = {(DIGEST, 0, Tier.HOST, prompt[0]) for prompt in prompts}

    async def watch() -> EventMirror:
        mirror, watcher = EventMirror(), log.watch(0)
        mirror.apply(await anext(watcher))
        assert mirror.pages < before
        log.append([removed(prompt) for prompt in prompts[::2]])
        log.append([stored(chain("new", 5)), stored(prompts[0])])
        log.close()
        async for batch in watcher:
            mirror.apply(batch)
            if batch.snapshot_end:
                assert mirror.pages == before
        return mirror

    mirror = asyncio.run(watch())
    left = [*prompts[1::2], chain("new", 5), prompts[0]]
    assert mirror.pages == {(DIGEST, 0, Tier.HOST, page) for prompt in left for page in prompt}
    assert mirror.snapshots == 1


def test_a_snapshot_tells_parents_before_children_in_long_runs() -> None:
    """A trunk with two branches is three runs, whatever the order in which they came."""
    trunk, left, right = chain("t", 5), chain("l", 3), chain("r", 2)
    log = log_of()
    log.append(
        [
            Stored(DIGEST, 0, Tier.HOST, right, trunk[3], 4, b""),
            Stored(DIGEST, 0, Tier.HOST, left, trunk[1], 2, b""),
            stored(trunk),
        ]
    )
    found = [event for batch in batches(log, 0) for event in batch.events]
    known: set[bytes | None] = {None}
    for event in found:
        assert isinstance(event, Stored)
        assert event.parent_hash in known
        known |= set(event.page_hashes)
    assert len(found) == 3
    assert known == {None, *trunk, *left, *right}


def test_an_empty_snapshot_is_one_batch() -> None:
    log = log_of()
    assert batches(log, 0) == [EventBatch(FIRST, int(NOW * 1000), snapshot=True, snapshot_end=True)]


def test_who_fell_behind_is_told_how_far_and_gets_a_snapshot() -> None:
    log = log_of(most_events=4)
    for number in range(10):
        log.append([stored(chain(str(number), 2))])
    found = batches(log, FIRST + 1)
    assert found[0] == EventBatch(FIRST + 10, int(NOW * 1000), lost=5)
    mirror = EventMirror()
    for batch in found:
        mirror.apply(batch)
    assert len(mirror.pages) == 20
    assert (mirror.lost, mirror.snapshots, mirror.next_number) == (5, 1, FIRST + 10)
    assert (log.statistics().kept, log.statistics().lost) == (4, 1)


def test_the_ring_is_bounded_in_bytes_too() -> None:
    log = log_of(most_bytes=1000)
    for number in range(100):
        log.append([stored(chain(str(number), 4))])
    assert log.statistics().kept == 1000 // (4 * 32)


@pytest.mark.parametrize("at", [1, FIRST - 1, FIRST + 11, 2**63])
def test_a_number_of_another_life_is_seen_to_be_one(at: int) -> None:
    """How many events such a watcher missed is not known; that it missed some is."""
    log = log_of()
    log.append([stored(chain(str(number), 1)) for number in range(10)])
    found = batches(log, at)
    assert found[0].lost == 1
    assert found[1].snapshot


def test_lives_have_numbers_of_their_own() -> None:
    """Even at a million events a second, and over a restart that took no time at all."""
    assert first_number(NOW + 1) > first_number(NOW) + 1_000_000
    assert first_number(4_000_000_000.0) < 2**53


def test_long_events_are_taken_over_in_slices_and_in_order() -> None:
    """No call does more than a slice; what is left comes later, and what comes meanwhile waits behind it."""
    a = chain("a", 3 * SLICE_PAGES + 1)
    later = Later()
    log = log_of(later=later)
    log.append([stored(a, tokens=token_bytes(len(a)))], describe=describe)
    assert log.statistics().pages == SLICE_PAGES
    log.append([removed(a)], describe=describe)
    assert log.statistics().pages == 2 * SLICE_PAGES
    assert log.statistics().waiting == 6
    assert later.run() == 5  # one step has room for the last page that came and the first that went
    assert (log.statistics().pages, log.statistics().waiting) == (0, 0)
    mirror = EventMirror()
    mirror.next_number = FIRST
    for batch in batches(log, FIRST):
        mirror.apply(batch)
    assert mirror.pages == set()
    assert b"".join(event.tokens for event in mirror.events if isinstance(event, Stored)) == token_bytes(len(a))
    assert [page for event in mirror.events if isinstance(event, Removed) for page in event.page_hashes] == [*a[::-1]]


def test_a_watcher_waits_for_what_comes() -> None:
    log = log_of()
    a = chain("a", 2)

    async def watch() -> list[EventBatch]:
        watcher = log.watch(FIRST)
        waits = asyncio.ensure_future(anext(watcher))
        while not log.statistics().watchers:
            await asyncio.sleep(0)
        assert not waits.done()
        await asyncio.to_thread(log.append, [stored(a)])
        first = await waits
        last = asyncio.ensure_future(anext(watcher, None))
        await asyncio.sleep(0)
        assert not last.done()
        log.close()
        assert await last is None
        return [first]

    assert asyncio.run(watch()) == [EventBatch(FIRST, int(NOW * 1000), (stored(a),))]
    assert log.statistics().watchers == 0


def test_watchers_are_bounded_and_leave_nothing_behind() -> None:
    log = log_of(watchers=2)

    async def watch() -> None:
        watchers = [log.watch(0), log.watch(0)]
        for watcher in watchers:
            await anext(watcher)
        with pytest.raises(LimitExceeded, match="2 watch events already, the limit is 2"):
            await anext(log.watch(0))
        for watcher in watchers:
            await watcher.aclose()  # type: ignore[attr-defined]

    asyncio.run(watch())
    assert log.statistics().watchers == 0


def test_a_scope_without_pages_costs_nothing() -> None:
    """Namespaces come and go, such as one a salt; what describes them goes with their pages."""
    log = log_of()

    def spaces() -> Iterator[bytes]:
        for number in range(100):
            yield number.to_bytes(16, "little")

    a = chain("a", 2)
    for digest in spaces():
        log.append([Stored(digest, 0, Tier.HOST, a, None, 0, b""), Removed(digest, 0, Tier.HOST, a[::-1], "evicted")])
    assert not log._scopes
    assert not log._twins
    assert not log._kin
    assert not any(log.table._buckets)
