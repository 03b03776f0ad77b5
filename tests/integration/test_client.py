"""The client against a real server over a service without tiers: when all is well, and when it is not."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.errors import (
    CacheClosed,
    HashMismatch,
    InvalidInput,
    NamespaceError,
    OutOfSlots,
    PermissionDenied,
    ServiceUnavailable,
    Unauthenticated,
)
from hicache.rpc.service import Caller, Draining, Limits, Peer, Revoked
from hicache.testing.engine import prompt, small_namespace
from hicache.testing.rpcservice import FakeService
from hicache.testing.serving import Served

NAMESPACE = small_namespace(hash="sha256")
SIZE = NAMESPACE.geometry.page_bytes(4)
PATIENCE = 20.0
SOON = hicache.Backoff(first=0.005, most=0.05)


def until(met: Callable[[], bool], what: str = "it") -> None:
    """Wait for something that happens in another thread."""
    end = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not met():
        assert time.monotonic() < end, f"{what} did not happen"
        pause.wait(0.002)


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(lambda: FakeService(page_bytes=SIZE)) as served:
        yield served


def connected(served: Served, **options: Any) -> hicache.ConnectedCache:
    return hicache.connect(served.address, NAMESPACE, **({"insecure": True, "backoff": SOON} | options))


@pytest.fixture
def cache(served: Served) -> Iterator[hicache.ConnectedCache]:
    with connected(served) as cache:
        yield cache


def pages(count: int, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.frombuffer(np.random.default_rng(seed).bytes(count * SIZE), np.uint8).reshape(count, SIZE)


def store(cache: hicache.ConnectedCache, tokens: list[int], **options: Any) -> np.ndarray[Any, Any]:
    with cache.request(tokens, **options) as request:
        usable = len(request.load())
        content = pages(len(request.allocate()), seed=len(tokens))
        assert request.write_from(content) == len(content)
        request.commit()
    assert usable == 0
    return content


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
        assert request.write_from(pages(3)) == 3
        request.commit(upto=9)
        assert cache.match(prompt(1, 9)).pages == 2
        for token in (7, 8, 9, 10, 11):
            request.extend([token])
            slots += list(request.allocate())
        assert len(slots) == 4
        request.commit()
    assert cache.match([*tokens, 7, 8, 9, 10, 11], logits=False).pages == 3


def test_scopes_tell_pages_apart(cache: hicache.ConnectedCache) -> None:
    tokens = prompt(1, 12)
    for options in ({}, {"salt": "x"}, {"adapter": hicache.Adapter("sql", digest=b"d" * 16)}):
        with cache.request(tokens, **options) as request:
            assert request.match.pages == 0
            assert request.write_from(pages(len(request.allocate()))) == 3
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
        assert request.write_from(pages(2)) == 0
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
            lambda: request.write_from(pages(1), first=0),
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
        request._verbs._symbols = bytes(len(request._verbs._symbols))  # tokens that are not those of the hashes
        with pytest.raises(HashMismatch):
            request.commit()
    assert served.service.pages == {}


def test_a_closed_request_and_a_closed_cache_say_so(served: Served) -> None:
    cache = connected(served)
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
    cache = connected(served)
    link = cache.state.link
    with pytest.warns(ResourceWarning, match="never closed"):
        cache.__del__()
    cache.close()
    assert link.connection is None


# ---- writers' events


def test_pages_are_published_when_their_writer_has_written_them(served: Served, cache: hicache.ConnectedCache) -> None:
    tokens, written = prompt(1, 8), hicache.ThreadEvent()
    request = cache.request(tokens, logits=False)
    request.allocate()
    request.write_from(pages(2))
    request.commit(ready=written)
    assert cache.match(tokens, logits=False).pages == 0
    counts = request.close()
    assert counts.asked == 2
    assert len(served.service.free) == 62  # a writer is at work: its slots are not given to others
    written.set()
    until(lambda: cache.match(tokens, logits=False).pages == 2, "the commit")
    until(lambda: not served.service.sessions[1].leases, "the release")


def test_closing_while_a_writer_is_at_work_says_no_goodbye(served: Served) -> None:
    cache = connected(served)
    request = cache.request(prompt(1, 8))
    request.allocate()
    request.commit(ready=hicache.ThreadEvent())
    assert cache.close()
    until(lambda: bool(served.service.ended), "the end of the session")
    assert served.service.ended == [(1, False)]
    request.close()


# ---- the service is away


def test_connecting_to_nothing_gives_a_cache_that_has_nothing(served: Served) -> None:
    served.stop()
    with connected(served) as cache:
        assert not cache.connected
        with cache.request(prompt(1, 8)) as request:
            assert (len(request.load()), len(request.allocate())) == (0, 0)
            request.commit()
        assert request.counts.missed == {hicache.MissReason.BYPASSED: 1}
        assert cache.match(prompt(1, 8)) == cache.prefetch(prompt(1, 8)) == hicache.Match()
        assert cache.host.slots == 0
        assert cache.statistics().why_away
        with pytest.raises(ServiceUnavailable, match="nothing was cleared"):
            cache.clear()
        served.start()
        assert cache.wait_connected(PATIENCE)
        store(cache, prompt(1, 8))


def test_a_service_that_is_required_and_away_is_an_error(served: Served) -> None:
    served.stop()
    with pytest.raises(ServiceUnavailable, match="connect"):
        connected(served, required=True, timeout=0.3)


def test_the_end_of_the_service_ends_no_request_and_the_next_one_is_found(
    served: Served, cache: hicache.ConnectedCache
) -> None:
    tokens = prompt(1, 10)
    store(cache, tokens)
    request = cache.request(tokens)
    loaded = list(request.load())
    writer = cache.request(prompt(2, 10))
    writer.allocate()
    served.stop()
    until(lambda: not cache.connected, "the end of the connection")
    assert list(request.load()) == loaded  # what was answered stays answered
    assert request.read_into(np.zeros((2, SIZE), np.uint8)) == 0
    assert request.lost
    assert not len(request.allocate())
    assert writer.write_from(pages(3)) == 0
    writer.commit()
    assert writer.close().aborted is False
    assert request.close().host == 2
    served.start()
    assert cache.wait_connected(PATIENCE)
    assert cache.match(tokens).pages == 0
    store(cache, tokens)
    statistics = cache.statistics()
    assert statistics.connections == 2
    assert statistics.lost == 2


@pytest.mark.parametrize("verb", ["lease", "load", "reserve"])
def test_calls_that_wait_are_answered_at_once_when_the_service_ends(
    served: Served, cache: hicache.ConnectedCache, verb: str
) -> None:
    served.do(lambda: served.service.blocked.add(verb))
    answers: list[Any] = []

    def engine() -> None:
        with cache.request(prompt(1, 10), deadline=PATIENCE) as request:
            answers.append(list(request.load()))
            answers.append(list(request.allocate(deadline=PATIENCE)))

    thread = threading.Thread(target=engine)
    thread.start()
    until(lambda: served.service.waiting == 1, "the wait")
    began = time.monotonic()
    served.stop()
    thread.join(PATIENCE)
    assert answers == [[], []]
    assert time.monotonic() - began < PATIENCE / 2


def test_a_service_that_falls_silent_costs_one_deadline_and_then_nothing_until_it_is_heard(
    served: Served, cache: hicache.ConnectedCache
) -> None:
    tokens = prompt(1, 10)
    store(cache, tokens)
    opened = [cache.request(prompt(2, 10), deadline=60.0) for _ in range(20)]
    release = threading.Event()
    loop = served._loop
    assert loop is not None
    loop.call_soon_threadsafe(release.wait, PATIENCE)  # its thread stands still, as under SIGSTOP
    first = cache.request(tokens, deadline=0.05)
    assert first.bypassed
    began = time.monotonic()
    for _ in range(100):
        with cache.request(tokens, deadline=5.0) as request:
            assert request.bypassed
    for request in opened:
        assert not len(request.load())
        assert not len(request.allocate())
        request.close()
    assert time.monotonic() - began < 1.0
    assert not cache.connected
    assert cache.statistics().why_away == "the service does not answer"
    release.set()
    until(lambda: cache.connected, "an answer")
    assert cache.match(tokens).pages == 2
    assert cache.statistics().unanswered == 1
    until(lambda: not served.service.sessions[1].leases, "the release of the lease that came late")
    assert cache.statistics().late_answers == 1


def test_a_task_that_is_cancelled_while_it_waits_for_a_lease_leaves_none_behind(served: Served) -> None:
    release = threading.Event()

    async def main() -> None:
        async with await hicache.connect_async(served.address, NAMESPACE, insecure=True) as cache:
            assert served._loop is not None
            served._loop.call_soon_threadsafe(release.wait, PATIENCE)
            task = asyncio.create_task(cache.request(prompt(1, 10)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            release.set()
            assert (await cache.match(prompt(1, 10))).pages == 0  # answered behind the lease
            await cache.report_prefill(1, 1.0)  # and this one behind its release
            assert served.do(served.service.number) > 2  # there was one
            assert served.do(lambda: dict(served.service.sessions[1].leases)) == {}

    asyncio.run(main())


def test_a_draining_service_gets_nothing_new_and_its_requests_end_in_order(
    served: Served, cache: hicache.ConnectedCache
) -> None:
    request = cache.request(prompt(1, 8), logits=False)
    request.allocate()
    request.write_from(pages(2))
    served.do(lambda: served.service.sessions[1].notices.put_nowait(Draining(5.0)))
    until(lambda: not cache.connected, "the notice")
    assert cache.statistics().why_away == "the service is draining"
    assert cache.request(prompt(1, 8)).bypassed
    request.commit()
    request.close()
    assert len(served.service.pages) == 2


# ---- what the service takes back


def test_a_revoked_lease_is_acknowledged_and_nothing_more_is_done_with_it(
    served: Served, cache: hicache.ConnectedCache
) -> None:
    acknowledged: list[int] = []
    served.do(lambda: setattr(served.service.sessions[1], "acknowledge", acknowledged.extend))
    tokens = prompt(1, 8)
    store(cache, tokens)
    request = cache.request(tokens, logits=False)
    request.load()
    lease = next(iter(served.service.sessions[1].leases))
    served.do(lambda: served.service.sessions[1].notices.put_nowait(Revoked((lease, 777), "it is over")))
    until(lambda: sorted(acknowledged) == sorted([lease, 777]), "the acknowledgement")
    assert request.lost == "it is over"
    assert request.read_into(np.zeros((2, SIZE), np.uint8)) == 0
    assert not len(request.allocate(1))
    request.close()
    assert cache.statistics().revoked == 2


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
    with Served(lambda: FakeService(limits, page_bytes=SIZE)) as served, connected(served) as cache:
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


def test_a_client_without_the_right_token_is_refused_at_connect_and_one_with_it_is_not() -> None:
    def authenticate(peer: Peer) -> Caller:
        if peer.token == "reader":
            return Caller(tenant="acme", write=False, admin=False)
        raise Unauthenticated("no such token")

    with Served(lambda: FakeService(page_bytes=SIZE), authenticate=authenticate) as served:
        with pytest.raises(Unauthenticated, match="no such token"):
            connected(served)
        with pytest.raises(Unauthenticated):
            connected(served, token="wrong")
        with connected(served, token="reader") as cache:
            assert cache.match(prompt(1, 8)).pages == 0
            with pytest.raises(PermissionDenied, match="right admin"):
                cache.clear()


def test_a_service_that_starts_to_refuse_is_tried_again_and_the_reason_is_kept() -> None:
    allowed = threading.Event()

    def authenticate(peer: Peer) -> Caller:
        if allowed.is_set():
            return Caller()
        raise Unauthenticated("not yet")

    allowed.set()
    with Served(lambda: FakeService(page_bytes=SIZE), authenticate=authenticate) as served, connected(served) as cache:
        allowed.clear()
        served.stop()
        served.start()
        until(lambda: "not yet" in cache.statistics().why_away, "the refusal")
        allowed.set()
        assert cache.wait_connected(PATIENCE)


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
                assert await request.write_from(pages(6)) == 6
                await request.commit()
            assert (await cache.match(tokens)).pages == (await cache.prefetch(tokens)).pages == 5
            requests = await asyncio.gather(*(cache.request(tokens) for _ in range(50)))
            assert all(request.match.host == 5 for request in requests)
            buffer = np.zeros((5, SIZE), np.uint8)
            assert await requests[7].read_into(buffer) == 5
            assert (buffer == pages(6)[:5]).all()
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


def test_a_process_that_ends_without_closing_ends_at_once_and_in_order(served: Served) -> None:
    program = f"""
import hicache
from hicache.testing.engine import prompt, small_namespace
cache = hicache.connect({served.address!r}, small_namespace(hash="sha256"), insecure=True)
request = cache.request(prompt(1, 8))
request.allocate()
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "Traceback" not in done.stderr
    until(lambda: len(served.service.ended) == 1, "the end of the session")
    assert len(served.service.free) == 64
    assert time.monotonic() - began < PATIENCE


def test_a_forked_child_is_told_to_connect_itself_and_the_parent_goes_on(served: Served) -> None:
    program = f"""
import os, sys
import hicache
from hicache.testing.engine import prompt, small_namespace
cache = hicache.connect({served.address!r}, small_namespace(hash="sha256"), insecure=True)
request = cache.request(prompt(1, 8))
child = os.fork()
if not child:
    for call in (request.load, lambda: cache.match([1]), lambda: cache.request([1])):
        try:
            call()
        except hicache.CacheClosed as error:
            assert "fork" in str(error), error
        else:
            os._exit(3)
    request.close()
    cache.close()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert len(request.load()) == 0
request.close()
assert cache.match(prompt(1, 8)).pages == 0
assert cache.close()
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    until(lambda: served.service.ended == [(1, True)], "the parent's goodbye")
