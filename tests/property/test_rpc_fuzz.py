"""Whatever a client sends: each message is answered in words or ends its own stream, and nothing stays behind.

`RPC_FUZZ_MESSAGES` says how many messages each of the two runs sends; 10,000 by default, 100,000 in long runs.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import suppress

import pytest

from hicache.errors import HicacheError
from hicache.rpc.administration import CALLS
from hicache.rpc.service import Caller
from hicache.rpc.v1 import error_pb2
from hicache.rpc.v1 import session_pb2 as pb
from hicache.testing.loops import run
from hicache.testing.rpcfuzz import FUZZ_LIMITS, Fuzzer
from hicache.testing.rpcservice import FakeService
from hicache.testing.rpcstream import Served

MESSAGES = int(os.environ.get("RPC_FUZZ_MESSAGES", "10000"))
PER_STREAM = 200
CODES = {error_pb2.Reason.Value(name) for name in error_pb2.Reason.keys()}  # noqa: SIM118  not a mapping


async def stream(service: FakeService, fuzzer: Fuzzer, *, raw: bool, messages: int) -> tuple[int, Counter[str]]:
    """One stream of so many messages, or fewer where it ends. Returns how many were sent, and the replies by kind."""
    served = Served(service)
    begun = fuzzer.random.random() < 0.9
    if begun:
        await served.begin()
    service.blocked = {verb for verb in ("load", "prefetch", "put_bytes", "lease") if fuzzer.random.random() < 0.2}
    sent = 0
    for _ in range(messages):
        sent += 1
        served.wire.send_bytes(fuzzer.raw() if raw else fuzzer.message())
        await asyncio.sleep(fuzzer.random.choice((0, 0, 0, 0.01)))
        fuzzer.leases = [lease for session in service.sessions.values() for lease in session.leases]
        if served.task.done():
            break
    if fuzzer.random.random() < 0.5:
        served.wire.half_close()
        await asyncio.wait((served.task,), timeout=3600)
    served.task.cancel()
    with suppress(HicacheError, asyncio.CancelledError):
        await served.task
    for reply in served.wire.replies:
        assert reply.WhichOneof("result") is not None
        if reply.HasField("error"):
            assert reply.error.reason in CODES
            assert reply.error.reason not in (error_pb2.REASON_UNSPECIFIED, error_pb2.REASON_INTERNAL), reply
            assert reply.error.message
    return sent, Counter(reply.WhichOneof("result") or "" for reply in served.wire.replies)


@pytest.mark.slow
@pytest.mark.parametrize("raw", [False, True], ids=["messages", "bytes"])
def test_whatever_is_sent_is_answered_in_words_and_leaves_nothing(raw: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        fuzzer = Fuzzer(int(raw))
        sent, replies = 0, Counter[str]()
        while sent < MESSAGES:
            service = FakeService(FUZZ_LIMITS, slots=12)
            for _ in range(4):
                number, answers = await stream(service, fuzzer, raw=raw, messages=PER_STREAM)
                sent, replies = sent + number, replies + answers
                assert not service.sessions
                assert not service.waiting
                assert not service.reading
                assert len(service.free) + len(service.pages) == service.slots
        answered = {field.name for field in pb.Reply.DESCRIPTOR.oneofs_by_name["result"].fields}
        rare = {"bytes", "bytes_put", "farewell"} if raw else set()
        assert {*replies} >= answered - {"revoked", "draining"} - rare, "verbs that were never carried out"

    run(main())
    assert not caplog.records, "a bug was logged"


@pytest.mark.parametrize("name", CALLS)
def test_whatever_an_administrator_sends_is_answered_in_words(name: str) -> None:
    """An error of ours, or an answer; never another exception."""

    async def main() -> None:
        fuzzer, service, call = Fuzzer(7), FakeService(), CALLS[name]
        for _ in range(MESSAGES // 100):
            request = call.request()
            fuzzer.fill(request)
            with suppress(HicacheError):
                answer = call.run(service, Caller(), request)
                if asyncio.iscoroutine(answer):
                    assert (await answer).IsInitialized()
                else:
                    async for item in answer:  # type: ignore[union-attr]
                        assert item.IsInitialized()
        assert not service.reading

    run(main())
