"""Clients of a whole service over shared memory: groups of ranks, late reads, services that end and return."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.config import Config, Drain, Host, Leases, Listen, Size
from hicache.errors import CacheClosed, GeometryError, InvalidInput, LeaseExpired
from hicache.rpc.client.state import ClientState
from hicache.testing.clients import NAMESPACE, PATIENCE, SIZE, SOON, random_pages, store, until
from hicache.testing.engine import prompt, small_namespace
from hicache.testing.serving import ServedApp
from hicache.testing.sidecars import ServiceProcess

LATENT = small_namespace(
    hash="sha256", geometry=hicache.KVGeometry.mla(layers=2, latent_dim=12, rope_dim=4, dtype="float16")
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hc") as name:
        yield Path(name)


def config(folder: Path, **sections: Any) -> Config:
    listen = Listen(addresses=(f"unix://{folder}/s.sock",))
    return Config(listen=listen, host=Host(bytes=Size(64 * 8192)), drain=Drain(seconds=0.2), **sections)


@pytest.fixture
def served(folder: Path) -> Iterator[ServedApp]:
    with ServedApp(config(folder)) as served:
        yield served


def leases(served: ServedApp) -> Any:
    return served.do(served.app.service.leases.statistics)


def host(served: ServedApp) -> Any:
    return served.do(lambda: next(iter(served.app.service.pools)).cache.statistics().core.host)


def test_a_tensor_needs_no_copy_of_a_page_either(served: ServedApp) -> None:
    torch = pytest.importorskip("torch")
    with hicache.connect(served.address, NAMESPACE) as cache:
        tokens = prompt(1, 8)
        with cache.request(tokens, logits=False) as request:
            slots = request.allocate()
            torch.from_numpy(request.page(0)).fill_(7)
            torch.from_numpy(cache.host.page(slots[1])).view(torch.float16).fill_(1.5)
            request.commit()
        with cache.request(tokens, logits=False) as request:
            request.load()
            tensors = torch.zeros((2, SIZE // 2), dtype=torch.float16)
            assert request.read_into(tensors.view(torch.uint8).numpy()) == 2
        assert tensors[1].eq(1.5).all()
        assert tensors[0].view(torch.uint8).eq(7).all()


def test_whoever_copies_by_himself_is_lent_slots_and_says_what_he_wrote(served: ServedApp) -> None:
    """As a device does; the service gives none of them to others before the loan is closed."""
    with hicache.connect(served.address, NAMESPACE) as cache:
        memory, tokens = cache.host.memory, prompt(2, 12)
        assert memory is not None
        with cache.request(tokens, logits=False) as request:
            assert request.lend(0, 3) is None
            request.allocate()
            with pytest.raises(InvalidInput, match="was never written"):
                request.commit()
            loan = request.lend(0, 9, write=True)
            assert loan is not None
            with loan:
                assert loan.memory is memory
                assert loan.good() == len(loan.slots) == 3
                for page, slot in enumerate(loan.slots):
                    memory.pages.write_page(int(slot), np.full(SIZE, page, np.uint8))
                loan.wrote(3)
            request.commit()
        with cache.request(tokens, logits=False) as request:
            request.load()
            with pytest.raises(InvalidInput, match="read only"):
                request.lend(0, 3, write=True)
            with pytest.raises(InvalidInput, match="first=-1"):
                request.lend(-1, 3)
            loan = request.lend(1, 2)
            assert loan is not None
            with loan:
                assert [int(memory.pages.read_page(int(slot))[0]) for slot in loan.slots] == [1, 2]
        with pytest.raises(CacheClosed):
            request.lend(0, 3)


# ---- pages that were never written


@pytest.mark.parametrize("streamed", [False, True])
def test_a_slot_that_was_written_once_begins_unwritten_for_the_next_request(
    served: ServedApp, *, streamed: bool
) -> None:
    """What an earlier request has put into a slot does not count for a later one that gets the same."""
    with hicache.connect(served.address, NAMESPACE, streamed=streamed) as cache:
        used = set()
        for seed in range(2):
            with cache.request(prompt(seed, 4 * 64), logits=False) as request:  # all slots that there are
                used.add(tuple(sorted(request.allocate().tolist())))
                with pytest.raises(InvalidInput, match=r"page 0 .* never written"):
                    request.commit()
                assert request.write_from(random_pages(64)) == 64
        assert len(used) == 1
        assert cache.match(prompt(1, 4 * 64), logits=False).pages == 0


def test_memory_that_was_handed_out_counts_as_written(served: ServedApp) -> None:
    """An engine that writes by itself says nothing of it, so pages that it has looked at can be committed."""
    with hicache.connect(served.address, NAMESPACE) as cache, cache.request(prompt(1, 16), logits=False) as request:
        slots = request.allocate().tolist()
        request.page(0)[:] = 1
        cache.host.page(slots[1])[:] = 2
        cache.host.write_page(slots[2], random_pages(1)[0])
        cache.host.read_page(slots[3])
        with pytest.raises(InvalidInput, match="page 3"):
            request.commit()
        request.commit(upto=12)
        assert cache.match(prompt(1, 16), logits=False).pages == 3


def test_each_rank_answers_for_what_it_writes(served: ServedApp) -> None:
    """A rank of several that has written nothing is told so, unless its part of the pages is written by another."""
    for namespace, refused in ((NAMESPACE, True), (LATENT, False)):
        with ExitStack() as stack:
            ranks = [
                stack.enter_context(hicache.connect(served.address, namespace, group="g", tp_rank=rank, tp_size=2))
                for rank in range(2)
            ]
            request = stack.enter_context(ranks[0].request(prompt(1, 8), logits=False))
            request.allocate()
            request.write_from(random_pages(2, size=ranks[0].host.page_bytes))
            request.commit()
            ticket = request.ticket()
            assert ticket is not None
            joined = stack.enter_context(ranks[1].join(ticket))
            if refused:
                with pytest.raises(InvalidInput, match=r"page 0 .* never written"):
                    joined.commit()
                joined.write_from(random_pages(2, size=ranks[1].host.page_bytes))
            joined.commit()
            assert ranks[0].match(prompt(1, 8), logits=False).pages == 2


# ---- groups


def test_a_page_is_there_when_every_rank_has_committed_its_part(served: ServedApp) -> None:
    tokens = prompt(1, 8)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(hicache.connect(served.address, NAMESPACE, group="g", tp_rank=rank, tp_size=2))
            for rank in range(2)
        ]
        parts = [random_pages(2, seed=rank, size=SIZE // 2) for rank in range(2)]
        assert [cache.host.page_bytes for cache in ranks] == [SIZE // 2] * 2
        with ranks[0].request(tokens, logits=False) as request:
            request.allocate()
            assert request.write_from(parts[0]) == 2
            request.commit()
            assert ranks[0].match(tokens, logits=False).pages == 0
            ticket = request.ticket()
            assert ticket is not None
            with ranks[1].join(ticket.encode()) as joined:
                assert joined.write_from(parts[1]) == 2
                joined.commit(upto=7)
                assert ranks[0].match(tokens, logits=False).pages == 1
                joined.commit()
            assert ranks[1].match(tokens, logits=False).pages == 2
        with ranks[1].request(tokens, logits=False) as request:
            assert len(request.load()) == 2
            ticket = request.ticket()
            assert ticket is not None
            for rank, cache in enumerate(ranks):
                buffer = np.zeros((2, SIZE // 2), np.uint8)
                with cache.join(ticket) as joined:
                    assert joined.read_into(buffer) == 2
                assert np.array_equal(buffer, parts[rank])


def test_a_scheduler_that_touches_no_page_leads_ranks_that_do(served: ServedApp) -> None:
    tokens = prompt(1, 9)
    options: dict[str, Any] = {"group": "g", "tp_size": 2}
    with ExitStack() as stack:
        scheduler = stack.enter_context(hicache.connect(served.address, NAMESPACE, worker=False, **options))
        workers = [
            stack.enter_context(hicache.connect(served.address, NAMESPACE, tp_rank=rank, **options))
            for rank in range(2)
        ]
        with scheduler.request(tokens) as request:
            assert len(request.allocate()) == 3
            ticket = request.ticket()
            assert ticket is not None
            for rank, worker in enumerate(workers):
                written = hicache.ThreadEvent()
                with worker.join(ticket) as joined:
                    assert joined.write_from(random_pages(3, seed=rank, size=SIZE // 2)) == 3
                    joined.commit(ready=written)
                    with pytest.raises(InvalidInput, match="upto=10"):
                        joined.commit(upto=10)
                    written.set()
                    until(lambda joined=joined: not joined._commits.pending)
            until(lambda: scheduler.match(tokens).pages == 2, "the commit of both ranks")
        assert request.counts.asked == 2


def test_state_that_ranks_hold_alike_is_there_once_and_written_by_one(served: ServedApp) -> None:
    tokens = prompt(1, 8)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(hicache.connect(served.address, LATENT, group="g", tp_rank=rank, tp_size=2))
            for rank in range(2)
        ]
        writes = [cache.state.link.connection.memory.writes for cache in ranks]  # type: ignore[union-attr]
        assert sorted(writes) == [False, True]
        size = LATENT.geometry.page_bytes(4)
        pages = random_pages(2, seed=3, size=size)
        with ranks[0].request(tokens, logits=False) as request:
            request.allocate()
            ticket = request.ticket()
            assert ticket is not None
            with ranks[1].join(ticket) as joined:
                for rank, writer in enumerate((request, joined)):
                    assert writer.write_from(pages if writes[rank] else np.zeros_like(pages)) == 2
                    writer.commit()
        for cache in ranks:
            with cache.request(tokens, logits=False) as request:
                buffer = np.zeros((2, size), np.uint8)
                request.load()
                assert request.read_into(buffer) == 2
                assert np.array_equal(buffer, pages)


def test_ranks_that_do_not_fit_their_group_are_refused(served: ServedApp) -> None:
    options: dict[str, Any] = {"group": "g", "pool_size": "128KiB"}
    with hicache.connect(served.address, NAMESPACE, tp_size=2, **options) as first:
        with pytest.raises(GeometryError, match="is taken"):
            hicache.connect(served.address, NAMESPACE, tp_size=2, **options)
        with pytest.raises(GeometryError, match="group 'g'"):
            hicache.connect(served.address, NAMESPACE, tp_size=1, **options)
        assert first.connected


# ---- leases that end


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose own thread does not come to renew its leases."""
    monkeypatch.setattr(ClientState, "renew", lambda *_: None)


@pytest.mark.usefixtures("hung")
def test_a_lease_that_is_not_used_for_too_long_is_taken_back_when_nobody_copies(folder: Path) -> None:
    with (
        ServedApp(config(folder, leases=Leases(seconds=0.2))) as served,
        hicache.connect(served.address, NAMESPACE) as cache,
    ):
        tokens = prompt(1, 8)
        store(cache, tokens)
        request = cache.request(tokens, logits=False)
        assert len(request.load()) == 2
        until(lambda: request.lost is not None, "the revocation")
        until(lambda: leases(served).ended == 0, "the acknowledgement")
        assert "not used" in str(request.lost)
        assert request.read_into(np.zeros((2, SIZE), np.uint8)) == 0
        assert not len(request.allocate(1))
        assert request.close().host == 2
        assert host(served).pinned == 0


@pytest.mark.usefixtures("hung")
def test_pages_that_an_engine_sees_without_a_copy_are_kept_until_it_has_closed_its_request(folder: Path) -> None:
    with (
        ServedApp(config(folder, leases=Leases(seconds=0.2))) as served,
        hicache.connect(served.address, NAMESPACE) as cache,
    ):
        tokens = prompt(1, 8)
        pages = store(cache, tokens)
        request = cache.request(tokens, logits=False)
        request.load()
        view = request.page(1)
        until(lambda: request.lost is not None, "the revocation")
        assert leases(served).ended == 1
        assert host(served).pinned == 2
        assert np.array_equal(view, pages[1])
        request.close()
        until(lambda: leases(served).ended == 0, "the release")
        assert host(served).pinned == 0


def test_pages_whose_slots_were_given_away_meanwhile_do_not_count(served: ServedApp) -> None:
    with hicache.connect(served.address, NAMESPACE) as cache:
        tokens = prompt(1, 16)
        store(cache, tokens)
        with cache.request(tokens, logits=False) as request:
            request.load()
            noted = request._verbs.pages._words  # type: ignore[union-attr]
            noted[2] -= 1  # as if the slot had been given away after the lease was made
            assert request.read_into(np.zeros((4, SIZE), np.uint8)) == 2
            assert request.read_into(np.zeros((1, SIZE), np.uint8), first=3) == 1
        assert cache.statistics().overwritten_pages == 2
        with cache.request(prompt(3, 8)) as request:
            slots = request.allocate()
            request._verbs.pages._words[0] -= 1  # type: ignore[union-attr]
            before = cache.host.read_page(slots[0])
            assert request.write_from(random_pages(2)) == 0
            assert np.array_equal(cache.host.read_page(slots[0]), before)


def test_what_was_copied_while_the_service_ended_does_not_count(
    served: ServedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hicache.connect(served.address, NAMESPACE) as cache:
        tokens = prompt(1, 8)
        store(cache, tokens)
        with cache.request(tokens, logits=False) as reader, cache.request(prompt(2, 8)) as writer:
            reader.load()
            writer.allocate()
            # The lifeline says it before the client's own thread has seen it.
            monkeypatch.setattr(cache.state.link.connection, "gone", lambda: True)
            assert reader.read_into(np.zeros((2, SIZE), np.uint8)) == 0
            assert writer.write_from(random_pages(2)) == 0


# ---- services that end


def test_slots_of_one_service_are_never_taken_for_those_of_the_next(folder: Path) -> None:
    served = ServedApp(config(folder))
    served.start()
    try:
        with hicache.connect(served.address, NAMESPACE, backoff=SOON) as cache:
            tokens = prompt(1, 8)
            pages = store(cache, tokens)
            old = cache.request(tokens, logits=False)
            slots = old.load()
            view = cache.host.page(slots[0])
            served.stop()
            until(lambda: not cache.connected, "the end")
            assert np.array_equal(view, pages[0])  # still mapped, for copies that are under way
            assert np.array_equal(cache.host.page(slots[0]), pages[0])
            assert old.read_into(np.zeros((2, SIZE), np.uint8)) == 0
            served.start()
            assert cache.wait_connected(PATIENCE)
            store(cache, prompt(2, 8))
            with cache.request(prompt(2, 8), logits=False) as new:
                fresh = new.load()
                assert not set(fresh.tolist()) & set(slots.tolist())
                cache.host.page(slots[0])[:] = 0  # a late write of the old request
                assert np.array_equal(cache.host.page(fresh[0]), random_pages(2, seed=8, size=SIZE)[0])
            ticket = old.ticket()
            assert ticket is None
            old.close()
            with pytest.raises(CacheClosed, match="belongs to a request that is closed"):
                cache.host.page(slots[0])
    finally:
        served.stop()


def test_memory_is_let_go_of_at_the_services_end_where_nobody_has_views(folder: Path) -> None:
    """So the next service need not keep the slots of requests that are open; the first view then comes too late."""
    served = ServedApp(config(folder))
    served.start()
    try:
        with hicache.connect(served.address, NAMESPACE, backoff=SOON) as cache:
            store(cache, prompt(1, 8))
            with cache.request(prompt(1, 8), logits=False) as old:
                slots = old.load()
                assert "hicache-arena" in Path("/proc/self/maps").read_text()
                served.stop()
                until(lambda: "hicache-arena" not in Path("/proc/self/maps").read_text(), "the end of the memory")
                for late in (lambda: old.page(0), lambda: cache.host.page(slots[0])):
                    with pytest.raises(LeaseExpired):
                        late()
                assert old.read_into(np.zeros((2, SIZE), np.uint8)) == 0
    finally:
        served.stop()


def test_a_ticket_of_an_earlier_service_joins_nothing(folder: Path) -> None:
    served = ServedApp(config(folder))
    served.start()
    try:
        with hicache.connect(served.address, NAMESPACE, backoff=SOON, group="g") as cache:
            request = cache.request(prompt(1, 8))
            request.allocate()
            ticket = request.ticket()
            assert ticket is not None
            served.stop()
            served.start()
            until(lambda: cache.statistics().connections == 2, "the next connection")
            with cache.join(ticket) as joined:
                assert joined.lost
                assert joined.write_from(random_pages(2, seed=1, size=SIZE)) == 0
                joined.commit()
                with pytest.raises(InvalidInput, match="started anew"):
                    joined.page(0)
            request.close()
    finally:
        served.stop()


@pytest.mark.alone
@pytest.mark.chaos
@pytest.mark.slow
def test_a_service_that_is_killed_costs_milliseconds_and_its_successor_is_found_within_two_seconds(
    folder: Path,
) -> None:
    tokens = prompt(1, 40)
    with ServiceProcess(folder) as first, hicache.connect(first.address, NAMESPACE) as cache:
        store(cache, tokens)
        waiting = cache.request(tokens, logits=False)
        waiting.load()
        first.kill()
        until(lambda: not cache.connected, "the end of the lifeline")
        took = []
        for _ in range(2000):
            began = time.monotonic()
            with cache.request(tokens) as request:
                assert not len(request.load())
                assert not len(request.allocate())
                request.commit()
            took.append(time.monotonic() - began)
        assert sorted(took)[int(len(took) * 0.99)] < 0.005
        assert waiting.read_into(np.zeros((10, SIZE), np.uint8)) == 0
        waiting.close()
        with ServiceProcess(folder):
            began = time.monotonic()
            assert cache.wait_connected(PATIENCE)
            assert time.monotonic() - began < 2.0
            store(cache, tokens)
            assert cache.match(tokens).pages == 9


@pytest.mark.chaos
@pytest.mark.slow
def test_a_service_that_is_stopped_costs_one_deadline_until_it_goes_on(folder: Path) -> None:
    tokens = prompt(1, 40)
    with ServiceProcess(folder) as service, hicache.connect(service.address, NAMESPACE, deadline=0.3) as cache:
        pages = store(cache, tokens)
        open_request = cache.request(tokens, logits=False)
        open_request.load()
        service.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(50):
            with cache.request(tokens) as request:
                assert not len(request.load())
        assert time.monotonic() - began < 2.0
        # The memory does not need the service to be read.
        buffer = np.zeros((10, SIZE), np.uint8)
        assert open_request.read_into(buffer) == 10
        assert np.array_equal(buffer, pages)
        service.process.send_signal(signal.SIGCONT)
        until(lambda: cache.connected, "an answer")
        assert cache.match(tokens).pages == 9
        assert open_request.close().host == 10
        statistics = cache.statistics()
        assert (statistics.unanswered, statistics.connections) == (1, 1)
