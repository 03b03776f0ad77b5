"""A session's stream: order, ids, deadlines, limits, back-pressure, and what is left when it ends."""

from __future__ import annotations

import asyncio

import pytest

from hicache.errors import (
    DeadlineExceeded,
    HicacheError,
    InvalidInput,
    LimitExceeded,
    ProtocolMismatch,
    Unauthenticated,
)
from hicache.rpc.outbox import HIGH_BYTES
from hicache.rpc.service import Caller, Draining, Limits, Revoked
from hicache.rpc.stream import GRACE, HELLO_SECONDS
from hicache.rpc.v1 import error_pb2
from hicache.rpc.v1 import session_pb2 as pb
from hicache.rpc.verbs import LATER, LONGEST_DEADLINE, NOW
from hicache.testing.loops import run
from hicache.testing.rpcservice import FakeService
from hicache.testing.rpcstream import HASHES, HELLO, RAW_TOKENS, Served, serving

Reason = error_pb2.Reason


def test_a_page_goes_in_and_comes_out() -> None:
    """All verbs of a request's life, over bytes."""

    async def main() -> None:
        async with serving() as served:
            wire = served.wire
            lease = await served.lease()
            reserved = (await wire.ask(pb.Request(id=11, reserve=pb.Reserve(lease=lease, pages=3)))).reserved
            assert len(reserved.slots) == 12
            for page in range(3):
                put = pb.PutBytes(lease=lease, page=page, data=bytes([page]) * 64)
                assert (await wire.ask(pb.Request(id=12 + page, put_bytes=put))).HasField("bytes_put")
            commit = pb.Commit(lease=lease, upto=3, tokens=RAW_TOKENS)
            assert (await wire.ask(pb.Request(id=20, commit=commit))).committed.visible == 3
            released = (await wire.ask(pb.Request(id=21, release=pb.Release(lease=lease)))).released
            assert (released.asked, dict(released.missed)) == (3, {"cold": 3})

            match = pb.MatchPages(attachment=1, page_hashes=HASHES)
            assert (await wire.ask(pb.Request(id=22, match=match))).matched.host == 3
            lease = await served.lease(23)
            get = pb.GetBytes(lease=lease, first_page=0, end_page=3)
            await wire.ask(pb.Request(id=24, get_bytes=get))
            pieces = [reply for reply in wire.replies if reply.id == 24]
            assert [piece.more for piece in pieces] == [True, True, False]
            assert b"".join(piece.bytes.data for piece in pieces) == b"".join(bytes([page]) * 64 for page in range(3))
            await wire.ask(pb.Request(id=25, release=pb.Release(lease=lease)))

    run(main())


def test_every_verb_of_the_protocol_is_served() -> None:
    verbs = {field.name for field in pb.Request.DESCRIPTOR.oneofs_by_name["verb"].fields}
    assert verbs == {*NOW, *LATER, "hello", "goodbye"}


def test_a_request_that_waits_holds_up_no_other() -> None:
    """Replies come as they are done, with the ids of their requests."""

    async def main() -> None:
        async with serving() as served:
            lease = await served.lease()
            served.service.blocked.add("load")
            served.wire.send(
                pb.Request(id=30, load=pb.Load(lease=lease), deadline_ms=5_000),
                pb.Request(id=31, echo=pb.Echo(data=b"x")),
            )
            assert (await served.wire.answer(31)).echoed.data == b"x"
            assert served.service.waiting == 1
            assert (await served.wire.answer(30)).HasField("loaded")

    run(main())


@pytest.mark.parametrize("seconds", [0.0, 0.2, 30.0])
def test_a_request_is_answered_by_its_deadline(seconds: float) -> None:
    """The service is given the moment, and answers what it has by then."""

    async def main() -> None:
        async with serving() as served:
            lease = await served.lease()
            served.service.blocked.add("load")
            began = asyncio.get_running_loop().time()
            reply = await served.wire.ask(
                pb.Request(id=30, load=pb.Load(lease=lease), deadline_ms=round(seconds * 1000))
            )
            assert reply.HasField("loaded")
            assert asyncio.get_running_loop().time() - began == pytest.approx(seconds)

    run(main())


def test_a_deadline_that_is_absent_is_that_of_the_verb() -> None:
    async def main() -> None:
        async with serving() as served:
            lease = await served.lease()
            served.service.blocked.add("load")
            began = asyncio.get_running_loop().time()
            await served.wire.ask(pb.Request(id=30, load=pb.Load(lease=lease)))
            assert asyncio.get_running_loop().time() - began == pytest.approx(LATER["load"].seconds)

    run(main())


@pytest.mark.case("GRPC-2")
def test_a_service_that_does_not_answer_is_given_up() -> None:
    """A verb that goes on past its deadline is cancelled, and its client told."""

    async def main() -> None:
        async with serving() as served:
            served.service.blocked.add("lease")  # waits for ever
            began = asyncio.get_running_loop().time()
            lease = pb.Lease(attachment=1, page_hashes=HASHES)
            error = await served.error(pb.Request(id=30, lease=lease, deadline_ms=200))
            assert error.reason == Reason.REASON_DEADLINE
            assert "lease: no answer within 0.2 s" in error.message
            assert asyncio.get_running_loop().time() - began == pytest.approx(0.2 + GRACE)
            assert not served.service.waiting

    run(main())


def test_no_deadline_is_longer_than_the_longest() -> None:
    async def main() -> None:
        async with serving() as served:
            lease = await served.lease()
            served.service.blocked.add("load")
            began = asyncio.get_running_loop().time()
            await served.wire.ask(pb.Request(id=30, load=pb.Load(lease=lease), deadline_ms=2**32 - 1))
            assert asyncio.get_running_loop().time() - began == pytest.approx(LONGEST_DEADLINE)

    run(main())


# ---- beginning


@pytest.mark.parametrize(
    ("hello", "kind", "reason"),
    [
        (pb.Hello(protocol_min=2, protocol_max=9), ProtocolMismatch, Reason.REASON_PROTOCOL),
        (pb.Hello(), ProtocolMismatch, Reason.REASON_PROTOCOL),
        (pb.Hello(protocol_min=1, protocol_max=1, client="x" * 300), InvalidInput, Reason.REASON_INVALID),
        (pb.Hello(protocol_min=1, protocol_max=1, lifeline_key=b"k"), InvalidInput, Reason.REASON_INVALID),
    ],
    ids=["newer", "no version", "long name", "short key"],
)
def test_a_hello_that_cannot_be_is_refused_and_ends_the_stream(
    hello: pb.Hello, kind: type[HicacheError], reason: error_pb2.Reason.ValueType
) -> None:
    """The error is in a reply, and the stream's own end."""

    async def main() -> None:
        async with serving(begun=False) as served:
            error = await served.error(pb.Request(id=5, hello=hello))
            assert error.reason == reason
            assert type(await served.failed()) is kind
            assert not served.service.ended, "a session was opened"

    run(main())


def test_who_is_not_known_is_refused_before_there_is_a_session() -> None:
    keys = []

    def refuse(key: bytes) -> Caller:
        keys.append(key)
        raise Unauthenticated("no token: give one")

    async def main() -> None:
        service = FakeService()
        served = Served(service, refuse)
        hello = pb.Hello(protocol_min=1, protocol_max=1, lifeline_key=b"k" * 16)
        assert (await served.error(pb.Request(id=1, hello=hello))).reason == Reason.REASON_UNAUTHENTICATED
        assert type(await served.failed()) is Unauthenticated
        assert not service.ended
        assert keys == [b"k" * 16]

    run(main())


def test_a_stream_without_a_hello_ends() -> None:
    async def main() -> None:
        async with serving(begun=False) as served:
            error = await served.failed()
            assert type(error) is DeadlineExceeded
            assert asyncio.get_running_loop().time() == pytest.approx(HELLO_SECONDS)

    run(main())


def test_a_session_that_has_begun_may_be_silent_for_long() -> None:
    async def main() -> None:
        async with serving() as served:
            await asyncio.sleep(86_400)  # of the loop's own time
            assert (await served.wire.ask(pb.Request(id=30, echo=pb.Echo()))).HasField("echoed")

    run(main())


@pytest.mark.parametrize("verb", sorted({*NOW, *LATER, "goodbye"}))
def test_a_verb_before_the_hello_is_refused_and_the_hello_may_come(verb: str) -> None:
    async def main() -> None:
        async with serving(begun=False) as served:
            request = pb.Request(id=7)
            getattr(request, verb).SetInParent()
            error = await served.error(request)
            assert error.reason == Reason.REASON_INVALID
            assert "begins with a hello" in error.message
            await served.begin()

    run(main())


def test_a_second_hello_is_refused() -> None:
    async def main() -> None:
        async with serving() as served:
            error = await served.error(pb.Request(id=30, hello=HELLO.hello))
            assert "begins with a hello, and with one" in error.message
            assert len(served.service.sessions) == 1

    run(main())


# ---- what is wrong with a request


def test_an_id_is_unique_while_it_is_not_answered() -> None:
    async def main() -> None:
        async with serving() as served:
            lease = await served.lease()
            served.service.blocked.add("load")
            load = pb.Request(id=30, load=pb.Load(lease=lease), deadline_ms=1_000)
            served.wire.send(load)
            error = await served.error(pb.Request(id=30, echo=pb.Echo()))
            assert "id 30 is that of a request that is not answered yet" in error.message
            served.wire.replies.clear()
            assert (await served.wire.answer(30)).HasField("loaded")
            assert (await served.wire.ask(pb.Request(id=30, echo=pb.Echo()))).id == 30

    run(main())


def test_what_cannot_be_a_request_is_refused_in_words() -> None:
    async def main() -> None:
        async with serving() as served:
            wire = served.wire
            assert "without an id" in (await served.error(pb.Request(echo=pb.Echo()))).message
            assert "no verb that is known" in (await served.error(pb.Request(id=30))).message
            wire.replies.clear()
            wire.send_bytes(b"\xff\xff\xff\xff")
            assert "no OpenRequest" in (await wire.answer(0)).error.message
            unknown = pb.Request(id=31).SerializeToString() + bytes([0xC2, 0x3E, 0])  # a verb of the future
            wire.send_bytes(bytes([0x0A, len(unknown)]) + unknown)
            assert "service may be older" in (await wire.answer(31)).error.message
            assert (await wire.ask(pb.Request(id=32, echo=pb.Echo()))).HasField("echoed")

    run(main())


LIMITS = Limits(message_bytes=2_000, pages=4, leases=3, requests=5, chunk_bytes=16)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (pb.Request(match=pb.MatchPages(attachment=1, page_hashes=bytes(32 * 5))), "5 page hashes: the limit is 4"),
        (pb.Request(lease=pb.Lease(attachment=1, page_hashes=bytes(32 * 5))), "5 page hashes: the limit is 4"),
        (pb.Request(prefetch=pb.Prefetch(attachment=1, page_hashes=bytes(160))), "5 page hashes: the limit is 4"),
        (pb.Request(extend=pb.Extend(lease=1, page_hashes=bytes(160))), "5 page hashes: the limit is 4"),
        (pb.Request(reserve=pb.Reserve(lease=1, pages=5)), "5 pages reserved at once: the limit is 4"),
        (pb.Request(put_bytes=pb.PutBytes(lease=1, data=bytes(17))), "17 bytes in one put_bytes: the limit is 16"),
        (pb.Request(acknowledge=pb.Acknowledge(leases=[1] * 4)), "4 leases at once: the limit is 3"),
        (pb.Request(report_device=pb.ReportDevice(attachment=1, stored=bytes(160))), "5 page hashes: the limit is 4"),
        (pb.Request(echo=pb.Echo(data=bytes(3_000))), "bytes: the limit is 2000"),
    ],
    ids=lambda value: value.WhichOneof("verb") if isinstance(value, pb.Request) else "",
)
def test_what_is_above_a_limit_is_refused_with_the_number(request_: pb.Request, text: str) -> None:
    async def main() -> None:
        async with serving(FakeService(LIMITS)) as served:
            request_.id = 30
            error = await served.error(request_)
            assert error.reason == Reason.REASON_RESOURCE_LIMIT
            assert text in error.message
            assert (await served.wire.ask(pb.Request(id=31, echo=pb.Echo()))).HasField("echoed")

    run(main())


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (pb.Request(match=pb.MatchPages(attachment=1, page_hashes=b"cut")), "3 bytes: a multiple of 32"),
        (pb.Request(commit=pb.Commit(lease=1, tokens=b"abc")), "tokens have 3 bytes"),
        (pb.Request(commit=pb.Commit(lease=1, extras=b"abc")), "extras have 3 bytes"),
        (pb.Request(report_device=pb.ReportDevice(attachment=1, parent_hash=b"abc")), "parent_hash has 3 bytes"),
        (pb.Request(report_prefill=pb.ReportPrefill(attachment=1, tokens=5)), "seconds above 0"),
        (pb.Request(report_prefill=pb.ReportPrefill(attachment=1, seconds=float("nan"))), "seconds above 0"),
        (pb.Request(get_bytes=pb.GetBytes(lease=1, first_page=2, end_page=2)), "end_page is behind the last"),
    ],
    ids=["match", "tokens", "extras", "parent", "no seconds", "nan", "no pages"],
)
def test_a_field_without_its_form_is_refused(request_: pb.Request, text: str) -> None:
    async def main() -> None:
        async with serving() as served:
            request_.id = 30
            error = await served.error(request_)
            assert error.reason == Reason.REASON_INVALID
            assert text in error.message

    run(main())


@pytest.mark.parametrize("verb", ["load", "reserve", "extend", "commit", "release", "put_bytes", "get_bytes"])
def test_a_lease_of_nobody_is_not_found(verb: str) -> None:
    async def main() -> None:
        async with serving() as served:
            request = pb.Request(id=30)
            getattr(request, verb).lease = 2**63
            if verb == "get_bytes":
                request.get_bytes.end_page = 1
            error = await served.error(request)
            assert error.reason == Reason.REASON_NOT_FOUND
            assert str(2**63) in error.message

    run(main())


def test_more_unanswered_requests_than_the_limit_are_refused() -> None:
    async def main() -> None:
        async with serving(FakeService(LIMITS)) as served:
            lease = await served.lease()
            served.service.blocked.add("load")
            for number in range(5):
                served.wire.send(pb.Request(id=30 + number, load=pb.Load(lease=lease), deadline_ms=1_000))
            error = await served.error(pb.Request(id=40, load=pb.Load(lease=lease)))
            assert "5 requests are not answered yet, and that is the limit" in error.message
            assert (await served.wire.ask(pb.Request(id=41, echo=pb.Echo()))).HasField("echoed"), "not one that waits"
            await served.wire.answer(34)

    run(main())


def test_a_message_with_more_requests_than_may_be_open_ends_the_stream() -> None:
    """Each would need a reply, so they cannot all be refused one by one."""

    async def main() -> None:
        async with serving(FakeService(LIMITS)) as served:
            served.wire.send(*(pb.Request(id=30 + number, echo=pb.Echo()) for number in range(6)))
            error = await served.failed()
            assert type(error) is LimitExceeded
            assert "6 requests in one message: the limit is 5" in str(error)

    run(main())


def test_a_bug_of_the_service_ends_only_its_request(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving() as served:
            served.session.match = None  # type: ignore[method-assign, assignment]
            served.session.load = None  # type: ignore[method-assign, assignment]
            for number, request in enumerate((pb.Request(match=pb.MatchPages()), pb.Request(load=pb.Load()))):
                request.id = 30 + number
                error = await served.error(request)
                assert error.reason == Reason.REASON_INTERNAL
                assert "NoneType" not in error.message
            assert (await served.wire.ask(pb.Request(id=40, echo=pb.Echo()))).HasField("echoed")

    run(main())
    assert "NoneType" in caplog.text


# ---- notices and replies


def test_what_the_service_has_to_tell_is_told() -> None:
    async def main() -> None:
        async with serving() as served:
            served.session.notices.put_nowait(Revoked((7, 8), "rank 1 is lost"))
            served.session.notices.put_nowait(Draining(2.5))
            await served.wire.answer(0)
            await served.wire.ask(pb.Request(id=30, echo=pb.Echo()))
            notices = [reply for reply in served.wire.replies if reply.id == 0]
            assert list(notices[0].revoked.leases) == [7, 8]
            assert notices[1].draining.milliseconds == 2500

    run(main())


def test_replies_that_are_ready_travel_in_one_message() -> None:
    async def main() -> None:
        async with serving() as served:
            before = served.wire.messages
            served.wire.send(*(pb.Request(id=100 + number, echo=pb.Echo()) for number in range(200)))
            await served.wire.answer(299)
            assert [reply.id for reply in served.wire.replies[-200:]] == list(range(100, 300))
            assert served.wire.messages - before < 20

    run(main())


def test_a_client_that_does_not_read_is_not_read_either() -> None:
    """What waits for it is bounded; when it reads again everything is answered."""

    async def main() -> None:
        async with serving() as served:
            served.wire.open.clear()
            size = 100_000
            for number in range(200):
                served.wire.send(pb.Request(id=100 + number, echo=pb.Echo(data=bytes(size))))
            outbox = served.stream._outbox
            await asyncio.sleep(1)
            assert HIGH_BYTES < outbox._bytes < HIGH_BYTES + 2 * size
            served.wire.open.set()
            await served.wire.answer(299)
            assert [reply.id for reply in served.wire.replies[-200:]] == list(range(100, 300))

    run(main())


def test_bytes_for_a_client_that_does_not_read_are_not_made() -> None:
    async def main() -> None:
        limits = Limits(chunk_bytes=2**20)
        async with serving(FakeService(limits, slots=3, page_bytes=16 * 2**20)) as served:
            wire = served.wire
            lease = await served.lease()
            await wire.ask(pb.Request(id=11, reserve=pb.Reserve(lease=lease, pages=3)))
            await wire.ask(pb.Request(id=20, commit=pb.Commit(lease=lease, upto=3, tokens=RAW_TOKENS)))
            lease = await served.lease(21)
            wire.open.clear()
            get = pb.GetBytes(lease=lease, end_page=3)
            wire.send(pb.Request(id=30, get_bytes=get, deadline_ms=600_000))
            await asyncio.sleep(1)
            assert served.stream._outbox._bytes < HIGH_BYTES + 2 * limits.chunk_bytes
            assert served.service.reading == 1
            wire.open.set()
            await wire.answer(30)
            assert sum(len(reply.bytes.data) for reply in wire.replies if reply.id == 30) == 3 * 16 * 2**20
            assert not served.service.reading

    run(main())


def test_requests_begin_in_the_order_in_which_they_come() -> None:
    """A read of a lease that stands before its release finds it, though it is answered later."""

    async def main() -> None:
        async with serving() as served:
            lease = await served.lease()
            served.wire.send(
                pb.Request(id=30, reserve=pb.Reserve(lease=lease, pages=1)),
                pb.Request(id=31, put_bytes=pb.PutBytes(lease=lease, data=b"x")),
                pb.Request(id=32, release=pb.Release(lease=lease)),
            )
            assert (await served.wire.answer(32)).HasField("released")
            assert (await served.wire.answer(30)).HasField("reserved")
            assert (await served.wire.answer(31)).HasField("bytes_put")

    run(main())


def test_bytes_are_those_of_the_moment_at_which_they_were_read() -> None:
    """A client that reads slowly gets no bytes of a page that has the slot later."""

    async def main() -> None:
        limits = Limits(chunk_bytes=2**20)
        async with serving(FakeService(limits, slots=1, page_bytes=16 * 2**20)) as served:
            wire, service = served.wire, served.service
            lease = await served.lease()
            await wire.ask(pb.Request(id=11, reserve=pb.Reserve(lease=lease, pages=1)))
            await wire.ask(pb.Request(id=20, commit=pb.Commit(lease=lease, upto=1, tokens=RAW_TOKENS[:16])))
            lease = await served.lease(21)
            wire.open.clear()
            wire.send(pb.Request(id=30, get_bytes=pb.GetBytes(lease=lease, end_page=1), deadline_ms=600_000))
            await asyncio.sleep(1)
            assert service.reading == 1, "it waits for the client"
            service.bytes[0][:] = b"\xee" * len(service.bytes[0])
            before = service.given
            wire.open.set()
            await wire.answer(30)
            pieces = [reply.bytes.data for reply in wire.replies if reply.id == 30]
            assert HIGH_BYTES // limits.chunk_bytes < before < len(pieces) == 16
            assert [b"\xee" in piece for piece in pieces] == [at >= before for at in range(16)]

    run(main())
