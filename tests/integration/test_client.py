"""The client against a real server over a service without tiers: when all is well, and what it refuses."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

import hicache
from hicache.core.symbols import symbols
from hicache.errors import (
    CacheClosed,
    HashMismatch,
    InvalidInput,
    NamespaceError,
    OutOfSlots,
    PermissionDenied,
    ProtocolMismatch,
    Unauthenticated,
)
from hicache.rpc.service import Caller, Limits, Peer
from hicache.testing.clients import NAMESPACE, PATIENCE, SIZE, connected, random_pages, store, until
from hicache.testing.engine import prompt, small_namespace
from hicache.testing.rpcservice import FakeService
from hicache.testing.serving import Served


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(lambda: FakeService(page_bytes=SIZE)) as served:
        yield served


@pytest.fixture
def cache(served: Served) -> Iterator[hicache.ConnectedCache]:
    with connected(served.address) as cache:
        yield cache


def test_what_one_request_stores_the_next_one_reads(cache: hicache.ConnectedCache) -> None:
    tokens = prompt(1, 22)
    content = store(cache, tokens)
    assert cache.match(tokens) == hicache.Match(host=5)
    with cache.request(tokens) as request:
        assert request.match == hicache.Match(host=5)
        assert len(request.load()) == 5
        buffers = np.zeros((5, SIZE), np.uint8)
        assert request.read_into(buffers) == 5
        assert (buffers == content[:5]).all()
        one = bytearray(SIZE)
        assert request.read_into([one], first=3) == 1
        assert one == content[3].tobytes()
    assert request.counts.host == 5
    statistics = cache.statistics()
    assert (statistics.requests, statistics.open_requests, statistics.pages_read) == (2, 0, 6)


def test_a_prompt_that_grows_is_committed_as_its_pages_become_whole(cache: hicache.ConnectedCache) -> None:
    tokens = prompt(1, 10)
    with cache.request(tokens) as request:
        slots = list(request.allocate())
        assert request.write_from(random_pages(3)) == 3
        request.commit(upto=9)
        assert cache.match(prompt(1, 9)).pages == 2
        for token in (7, 8, 9, 10, 11):
            request.extend([token])
            slots += list(request.allocate())
        assert len(slots) == 4
        request.commit()
    assert cache.match([*tokens, 7, 8, 9, 10, 11], logits=False).pages == 3


def test_pages_that_were_never_written_are_not_published(served: Served, cache: hicache.ConnectedCache) -> None:
    """A commit that covers a page with whatever its slot had before is refused, and publishes nothing."""
    tokens = prompt(1, 16)
    with cache.request(tokens, logits=False) as request:
        request.allocate()
        request.write_from(random_pages(1, seed=2))
        request.write_from(random_pages(1), first=2)
        with pytest.raises(InvalidInput, match=r"page 1 .* never written: .*upto=4"):
            request.commit()
        with pytest.raises(InvalidInput, match="page 1"):
            request.commit(wait=False)
        assert not served.service.pages
        request.commit(upto=4)
        request.write_from(random_pages(1, seed=3), first=1)
        request.commit(upto=12)
        assert cache.match(tokens, logits=False).pages == 3
        written = hicache.ThreadEvent()
        request.commit(ready=written)  # the writer may still write it
        written.set()
        until(lambda: cache.statistics().failed_commits == 1, "the refusal")
    assert cache.match(tokens, logits=False).pages == 3


def hashes_of(tokens: list[int]) -> bytes:
    pages = len(tokens) // NAMESPACE.page_size
    return NAMESPACE.derive().hasher().extend(None, symbols(tokens, NAMESPACE.page_size), pages)


def test_who_knows_hashes_and_no_tokens_stores_and_reads_by_them(cache: hicache.ConnectedCache) -> None:
    """Such pages are those of the tokens, too; and what was stored with tokens is read by hash."""
    tokens = prompt(1, 20)
    hashes, pages = hashes_of(tokens), random_pages(5)
    with cache.request_by_hash(hashes[:96]) as request:
        assert len(request.load()) == 0
        assert request.write_from(pages[: len(request.allocate())]) == 3
        request.commit(upto=8)
        request.commit()
        with pytest.raises(InvalidInput, match="names its pages by hash"):
            request.extend([1])
    with cache.request_by_hash(hashes, deadline=1) as request:
        assert (len(request.load()), len(request.allocate()), request.tokens) == (3, 2, 20)
        request.write_from(pages[3:])
        request.commit()
    with cache.request(tokens, logits=False) as request:
        read = np.zeros((5, SIZE), np.uint8)
        assert request.read_into(read) == 5
        assert (read == pages).all()
    content = store(cache, others := prompt(2, 8))
    with cache.request_by_hash(hashes_of(others)) as request:
        read = np.zeros((2, SIZE), np.uint8)
        assert request.read_into(read) == 2
        assert (read == content).all()
    with pytest.raises(InvalidInput, match="31 bytes, not a multiple of 32"):
        cache.request_by_hash(hashes[:31])


def test_a_service_that_takes_no_hashes_is_named(
    served: Served, cache: hicache.ConnectedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older service would never show such pages: the client is told, and reads on."""
    connection = cache.state.link.connection
    assert connection is not None
    monkeypatch.setattr(connection, "welcome", replace(connection.welcome, server="0.0.9", capabilities=()))
    with cache.request_by_hash(hashes_of(prompt(1, 4))) as request:
        assert request.write_from(random_pages(len(request.allocate()))) == 1
        with pytest.raises(ProtocolMismatch, match=r"hicache 0\.0\.9, which takes no pages by hash: upgrade it"):
            request.commit()
    assert not served.service.pages


def test_scopes_tell_pages_apart(cache: hicache.ConnectedCache) -> None:
    tokens = prompt(1, 12)
    for options in ({}, {"salt": "x"}, {"adapter": hicache.Adapter("sql", digest=b"d" * 16)}):
        with cache.request(tokens, **options) as request:
            assert request.match.pages == 0
            assert request.write_from(random_pages(len(request.allocate()))) == 3
            request.commit()
        assert cache.match(tokens, **options).pages == 2


def test_images_given_to_a_client_without_extras_are_refused(cache: hicache.ConnectedCache) -> None:
    with pytest.raises(InvalidInput, match="extras=True"):
        cache.request(prompt(1, 12), extras=[(b"image", 2, 5)])


def test_an_adapter_without_a_digest_goes_past_the_cache(cache: hicache.ConnectedCache) -> None:
    tokens, adapter = prompt(1, 12), hicache.Adapter("unknown")
    store(cache, tokens)
    with cache.request(tokens, adapter=adapter) as request:
        assert request.bypassed
        assert not len(request.load())
        assert not len(request.allocate())
        assert request.write_from(random_pages(2)) == 0
        request.commit()
    assert request.counts.missed == {hicache.MissReason.BYPASSED: 2}
    assert cache.match(tokens, adapter=adapter) == hicache.Match()


def test_what_cannot_work_is_refused_before_anything_is_sent(cache: hicache.ConnectedCache) -> None:
    calls: list[tuple[Callable[[], object], type[Exception]]] = [
        (lambda: cache.request("text"), InvalidInput),  # type: ignore[arg-type]
        (lambda: cache.request([1, -2]), InvalidInput),
        (lambda: cache.request([1], deadline=-1), InvalidInput),
        (lambda: cache.request([1], priority=2**31), InvalidInput),
        (lambda: cache.request([1], logits="yes"), InvalidInput),  # type: ignore[arg-type]
        (lambda: cache.request([1], adapter="name"), NamespaceError),  # type: ignore[arg-type]
        (lambda: cache.request([1], salt=""), NamespaceError),
        (lambda: cache.match([1], salt=[]), NamespaceError),  # type: ignore[arg-type]
        (lambda: cache.match([[1]]), InvalidInput),  # type: ignore[list-item]
        (lambda: cache.report_prefill(0, 1.0), InvalidInput),
        (lambda: cache.join(b"junk"), InvalidInput),
        (lambda: cache.close(-1), InvalidInput),
    ]
    for number, (call, error) in enumerate(calls):
        with pytest.raises(error):  # noqa: PT012  says which
            call()
            pytest.fail(f"call {number} was taken")
    assert cache.statistics().open_requests == 0


def test_verbs_of_a_request_check_what_they_are_given(cache: hicache.ConnectedCache) -> None:
    store(cache, prompt(1, 8))
    with cache.request(prompt(1, 18)) as request:
        assert len(request.load()) == 2
        request.allocate(1)
        calls: list[Callable[[], object]] = [
            lambda: request.allocate(-1),
            lambda: request.commit(upto=19),
            lambda: request.commit(upto=16),  # the fourth page has no slot
            lambda: request.commit(ready="soon"),  # type: ignore[arg-type]
            lambda: request.write_from(random_pages(1), first=0),
            lambda: request.read_into(bytearray(SIZE + 1)),
            lambda: request.read_into(bytes(SIZE)),
            lambda: request.read_into(bytearray(SIZE), first=-1),
            lambda: request.extend(["x"]),  # type: ignore[list-item]
            lambda: request.page(0),  # streamed
            lambda: request.counts,
        ]
        for number, call in enumerate(calls):
            with pytest.raises(InvalidInput):  # noqa: PT012  says which
                call()
                pytest.fail(f"call {number} was taken")


def test_more_slots_than_there_are_are_refused_with_the_numbers(cache: hicache.ConnectedCache) -> None:
    with cache.request(prompt(1, 8)) as request, pytest.raises(OutOfSlots) as caught:
        request.allocate(65)
    assert (caught.value.asked, caught.value.free, caught.value.capacity) == (65, 64, 64)


def test_a_service_that_names_pages_otherwise_publishes_nothing(served: Served, cache: hicache.ConnectedCache) -> None:
    with cache.request(prompt(1, 8), logits=False) as request:
        request.allocate()
        request.write_from(random_pages(2))
        request._verbs._symbols = bytes(len(request._verbs._symbols))  # tokens that are not those of the hashes
        with pytest.raises(HashMismatch):
            request.commit()
    assert served.service.pages == {}


def test_a_closed_request_and_a_closed_cache_say_so(served: Served) -> None:
    cache = connected(served.address)
    request = cache.request(prompt(1, 8))
    other = cache.request(prompt(2, 8))
    request.close()
    assert request.close() == request.counts
    for call in (request.load, request.allocate, request.commit, lambda: request.extend([1])):
        with pytest.raises(CacheClosed, match="slots belong to others"):
            call()
    assert cache.close()
    assert cache.close()
    for call in (other.load, lambda: cache.match([1]), lambda: cache.request([1])):
        with pytest.raises(CacheClosed, match="the cache is closed"):
            call()
    assert other.close().asked == 1
    until(lambda: served.service.ended == [(1, True)], "the goodbye")
    assert len(served.service.free) == 64


def test_a_request_that_is_collected_is_released_and_counted(served: Served, cache: hicache.ConnectedCache) -> None:
    cache.request(prompt(1, 8)).allocate()
    gc.collect()
    until(lambda: len(served.service.free) == 64, "the release")
    assert cache.statistics().dropped == 1
    assert cache.statistics().open_requests == 0


def test_a_cache_that_is_collected_open_warns(served: Served) -> None:
    cache = connected(served.address)
    link = cache.state.link
    with pytest.warns(ResourceWarning, match="never closed"):
        cache.__del__()
    cache.close()
    assert link.connection is None


# ---- bytes


def pages_of(size: int) -> hicache.Namespace:
    geometry = hicache.KVGeometry.opaque(engine="e", backend="b", version="1", shape="any", page_bytes=size)
    return small_namespace(hash="sha256", geometry=geometry)


@pytest.mark.case("GRPC-1")
@pytest.mark.parametrize("size", [4 * 2**20 - 1, 4 * 2**20, 4 * 2**20 + 1, 64 * 2**20])
def test_pages_of_any_size_travel_in_pieces_that_every_receiver_takes(size: int) -> None:
    content = np.frombuffer(np.random.default_rng(3).bytes(size), np.uint8).reshape(1, size)
    with (
        Served(lambda: FakeService(slots=1, page_bytes=size)) as served,
        hicache.connect(served.address, pages_of(size), insecure=True) as cache,
    ):
        with cache.request(prompt(1, 4), logits=False) as request:
            request.allocate()
            assert request.write_from(content) == 1
            request.commit()
        with cache.request(prompt(1, 4), logits=False) as request:
            buffer = np.zeros((1, size), np.uint8)
            assert request.read_into(buffer) == 1
            assert np.array_equal(buffer, content)
        assert served.do(lambda: dict(served.service.sessions[1].leases)) == {}


@pytest.mark.case("GRPC-1")
def test_a_prompt_that_fits_no_message_is_not_cached_and_the_limit_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(message_bytes=4096)
    with Served(lambda: FakeService(limits, page_bytes=SIZE)) as served, connected(served.address) as cache:
        with cache.request(prompt(1, 4 * 200)) as request:
            assert request.bypassed
            assert cache.request(prompt(1, 4 * 200)).close().missed == {hicache.MissReason.BYPASSED: 199}
        assert caplog.text.count("4,096 bytes a message") == 1  # not for every request
        assert cache.statistics().refused == 2
        store(cache, prompt(1, 4 * 20))


def test_a_stream_that_ends_in_the_middle_of_pages_leaves_those_that_are_whole(served: Served) -> None:
    size = 4 * 2**20
    served.stop()
    with Served(lambda: FakeService(slots=8, page_bytes=size)) as large:  # noqa: SIM117  ended inside
        with hicache.connect(large.address, pages_of(size), insecure=True, window=2 * size) as cache:
            with cache.request(prompt(1, 16), logits=False) as request:
                request.allocate()
                content = np.frombuffer(np.random.default_rng(3).bytes(4 * size), np.uint8).reshape(4, size)
                assert request.write_from(content) == 4
                request.commit()
            request = cache.request(prompt(1, 16), logits=False)
            large.do(lambda: large.service.blocked.add("get_bytes"))
            buffer = np.zeros((4, size), np.uint8)
            read: list[int] = []
            thread = threading.Thread(target=lambda: read.append(request.read_into(buffer)))
            thread.start()
            until(lambda: large.service.waiting >= 1, "the stream")
            large.stop()
            thread.join(PATIENCE)
            assert read == [0]
            request.close()


# ---- who may what


@pytest.mark.case("GRPC-4")
def test_the_clients_pings_are_tolerated_by_the_server(served: Served, cache: hicache.ConnectedCache) -> None:
    """Time is scaled down by options in the tests of the server; here the settings of both sides are compared."""
    from hicache.rpc.transport import CHANNEL_OPTIONS, SERVER_OPTIONS

    channel, server = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    assert channel["grpc.keepalive_time_ms"] > server["grpc.http2.min_ping_interval_without_data_ms"]
    assert cache.connected


def test_a_client_without_the_right_token_is_refused_at_connect_and_one_with_it_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def authenticate(peer: Peer) -> Caller:
        if peer.token == "reader":
            return Caller(tenant="acme", write=False, admin=False)
        raise Unauthenticated("no such token")

    with Served(lambda: FakeService(page_bytes=SIZE), authenticate=authenticate) as served:
        with pytest.raises(Unauthenticated, match="no such token"):
            connected(served.address)
        with pytest.raises(Unauthenticated):
            connected(served.address, token="wrong")
        assert "goes on" not in caplog.text  # it was raised, so nothing does
        with connected(served.address, token="reader") as cache:
            assert cache.match(prompt(1, 8)).pages == 0
            with pytest.raises(PermissionDenied, match="right admin"):
                cache.clear()


def test_a_service_that_starts_to_refuse_is_tried_again_and_the_reason_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    allowed = threading.Event()

    def authenticate(peer: Peer) -> Caller:
        if allowed.is_set():
            return Caller()
        raise Unauthenticated("not yet")

    allowed.set()
    with (
        Served(lambda: FakeService(page_bytes=SIZE), authenticate=authenticate) as served,
        connected(served.address) as cache,
    ):
        allowed.clear()
        served.stop()
        served.start()
        until(lambda: "not yet" in cache.statistics().why_away, "the refusal")
        assert caplog.text.count("refuses this client, it goes on without the cache: not yet") == 1
        allowed.set()
        assert cache.wait_connected(PATIENCE)
        levels = {record.levelname for record in caplog.records if "again" in record.getMessage()}
        assert levels == {"WARNING"}  # whoever saw that the cache went away sees that it is back


def test_clearing_says_what_storage_has_not_confirmed(cache: hicache.ConnectedCache) -> None:
    store(cache, prompt(1, 8))
    with pytest.raises(hicache.StorageError, match="storage has not answered"):
        cache.clear()
    assert cache.match(prompt(1, 8)).pages == 0


# ---- asyncio


def test_the_asyncio_client_does_the_same(served: Served) -> None:
    tokens = prompt(1, 22)

    async def main() -> None:
        async with await hicache.connect_async(served.address, NAMESPACE, insecure=True) as cache:
            async with await cache.request(tokens) as request:
                assert len(await request.load()) == 0
                assert len(await request.allocate()) == 6
                assert await request.write_from(random_pages(6)) == 6
                await request.commit()
            assert (await cache.match(tokens)).pages == (await cache.prefetch(tokens)).pages == 5
            requests = await asyncio.gather(*(cache.request(tokens) for _ in range(50)))
            assert all(request.match.host == 5 for request in requests)
            buffer = np.zeros((5, SIZE), np.uint8)
            assert await requests[7].read_into(buffer) == 5
            assert (buffer == random_pages(6)[:5]).all()
            counts = await asyncio.gather(*(request.close() for request in requests))
            assert {count.host for count in counts} == {5}

    asyncio.run(main())
    until(lambda: not served.service.sessions, "the end of the session")
    assert served.service.ended == [(1, True)]


def test_many_threads_share_one_connection(cache: hicache.ConnectedCache) -> None:
    store(cache, prompt(1, 22))
    failures: list[object] = []

    def engine() -> None:
        for _ in range(30):
            with cache.request(prompt(1, 22)) as request:
                if len(request.load()) != 5:
                    failures.append(request)

    threads = [threading.Thread(target=engine) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures
    assert cache.statistics().requests == 241
