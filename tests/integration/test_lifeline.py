"""Lifelines between real processes: descriptors, and ends of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hicache.errors import HicacheError, NotFound, PermissionDenied, ServiceUnavailable
from hicache.memory.arena import Arena, MappedArena
from hicache.rpc.client.lifeline import Lifeline as ClientLifeline
from hicache.rpc.convert.lifeline import LIFELINE_PACKET, decode_reply, encode_greeting, encode_reply, encode_request
from hicache.sidecar import lifeline as lifeline_module
from hicache.sidecar.lifeline import Lifeline, LifelineServer

T = TypeVar("T")
SLOTS, STRIDE, ARENA = 4, 4096, 7
SOON = 10.0  # seconds in which what must happen must have happened

CLIENT = f"""
import os, sys
from hicache.memory.arena import MappedArena
from hicache.rpc.client.lifeline import Lifeline
lifeline = Lifeline(sys.argv[1], timeout=30)
print(lifeline.key.hex(), flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "map":
        fd, size = lifeline.fetch({ARENA})
        arena = MappedArena(fd, {SLOTS}, {STRIDE}, size=size, writable=True)
    elif word == "write":
        arena.rows[1] = 5
    elif word == "close":
        lifeline.close()
    elif word == "finish":
        lifeline.finish()
    elif word == "fork":
        child = os.fork()
        if not child:
            os.read(int(sys.argv[2]), 1)  # with a copy of the connection, until the test lets it go
            os._exit(0)
        word = str(child)
    print(word, flush=True)
"""


def run(main: Coroutine[Any, Any, T]) -> T:
    async def within() -> T:
        return await asyncio.wait_for(main, 60)

    return asyncio.run(within())


class Process:
    """A client in a process of its own, which does one thing a line."""

    def __init__(self, path: Path, *arguments: str, pass_fds: tuple[int, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(path), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
        )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        self.key = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    async def begin(self) -> None:
        self.key = bytes.fromhex(await asyncio.to_thread(self.stdout.readline))

    async def tell(self, word: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return (await asyncio.to_thread(self.stdout.readline)).strip()

    def end(self) -> None:
        self.process.kill()
        with self.process:
            pass


class Scene:
    """A server of lifelines, an arena, and clients in processes of their own."""

    def __init__(self, server: LifelineServer, path: Path) -> None:
        self.server = server
        self.path = path
        self.arena = Arena(SLOTS, STRIDE)
        self.processes: list[Process] = []

    async def client(self, *, maps: bool = True, arguments: tuple[int, ...] = ()) -> tuple[Process, Lifeline]:
        client = Process(self.path, *map(str, arguments), pass_fds=arguments)
        self.processes.append(client)
        await client.begin()
        lifeline = self.server.find(client.key)
        assert lifeline is not None
        if maps:
            self.grant(lifeline)
            assert await client.tell("map") == "map"
        return client, lifeline

    def grant(self, lifeline: Lifeline) -> None:
        lifeline.grants[ARENA] = (self.arena.fd, self.arena.size)

    async def here(self, work: Callable[[ClientLifeline], T]) -> T:
        """A client of this process, for the time of some work."""

        def there() -> T:
            with contextlib.closing(ClientLifeline(str(self.path), timeout=SOON)) as client:
                return work(client)

        return await asyncio.to_thread(there)


@contextlib.asynccontextmanager
async def scene(tmp_path: Path, **options: Any) -> AsyncIterator[Scene]:
    server = LifelineServer(**options)
    server.boot = bytes(range(16))
    path = tmp_path / "s.lifeline"
    await server.listen(str(path))
    made = Scene(server, path)
    try:
        yield made
    finally:
        for process in made.processes:
            process.end()
        await server.close()
        made.arena.close()


async def at(when: Callable[[Callable[[], None]], None]) -> float:
    """The moment of an event, by the loop's clock."""
    loop = asyncio.get_running_loop()
    happened: asyncio.Future[float] = loop.create_future()
    when(lambda: happened.done() or happened.set_result(loop.time()))
    return await asyncio.wait_for(happened, SOON)


async def settled(condition: Callable[[], bool]) -> None:
    """Until something holds; every look lets the loop work."""
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def raw(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(str(path))
    client.settimeout(SOON)
    return client


def test_a_client_gets_the_memory_that_it_was_granted_and_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as here:

            def work(client: ClientLifeline) -> tuple[bytes, bytes]:
                with pytest.raises(NotFound, match="no memory 7 was given to this client: attach first"):
                    client.fetch(ARENA)
                found = here.server.find(client.key)
                assert found is not None
                here.grant(found)
                with pytest.raises(NotFound, match="no memory 8"):
                    client.fetch(8)
                fd, size = client.fetch(ARENA)
                assert not os.get_inheritable(fd)
                mapped = MappedArena(fd, SLOTS, STRIDE, size=size, writable=True)
                mapped.rows[2] = 9
                mapped.close()
                assert found.peer == (os.getpid(), os.getuid(), os.getgid())
                assert here.server.uid_of(client.key) == os.getuid()
                assert not client.ended
                return client.key, client.boot

            key, boot = await here.here(work)
            assert boot == here.server.boot
            assert here.arena.rows.max(axis=1).tolist() == [0, 0, 9, 0]
            await settled(lambda: here.server.find(key) is None)
            assert here.server.uid_of(key) is None
            assert here.path.stat().st_mode & 0o777 == 0o600

    run(main())


def test_a_killed_client_is_seen_to_be_gone_within_a_second(tmp_path: Path) -> None:
    """`kill -9` of a client that maps memory: its lifeline ends, its process is gone, and the kernel says so."""

    async def main() -> list[float]:
        took = []
        async with scene(tmp_path) as here:
            for _ in range(5):
                client, lifeline = await here.client()
                assert lifeline.watched
                start = asyncio.get_running_loop().time()
                os.kill(client.pid, signal.SIGKILL)
                took.append(await at(lifeline.when_gone) - start)
                assert lifeline.ended
                assert here.server.count == 0
        return took

    took = run(main())
    assert max(took) < 1.0, took


def test_a_connection_that_ends_is_not_yet_a_process_that_is_gone(tmp_path: Path) -> None:
    """A client that only closes may go on writing what it has mapped: it is gone when its process is."""

    async def main() -> None:
        async with scene(tmp_path) as here:
            client, lifeline = await here.client()
            assert await client.tell("close") == "close"
            await at(lifeline.when_ended)
            assert here.server.find(client.key) is None
            assert await client.tell("write") == "write"
            assert not lifeline.gone
            assert here.arena.rows.max(axis=1).tolist() == [0, 5, 0, 0]
            os.kill(client.pid, signal.SIGKILL)
            await at(lifeline.when_gone)

    run(main())


@pytest.mark.parametrize("maps", [True, False])
def test_who_says_that_it_is_finished_or_never_mapped_anything_is_gone_at_once(tmp_path: Path, maps: bool) -> None:
    async def main() -> None:
        async with scene(tmp_path) as here:
            client, lifeline = await here.client(maps=maps)
            assert await client.tell("finish" if maps else "close")
            await at(lifeline.when_gone)
            assert client.process.poll() is None
            assert here.server.count == 0

    run(main())


def test_a_stopped_client_has_not_ended(tmp_path: Path) -> None:
    """However long it is stopped: others are served meanwhile, and it goes on where it was."""

    async def main() -> None:
        async with scene(tmp_path) as here:
            client, lifeline = await here.client()
            os.kill(client.pid, signal.SIGSTOP)
            stopped = await asyncio.to_thread(os.waitid, os.P_PID, client.pid, os.WSTOPPED | os.WNOWAIT)
            assert stopped is not None
            for _ in range(20):  # the server would have seen an end by now
                await here.here(lambda other: other.key)
            assert not lifeline.ended
            assert not lifeline.gone
            os.kill(client.pid, signal.SIGCONT)
            assert await client.tell("write") == "write"
            assert here.server.find(client.key) is lifeline

    run(main())


def test_a_forked_child_does_not_keep_its_dead_parent_alive(tmp_path: Path) -> None:
    """The child has a copy of the connection, so that does not end; the process is gone all the same."""

    async def main() -> None:
        read, write = os.pipe()
        try:
            async with scene(tmp_path) as here:
                client, lifeline = await here.client(arguments=(read,))
                child = int(await client.tell("fork"))
                os.kill(client.pid, signal.SIGKILL)
                await at(lifeline.when_gone)
                assert lifeline.ended
                os.kill(child, 0)  # lives
        finally:
            os.close(write)
            os.close(read)

    run(main())


def test_where_the_kernel_does_not_tell_a_while_behind_the_end_must_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline_module, "peer_pidfd", lambda connection, peer: None)

    async def main() -> tuple[float, float]:
        async with scene(tmp_path, grace=0.25) as here:
            client, lifeline = await here.client()
            assert not lifeline.watched
            os.kill(client.pid, signal.SIGKILL)
            ended, gone = await asyncio.gather(at(lifeline.when_ended), at(lifeline.when_gone))
            return ended, gone

    ended, gone = run(main())
    assert gone - ended >= 0.24


def test_a_process_is_looked_up_by_its_number_where_the_socket_does_not_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before Linux 6.5; a number that is another user's by now, or whose connection has ended, is not believed."""
    from hicache.sidecar import processes

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer = processes.peer_of(ours)
    assert peer.pid == os.getpid()
    monkeypatch.setattr(processes, "_SO_PEERPIDFD", 9999)
    fd = processes.peer_pidfd(ours, peer)
    assert fd is not None
    os.close(fd)
    before = descriptors()
    assert processes.peer_pidfd(ours, peer._replace(uid=peer.uid + 1)) is None
    assert processes.peer_pidfd(ours, peer._replace(pid=0)) is None
    assert processes.peer_pidfd(ours, peer._replace(pid=2**22 + 1)) is None
    theirs.close()
    assert processes.peer_pidfd(ours, peer) is None
    assert descriptors() == before - 1
    ours.close()


def test_the_client_sees_the_end_of_its_service(tmp_path: Path) -> None:
    """At once, without asking it anything; and a fetch behind it is refused, not waited for."""

    async def main() -> None:
        async with scene(tmp_path) as here:
            client = await asyncio.to_thread(ClientLifeline, str(here.path))
            assert not client.ended
            await here.server.close()
            assert client.ended
            with pytest.raises(ServiceUnavailable, match=r"has hung up|has ended"):
                await asyncio.to_thread(client.fetch, 1)
            assert client.fileno() == -1
            client.close()
            client.finish()

    run(main())


def test_a_service_that_does_not_answer_costs_the_timeout(tmp_path: Path) -> None:
    """A stopped service: neither connecting nor asking hangs."""
    path = str(tmp_path / "s")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(0)
    with pytest.raises(ServiceUnavailable, match="does not answer: it may hang, or be stopped"):
        ClientLifeline(path, timeout=0.01)
    listener.close()
    with pytest.raises(ServiceUnavailable, match=r"no service answers at .*: Connection refused"):
        ClientLifeline(path)
    with pytest.raises(ServiceUnavailable, match="No such file"):
        ClientLifeline(path + "x")


def wrong_service(path: Path, *answers: tuple[bytes, int]) -> threading.Thread:
    """Gives a client one packet with so many descriptors, and another for each that the client sends."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        for packet, fds in answers:
            socket.send_fds(connection, [packet], [0] * fds)
            connection.recv(100)
        connection.close()
        listener.close()

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


GREETING = encode_greeting(bytes(16), bytes(16))


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([(b"HTTP/1.1 400 Bad Request", 0)], "is this the socket of a hicache service"),
        ([(b"HTTP/1.1 400 Bad Request", 3)], "is this the socket of a hicache service"),
        ([(GREETING, 2), (encode_reply(8, size=1), 1)], "answered with another memory than 7"),
        ([(GREETING, 0), (encode_reply(7, size=1), 0)], "answered with another memory than 7"),
        ([(GREETING, 0), (encode_reply(7, size=1), 2)], "answered with another memory than 7"),
        ([(GREETING, 0), (encode_reply(7, error="no"), 1)], "gives no memory 7: no"),
        ([(GREETING, 0), (b"\xff", 1)], "the lifeline's answer cannot be read"),
    ],
)
def test_a_wrong_service_is_refused_and_its_descriptors_are_closed(
    tmp_path: Path, answers: list[tuple[bytes, int]], text: str
) -> None:
    before = descriptors()
    thread = wrong_service(tmp_path / "s", *answers)

    def ask() -> None:
        with contextlib.closing(ClientLifeline(str(tmp_path / "s"))) as client:
            client.fetch(7)

    with pytest.raises(HicacheError, match=text):
        ask()
    thread.join()
    assert descriptors() == before


def test_a_socket_that_forbids_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden(socket.socket):
        def connect(self, address: Any) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("hicache.rpc.client.lifeline.socket.socket", Forbidden)
    with pytest.raises(PermissionDenied, match="this user may not connect to"):
        ClientLifeline(str(tmp_path / "s"))


class TestHostile:
    """Whatever arrives costs a bounded amount, and at most the connection on which it came."""

    def test_ten_thousand_random_packets(self, tmp_path: Path) -> None:
        """Noise, empty and oversized packets, unknown ids, descriptors: the server serves on and keeps nothing."""
        dice = random.Random(3)

        def packet() -> bytes:
            kind = dice.randrange(6)
            if kind == 0:
                return dice.randbytes(dice.randrange(1, 60))
            if kind == 1:
                return dice.randbytes(dice.randrange(LIFELINE_PACKET - 2, LIFELINE_PACKET + 3000))
            if kind == 2:
                return encode_request(dice.randrange(1, 2**64), finished=not dice.randrange(9))
            if kind == 3:
                return bytearray(encode_request(dice.randrange(1, 99)) + dice.randbytes(3))
            return encode_request(dice.randrange(1, 9))

        def attack(path: Path) -> int:
            connections = 0
            client: socket.socket | None = None
            for _ in range(10_000):
                if client is None:
                    client, connections = raw(path), connections + 1
                    client.recv(LIFELINE_PACKET)
                fds = [0] * dice.choice([0, 0, 0, 1, 3])
                try:
                    socket.send_fds(client, [packet()], fds)
                    alive = bool(client.recv(LIFELINE_PACKET))
                except ConnectionError:
                    alive = False
                if not alive or not dice.randrange(50):
                    client.close()
                    client = None
            if client is not None:
                client.close()
            return connections

        async def main() -> int:
            async with scene(tmp_path) as here:
                await here.here(lambda client: client.key)
                await settled(lambda: here.server.count == 0)
                before = descriptors()
                connections = await asyncio.to_thread(attack, here.path)
                await settled(lambda: here.server.count == 0)
                assert descriptors() == before
                await here.here(lambda client: client.key)
                return connections

        assert run(main()) > 1000

    def test_garbage_is_answered_with_words_and_a_hang_up(self, tmp_path: Path) -> None:
        async def main() -> None:
            async with scene(tmp_path) as here:

                def work() -> None:
                    for packet, text in (
                        (b"\xff\xff", "cannot be read"),
                        (b"\x08\x00", "without an id"),
                        (bytes(LIFELINE_PACKET + 1), "has at most 4096 bytes"),
                    ):
                        client = raw(here.path)
                        client.recv(LIFELINE_PACKET)
                        client.send(packet)
                        assert text in decode_reply(client.recv(LIFELINE_PACKET)).error
                        assert client.recv(1) == b""
                        client.close()

                await asyncio.to_thread(work)

        run(main())

    def test_who_asks_without_reading_is_hung_up_on(self, tmp_path: Path) -> None:
        """Answers in flight hold descriptors, so they are bounded."""

        async def main() -> None:
            async with scene(tmp_path) as here:

                def work() -> int:
                    client = raw(here.path)
                    client.recv(LIFELINE_PACKET)
                    lifeline = next(iter(here.server._lifelines.values()))
                    here.grant(lifeline)
                    sent = 0
                    with contextlib.suppress(ConnectionError):
                        while sent < 100_000:
                            client.send(encode_request(ARENA))
                            sent += 1
                    client.close()
                    return sent

                assert await asyncio.to_thread(work) < 100_000

        run(main())

    def test_a_flood_does_not_keep_others_waiting(self, tmp_path: Path) -> None:
        """One client sends as fast as it can; another's requests are answered all the same."""

        async def main() -> None:
            async with scene(tmp_path) as here:
                stop = threading.Event()

                def flood() -> int:
                    client, sent = raw(here.path), 0
                    client.recv(LIFELINE_PACKET)
                    while not stop.is_set():
                        client.send(encode_request(99))
                        client.recv(LIFELINE_PACKET)
                        sent += 1
                    client.close()
                    return sent

                flooding = asyncio.create_task(asyncio.to_thread(flood))

                def ask(client: ClientLifeline) -> None:
                    for _ in range(50):
                        with pytest.raises(NotFound):
                            client.fetch(1)

                await here.here(ask)
                stop.set()
                assert await flooding > 0

        run(main())

    def test_connections_are_bounded_in_all_and_for_each_process(self, tmp_path: Path) -> None:
        async def main() -> None:
            for options in ({"limit": 3}, {"per_process": 3}):
                async with scene(tmp_path / next(iter(options)), **options) as here:

                    def work() -> None:
                        held = [ClientLifeline(str(here.path)) for _ in range(3)]
                        for _ in range(3):
                            with pytest.raises(ServiceUnavailable, match="hung up: it ends, or has too many clients"):
                                ClientLifeline(str(here.path))
                        for client in held:
                            client.close()

                    await asyncio.to_thread(work)
                    await settled(lambda: here.server.count == 0)
                    await here.here(lambda client: client.key)

        for name in ("limit", "per_process"):
            (tmp_path / name).mkdir()
        run(main())

    def test_a_client_that_says_nothing_is_dropped_and_one_in_use_is_not(self, tmp_path: Path) -> None:
        async def main() -> None:
            async with scene(tmp_path, unused=0.2) as here:
                used, silent = await asyncio.to_thread(lambda: [ClientLifeline(str(here.path)) for _ in range(2)])
                assert here.server.find(used.key) is not None
                await settled(lambda: silent.ended)
                assert not used.ended
                assert here.server.find(silent.key) is None
                used.close()
                silent.close()

        run(main())

    def test_without_a_descriptor_to_spare_others_wait_and_then_are_served(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The loop does not spin on a connection that it cannot take, and takes it when it can."""
        monkeypatch.setattr(lifeline_module, "_PAUSE", 0.05)

        async def main() -> None:
            async with scene(tmp_path) as here:
                client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with no_descriptors():
                    client.connect(str(here.path))
                    listener = here.server._listeners[0]
                    await settled(lambda: not is_read(listener.fileno()))
                client.settimeout(SOON)
                assert await asyncio.to_thread(client.recv, LIFELINE_PACKET)
                client.close()

        run(main())

    def test_two_hundred_clients_leave_no_descriptor(self, tmp_path: Path) -> None:
        async def main() -> None:
            async with scene(tmp_path) as here:

                def work(client: ClientLifeline) -> None:
                    found = here.server.find(client.key)
                    assert found is not None
                    here.grant(found)
                    fd, size = client.fetch(ARENA)
                    MappedArena(fd, SLOTS, STRIDE, size=size, writable=True).close()
                    client.finish()

                await here.here(work)
                await settled(lambda: here.server.count == 0)
                before = descriptors()
                for _ in range(200):
                    await here.here(work)
                await settled(lambda: here.server.count == 0)
                assert descriptors() == before

        run(main())


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, limits[1]))
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def is_read(fd: int) -> bool:
    """Whether the loop looks at a descriptor."""
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    return fd in selector.get_map()
