"""No call lasts beyond its deadline: whatever names, handshakes, redis-py's own ways or the other side take."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import StorageUnavailable
from hicache.storage.base import ObjectStatus, StorageUrl
from hicache.testing.certificates import make_certificates
from hicache.testing.gates import Gate
from hicache.testing.objects import NAMESPACE, make_chain, read, status_of
from hicache.testing.proxy import Fault, Proxy
from hicache.testing.servers import Server, binaries, free_port, has_tls
from hicache_redis import RedisBackend

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.case("REDIS-4")]

SIZE = 16 * 1024
DEADLINE = 0.2
SLACK = 1.0  # for a machine that does something else at the moment; what is tested would take seconds
LIMITS = f"deadline={DEADLINE}&timeout=0.15&connect_timeout=0.15"
OBJECTS = make_chain(4, SIZE)
KEYS = [stored.key for stored in OBJECTS]
Calls = dict[str, Callable[[RedisBackend], Any]]


def _loudly(call: Callable[[RedisBackend], Any]) -> Callable[[RedisBackend], Any]:
    def run(backend: RedisBackend) -> None:
        with contextlib.suppress(StorageUnavailable):
            call(backend)

    return run


CALLS: Calls = {
    "put": lambda backend: backend.put(OBJECTS),
    "get_into": lambda backend: backend.get_into(KEYS, [memoryview(bytearray(SIZE)) for _ in KEYS]),
    "contains": _loudly(lambda backend: backend.contains(KEYS)),
    "generation": _loudly(lambda backend: backend.generation(NAMESPACE)),
    "list_objects": _loudly(lambda backend: list(backend.list_objects())),
    "check_object": _loudly(lambda backend: backend.check_object(KEYS[0])),
}


def each_call_ends_in_time(make: Callable[[], RedisBackend]) -> None:
    """Each on a backend of its own, so that none profits from what the one before has learnt."""
    for name, call in CALLS.items():
        start = time.monotonic()
        backend = make()
        opened = time.monotonic()
        try:
            call(backend)
            ended = time.monotonic()
        finally:
            backend.close()
        assert opened - start < DEADLINE + SLACK, "opening"
        assert ended - opened < DEADLINE + SLACK, name


def opened(url: str) -> RedisBackend:
    return RedisBackend.from_url(StorageUrl.parse(url))


@pytest.mark.parametrize("scheme", ["redis://{}/0", "redis+cluster://{}", "redis+sentinel://{}/mymaster/0"])
def test_a_name_that_nobody_resolves(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()

    def hang(*_: object, **__: object) -> Any:
        gate.enter()
        raise socket.gaierror("nobody knows it")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        each_call_ends_in_time(lambda: opened(f"{scheme.format('cache.example:1234')}?{LIMITS}"))
        gate.until_arrived(1)
    finally:
        gate.open()


class _Slow(socketserver.StreamRequestHandler):
    """Says what it has to say one byte at a time, each in time and all of it much too late."""

    stop = threading.Event()
    words = b"*3\r\n" + b"+OK\r\n" * 100

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            for byte in self.words:
                if self.stop.wait(0.08):
                    return
                self.wfile.write(bytes([byte]))


@contextlib.contextmanager
def slow_server() -> Iterator[int]:
    class Handler(_Slow):
        stop = threading.Event()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            Handler.stop.set()
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@127.0.0.1:{}/3?",
        "redis+cluster://127.0.0.1:{}?",
        "redis+sentinel://127.0.0.1:{}/mymaster/0?",
    ],
)
def test_a_server_that_says_one_byte_at_a_time(url: str) -> None:
    with slow_server() as port:
        each_call_ends_in_time(lambda: opened(url.format(port) + LIMITS))


@pytest.mark.redis
def test_replies_that_come_in_drops(tmp_path: Path) -> None:
    """Each piece is in time; the call as a whole is not, and keeps what it has."""
    large = make_chain(8, 1 << 20)[4:]  # sixty pieces and more
    keys = [stored.key for stored in large]
    buffers = [memoryview(bytearray(1 << 20)) for _ in keys]
    calls: Calls = CALLS | {"get_into of many": lambda backend: backend.get_into(keys, buffers)}
    with Server(next(iter(binaries().values())), tmp_path / "server") as server, Proxy(server.address) as proxy:
        writer = opened(f"redis://127.0.0.1:{server.port}/0")
        try:
            assert status_of(writer.put([*OBJECTS, *large])) == [ObjectStatus.OK] * 8
        finally:
            writer.close()
        backend = opened(f"redis://127.0.0.1:{proxy.port}/0?{LIMITS}")
        try:
            proxy.set(Fault(delay=0.05))
            for name, call in calls.items():
                start = time.monotonic()
                call(backend)
                assert time.monotonic() - start < DEADLINE + SLACK, name
        finally:
            backend.close()


@pytest.mark.redis_tls
@pytest.mark.parametrize(("count", "size"), [(64, 256 << 10), (1, 16 << 20)], ids=["many objects", "a large one"])
def test_a_server_that_takes_what_is_sent_in_drops_over_tls(count: int, size: int, tmp_path: Path) -> None:
    """Each piece is taken in time, and a piece may take longer than the call: the call ends by its deadline."""
    binary = next(binary for binary in binaries().values() if has_tls(binary))
    made = make_certificates(tmp_path / "tls")
    port = free_port()
    settings = {
        "tls-port": str(port),
        "tls-cert-file": str(made.server),
        "tls-key-file": str(made.server_key),
        "tls-ca-cert-file": str(made.ca),
    }
    objects = make_chain(count, size)  # several times what kernels hold on the way
    mine = f"ca={made.ca}&cert={made.client}&key={made.client_key}"
    deadline = 2
    limits = f"deadline={deadline}&timeout=10&connect_timeout=10&window=64MiB"
    with Server(binary, tmp_path / "server", settings), Proxy(("127.0.0.1", port)) as proxy:
        backend = opened(f"rediss://127.0.0.1:{proxy.port}/0?{mine}&{limits}")
        try:
            assert read(backend, objects[0].key, size)[0].status is ObjectStatus.MISSING
            proxy.set(Fault(delay_request=0.1))
            start = time.monotonic()
            assert set(status_of(backend.put(objects))) == {ObjectStatus.FAILED}
            assert deadline <= time.monotonic() - start < deadline + SLACK
        finally:
            proxy.set()
            backend.close()
