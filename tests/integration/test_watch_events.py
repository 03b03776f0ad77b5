"""The events of a running service, from the commit of a page to the screen and to a router."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import hicache
from hicache.cli.main import main
from hicache.config import Config, Events, Host, Listen, Metrics, Size, Storage
from hicache.core.hashing import PageHasher
from hicache.events import Stored
from hicache.records import Tier
from hicache.rpc.address import Address
from hicache.rpc.client.admin import AdminClient
from hicache.rpc.client.options import Secrets
from hicache.rpc.service import Attachment, Caller, RequestScope
from hicache.sidecar import document as documents
from hicache.sidecar.kv_wire import decode_batch, short_hash
from hicache.sidecar.session import SidecarSession
from hicache.testing.engine import small_namespace
from hicache.testing.kvevents import BlockMirror, EventMirror, places
from hicache.testing.serving import ServedApp
from hicache.testing.sidecars import ServiceProcess

NAMESPACE = small_namespace(hash="sha256")
PAGE = NAMESPACE.page_size
PATIENCE = 30.0


def config(folder: Path, **sections: Any) -> Config:
    return Config(
        **{
            "listen": Listen(addresses=[f"unix://{folder}/s"]),
            "host": Host(bytes=Size(2**20), populate=False),
            "storage": Storage(url=f"file://{folder}/store?capacity=64MiB"),
            **sections,
        }
    )


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedApp]:
    with ServedApp(config(tmp_path)) as served:
        yield served


def prompt(seed: int, pages: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2**32, pages * PAGE, dtype=np.uint32).tolist()


def hashes(tokens: list[int], salt: str | None = None) -> list[bytes]:
    hasher: PageHasher = NAMESPACE.derive(salt=salt).hasher()
    glued = hasher.extend(None, np.array(tokens, "<u4").tobytes(), len(tokens) // PAGE)
    return [glued[at : at + 32] for at in range(0, len(glued), 32)]


def store(cache: hicache.ConnectedCache, tokens: list[int], **scope: Any) -> None:
    with cache.request(tokens, deadline=PATIENCE, **scope) as request:
        request.load()
        slots = request.allocate()
        request.write_from(np.zeros((len(slots), NAMESPACE.geometry.page_bytes(PAGE)), np.uint8))
        request.commit(ready=hicache.READY)


class Watching:
    """A client of the stream, which reads until something holds."""

    def __init__(self, address: str, number: int = 0) -> None:
        self.mirror = EventMirror()
        self._client = AdminClient(Address.parse(address), Secrets(), timeout=PATIENCE)
        self._batches = self._client.watch_events(number)

    def until(self, met: Callable[[EventMirror], bool]) -> EventMirror:
        while not met(self.mirror):
            self.mirror.apply(next(self._batches))
        return self.mirror

    def close(self) -> None:
        self._batches.close()
        self._client.close()


@pytest.fixture
def watching(served: ServedApp) -> Iterator[Watching]:
    made = Watching(served.address)
    yield made
    made.close()


def in_tier(mirror: EventMirror, tier: Tier) -> set[bytes]:
    return {page for _, _, found, page in mirror.pages if found is tier}


def resident(served: ServedApp) -> set[Any]:
    log = served.app.service.events

    def look() -> set[Any]:
        with log.lock:
            return places(log.view())

    return served.do(look)


def in_trees(served: ServedApp) -> set[Any]:
    """The same as the trees of the pools have it."""

    def look() -> set[Any]:
        found: set[Any] = set()
        for pool in served.app.service.pools:
            for tree in pool.cache.parts.reducer.core._trees.values():
                todo = [tree.root]
                while todo:
                    node = todo.pop()
                    todo += node.children.values()
                    for tier, pages in ((Tier.HOST, node.resident[Tier.HOST]), (Tier.STORAGE, node.believed)):
                        told = tree.hashes(node, 0, pages) if pages else []
                        found |= {(tree.namespace, tree.generation, tier, page) for page in told}
        return found

    return served.do(look)


@pytest.mark.case("STAT-3")
def test_a_watcher_sees_pages_come_to_each_tier_with_their_tokens(served: ServedApp, watching: Watching) -> None:
    """HOST at commit, then STORAGE; and all of it gone at a clear."""
    tokens = prompt(1, 5)
    pages = hashes(tokens)
    watching.until(lambda mirror: mirror.snapshots == 1)
    with hicache.connect(served.address, NAMESPACE) as cache:
        store(cache, tokens)
        mirror = watching.until(lambda mirror: set(pages) <= in_tier(mirror, Tier.STORAGE))
        assert in_tier(mirror, Tier.HOST) == set(pages)
        for tier in (Tier.HOST, Tier.STORAGE):
            told = [event for event in mirror.events if isinstance(event, Stored) and event.tier is tier]
            assert [page for event in told for page in event.page_hashes] == pages
            assert b"".join(event.tokens for event in told) == np.array(tokens, "<u4").tobytes()
            assert told[0].parent_hash is None
        cache.clear()
        watching.until(lambda mirror: not mirror.pages)


@pytest.mark.case("STAT-3")
def test_what_engines_hold_is_told_and_goes_with_them(served: ServedApp, watching: Watching) -> None:
    """An engine's report has hashes only; the service adds the tokens that it knows."""
    tokens = prompt(1, 4)
    pages = hashes(tokens)
    with hicache.connect(served.address, NAMESPACE) as cache:
        store(cache, tokens)
        watching.until(lambda mirror: set(pages) <= in_tier(mirror, Tier.HOST))

        async def engine() -> SidecarSession:
            session = await served.app.service.open_session(Caller(), "engine")
            await session.attach(Attachment(1, NAMESPACE, group="g", streamed=True))
            return session

        session = served.run(engine())

        def report(stored: list[bytes], removed: list[bytes]) -> None:
            session.report_device(
                1,
                RequestScope(),
                stored=b"".join(stored),
                parent_hash=b"",
                first_page=0,
                removed=b"".join(removed),
                cleared=False,
            )

        served.do(lambda: report(pages, []))
        mirror = watching.until(lambda mirror: in_tier(mirror, Tier.DEVICE) == set(pages))
        (told,) = [event for event in mirror.events if isinstance(event, Stored) and event.tier is Tier.DEVICE]
        assert told.tokens == np.array(tokens, "<u4").tobytes()
        assert (told.parent_hash, told.first_page) == (None, 0)
        served.do(lambda: report([], pages[:1:-1]))
        mirror = watching.until(lambda mirror: in_tier(mirror, Tier.DEVICE) == set(pages[:2]))
        served.do(lambda: session.end(orderly=True))
        mirror = watching.until(lambda mirror: not in_tier(mirror, Tier.DEVICE))
        assert in_tier(mirror, Tier.HOST) == set(pages)


def test_residency_told_is_residency(served: ServedApp, watching: Watching) -> None:
    """A pool so small that pages are evicted all the time; what storage has comes back."""
    with hicache.connect(served.address, NAMESPACE) as cache:
        for seed in range(60):
            store(cache, prompt(seed % 25, 1 + seed % 7), salt=("", "a", "b")[seed % 3] or None)
        store(cache, prompt(1000, 1), salt="last")
    last = hashes(prompt(1000, 1), "last")[0]
    watching.until(lambda mirror: last in in_tier(mirror, Tier.STORAGE))
    end = time.monotonic() + PATIENCE
    while not watching.mirror.pages == resident(served) == in_trees(served):
        assert time.monotonic() < end
        number = served.do(lambda: served.app.service.events.statistics().next_number)
        watching.until(lambda mirror, number=number: mirror.next_number >= number)  # type: ignore[misc]
    assert len(watching.mirror.pages) > 100


def test_a_watcher_that_outlives_the_service_finds_what_the_next_one_took_over(tmp_path: Path) -> None:
    """It is told that its number is of another life, and gets all that the next one has, tokens included."""
    tokens = prompt(1, 4)
    with ServiceProcess(tmp_path, host="1MiB") as first:
        with hicache.connect(first.address, NAMESPACE) as cache:
            store(cache, tokens)
        watching = Watching(first.address)
        number = watching.until(lambda mirror: len(mirror.pages) == 4).next_number
        known = watching.mirror.pages
        watching.close()
        with ServiceProcess(tmp_path, host="1MiB", takeover=True) as second:
            first.ended()
            watching = Watching(second.address, number)
            mirror = watching.until(lambda mirror: mirror.pages == known)
            assert (mirror.lost, mirror.snapshots) == (1, 1)
            assert mirror.next_number > number
            told = [event for event in (*mirror.told, *mirror.events) if isinstance(event, Stored)]
            assert b"".join(event.tokens for event in told) == np.array(tokens, "<u4").tobytes()
            watching.close()
            second.stop()


def test_a_router_and_a_snapshot_over_http(tmp_path: Path) -> None:
    """The endpoints of the configuration publish the same, and the snapshot continues with the next message."""
    events = Events(
        publish=f"ipc://{tmp_path}/kv",
        replay=f"ipc://{tmp_path}/replay",
        model=NAMESPACE.model + "/",
        storage_medium="FS",
        dp_rank=2,
    )
    tokens = prompt(1, 4)
    expected = {(medium, short_hash(page)) for medium in ("CPU", "FS") for page in hashes(tokens)}
    with ServedApp(config(tmp_path, events=events, metrics=Metrics(address="127.0.0.1:0"))) as served:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
            dealer.connect(events.replay)
            with hicache.connect(served.address, NAMESPACE) as cache:
                store(cache, tokens)
            cache_is_told(served, hashes(tokens))
            mirror, end = BlockMirror(), time.monotonic() + PATIENCE
            while mirror.blocks != expected:
                assert time.monotonic() < end
                mirror = BlockMirror()
                dealer.send((0).to_bytes(8, "big"))
                while (frames := dealer.recv_multipart())[1]:
                    mirror.apply(decode_batch(frames[1]))
        with urllib.request.urlopen(f"http://{served.app.http}/kv_events/snapshot", timeout=PATIENCE) as answer:
            document = json.load(answer)
        assert {(event["medium"], block) for event in document["events"] for block in event["block_hashes"]} == expected
        assert {event["model_name"] for event in document["events"]} == {NAMESPACE.model}
        assert document["dp_rank"] == 2
        counted = served.do(lambda: documents.document(served.app.service, Caller()))["service"]
        assert counted["kv_events"]["replays"] > 0
        assert counted["events"]["pages"] == 4


def test_the_command_shows_the_snapshot_and_what_follows(served: ServedApp, capsys: pytest.CaptureFixture[str]) -> None:
    """As lines for people, and as a JSON document each; tokens only where they are asked for."""
    tokens = prompt(1, 3)
    pages = hashes(tokens)
    with hicache.connect(served.address, NAMESPACE) as cache:
        store(cache, tokens)
        cache_is_told(served, pages)
    assert main(["events", served.address, "--snapshot"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "resident" in lines[0]
    assert "host" in lines[0]
    assert "3 pages from page 0" in lines[0]
    assert pages[0].hex()[:8] in lines[0]
    assert "the next event is number" in lines[2]

    assert main(["events", served.address, "--snapshot", "--json"]) == 0
    host, storage, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert (host["event"], host["tier"], storage["tier"], end["event"]) == ("stored", "host", "storage", "snapshot_end")
    assert host["page_hashes"] == [page.hex() for page in pages]
    assert host["snapshot"] is True
    assert "tokens" not in host

    assert main(["events", served.address, "--from", "1", "--count", "2", "--json", "--tokens"]) == 0
    lost, host = map(json.loads, capsys.readouterr().out.splitlines())
    assert (lost["event"], lost["lost"]) == ("lost", 1)
    assert host["tokens"] == tokens


def cache_is_told(served: ServedApp, pages: list[bytes]) -> None:
    """All of them are in storage, as the log has it."""
    waiting = threading.Event()
    for _ in range(int(PATIENCE / 0.01)):
        if {page for _, _, tier, page in resident(served) if tier is Tier.STORAGE} >= set(pages):
            return
        waiting.wait(0.01)
    raise AssertionError("the pages did not reach storage")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--count", "0"], "give 1 or more"), (["--from", "-1"], "number of an event")],
)
def test_bad_usage_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "unix:///nowhere", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
