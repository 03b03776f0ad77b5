"""KV events over real sockets: what a router rebuilds is what is resident, also after gaps, resets and restarts."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import hicache
from hicache.core.hashing import PageHasher
from hicache.errors import ConfigError, LimitExceeded, ServiceUnavailable
from hicache.events import Cleared, Event, Removed, Stored
from hicache.records import Tier
from hicache.sidecar import kv_events
from hicache.sidecar.events import EventLog
from hicache.sidecar.kv_events import KvPublisher
from hicache.sidecar.kv_wire import MEDIA, AllBlocksCleared, decode_batch, short_hash
from hicache.testing.kvevents import BlockMirror, places
from hicache.testing.kvrouter import PATIENCE_MS, Router

GEOMETRY = hicache.KVGeometry.mha(2, kv_heads=2, head_dim=8, dtype="float16")
BASE = hicache.Namespace("example/m", geometry=GEOMETRY, page_size=4, hash="sha256")
PLAIN = BASE.derive()
ACME = BASE.derive(tenant="acme")  # its chain of hashes is that of PLAIN
SALTED = BASE.derive(salt="pepper")
OTHER = hicache.Namespace("example/other", geometry=GEOMETRY, page_size=4, hash="sha256").derive()
KNOWN = {namespace.digest: namespace for namespace in (PLAIN, ACME, SALTED, OTHER)}


class Prompt:
    """Tokens of some pages, and their hashes in a namespace."""

    def __init__(self, seed: int, pages: int, namespace: hicache.DerivedNamespace = PLAIN) -> None:
        self.ids = np.random.default_rng(seed).integers(0, 2**32, 4 * pages, dtype=np.uint32)
        self.namespace = namespace
        hasher: PageHasher = namespace.hasher()
        glued = hasher.extend(None, self.ids.tobytes(), pages)
        self.hashes = tuple(glued[at : at + 32] for at in range(0, len(glued), 32))

    def stored(self, tier: Tier = Tier.HOST, *, generation: int = 0) -> Stored:
        return Stored(self.namespace.digest, generation, tier, self.hashes, None, 0, b"", self.ids.tobytes())

    def removed(self, tier: Tier = Tier.HOST) -> Removed:
        return Removed(self.namespace.digest, 0, tier, self.hashes[::-1], "evicted")

    def blocks(self, tier: Tier = Tier.HOST) -> set[tuple[str | None, int | bytes]]:
        return {(MEDIA[tier], short_hash(page)) for page in self.hashes}


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as made:
        yield made


class Publishing:
    """A log, its publisher, and a router that hears all of it."""

    def __init__(self, context: zmq.Context[Any], **options: Any) -> None:
        self.log = EventLog(buckets=64)
        options = {"publish": "tcp://127.0.0.1:*", "replay": "tcp://127.0.0.1:*", "hashes": "int64"} | options
        self.publisher = KvPublisher(self.log, **options)
        self.router = Router(context, self.publisher.endpoints, topic=options.get("topic", ""))
        self._fences = 0

    def tell(self, *events: Event, source: str = "pool") -> None:
        self.log.append(events, source=source, describe=KNOWN.get)

    def hear(self) -> BlockMirror:
        """All that was told before has arrived.

        A page that comes and goes behind it shows that. It does so again and again, since connections are made in the
        background, and what is published before is not heard of.
        """
        self._fences += 1
        fence = Prompt(10**9 + self._fences, 1, SALTED)
        for event, there in ((fence.stored(), True), (fence.removed(), False)):
            for _ in range(PATIENCE_MS // 20):
                self.tell(event)
                while self.router.poll(20):
                    self.router.receive()
                if (fence.blocks() <= self.router.mirror.blocks) is there and self.router.last is not None:
                    break
                self.tell(fence.removed() if there else fence.stored())
            else:
                raise AssertionError("nothing arrives")
        return self.router.mirror

    def resident(self) -> set[tuple[str | None, int | bytes]]:
        """What there is, as the wire would have it."""
        with self.log.lock:
            return {(MEDIA[tier], short_hash(page)) for _, _, tier, page in places(self.log.view())}

    def close(self) -> None:
        self.publisher.close()
        self.router.close()


@contextmanager
def publishing(context: zmq.Context[Any], **options: Any) -> Iterator[Publishing]:
    made = Publishing(context, **options)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_router_knows_what_is_resident_in_every_tier(
    context: zmq.Context[Any], tmp_path: Path, encoding: str, scheme: str
) -> None:
    """With tokens, parents and block size wherever a page comes to be, as routers need them to find it."""
    options: dict[str, Any] = {"encoding": encoding}
    if scheme == "ipc":
        options |= {"publish": f"ipc://{tmp_path}/events", "replay": f"ipc://{tmp_path}/replay"}
    prompt = Prompt(1, 5)
    with publishing(context, **options) as it:
        it.tell(prompt.stored(Tier.DEVICE), prompt.stored(Tier.HOST), prompt.stored(Tier.STORAGE))
        it.tell(prompt.removed(Tier.DEVICE))
        mirror = it.hear()
        assert mirror.blocks == prompt.blocks(Tier.HOST) | prompt.blocks(Tier.STORAGE)
        before = None
        for number, page in enumerate(prompt.hashes):
            block = short_hash(page)
            assert mirror.parents[block] == before
            assert mirror.tokens[block] == tuple(prompt.ids[4 * number : 4 * number + 4].tolist())
            before = block


def test_topic_and_number_lead_each_message(context: zmq.Context[Any]) -> None:
    with publishing(context, topic="kv@host@m", dp_rank=3) as it:
        it.hear()
        first, *rest = it.router.numbers
        assert rest == list(range(first + 1, first + 1 + len(rest)))
        it.tell(Prompt(2, 1).stored())
        topic, number, payload = it.router.socket.recv_multipart()
        assert (topic, int.from_bytes(number, "big")) == (b"kv@host@m", it.router.numbers[-1] + 1)
        assert decode_batch(payload).dp_rank == 3


def test_a_gap_is_filled_by_a_replay(context: zmq.Context[Any]) -> None:
    """A router that was away asks for what it missed, and knows what one knows that was there all the time."""
    with publishing(context) as it:
        it.tell(*(Prompt(number, 3).stored() for number in range(20)))
        it.hear()
        endpoint = it.publisher.endpoints[0]
        it.router.socket.disconnect(endpoint)
        replayed = it.router.replayed
        for number in range(10):
            it.tell(Prompt(number, 3).removed())
            it.tell(Prompt(100 + number, 2).stored(Tier.STORAGE))
        asyncio.run(it.publisher.snapshot())  # comes behind all of it
        it.router.socket.connect(endpoint)
        assert it.hear().blocks == it.resident()
        assert it.router.replayed > replayed
        assert it.router.numbers == list(range(it.router.numbers[0], it.publisher._next))


def test_replay_starts_where_it_is_asked_to(context: zmq.Context[Any]) -> None:
    with publishing(context) as it:
        for number in range(5):
            it.tell(Prompt(number, 1).stored())
            it.hear()
        everything = it.router.replay(0)
        numbers = [number for number, _ in everything]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert it.router.replay(numbers[3]) == everything[3:]
        assert it.router.replay(numbers[-1] + 1) == []
        assert it.router.replay(0, between=(b"",)) == everything
        assert decode_batch(everything[0][1]).events[0] == AllBlocksCleared()


def test_what_is_no_request_is_ignored(context: zmq.Context[Any]) -> None:
    """Garbage on the replay socket costs nobody else an answer."""
    with publishing(context) as it:
        it.hear()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        replay = it.publisher.endpoints[1]
        assert replay is not None
        dealer.connect(replay)
        for frames in ([b""], [b"1234567"], [b"123456789"], [b"x", b"12345678"], [b""] * 3 + [b"12345678"]):
            dealer.send_multipart(frames)
        dealer.send((0).to_bytes(8, "big"))
        dealer.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        assert len(dealer.recv_multipart()) == 2
        dealer.close()
        assert it.publisher.statistics().replays_refused == 5
        assert it.router.replay(0)


def test_only_so_many_messages_are_kept(context: zmq.Context[Any]) -> None:
    with publishing(context, batches=3) as it:
        for number in range(6):
            it.tell(Prompt(number, 1).stored())
            it.hear()
        kept = it.router.replay(0)
        assert len(kept) == 3
        assert kept[-1][0] == it.router.last


def test_messages_are_kept_in_so_many_bytes(context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest is kept in any case."""
    monkeypatch.setattr(kv_events, "KEPT_BYTES", 2000)
    with publishing(context) as it:
        for number in range(20):
            it.tell(Prompt(number, 1).stored())
            it.hear()
        kept = it.router.replay(0)
        assert 1 < len(kept) < 20
        assert sum(len(payload) for _, payload in kept) <= 2000
        it.tell(Prompt(100, 500).stored())
        asyncio.run(it.publisher.snapshot())
        ((_, payload),) = it.router.replay(0)
        assert len(payload) > 2000


def test_a_snapshot_that_is_too_large_is_refused(context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "SNAPSHOT_BYTES", 5000)
    with publishing(context) as it:
        it.tell(Prompt(1, 10).stored())
        assert json.loads(asyncio.run(it.publisher.snapshot()))["events"]
        it.tell(Prompt(2, 200).stored())
        with pytest.raises(LimitExceeded, match="more than 5,000 bytes"):
            asyncio.run(it.publisher.snapshot())
        assert it.publisher.statistics().failures == 0


def test_a_snapshot_goes_on_with_the_next_message(context: zmq.Context[Any]) -> None:
    """Whoever cannot replay takes the snapshot, and applies messages from its number on."""
    with publishing(context, batches=1) as it:
        for number in range(30):
            it.tell(Prompt(number, 3).stored(), Prompt(number, 3).stored(Tier.STORAGE))
        it.tell(*(Prompt(number, 3).removed() for number in range(0, 30, 2)))
        it.hear()
        document = json.loads(asyncio.run(it.publisher.snapshot()))
        known = {(event["medium"], block) for event in document["events"] for block in event["block_hashes"]}
        assert known == it.resident()
        assert document["number"] == it.publisher._next
        assert {event["block_size"] for event in document["events"]} == {4}
        assert all(len(event["token_ids"]) == 4 * len(event["block_hashes"]) for event in document["events"])


def test_hashes_are_hex_digits_in_a_snapshot(context: zmq.Context[Any]) -> None:
    prompt = Prompt(1, 2)
    with publishing(context, hashes="bytes") as it:
        it.tell(prompt.stored())
        (event,) = json.loads(asyncio.run(it.publisher.snapshot()))["events"]
        assert event["block_hashes"] == [page.hex() for page in prompt.hashes]
        assert event["parent_block_hash"] is None


@pytest.mark.case("STAT-3")
def test_a_clear_of_all_there_is_says_so_and_another_names_its_blocks(context: zmq.Context[Any]) -> None:
    """Routers clear a whole publisher at once, so that is only said where nothing is left."""
    one, two = Prompt(1, 3), Prompt(2, 3, SALTED)
    with publishing(context) as it:
        it.tell(one.stored(), one.stored(Tier.STORAGE), two.stored())
        cleared = it.hear().cleared
        it.tell(Cleared(PLAIN.digest, 0))
        mirror = it.hear()
        assert (mirror.blocks, mirror.cleared) == (two.blocks(), cleared)
        it.tell(Cleared(SALTED.digest, 0))
        mirror = it.hear()
        assert (mirror.blocks, mirror.cleared) == (set(), cleared + 1)


def test_equal_hashes_of_two_tenants_are_one_block(context: zmq.Context[Any]) -> None:
    """The wire has hashes only, so a block is gone when the last tenant's page is."""
    mine, theirs = Prompt(1, 3), Prompt(1, 3, ACME)
    assert mine.hashes == theirs.hashes
    with publishing(context) as it:
        it.tell(mine.stored(), theirs.stored(), mine.removed())
        assert it.hear().blocks == mine.blocks()
        it.tell(mine.stored(Tier.STORAGE), Cleared(ACME.digest, 0))
        assert it.hear().blocks == mine.blocks(Tier.STORAGE)
        it.tell(theirs.stored(Tier.STORAGE), Cleared(PLAIN.digest, 0))
        assert it.hear().blocks == mine.blocks(Tier.STORAGE)


def test_a_publisher_of_one_model_tells_of_no_other(context: zmq.Context[Any]) -> None:
    mine, other = Prompt(1, 3), Prompt(2, 3, OTHER)
    with publishing(context, model="example/m") as it:
        it.tell(mine.stored(), other.stored())
        assert it.hear().blocks == mine.blocks()
        it.tell(Cleared(OTHER.digest, 0))
        assert it.hear().blocks == mine.blocks()


def test_what_nobody_describes_is_not_published(context: zmq.Context[Any]) -> None:
    """Without a block size a router can do nothing with it; it is counted."""
    prompt = Prompt(1, 2)
    with publishing(context) as it:
        it.log.append([prompt.stored()], source="pool")
        assert it.hear().blocks == set()
        assert it.publisher.statistics().undescribed_events == 1


class Gate:
    """Holds the publisher's thread at its next message."""

    def __init__(self, publisher: KvPublisher) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self._publish = publisher._sockets.publish
        publisher._sockets.publish = self._held  # type: ignore[method-assign]

    def _held(self, number: int, payload: bytes) -> None:
        self.entered.set()
        assert self.open.wait(PATIENCE_MS / 1000)
        self._publish(number, payload)


def test_a_publisher_that_falls_behind_tells_everything_anew(context: zmq.Context[Any]) -> None:
    """The log never waits for it; what is dropped is counted, and routers are right again afterwards."""
    with publishing(context, queued_pages=50) as it:
        it.hear()
        gate = Gate(it.publisher)
        it.tell(Prompt(0, 1).stored())
        assert gate.entered.wait(PATIENCE_MS / 1000)
        for number in range(1, 40):
            it.tell(Prompt(number, 3).stored())
            if number % 2:
                it.tell(Prompt(number, 3).removed())
        gate.open.set()
        it.hear()
        statistics = it.publisher.statistics()
        assert statistics.resets >= 1
        assert statistics.dropped_events > 0
        assert it.router.mirror.blocks == it.resident()
        assert it.router.numbers == list(range(it.router.numbers[0], it.publisher._next))


def test_a_failure_inside_is_survived(context: zmq.Context[Any], caplog: pytest.LogCaptureFixture) -> None:
    with publishing(context) as it:
        it.hear()
        write = it.publisher._format.removed

        def broken(*arguments: Any) -> Any:
            it.publisher._format.removed = write  # type: ignore[method-assign]
            raise RuntimeError("a bug")

        it.tell(Prompt(1, 2).stored())
        it.publisher._format.removed = broken  # type: ignore[method-assign]
        it.tell(Prompt(2, 2).stored())
        it.hear()
        assert it.publisher.statistics().failures == 1
        assert it.router.mirror.blocks == it.resident() == Prompt(1, 2).blocks() | Prompt(2, 2).blocks()
        assert "something could not be told" in caplog.text


def test_sockets_that_fail_end_the_publisher_and_nothing_else(
    context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with publishing(context) as it:
        it.hear()

        def broken(woken: object) -> bool:
            raise RuntimeError("no sockets any more")

        it.publisher._sockets.wait = broken  # type: ignore[method-assign]
        it.tell(Prompt(1, 2).stored())
        it.publisher._thread.join(PATIENCE_MS / 1000)
        assert "the publisher has ended" in caplog.text
        it.tell(Prompt(2, 2).stored())
        assert not it.publisher._queue
        with pytest.raises(ServiceUnavailable):
            asyncio.run(it.publisher.snapshot())
        it.publisher.close()
    assert not it.log._listeners


def test_a_consumer_that_does_not_read_holds_up_nobody(context: zmq.Context[Any]) -> None:
    """Above the high water mark it loses messages, which it can see, and a replay has them."""
    with publishing(context, high_water=4) as it:
        slow = Router(context, it.publisher.endpoints, high_water=1)
        try:
            it.hear()
            prompts = [Prompt(number, 500) for number in range(40)]
            for prompt in prompts:
                for _ in range(8):
                    it.tell(prompt.stored())
                    it.tell(prompt.removed())
            it.tell(Prompt(1000, 3).stored())
            it.hear()
            assert it.router.mirror.blocks == it.resident()
            while slow.mirror.blocks != it.resident() or not slow.numbers:
                if not slow.poll(200):
                    it.hear()
                slow.receive()
            assert slow.replayed > 0
            assert slow.numbers == list(range(slow.numbers[0], slow.numbers[-1] + 1))
        finally:
            slow.close()


def test_a_restart_is_seen(context: zmq.Context[Any]) -> None:
    """A new life publishes under higher numbers; a router that asks for what it missed is told that all is cleared."""
    seconds = 1_000_000.0
    port = free_port()
    options = {
        "publish": f"tcp://127.0.0.1:{port}",
        "replay": f"tcp://127.0.0.1:{free_port()}",
        "wall": lambda: seconds,
    }
    with publishing(context, **options) as it:
        it.tell(Prompt(1, 3).stored())
        it.hear()
        it.publisher.close()
        seconds += 1.0
        router = it.router
        it.log = EventLog()
        it.publisher = KvPublisher(it.log, hashes="int64", **options)
        it.tell(Prompt(2, 3).stored())
        it.hear()
        assert router.numbers[-1] > router.numbers[0] + 1_000_000
        assert router.mirror.blocks == it.resident() == Prompt(2, 3).blocks()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_end_says_that_all_is_cleared(context: zmq.Context[Any]) -> None:
    with publishing(context) as it:
        it.tell(Prompt(1, 3).stored())
        it.hear()
        it.publisher.close()
        it.publisher.close()
        while it.router.mirror.blocks:
            it.router.receive()
        it.tell(Prompt(2, 3).stored())  # the log goes on without it
        with pytest.raises(ServiceUnavailable, match="not published any more"):
            asyncio.run(it.publisher.snapshot())


def test_endpoints_that_are_taken_are_refused_in_one_line(tmp_path: Path) -> None:
    log = EventLog()
    first = KvPublisher(log, publish=f"ipc://{tmp_path}/events", replay="tcp://127.0.0.1:*")
    try:
        assert (tmp_path / "events").stat().st_mode & 0o777 == 0o600
        for options, text in (
            ({"publish": f"ipc://{tmp_path}/events"}, "in use by another process"),
            ({"publish": "tcp://127.0.0.1:*", "replay": first.endpoints[1]}, "cannot be bound"),
            ({"publish": "carrier://pigeon"}, "cannot be bound"),
            ({"publish": f"ipc://{tmp_path}/{'x' * 200}"}, "cannot be bound"),
        ):
            with pytest.raises(ConfigError, match=text):
                KvPublisher(log, **options)  # type: ignore[arg-type]
    finally:
        first.close()
    assert not log._listeners


def test_without_pyzmq_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install 'hicache\[server\]'"):
        KvPublisher(EventLog(), publish="tcp://127.0.0.1:*")


@pytest.mark.slow
@pytest.mark.case("STAT-3", "STAT-4")
@pytest.mark.parametrize("seed", range(4))
def test_random_histories(context: zmq.Context[Any], seed: int) -> None:
    """Several namespaces and sources, clears, and a queue so short that it often overflows."""
    choose = random.Random(seed)
    prompts = [
        Prompt(number, choose.randrange(1, 6), choose.choice([PLAIN, ACME, SALTED, OTHER])) for number in range(20)
    ]
    prompts += [Prompt(number, 3, namespace) for number in range(20, 25) for namespace in (PLAIN, ACME)]
    with publishing(context, queued_pages=(20, 100_000)[seed % 2]) as it:
        it.hear()
        for step in range(600):
            prompt, source = choose.choice(prompts), choose.choice(["tp1", "tp2"])
            tier = choose.choice(list(Tier))
            what = choose.randrange(12)
            if what < 6:
                it.tell(prompt.stored(tier), source=source)
            elif what < 11:
                it.tell(prompt.removed(tier), source=source)
            else:
                it.tell(Cleared(prompt.namespace.digest, 0), source=source)
            if step % 60 == 59:
                it.hear()
                assert it.router.mirror.blocks == it.resident()
        assert it.publisher.statistics().failures == 0
        assert bool(it.publisher.statistics().resets) == (seed % 2 == 0)
