"""Whatever a client sends: each message is answered in words or ends its own stream, and nothing stays behind.

`RPC_FUZZ_MESSAGES` says how many messages each of the two runs sends; 10,000 by default, 100,000 in long runs.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from hicache.errors import HicacheError
from hicache.rpc.administration import CALLS
from hicache.rpc.service import Caller, Limits
from hicache.rpc.v1 import error_pb2
from hicache.rpc.v1 import session_pb2 as pb
from hicache.testing.loops import run
from hicache.testing.rpcservice import FakeService
from hicache.testing.rpcstream import ATTACH, GOODBYE, HASHES, HELLO, RAW_TOKENS, Served

MESSAGES = int(os.environ.get("RPC_FUZZ_MESSAGES", "10000"))
PER_STREAM = 200
LIMITS = Limits(message_bytes=20_000, pages=6, leases=8, requests=40, chunk_bytes=32)
CODES = {error_pb2.Reason.Value(name) for name in error_pb2.Reason.keys()}  # noqa: SIM118  not a mapping
NUMBERS = (0, 1, 2, 3, 5, 7, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
TEXTS = ("", "org/tiny", "sha256", "canonical-v1", "float16", "x" * 300, "\0", "../../etc", "é")
BLOBS = (b"", b"k", bytes(16), bytes(32), HASHES, HASHES[:32], HASHES + bytes(320), RAW_TOKENS, RAW_TOKENS[:16])
Field = FieldDescriptor


class Fuzzer:
    """Random messages of the schema, mostly with values that mean something."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.leases: list[int] = []

    def fill(self, message: Message, depth: int = 0) -> None:
        descriptor = message.DESCRIPTOR
        skipped = set()
        for oneof in descriptor.oneofs:
            names = [field.name for field in oneof.fields]
            skipped |= {*names} - {self.random.choice(names)}
        for field in descriptor.fields:
            if field.name not in skipped and self.random.random() < (0.1 if field.name == "scope" else 0.8):
                self.fill_field(message, field, depth)

    def fill_field(self, message: Message, field: Field, depth: int) -> None:
        repeated = isinstance(getattr(message, field.name), Message) is False and hasattr(
            getattr(message, field.name), "append"
        )
        if field.message_type is not None:
            targets = [getattr(message, field.name)]
            if repeated:
                targets = [targets[0].add() for _ in range(self.random.randrange(3))]
            for target in targets:
                target.SetInParent()
                if depth < 5:
                    self.fill(target, depth + 1)
        elif repeated:
            getattr(message, field.name).extend([self.value(field) for _ in range(self.random.randrange(4))])
        else:
            setattr(message, field.name, self.value(field))

    def value(self, field: Field) -> object:
        choose = self.random.choice
        if self.random.random() < 0.8:
            if field.name in ("lease", "leases") and self.leases:
                return choose(self.leases)
            if field.name == "attachment":
                return 1
            if field.name in ("page_hashes", "stored", "removed"):
                return HASHES
            if field.name == "tokens" and field.type == Field.TYPE_BYTES:
                return RAW_TOKENS
            if field.name in ("pages", "upto", "page", "first_page", "end_page", "offset", "limit"):
                return self.random.randrange(4)
        if field.type in (Field.TYPE_UINT32, Field.TYPE_SINT32):
            return choose(NUMBERS) % 2**31
        if field.type == Field.TYPE_UINT64:
            return choose(NUMBERS)
        if field.type == Field.TYPE_DOUBLE:
            return choose((0.0, -1.0, 1.5, 1e300, float("inf"), float("nan")))
        if field.type == Field.TYPE_BOOL:
            return choose((True, False))
        if field.type == Field.TYPE_STRING:
            return choose(TEXTS)
        if field.type == Field.TYPE_BYTES:
            return choose(BLOBS)
        return 0

    def request(self) -> pb.Request:
        request = pb.Request()
        if self.random.random() < 0.05:
            request.CopyFrom(GOODBYE if self.random.random() < 0.05 else self.random.choice((HELLO, ATTACH)))
            return request
        verbs = [field.name for field in pb.Request.DESCRIPTOR.oneofs_by_name["verb"].fields]
        self.fill(getattr(request, self.random.choice(verbs[2:-1])))
        request.id = self.random.randrange(60)
        if self.random.random() < 0.7:
            request.deadline_ms = self.random.choice((0, 1, 1_000, 2**32 - 1))
        return request

    def message(self) -> bytes:
        count = 1 if self.random.random() < 0.9 else self.random.randrange(LIMITS.requests)
        return pb.OpenRequest(requests=[self.request() for _ in range(count)]).SerializeToString()

    def raw(self) -> bytes:
        """Bytes that are none, or a good message, mostly with some of them changed, cut or put in between."""
        if self.random.random() < 0.3:
            return self.random.randbytes(self.random.randrange(200))
        data = bytearray(self.message())
        for _ in range(self.random.randrange(4)):
            at = self.random.randrange(len(data) + 1)
            how = self.random.randrange(3)
            if how == 0 and at < len(data):
                data[at] ^= 1 << self.random.randrange(8)
            elif how == 1:
                del data[at : at + self.random.randrange(9)]
            else:
                data[at:at] = self.random.randbytes(self.random.randrange(9))
        if self.random.random() < 0.002:
            data += bytes([0x0A, 0]) * (LIMITS.message_bytes // 2)
        return bytes(data)


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


@pytest.mark.parametrize("raw", [False, True], ids=["messages", "bytes"])
def test_whatever_is_sent_is_answered_in_words_and_leaves_nothing(raw: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        fuzzer = Fuzzer(int(raw))
        sent, replies = 0, Counter[str]()
        while sent < MESSAGES:
            service = FakeService(LIMITS, slots=12)
            for _ in range(4):
                number, answers = await stream(service, fuzzer, raw=raw, messages=PER_STREAM)
                sent, replies = sent + number, replies + answers
                assert not service.sessions
                assert not service.waiting
                assert not service.reading
                assert len(service.free) + len(service.pages) == service.slots
        answered = {field.name for field in pb.Reply.DESCRIPTOR.oneofs_by_name["result"].fields}
        assert {*replies} >= answered - {"revoked", "draining"}, "verbs that were never carried out"

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
