"""Real servers in trouble: what was asked fails in bounded time, nothing wrong is ever read, and all comes back."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from hicache.errors import StorageUnavailable
from hicache.storage.base import BreakerState, ObjectStatus, StorageUrl, StoredObject
from hicache.storage.breaker import BreakerBackend, BreakerPolicy
from hicache.testing.clock import ManualClock
from hicache.testing.objects import in_threads, make_chain, make_key, make_object, pattern, read, status_of
from hicache.testing.proxy import Fault, Proxy
from hicache.testing.servers import Server, binaries
from hicache_redis import RedisBackend, RedisSettings

pytestmark = [pytest.mark.chaos, pytest.mark.redis]

SIZE = 64 * 1024
OK, MISSING, FAILED, CORRUPT = ObjectStatus.OK, ObjectStatus.MISSING, ObjectStatus.FAILED, ObjectStatus.CORRUPT
Open = Callable[..., RedisBackend]


@pytest.fixture(params=[pytest.param(name) for name in binaries() or ("none",)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with Server(binaries()[request.param], tmp_path / "server") as running:
        yield running


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.address) as between:
        yield between


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def open_at(clock: ManualClock) -> Iterator[Open]:
    """Opens backends whose pauses between tries pass when the clock is told so."""
    opened: list[RedisBackend] = []

    def make(port: int, *, real_time: bool = False, **parameters: object) -> RedisBackend:
        wanted = {"timeout": 0.5, "connect_timeout": 5, "deadline": 20} | parameters
        text = "&".join(f"{name}={value}" for name, value in wanted.items())
        settings = RedisSettings.from_url(StorageUrl.parse(f"redis://127.0.0.1:{port}/0?{text}"))
        opened.append(RedisBackend(settings, now=time.monotonic if real_time else clock.now))
        return opened[-1]

    yield make
    for backend in opened:
        backend.close()


def holds(backend: RedisBackend, stored: StoredObject) -> bool:
    """Whether it is read; never anything else than what was stored."""
    result, payload = read(backend, stored.key, stored.payload.nbytes)
    assert result.status is not OK or payload == bytes(stored.payload), "another payload than was stored"
    return result.status is OK


def name_of(stored: StoredObject) -> str:
    return f"hicache:{stored.key.name}"


@pytest.mark.case("REDIS-1")
def test_a_write_whose_reply_is_lost_failed_and_repeating_it_is_harmless(
    server: Server, proxy: Proxy, open_at: Open, clock: ManualClock
) -> None:
    backend = open_at(proxy.port)
    stored, other = make_chain(2, SIZE)
    backend.put([other])  # so that the connection is there
    before = backend.statistics().bytes_written
    proxy.set(Fault(cut_reply=len(b"$0\r\n\r\n+"), times=1))  # the look before the write, and one byte of its answer
    (result,) = backend.put([stored])
    assert (result.status, result.reason) == (FAILED, "connection")
    assert server.call("EXISTS", name_of(stored)) == 1, "the server has acted"
    assert backend.statistics().bytes_written == before
    clock.advance(5)
    assert status_of(backend.put([stored])) == [OK]
    assert backend.statistics().bytes_written == before, "it was there, so nothing was sent again"
    assert server.call("STRLEN", name_of(stored)) == len(stored.header) + SIZE
    assert holds(backend, stored)


@pytest.mark.case("REDIS-2")
@pytest.mark.slow
def test_a_full_server_refuses_writes_and_goes_on_with_reads(server: Server, open_at: Open) -> None:
    server.call("CONFIG", "SET", "maxmemory", int(server.info("memory", "used_memory")) + (8 << 20))
    backend = open_at(server.port, timeout=20)
    guarded = BreakerBackend(backend, BreakerPolicy(failures=3))
    objects = [make_object(make_key(i), pattern(i, 1 << 20)) for i in range(20)]
    results = [guarded.put([stored])[0] for stored in objects]
    stored_count = sum(result.status is OK for result in results)
    assert 2 <= stored_count <= 8
    assert {result.reason for result in results if result.status is not OK} == {"oom", "breaker_open"}
    assert guarded.statistics().by_reason["oom"] >= 3
    read_breaker, write_breaker = guarded.statistics().breakers
    assert (read_breaker.state, write_breaker.state) == (BreakerState.CLOSED, BreakerState.OPEN)
    assert write_breaker.reason == "oom"
    assert holds(backend, objects[0])
    batch = backend.put(objects)
    assert sum(result.status is FAILED for result in batch) == 20 - stored_count
    assert server.info("stats", "evicted_keys") == "0"


@pytest.mark.case("REDIS-4")
@pytest.mark.slow
def test_a_frozen_server_costs_a_bounded_time_and_then_nothing(server: Server, open_at: Open) -> None:
    backend = open_at(server.port, real_time=True, timeout=0.2, deadline=0.4)
    guarded = BreakerBackend(backend, BreakerPolicy(failures=3, interval=0.5, timeout=5))
    objects = make_chain(8, SIZE)
    assert status_of(guarded.put(objects)) == [OK] * 8
    server.pause()
    try:
        start = time.monotonic()
        results = [
            guarded.get_into([stored.key], [memoryview(bytearray(SIZE))])[0] for _ in range(13) for stored in objects
        ]
        spent = time.monotonic() - start
        assert {result.status for result in results} == {FAILED}
        assert spent < len(results) * 0.2 / 4, "most were answered without waiting"
        assert guarded.statistics().breakers[0].state is not BreakerState.CLOSED
    finally:
        server.resume()
    end = time.monotonic() + 20
    while not all(holds(backend, stored) for stored in objects):
        assert time.monotonic() < end, "it did not come back"
        threading.Event().wait(0.05)


@pytest.mark.case("REDIS-5")
def test_half_an_object_is_a_miss(server: Server, open_at: Open) -> None:
    backend = open_at(server.port)
    one, two = make_chain(2, SIZE)
    backend.put([one, two])
    assert server.call("DBSIZE") == 2, "a page is one key"
    values = [server.call("GET", name_of(stored)) for stored in (one, two)]
    assert all(isinstance(value, bytes) for value in values)
    first, second = (bytes(value) for value in values if isinstance(value, bytes))
    length = len(one.header)
    for spoilt, status in (
        (first[:length] + second[len(two.header) :], CORRUPT),  # two's payload behind one's header
        (second, MISSING),  # two under one's name
        (first[: length + 100], CORRUPT),
        (first[: length - 1], CORRUPT),
        (first + b"more", CORRUPT),
        (b"", CORRUPT),
    ):
        server.call("SET", name_of(one), spoilt)
        result, _ = read(backend, one.key, SIZE)
        assert result.status is status, result
        assert not holds(backend, one)
        assert status_of(backend.put([one])) == [OK]
        assert holds(backend, one)
    server.call("DEL", name_of(one))
    assert not holds(backend, one)
    server.call("LPUSH", name_of(one), "a list")
    assert read(backend, one.key, SIZE)[0].reason == "foreign"
    assert status_of(backend.put([one])) == [OK]
    assert holds(backend, one)


@pytest.mark.case("SEC-1")
def test_a_pickle_under_our_name_is_never_run(server: Server, open_at: Open, tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    bomb = b"cposix\nsystem\n(S'touch \"" + str(marker).encode() + b"\"'\ntR."
    backend = open_at(server.port)
    (stored,) = make_chain(1, SIZE)
    for value in (bomb, stored.header + bomb, stored.header + bomb + bytes(SIZE - len(bomb))):
        server.call("SET", name_of(stored), value)
        assert read(backend, stored.key, SIZE)[0].status in (MISSING, CORRUPT)
        assert status_of(backend.put([stored])) == [OK]
        assert holds(backend, stored)
    assert not marker.exists()


@pytest.mark.case("REDIS-6")
def test_a_connection_that_was_interrupted_is_not_used_again(proxy: Proxy, open_at: Open, clock: ManualClock) -> None:
    backend = open_at(proxy.port, timeout=0.2, connections=1)
    one, two = make_chain(2, SIZE)
    assert status_of(backend.put([one, two])) == [OK, OK]
    proxy.set(Fault(hold_replies=True))
    result, _ = read(backend, one.key, SIZE)
    assert (result.status, result.reason) == (FAILED, "timeout")
    proxy.set()
    clock.advance(5)
    before = proxy.connections
    assert holds(backend, two)
    assert proxy.connections == before + 1
    assert holds(backend, one)


class ShiftedReplies(socketserver.StreamRequestHandler):
    """Answers each GET with what the one before asked for, as a pool with an unread reply would."""

    values: ClassVar[dict[bytes, bytes]]
    others: ClassVar[dict[bytes, bytes]] = {
        b"INFO": b"$21\r\nredis_version:7.0.0\r\n\r\n",
        b"EXISTS": b":0\r\n",
        b"TOUCH": b":0\r\n",
        b"UNLINK": b":0\r\n",
    }

    def handle(self) -> None:
        last = b""
        while words := self.command():
            if words[0] != b"GET":
                self.wfile.write(self.others.get(words[0], b"-ERR no\r\n"))
                continue
            value = self.values.get(last)
            self.wfile.write(b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value))
            last = words[1]

    def command(self) -> list[bytes]:
        line = self.rfile.readline()
        if not line.startswith(b"*"):
            return []
        words = []
        for _ in range(int(line[1:])):
            length = int(self.rfile.readline()[1:])
            words.append(self.rfile.read(length + 2)[:-2])
        return words


@pytest.mark.case("REDIS-6")
def test_shifted_replies_are_told_by_what_the_values_say_they_are(open_at: Open) -> None:
    objects = make_chain(6, SIZE)

    class Handler(ShiftedReplies):
        values: ClassVar[dict[bytes, bytes]] = {
            name_of(stored).encode(): stored.header + bytes(stored.payload) for stored in objects
        }

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as shifting:
        shifting.daemon_threads = True
        thread = threading.Thread(target=shifting.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            backend = open_at(shifting.server_address[1])
            keys = [stored.key for stored in objects]
            results = backend.get_into(keys, [memoryview(bytearray(SIZE)) for _ in keys])
            assert OK not in status_of(results)
            assert not any(holds(backend, stored) for stored in objects)
            backend.close()
        finally:
            shifting.shutdown()
            thread.join()


@pytest.mark.case("REDIS-7")
@pytest.mark.slow
def test_it_comes_back_by_itself(server: Server, open_at: Open, clock: ManualClock) -> None:
    server.kill()
    backend = open_at(server.port)
    assert "cannot be reached" in backend.health.warnings[0]
    (stored,) = make_chain(1, SIZE)
    assert backend.put([stored])[0].reason == "connection"
    for verb in (backend.contains, backend.touch, backend.delete):
        with pytest.raises(StorageUnavailable, match="connection"):
            verb([stored.key])

    server.start()
    clock.advance(5)
    assert status_of(backend.put([stored])) == [OK]
    assert holds(backend, stored)

    server.restart()
    clock.advance(5)
    assert not holds(backend, stored)
    assert status_of(backend.put([stored])) == [OK]

    server.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert holds(backend, stored), "a connection that was closed while idle is no failure"


@pytest.mark.case("REDIS-4")
def test_only_one_caller_tries_a_node_that_failed(server: Server, open_at: Open, clock: ManualClock) -> None:
    backend = open_at(server.port, timeout=0.2)
    (stored,) = make_chain(1, SIZE)
    backend.put([stored])
    server.pause()
    try:
        assert read(backend, stored.key, SIZE)[0].reason == "timeout"
        start = time.monotonic()
        for _ in range(100):
            assert read(backend, stored.key, SIZE)[0].reason == "timeout"
        assert time.monotonic() - start < 100 * 0.2 / 2, "they did not wait for the node"
        clock.advance(10)
        waited = in_threads(8, lambda _: read(backend, stored.key, SIZE)[0].reason)
        assert waited == ["timeout"] * 8
    finally:
        server.resume()
    clock.advance(10)
    assert holds(backend, stored)


FAULTS = {
    "cut before forwarding": Fault(cut_request=SIZE // 2, times=2),
    "cut after forwarding": Fault(cut_reply=0, times=2),
    "cut within a reply": Fault(cut_reply=SIZE + 100, times=2),
    "a bit of a payload": Fault(flip=SIZE // 2, times=1),
    "a bit of a length": Fault(flip=2, times=1),
    "a bit of a type": Fault(flip=0, times=1),
    "a bit of a header": Fault(flip=90, times=1),
    "black hole for replies": Fault(hold_replies=True),
    "black hole for requests": Fault(hold_requests=True),
    "slow": Fault(delay=0.3),
}


@pytest.mark.slow
@pytest.mark.case("FAIL-1", "REDIS-6")
@pytest.mark.parametrize("name", FAULTS)
def test_a_spoilt_connection_never_gives_a_wrong_page(
    name: str, proxy: Proxy, open_at: Open, clock: ManualClock
) -> None:
    backend = open_at(proxy.port, timeout=0.2, deadline=20, connections=2)
    objects = make_chain(6, SIZE)
    assert status_of(backend.put(objects[:3])) == [OK] * 3
    proxy.set(FAULTS[name])
    results = []
    for _ in range(3):
        keys = [stored.key for stored in objects]
        buffers = [memoryview(bytearray(SIZE)) for _ in keys]
        results += backend.get_into(keys, buffers)
        for stored, buffer, result in zip(objects, buffers, results[-6:], strict=True):
            assert result.status is not OK or bytes(buffer) == bytes(stored.payload)
        results += backend.put(objects)
        clock.advance(5)
    assert proxy.struck or FAULTS[name].delay
    proxy.set()
    clock.advance(5)
    assert status_of(backend.put(objects)) == [OK] * 6
    assert all(holds(backend, stored) for stored in objects)


@pytest.mark.case("REDIS-6")
def test_what_came_before_the_deadline_is_kept(proxy: Proxy, open_at: Open) -> None:
    backend = open_at(proxy.port, timeout=0.3)
    objects = make_chain(4, SIZE)
    backend.put(objects)
    size = len(objects[0].header) + SIZE + len(f"${SIZE + 200}\r\n\r\n")
    proxy.set(Fault(cut_reply=2 * size + 1000, times=1))
    keys = [stored.key for stored in objects]
    buffers = [memoryview(bytearray(SIZE)) for _ in keys]
    results = backend.get_into(keys, buffers)
    assert status_of(results) == [OK, OK, FAILED, FAILED]
    assert [result.reason for result in results[2:]] == ["connection"] * 2
    assert bytes(buffers[1]) == bytes(objects[1].payload)


def test_a_bit_that_turned_on_the_way_does_not_cost_the_object(proxy: Proxy, open_at: Open) -> None:
    backend = open_at(proxy.port)
    (stored,) = make_chain(1, SIZE)
    backend.put([stored])
    proxy.set(Fault(flip=SIZE // 2, times=1))
    assert holds(backend, stored), "it was read again before it was believed to be damaged"
    assert proxy.struck == 1
    assert backend.contains([stored.key]) == [True]


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (("REPLICAOF", "127.0.0.1", "1"), "readonly"),
        (("ACL", "SETUSER", "default", "-set"), "acl"),
    ],
)
def test_refusals_have_a_word_and_the_connection_lives(
    server: Server, open_at: Open, refusal: tuple[str, ...], reason: str
) -> None:
    backend = open_at(server.port)
    one, two = make_chain(2, SIZE)
    backend.put([one])
    server.call(*refusal)
    results = backend.put([one, two])
    assert [(result.status, result.reason) for result in results] == [(OK, ""), (FAILED, reason)]
    assert backend.statistics().by_reason == {reason: 1}
    assert holds(backend, one)
