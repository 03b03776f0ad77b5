"""Reading replies from a socket, in every way that they can be cut into pieces."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.storage.base import ObjectResult, ObjectStatus
from hicache.testing.objects import make_chain, make_key, make_object, pattern
from hicache_redis.channel import Channel, Deadline, socket_of
from hicache_redis.transfers import Reads, ask, command, fetch
from hicache_redis.trouble import Trouble


class Pieces:
    """A socket that gives bytes in pieces of scripted lengths, then says that the other side has gone."""

    def __init__(self, data: bytes, lengths: list[int]) -> None:
        self.data = memoryview(data)
        self.lengths = lengths or [len(data)]
        self.reads = 0
        self.timeouts: list[float] = []

    def recv_into(self, view: memoryview) -> int:
        length = min(self.lengths[self.reads % len(self.lengths)], view.nbytes, len(self.data))
        self.reads += 1
        view[:length] = self.data[:length]
        self.data = self.data[length:]
        return length

    def settimeout(self, seconds: float) -> None:
        self.timeouts.append(seconds)


def channel_of(data: bytes, lengths: list[int] | None = None, *, now: Any = lambda: 0.0) -> Channel:
    sent: list[bytes] = []
    connection = SimpleNamespace(
        _sock=Pieces(data, lengths or []),
        socket_timeout=1.0,
        sent=sent,
        send_packed_command=lambda parts, check_health: sent.extend(bytes(part) for part in parts),
    )
    return Channel(connection, timeout=1.0, deadline=Deadline(now, 10.0))


def value(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


OBJECTS = make_chain(3, 5000)
FULL = [stored.header + bytes(stored.payload) for stored in OBJECTS]


def read_all(
    data: bytes, lengths: list[int], *, window: int = 1 << 20
) -> tuple[list[ObjectResult | None], Reads, Channel]:
    channel = channel_of(data, lengths)
    names = [stored.key.name.encode() for stored in OBJECTS]
    buffers = [memoryview(bytearray(5000)) for _ in OBJECTS]
    batch = Reads(names, [stored.key for stored in OBJECTS], buffers, [None] * len(OBJECTS))
    fetch(channel, batch, range(len(OBJECTS)), window)
    return batch.results, batch, channel


@given(st.lists(st.integers(1, 6000), min_size=1, max_size=40), st.sampled_from([1, 6000, 1 << 20]))
def test_objects_arrive_whole_however_they_are_cut(lengths: list[int], window: int) -> None:
    data = value(FULL[0]) + b"$-1\r\n" + value(FULL[2])
    results, batch, channel = read_all(data, lengths, window=window)
    assert [result.status for result in results if result] == [ObjectStatus.OK, ObjectStatus.MISSING, ObjectStatus.OK]
    assert bytes(batch.buffers[0]) == bytes(OBJECTS[0].payload)
    assert bytes(batch.buffers[2]) == bytes(OBJECTS[2].payload)
    assert channel.clean
    assert batch.doubtful == set()


@given(st.data())
def test_any_changed_byte_is_a_miss_a_break_or_harmless(data: st.DataObject) -> None:
    good = b"".join(value(full) for full in FULL)
    at = data.draw(st.integers(0, len(good) - 1))
    spoilt = bytearray(good)
    spoilt[at] ^= data.draw(st.integers(1, 255))
    buffers: list[memoryview] = []
    try:
        results, batch, _ = read_all(bytes(spoilt), [4096])
        buffers = list(batch.buffers)
    except Trouble:
        return
    for result, buffer, stored in zip(results, buffers, OBJECTS, strict=True):
        assert result is None or result.status is not ObjectStatus.OK or bytes(buffer) == bytes(stored.payload)


@given(st.integers(0, 3 * 5300))
def test_a_connection_that_ends_early_keeps_what_came(cut: int) -> None:
    good = b"".join(value(full) for full in FULL)
    cut = min(cut, len(good) - 1)
    channel = channel_of(good[:cut], [1000])
    names = [stored.key.name.encode() for stored in OBJECTS]
    batch = Reads(
        names, [s.key for s in OBJECTS], [memoryview(bytearray(5000)) for _ in OBJECTS], [None] * len(OBJECTS)
    )
    with pytest.raises(Trouble, match="connection"):
        fetch(channel, batch, range(3), 1 << 20)
    ends = [sum(len(value(full)) for full in FULL[: i + 1]) for i in range(3)]
    assert [result is not None for result in batch.results] == [end <= cut for end in ends]


def test_payloads_do_not_go_by_way_of_the_scratch_buffer() -> None:
    """Once a header of the same length was seen, a read ends exactly where the payload begins."""
    _, _, channel = read_all(b"".join(value(full) for full in FULL), [1 << 30])
    pieces: Any = channel._socket
    # Two an object: line and header, then the payload; an end comes with the next line. One more where the header is
    # longer than the one before (it has a parent), one for the last end.
    assert pieces.reads == 3 * 2 + 1 + 1
    assert len(channel._scratch) == 16 * 1024


def test_a_wrong_length_is_told_without_touching_the_buffer() -> None:
    stored = make_object(make_key(1), pattern(1, 5000))
    channel = channel_of(value(stored.header + bytes(stored.payload)) + b":7\r\n")
    buffer = memoryview(bytearray(100))
    batch = Reads([b"n"], [stored.key], [buffer], [None])
    fetch(channel, batch, [0], 1 << 20)
    (result,) = batch.results
    assert result is not None
    assert (result.status, result.reason) == (ObjectStatus.FAILED, "size")
    assert bytes(buffer) == bytes(100)
    assert channel.reply(b":") == 7


@pytest.mark.parametrize("length", [0, 1, 63, 64, 100])
def test_values_that_are_no_objects_are_read_over(length: int) -> None:
    stored = OBJECTS[0]
    for junk in (bytes(length), b"x" * length, stored.header[:length]):
        batch = Reads([b"n"], [stored.key], [memoryview(bytearray(5000))], [None])
        channel = channel_of(value(junk), [7])
        fetch(channel, batch, [0], 1 << 20)
        (result,) = batch.results
        assert result is not None
        assert result.status in (ObjectStatus.CORRUPT, ObjectStatus.MISSING)


@pytest.mark.case("REDIS-6")
@pytest.mark.parametrize(
    "answer",
    [b":1\r\n", b"+OK\r\n", b"*1\r\n", b"$x\r\n", b"$-2x\r\n", b"hello\r\n", b"$99999999999999999999\r\n", b"\r\n"],
)
def test_an_answer_to_another_question_breaks_the_connection_off(answer: bytes) -> None:
    channel = channel_of(answer)
    with pytest.raises(Trouble, match="protocol"):
        channel.reply(b"$")


def test_a_line_without_end_is_given_up() -> None:
    with pytest.raises(Trouble, match="protocol"):
        channel_of(b"-" + b"x" * 200_000).line()


def test_numbers_and_errors_of_short_replies() -> None:
    channel = channel_of(b":1\r\n-MOVED 5 host:1\r\n:0\r\n-OOM no\r\n-ERR what\r\n")
    requests = [command(b"EXISTS", b"k")] * 5
    assert ask(channel, requests) == [1, "moved", 0, "oom", "refused"]
    assert requests[0] == b"*2\r\n$6\r\nEXISTS\r\n$1\r\nk\r\n"
    assert channel.clean


def test_every_wait_ends_by_the_deadline() -> None:
    times = iter([0.0, 9.5, 9.5, 10.5])
    channel = channel_of(b"+a\r\n+b\r\n", [4], now=lambda: next(times))
    assert channel.line() == b"+a"
    pieces: Any = channel._socket
    assert pieces.timeouts == [0.5]
    assert channel.line() == b"+b"
    with pytest.raises(Trouble, match="timeout"):
        channel.line()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def test_a_real_socket_times_out_and_is_given_back_as_it_was(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    connection = SimpleNamespace(_sock=here, socket_timeout=7.0)
    assert socket_of(connection) is here
    channel = Channel(connection, timeout=0.01, deadline=Deadline(lambda: 0.0, 10.0))
    with pytest.raises(TimeoutError):
        channel.line()
    channel.restore()
    assert here.gettimeout() == 7.0
    writer = threading.Thread(target=there.sendall, args=(b"+OK\r\n",))
    writer.start()
    assert channel.reply(b"+") == b"+OK"
    writer.join()


def test_a_connection_without_socket_is_no_connection() -> None:
    with pytest.raises(Trouble, match="connection"):
        socket_of(SimpleNamespace(_sock=None))


@pytest.mark.case("REDIS-6")
def test_a_connection_with_leftover_bytes_is_not_clean() -> None:
    channel = channel_of(b"+OK\r\n:7\r\n")
    assert channel.clean
    channel.line()
    assert not channel.clean, "somebody's reply is left"
    assert channel.reply(b":") == 7
    assert channel.clean
    wrong = value(OBJECTS[1].header + bytes(OBJECTS[1].payload))
    batch = Reads([b"n"], [OBJECTS[0].key], [memoryview(bytearray(5000))], [None])
    channel = channel_of(wrong)
    fetch(channel, batch, [0], 1 << 20)
    assert batch.doubtful == {0}
    assert not channel.clean, "an object of another name may be the answer to another question"
