"""Calls into a whole service, over sockets, whose storage misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from hicache.config import Config, Host, Size, Storage
from hicache.core.statistics import CoreStatistics
from hicache.rpc.server import Listener, RpcServer
from hicache.rpc.v1 import error_pb2
from hicache.rpc.v1 import session_pb2 as pb
from hicache.sidecar.quotas import Quotas
from hicache.sidecar.service import SidecarService
from hicache.storage.base import ObjectResult, ObjectStatus, StorageBackend
from hicache.storage.registry import open_storage
from hicache.testing.faults import Call, FaultyStorage, delay
from hicache.testing.gates import Gate
from hicache.testing.rpcserving import PATIENCE, TCP, Client, anybody, client, run, until
from hicache.testing.rpcstream import HASHES, RAW_TOKENS
from hicache.testing.sessions import FakeLifelines

PAGES = 3
CONTENT = [bytes([page + 1]) * 64 for page in range(PAGES)]


@asynccontextmanager
async def whole(
    storage: StorageBackend, *, call_timeout: float = 5.0
) -> AsyncIterator[tuple[SidecarService, RpcServer]]:
    """A service on real pools behind a real server."""
    host = Host(bytes=Size(2**20), populate=False)
    config = Config(host=host, storage=Storage(call_timeout=call_timeout))
    lifelines = cast("Any", FakeLifelines())
    service = SidecarService(config, quotas=Quotas(None), storage=storage, lifelines=lifelines)
    service.ready = True
    server = RpcServer(service, [Listener(TCP)], authenticate=anybody)
    await server.start()
    try:
        yield service, server
    finally:
        await server.stop(0)
        await service.drain(5.0)
        await service.close(5.0)


async def lease(one: Client, number: int) -> int:
    prompt = pb.Lease(attachment=1, page_hashes=HASHES, tokens=12, limit=PAGES)
    return (await one.ask(pb.Request(id=number, lease=prompt, deadline_ms=5_000))).leased.lease


async def store(one: Client) -> None:
    held = await lease(one, 10)
    await one.ask(pb.Request(id=11, reserve=pb.Reserve(lease=held, pages=PAGES)))
    for page, content in enumerate(CONTENT):
        await one.ask(pb.Request(id=20 + page, put_bytes=pb.PutBytes(lease=held, page=page, data=content)))
    await one.ask(pb.Request(id=12, commit=pb.Commit(lease=held, upto=PAGES, tokens=RAW_TOKENS)))
    await one.ask(pb.Request(id=13, release=pb.Release(lease=held)))


@pytest.mark.slow
@pytest.mark.case("GRPC-2")
@pytest.mark.parametrize("call_timeout", [0.1, 60.0], ids=["given up", "waited for"])
def test_a_hundred_loads_that_storage_does_not_answer_leave_nothing_behind(call_timeout: float) -> None:
    """They are answered by their deadlines, others meanwhile at once.

    Nothing is held but slots that storage still writes into; when it has, these are free too, and pages are whole.
    """
    gate = Gate()

    async def main() -> None:
        inner = open_storage("memory://?capacity=16MiB")
        async with whole(inner) as (_, server), client(server) as one:
            await store(one)
        storage = FaultyStorage(inner)
        storage.always("get_into", delay(gate))
        async with (
            whole(storage, call_timeout=call_timeout) as (service, server),
            client(server) as one,
            client(server) as other,
        ):
            for number in range(100, 200):
                held = await lease(one, 2 * number)
                await one.send(pb.Request(id=1000 + number, load=pb.Load(lease=held), deadline_ms=200))
                one.replies = [reply for reply in one.replies if reply.id >= 1000]
            echo = await other.ask(pb.Request(id=5, echo=pb.Echo(data=b"at once")))
            assert echo.echoed.data == b"at once"
            assert (await other.ask(pb.Request(id=6, match=pb.MatchPages(attachment=1)))).HasField("matched")
            for number in range(100, 200):
                loaded = (await one.answer(1000 + number)).loaded
                assert not loaded.slots
            one.call.cancel()
            (pool,) = service.pools

            def core() -> CoreStatistics:
                return pool.cache.statistics().core

            await until(lambda: len(service.sessions) == 1)
            assert core().leases == 0
            assert core().host.private == 0
            assert storage.count("get_into") > 0
            assert core().host.quarantined + core().host.filling > 0, "slots that storage still writes into"
            gate.open()
            await until(lambda: core().transfers == 0 and core().host.quarantined == core().host.filling == 0)

            # Where calls were given up the breaker has opened: storage is asked again after a while.
            async with asyncio.timeout(PATIENCE):
                while True:
                    other.replies.clear()
                    held = await lease(other, 7)
                    if (await other.ask(pb.Request(id=8, load=pb.Load(lease=held)))).loaded.slots:
                        break
                    await other.ask(pb.Request(id=10, release=pb.Release(lease=held)))
            assert len(other.replies[-1].loaded.slots) == 4 * PAGES
            await other.ask(pb.Request(id=9, get_bytes=pb.GetBytes(lease=held, end_page=PAGES)))
            pieces = [reply.bytes for reply in other.replies if reply.id == 9]
            assert [piece.data for piece in pieces] == CONTENT

    run(main())


@pytest.mark.case("FAIL-5")
def test_a_load_ends_before_the_first_page_that_is_bad() -> None:
    """The pages in front of it are there, with their own bytes; behind it none counts, though storage has them."""

    def second_is_bad(call: Call) -> list[ObjectResult]:
        bad = ObjectResult(ObjectStatus.CORRUPT, "payload")
        results: list[ObjectResult] = call.apply()
        both = zip(call.keys, results, strict=True)
        return [bad if key.page_hash == HASHES[32:64] else result for key, result in both]

    async def main() -> None:
        inner = open_storage("memory://?capacity=16MiB")
        async with whole(inner) as (_, server), client(server) as one:
            await store(one)
        storage = FaultyStorage(inner)
        storage.always("get_into", second_is_bad)
        async with whole(storage) as (_, server), client(server) as one:
            held = await lease(one, 10)
            loaded = (await one.ask(pb.Request(id=11, load=pb.Load(lease=held), deadline_ms=20_000))).loaded
            assert (len(loaded.slots), len(loaded.words)) == (4, 8)
            first = await one.ask(pb.Request(id=12, get_bytes=pb.GetBytes(lease=held, end_page=1)))
            assert first.bytes.data == CONTENT[0]
            beyond = await one.ask(pb.Request(id=13, get_bytes=pb.GetBytes(lease=held, end_page=2)))
            assert beyond.error.reason == error_pb2.REASON_INVALID
            released = (await one.ask(pb.Request(id=14, release=pb.Release(lease=held)))).released
            assert (released.asked, released.host, released.storage) == (3, 0, 1)
            assert sum(released.missed.values()) == 2

    run(main())


@pytest.mark.case("FAIL-7")
def test_requests_of_one_message_are_independent_of_each_other() -> None:
    """Bad ones among them are refused one by one, all others are carried out."""

    async def main() -> None:
        async with whole(open_storage("memory://?capacity=16MiB")) as (_, server), client(server) as one:
            await store(one)
            match = pb.MatchPages(attachment=1, page_hashes=HASHES)
            await one.send(
                pb.Request(id=30, match=match),
                pb.Request(id=31, match=pb.MatchPages(attachment=1, page_hashes=b"cut")),
                pb.Request(id=32, load=pb.Load(lease=77)),
                pb.Request(id=33, match=pb.MatchPages(attachment=9, page_hashes=HASHES)),
                pb.Request(id=34, prefetch=pb.Prefetch(attachment=1, page_hashes=HASHES)),
                pb.Request(id=35),
                pb.Request(id=36, match=match),
            )
            replies = [await one.answer(number) for number in range(30, 37)]
            assert [reply.WhichOneof("result") for reply in replies] == [
                "matched",
                "error",
                "error",
                "error",
                "prefetching",
                "error",
                "matched",
            ]
            assert [reply.error.reason for reply in replies[1:4]] == [
                error_pb2.REASON_INVALID,
                error_pb2.REASON_NOT_FOUND,
                error_pb2.REASON_NOT_FOUND,
            ]
            assert replies[0].matched.host == replies[6].matched.host == PAGES

    run(main())
