"""The client when its service ends, hangs, drains or takes back what it gave; and when the client itself ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.errors import (
    ServiceUnavailable,
)
from hicache.rpc.service import Draining, Leased, Reserved, Revoked
from hicache.testing.clients import NAMESPACE, PATIENCE, SIZE, connected, random_pages, store, until
from hicache.testing.engine import prompt
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


# ---- writers' events


def test_pages_are_published_when_their_writer_has_written_them(served: Served, cache: hicache.ConnectedCache) -> None:
    tokens, written = prompt(1, 8), hicache.ThreadEvent()
    request = cache.request(tokens, logits=False)
    request.allocate()
    request.write_from(random_pages(2))
    request.commit(ready=written)
    assert cache.match(tokens, logits=False).pages == 0
    counts = request.close()
    assert counts.asked == 2
    assert len(served.service.free) == 62  # a writer is at work: its slots are not given to others
    written.set()
    until(lambda: cache.match(tokens, logits=False).pages == 2, "the commit")
    until(lambda: not served.service.sessions[1].leases, "the release")


def test_closing_while_a_writer_is_at_work_says_no_goodbye(served: Served) -> None:
    cache = connected(served.address)
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
    with connected(served.address) as cache:
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
        connected(served.address, required=True, timeout=0.3)


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
    assert writer.write_from(random_pages(3)) == 0
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
    request.write_from(random_pages(2))
    served.do(lambda: served.service.sessions[1].notices.put_nowait(Draining(5.0)))
    until(lambda: not cache.connected, "the notice")
    assert cache.statistics().why_away == "the service is draining"
    assert cache.request(prompt(1, 8)).bypassed
    request.commit()
    request.close()
    assert len(served.service.pages) == 2


# ---- what the service says and does not fit


def test_slots_of_other_pages_than_those_asked_for_are_not_written(
    served: Served, cache: hicache.ConnectedCache
) -> None:
    session = served.service.sessions[1]
    reserve = session.reserve

    async def elsewhere(lease: int, pages: int, *, until: float | None) -> Reserved:
        return replace(await reserve(lease, pages, until=until), first_page=1)

    served.do(lambda: setattr(session, "reserve", elsewhere))
    with cache.request(prompt(1, 8)) as request:
        assert not len(request.allocate())
        assert "page 1" in str(request.lost)
        request.commit()
    until(lambda: len(served.service.free) == 64, "the release")
    assert not served.service.pages


def test_a_request_that_the_service_sends_past_the_cache_gives_its_lease_back(
    served: Served, cache: hicache.ConnectedCache
) -> None:
    session = served.service.sessions[1]
    lease = session.lease

    async def past(*arguments: Any, **options: Any) -> Leased:
        return replace(await lease(*arguments, **options), bypassed=True)

    served.do(lambda: setattr(session, "lease", past))
    with cache.request(prompt(1, 8)) as request:
        assert request.bypassed
        assert not len(request.allocate())
    assert request.counts.missed == {hicache.MissReason.BYPASSED: 1}
    until(lambda: not session.leases, "the release")


# ---- what the service takes back


def test_a_lease_that_was_revoked_before_another_rank_could_join_it_is_of_no_use(
    served: Served, cache: hicache.ConnectedCache
) -> None:
    acknowledged: list[int] = []
    served.do(lambda: setattr(served.service.sessions[1], "acknowledge", acknowledged.extend))
    with cache.request(prompt(1, 8)) as request:
        request.allocate()
        ticket = request.ticket()
        assert ticket is not None
        served.do(lambda: served.service.sessions[1].notices.put_nowait(Revoked((ticket.lease,), "a rank was lost")))
        until(lambda: request.lost is not None, "the revocation")
        with cache.join(ticket) as joined:
            assert joined.lost
            assert joined.write_from(random_pages(2)) == 0
    until(lambda: len(acknowledged) >= 2, "the acknowledgements")


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


def test_a_process_that_ends_without_closing_ends_at_once_and_in_order(served: Served) -> None:
    program = f"""
import hicache
from hicache.testing.clients import NAMESPACE, PATIENCE, SIZE, connected, random_pages, store, until
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
from hicache.testing.clients import NAMESPACE, PATIENCE, SIZE, connected, random_pages, store, until
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
