"""What is left when a session's stream ends, whoever ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from hicache.errors import (
    LimitExceeded,
)
from hicache.rpc.v1 import session_pb2 as pb
from hicache.testing.loops import run
from hicache.testing.rpcstream import GOODBYE, HASHES, HELLO, Served, serving


async def blocked(served: Served) -> None:
    """A lease with reserved slots, and requests of every kind that wait."""
    lease = await served.lease()
    await served.wire.ask(pb.Request(id=11, reserve=pb.Reserve(lease=lease, pages=2)))
    served.service.blocked |= {"load", "prefetch", "reserve", "put_bytes"}
    prefetch = pb.Prefetch(attachment=1, page_hashes=HASHES)
    served.wire.send(
        pb.Request(id=50, load=pb.Load(lease=lease), deadline_ms=60_000),
        pb.Request(id=51, prefetch=prefetch, deadline_ms=60_000),
        pb.Request(id=52, reserve=pb.Reserve(lease=lease, pages=1), deadline_ms=60_000),
        pb.Request(id=53, put_bytes=pb.PutBytes(lease=lease, data=b"x"), deadline_ms=60_000),
        pb.Request(id=54, echo=pb.Echo()),
    )
    await served.wire.answer(54)
    assert served.service.waiting == 4


async def cancel(served: Served) -> None:
    served.task.cancel()
    with suppress(asyncio.CancelledError):
        await served.task


async def goodbye(served: Served) -> None:
    served.wire.send(GOODBYE)
    await served.task
    assert served.wire.replies[-1].id == 99
    assert served.wire.replies[-1].HasField("farewell")


async def half_close(served: Served) -> None:
    served.wire.half_close()
    await served.task
    assert {reply.id for reply in served.wire.replies} >= {50, 51, 52, 53}, "what was asked is answered"


async def flood(served: Served) -> None:
    served.wire.send(*(pb.Request(id=100 + number, echo=pb.Echo()) for number in range(2_000)))
    assert type(await served.failed()) is LimitExceeded


async def writing_fails(served: Served) -> None:
    async def broken(data: bytes) -> None:
        raise ConnectionError("gone")

    served.stream._outbox._write = broken
    served.wire.send(pb.Request(id=60, echo=pb.Echo()))
    await served.task


@pytest.mark.case("GRPC-2")
@pytest.mark.parametrize("end", [cancel, goodbye, half_close, flood, writing_fails], ids=lambda end: end.__name__)
def test_when_a_stream_ends_everything_of_it_ends(end: Callable[[Served], Awaitable[None]]) -> None:
    """Once, whoever ends it: no task, no waiter, no lease and no slot is left."""

    async def main() -> None:
        async with serving() as served:
            number = served.session.welcome.session
            await blocked(served)
            await end(served)
            assert served.service.ended == [(number, end is goodbye)]
            assert not served.service.waiting
            assert not served.service.sessions
            assert len(served.service.free) == served.service.slots

    run(main())


@pytest.mark.case("GRPC-2")
def test_a_stream_that_is_cancelled_while_it_opens_leaves_no_session() -> None:
    async def main() -> None:
        async with serving(begun=False) as served:
            served.service.blocked.add("hello")
            served.wire.send(HELLO)
            while not served.service.waiting:
                await asyncio.sleep(0)
            await cancel(served)
            assert not served.service.waiting
            assert not served.service.ended

    run(main())


def test_a_client_that_never_reads_its_farewell_is_left() -> None:
    """The session has ended before; the last words wait a while, not for ever."""

    async def main() -> None:
        async with serving() as served:
            served.wire.open.clear()
            served.wire.send(GOODBYE)
            await served.task
            assert [orderly for _, orderly in served.service.ended] == [True]
            assert asyncio.get_running_loop().time() < 60

    run(main())


def test_latencies_are_counted_by_verb() -> None:
    async def main() -> None:
        async with serving() as served:
            lease = await served.lease()
            served.service.blocked.add("load")
            await served.wire.ask(pb.Request(id=30, load=pb.Load(lease=lease), deadline_ms=2_000))
            await served.error(pb.Request(id=31, release=pb.Release(lease=5)))
            found = {verb.verb: verb for verb in served.meter.statistics()}
            assert {"hello", "attach", "lease", "load", "release"} == set(found)
            assert found["load"].answered == 1
            assert found["load"].seconds == pytest.approx(2.0)
            assert found["load"].buckets[-2] == 1  # from 1 to 5 s
            assert (found["release"].answered, found["release"].failed) == (1, 1)

    run(main())
