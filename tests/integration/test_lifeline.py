"""Lifelines between real processes: descriptors, and ends of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import HicacheError, NotFound, PermissionDenied, ServiceUnavailable
from hicache.memory.arena import MappedArena
from hicache.rpc.client.lifeline import Lifeline as ClientLifeline
from hicache.rpc.convert.lifeline import encode_greeting, encode_reply
from hicache.sidecar import lifeline as lifeline_module
from hicache.testing.lifelines import ARENA, SLOTS, STRIDE, at, descriptors, run, scene, settled


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
                client, lifeline = await here.client(fds=(read,))
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
