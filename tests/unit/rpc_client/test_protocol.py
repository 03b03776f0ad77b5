"""The session's messages without I/O: ids, batches, limits, deadlines, late answers, the end."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import LimitExceeded, NotFound, OutOfSlots
from hicache.rpc.client.protocol import Away, NoAnswer, SessionProtocol
from hicache.rpc.status import decode_error, encode_error
from hicache.rpc.v1 import session_pb2 as pb


class Wire:
    """A protocol and what it says unasked."""

    def __init__(self, most: int = 100) -> None:
        self.notices: list[pb.Reply] = []
        self.protocol = SessionProtocol(decode_error, self.notices.append)
        self.protocol.most_requests = most

    def echo(self, data: bytes = b"", **options: Any) -> Future[pb.Reply]:
        return self.protocol.begin(pb.Request(echo=pb.Echo(data=data)), **options)

    def sent(self) -> list[pb.Request]:
        found: list[pb.Request] = []
        while (message := self.protocol.take()) is not None:
            found += message.requests
        return found

    def answer(self, *replies: pb.Reply) -> None:
        self.protocol.received(pb.OpenResponse(replies=replies))


def echoed(request: pb.Request) -> pb.Reply:
    return pb.Reply(id=request.id, echoed=pb.Echoed(data=request.echo.data))


@given(st.permutations(range(6)))
def test_answers_find_their_calls_in_any_order(order: list[int]) -> None:
    wire = Wire()
    futures = [wire.echo(bytes([number])) for number in range(6)]
    requests = wire.sent()
    assert len({request.id for request in requests} - {0}) == 6
    for at in order:
        wire.answer(echoed(requests[at]))
    assert [future.result(0).echoed.data for future in futures] == [bytes([number]) for number in range(6)]
    assert wire.protocol.unanswered == 0


def test_calls_that_wait_together_go_out_in_one_message() -> None:
    wire = Wire()
    for _ in range(3):
        wire.echo()
    message = wire.protocol.take()
    assert message is not None
    assert len(message.requests) == 3
    assert wire.protocol.take() is None


@pytest.mark.case("GRPC-1")
def test_a_message_is_never_larger_than_the_service_takes_and_a_request_that_is_says_so_at_once() -> None:
    wire = Wire()
    wire.protocol.message_bytes = 1000
    futures = [wire.echo(bytes(300)) for _ in range(5)]
    sizes = []
    while (message := wire.protocol.take()) is not None:
        sizes.append(message.ByteSize())
    assert len(sizes) == 2
    assert max(sizes) <= 1000
    with pytest.raises(LimitExceeded, match="1,000 bytes"):
        wire.echo(bytes(1000))
    assert not any(future.done() for future in futures)


def test_no_more_calls_are_under_way_than_the_service_allows() -> None:
    wire = Wire(most=2)
    for _ in range(3):
        wire.echo()
    first = wire.sent()
    assert len(first) == 2
    wire.answer(echoed(first[0]))
    assert len(wire.sent()) == 1


def test_an_error_in_a_reply_is_raised_as_the_service_raised_it() -> None:
    wire = Wire()
    future = wire.echo()
    (request,) = wire.sent()
    error = OutOfSlots(asked=9, free=1, evictable=2, capacity=4)
    wire.answer(pb.Reply(id=request.id, error=encode_error(error)))
    with pytest.raises(OutOfSlots, match="9 slots asked, 1 free and 2 evictable of 4"):
        future.result(0)


def test_a_call_without_an_answer_is_given_up_and_the_late_reply_goes_to_whoever_must_give_it_back() -> None:
    wire = Wire()
    late: list[pb.Reply] = []
    future = wire.echo(b"x", expires=5.0, late=late.append)
    (request,) = wire.sent()
    assert wire.protocol.expire(4.9) == 5.0
    assert not future.done()
    wire.protocol.expire(5.0)
    with pytest.raises(NoAnswer):
        future.result(0)
    wire.answer(echoed(request))
    assert [reply.echoed.data for reply in late] == [b"x"]
    assert wire.protocol.late == 1
    assert wire.protocol.unanswered == 1  # the probe that was sent when the service fell silent


def test_a_service_that_falls_silent_is_asked_once_and_heard_again_by_whatever_it_says() -> None:
    wire = Wire()
    for _ in range(3):
        wire.echo(b"call", expires=1.0)
    wire.sent()
    wire.protocol.expire(2.0)
    assert wire.protocol.silent
    probes = wire.sent()
    assert [probe.echo.data for probe in probes] == [b""]
    wire.answer(echoed(probes[0]))
    assert not wire.protocol.silent


def test_a_call_that_was_never_sent_says_nothing_about_the_service_and_is_not_sent_afterwards() -> None:
    wire = Wire(most=1)
    wire.echo(b"first")
    wire.sent()
    waiting = wire.echo(b"waiting", expires=1.0)
    wire.protocol.expire(1.0)
    with pytest.raises(NoAnswer):
        waiting.result(0)
    assert not wire.protocol.silent
    wire.answer(pb.Reply(id=1, echoed=pb.Echoed()))
    assert wire.sent() == []
    assert wire.protocol.unanswered == 0


def test_the_end_answers_everything_at_once_and_everything_that_comes() -> None:
    wire = Wire(most=1)
    futures = [wire.echo() for _ in range(2)]  # one is sent, one waits
    wire.sent()
    wire.protocol.end("it was killed")
    futures.append(wire.echo())
    for future in futures:
        with pytest.raises(Away, match="it was killed"):
            future.result(0)
    assert wire.protocol.take() is None
    wire.protocol.end("again")


def test_parts_of_an_answer_go_to_their_sink_and_the_last_ends_the_call() -> None:
    wire = Wire()
    pieces: list[int] = []
    future = wire.protocol.begin(
        pb.Request(get_bytes=pb.GetBytes(lease=1, end_page=2)), sink=lambda piece: pieces.append(piece.page)
    )
    (request,) = wire.sent()
    wire.answer(pb.Reply(id=request.id, more=True, bytes=pb.Bytes(page=0)))
    assert not future.done()
    wire.answer(pb.Reply(id=request.id, bytes=pb.Bytes(page=1)))
    assert future.done()
    assert pieces == [0, 1]


def test_parts_that_come_after_the_call_was_given_up_touch_nothing() -> None:
    wire = Wire()
    pieces: list[pb.Bytes] = []
    future = wire.protocol.begin(
        pb.Request(get_bytes=pb.GetBytes(lease=1, end_page=2)), expires=1.0, sink=pieces.append
    )
    (request,) = wire.sent()
    wire.protocol.expire(1.0)
    wire.answer(pb.Reply(id=request.id, more=True, bytes=pb.Bytes(page=0)))
    wire.answer(pb.Reply(id=request.id, error=encode_error(NotFound("gone"))))
    assert pieces == []
    assert isinstance(future.exception(0), NoAnswer)


def test_notices_and_answers_to_nobody_are_told_apart() -> None:
    wire = Wire()
    wire.answer(pb.Reply(draining=pb.Draining(milliseconds=5)), pb.Reply(id=77, echoed=pb.Echoed()))
    assert [notice.draining.milliseconds for notice in wire.notices] == [5]


def test_a_waiter_that_is_cancelled_does_not_cancel_the_call() -> None:
    wire = Wire()
    future = wire.echo()
    assert not future.cancel()
    (request,) = wire.sent()
    wire.answer(echoed(request))
    assert future.result(0).id == request.id


def test_deadlines_of_calls_that_were_answered_do_not_pile_up() -> None:
    wire = Wire()
    waiting = wire.echo(b"waits", expires=1.0)
    (first,) = wire.sent()
    for _ in range(5000):
        wire.echo(expires=1000.0)
        wire.answer(*map(echoed, wire.sent()))
        wire.protocol.expire(0.5)
    assert len(wire.protocol._expiring) < 1000
    assert wire.protocol.expire(0.9) == 1.0
    wire.answer(echoed(first))
    assert waiting.result(0).echoed.data == b"waits"
