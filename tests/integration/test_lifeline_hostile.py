"""Hostile peers of a lifeline: what arrives costs a bounded amount, and at most the connection on which it came."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.errors import NotFound, ServiceUnavailable
from hicache.memory.arena import MappedArena
from hicache.rpc.client.lifeline import Lifeline as ClientLifeline
from hicache.rpc.convert.lifeline import LIFELINE_PACKET, decode_reply, encode_request
from hicache.sidecar import lifeline as lifeline_module
from hicache.testing.lifelines import ARENA, SLOTS, SOON, STRIDE, descriptors, run, scene, settled


def raw(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(str(path))
    client.settimeout(SOON)
    return client


def test_ten_thousand_random_packets(tmp_path: Path) -> None:
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


def test_garbage_is_answered_with_words_and_a_hang_up(tmp_path: Path) -> None:
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


def test_who_asks_without_reading_is_hung_up_on(tmp_path: Path) -> None:
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


def test_a_flood_does_not_keep_others_waiting(tmp_path: Path) -> None:
    """One client sends as fast as it can; another's requests are answered all the same."""

    async def main() -> None:
        async with scene(tmp_path) as here:
            begun, stop = threading.Event(), threading.Event()

            def flood() -> int:
                client, sent = raw(here.path), 0
                client.recv(LIFELINE_PACKET)
                while not stop.is_set():
                    client.send(encode_request(99))
                    client.recv(LIFELINE_PACKET)
                    sent += 1
                    begun.set()
                client.close()
                return sent

            flooding = asyncio.create_task(asyncio.to_thread(flood))

            def ask(client: ClientLifeline) -> None:
                for _ in range(50):
                    with pytest.raises(NotFound):
                        client.fetch(1)

            assert await asyncio.to_thread(begun.wait, 30)
            await here.here(ask)
            stop.set()
            assert await flooding > 0

    run(main())


def test_connections_are_bounded_in_all_and_for_each_process(tmp_path: Path) -> None:
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


def test_a_client_that_says_nothing_is_dropped_and_one_in_use_is_not(tmp_path: Path) -> None:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_two_hundred_clients_leave_no_descriptor(tmp_path: Path) -> None:
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
