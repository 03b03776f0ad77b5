"""Hostile clients of a whole service: whatever they send, it answers in words, goes on, and holds nothing for them.

`RPC_FUZZ_MESSAGES` says how many messages each of the two runs sends; 3,000 by default, 100,000 in long runs.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from grpc import aio

from hicache.config import Config, Host, Leases, Limits, Listen, Storage
from hicache.errors import HicacheError
from hicache.rpc.latency import LatencyMeter
from hicache.rpc.service import Caller
from hicache.rpc.stream import SessionStream
from hicache.rpc.transport import CHANNEL_OPTIONS
from hicache.rpc.v1 import error_pb2
from hicache.rpc.v1 import session_pb2 as pb
from hicache.sidecar.app import App
from hicache.testing.rpcfuzz import FUZZ_LIMITS, Fuzzer
from hicache.testing.rpcserving import Client
from hicache.testing.rpcstream import ATTACH, HASHES, HELLO, NAMESPACE, RAW_TOKENS, Wire
from hicache.units import parse_size

MESSAGES = int(os.environ.get("RPC_FUZZ_MESSAGES", "3000"))
PER_STREAM = 150
PAGE_BYTES = NAMESPACE.geometry.page_bytes(NAMESPACE.page_size)
CONTENT = [bytes([page + 1]) * PAGE_BYTES for page in range(3)]


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[App]:
    """A service with storage; when it has ended nothing was dropped."""
    limits = Limits(
        message_bytes=FUZZ_LIMITS.message_bytes,
        chunk_bytes=FUZZ_LIMITS.chunk_bytes,
        pages=FUZZ_LIMITS.pages,
        leases=FUZZ_LIMITS.leases,
        requests=FUZZ_LIMITS.requests,
    )
    app = App(
        Config(
            listen=Listen(addresses=(f"unix://{folder}/s",)),
            host=Host(bytes=parse_size("4MiB"), pool_bytes=parse_size("256KiB"), populate=False),
            storage=Storage(url=f"file://{folder}/store?capacity=16MiB"),
            leases=Leases(seconds=3600),
            limits=limits,
        )
    )
    await app.start()
    try:
        yield app
    finally:
        await app.close()


class Stream:
    """A session on the service without a network between."""

    def __init__(self, app: App, caller: Caller) -> None:
        self.wire = Wire()
        stream = SessionStream(app.service, lambda _: caller, self.wire.write, LatencyMeter())
        self.task = asyncio.create_task(stream.run(self.wire.read()))

    async def begin(self) -> None:
        for request in (HELLO, ATTACH):
            assert not (reply := await self.wire.ask(request)).HasField("error"), reply

    async def ask(self, number: int, **verb: object) -> pb.Reply:
        self.wire.replies.clear()
        return await self.wire.ask(pb.Request(id=number, deadline_ms=20_000, **verb))  # type: ignore[arg-type]

    async def lease(self) -> int:
        prompt = pb.Lease(attachment=1, page_hashes=HASHES, tokens=12, limit=3)
        lease = (await self.ask(10, lease=prompt)).leased.lease
        assert lease
        await self.ask(11, load=pb.Load(lease=lease))
        return lease

    async def store(self) -> None:
        lease = await self.lease()
        await self.ask(12, reserve=pb.Reserve(lease=lease, pages=3))
        for page, content in enumerate(CONTENT):
            for offset in range(0, PAGE_BYTES, FUZZ_LIMITS.chunk_bytes):
                piece = content[offset : offset + FUZZ_LIMITS.chunk_bytes]
                put = pb.PutBytes(lease=lease, page=page, offset=offset, data=piece)
                assert (await self.ask(13, put_bytes=put)).HasField("bytes_put")
        commit = pb.Commit(lease=lease, upto=3, tokens=RAW_TOKENS)
        assert (await self.ask(14, commit=commit)).committed.visible == 3
        await self.ask(15, release=pb.Release(lease=lease))

    async def read(self, lease: int) -> list[bytes]:
        await self.ask(16, get_bytes=pb.GetBytes(lease=lease, end_page=3))
        pages: list[bytes] = [b"", b"", b""]
        for reply in self.wire.replies:
            pages[reply.bytes.page] += reply.bytes.data
        return pages

    async def end(self) -> None:
        self.task.cancel()
        with suppress(HicacheError, asyncio.CancelledError):
            await self.task


async def attack(app: App, fuzzer: Fuzzer, lease: int, *, raw: bool) -> tuple[int, Counter[str]]:
    """One stream of another tenant, that mostly names its own leases and the victim's.

    Returns how many messages it has sent, and the replies by kind.
    """
    stream = Stream(app, Caller(tenant=fuzzer.random.choice(("mallory", "eve"))))
    if fuzzer.random.random() < 0.9:
        await stream.begin()
    sent = 0
    while sent < PER_STREAM and not stream.task.done():
        sent += 1
        stream.wire.send_bytes(fuzzer.raw() if raw else fuzzer.message())
        await asyncio.sleep(fuzzer.random.choice((0, 0.001)))
        own = {reply.leased.lease for reply in stream.wire.replies if reply.HasField("leased")}
        fuzzer.leases = [lease, *sorted(own)]
    stream.wire.half_close()
    await asyncio.wait((stream.task,), timeout=fuzzer.random.choice((0, 1)))
    await stream.end()
    for reply in stream.wire.replies:
        assert reply.error.reason != error_pb2.REASON_INTERNAL, reply
        assert reply.error.message or not reply.HasField("error")
    return sent, Counter(reply.WhichOneof("result") or "" for reply in stream.wire.replies)


@pytest.mark.slow
@pytest.mark.parametrize("raw", [False, True], ids=["messages", "bytes"])
def test_hostile_clients_harm_nobody(raw: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another tenant's lease stays as it was, its bytes too, and of the attackers nothing is left."""

    async def main() -> None:
        fuzzer, replies = Fuzzer(10 + raw), Counter[str]()
        async with running(tmp_path) as app:
            service = app.service
            victim = Stream(app, Caller(tenant="victim"))
            await victim.begin()
            await victim.store()
            lease = await victim.lease()
            sent = 0
            while sent < MESSAGES:
                number, answers = await attack(app, fuzzer, lease, raw=raw)
                sent, replies = sent + number, replies + answers
                assert len(service.sessions) == 1
                assert await victim.read(lease) == CONTENT
            assert replies["leased"] > MESSAGES / 200, replies
            await victim.ask(17, release=pb.Release(lease=lease))
            await victim.end()
            left = {}
            for pool in tuple(service.pools):
                statistics = pool.cache.statistics()
                left |= {pool: (statistics.core.host.private, statistics.core.host.quarantined)}
            assert {*left.values()} <= {(0, 0)}, left
            assert service.statistics().leases.open == 0

    asyncio.run(main())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


BOMB = b"cos\nsystem\n(S'touch marker'\ntR."
"""Makes a file in the current folder when it is unpickled."""

NAMES = ["../../etc", "/etc/x", "a\0b", ".", "", "CON", "x" * 10_000, "a/../../b", "%2e%2e/x"]


@pytest.mark.slow
@pytest.mark.case("SEC-1")
@pytest.mark.case("SEC-2")
def test_no_string_of_a_client_reaches_the_file_system_or_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of models, salts and adapters that are paths, bytes that are programs: encoded, or refused in words."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        async with running(root) as app, aio.insecure_channel(f"unix:{root}/s", CHANNEL_OPTIONS) as channel:
            stored = refused = 0
            for name in NAMES:
                client = Client(channel)
                await client.ask(HELLO)
                attach = pb.Request(id=2, attach=ATTACH.attach)
                attach.attach.namespace.model = name
                reply = await client.ask(attach)
                if reply.HasField("error"):
                    assert reply.error.reason == error_pb2.REASON_NAMESPACE, reply
                    refused += 1
                    continue
                prompt = pb.Lease(attachment=1, page_hashes=HASHES[:32], tokens=4, limit=1)
                lease = (await client.ask(pb.Request(id=3, lease=prompt))).leased.lease
                await client.ask(pb.Request(id=4, reserve=pb.Reserve(lease=lease, pages=1)))
                put = pb.PutBytes(lease=lease, data=BOMB)
                await client.ask(pb.Request(id=5, put_bytes=put))
                commit = pb.Commit(lease=lease, upto=1, tokens=RAW_TOKENS[:16])
                assert (await client.ask(pb.Request(id=6, commit=commit))).committed.visible == 1
                await client.ask(pb.Request(id=7, goodbye=pb.Goodbye()))
                stored += 1
            raw = channel.stream_stream("/hicache.rpc.v1.SessionService/Open")()
            await raw.write(BOMB)
            assert b"OpenRequest" in await raw.read()
            raw.cancel()
            assert (stored, refused) == (6, 3)
            assert app.service.sessions is not None

    asyncio.run(main())
    gc.collect()
    assert {path.name for path in tmp_path.iterdir()} == {"root"}
    monkeypatch.undo()
    names = {path.name for path in (root / "store").rglob("*")}
    assert not names & {"..", "etc", "CON"}
