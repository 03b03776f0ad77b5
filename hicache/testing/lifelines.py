"""A server of lifelines with real clients, in processes of their own, for tests of how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hicache.memory.arena import Arena
from hicache.rpc.client.lifeline import Lifeline as ClientLifeline
from hicache.sidecar.lifeline import Lifeline, LifelineServer

__all__ = ["ARENA", "SLOTS", "SOON", "STRIDE", "ClientProcess", "Scene", "at", "descriptors", "run", "scene", "settled"]

T = TypeVar("T")
SLOTS, STRIDE = 4, 4096
ARENA = 7
"""Id under which clients ask for the scene's arena."""
SOON = 10.0
"""Seconds in which what must happen must have happened."""

_CLIENT = f"""
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
    """Run a test's coroutine, for a minute at most."""

    async def within() -> T:
        return await asyncio.wait_for(main, 60)

    return asyncio.run(within())


class ClientProcess:
    """A client in a process of its own, which does one thing a word: map, write, close, finish, fork.

    Args:
        path: of the lifeline's socket.
        fds: descriptors that it inherits; a forked child reads from the first until the test lets it go.

    Attributes:
        key: of its lifeline, once it has begun.
    """

    def __init__(self, path: Path, *fds: int) -> None:
        self.process = subprocess.Popen(  # noqa: S603  our own interpreter
            [sys.executable, "-c", _CLIENT, str(path), *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
        )
        self.key = b""

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self.process.pid

    async def begin(self) -> None:
        """Wait until its lifeline is there."""
        self.key = bytes.fromhex(await self._line())

    async def tell(self, word: str) -> str:
        """Let it do something; what it answers when that is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return await self._line()

    async def _line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    def end(self) -> None:
        """Kill it, whatever it does."""
        self.process.kill()
        with self.process:
            pass


class Scene:
    """A server of lifelines, an arena, and clients in processes of their own."""

    def __init__(self, server: LifelineServer, path: Path) -> None:
        self.server = server
        self.path = path
        self.arena = Arena(SLOTS, STRIDE)
        self.processes: list[ClientProcess] = []

    async def client(self, *, maps: bool = True, fds: tuple[int, ...] = ()) -> tuple[ClientProcess, Lifeline]:
        """A new client, with the arena mapped or not, and the server's end of its lifeline."""
        client = ClientProcess(self.path, *fds)
        self.processes.append(client)
        await client.begin()
        lifeline = self.server.find(client.key)
        assert lifeline is not None
        if maps:
            self.grant(lifeline)
            assert await client.tell("map") == "map"
        return client, lifeline

    def grant(self, lifeline: Lifeline) -> None:
        """Let a client have the arena."""
        lifeline.grants[ARENA] = (self.arena.fd, self.arena.size)

    async def here(self, work: Callable[[ClientLifeline], T]) -> T:
        """A client of this process, in a thread, for the time of some work."""

        def there() -> T:
            with contextlib.closing(ClientLifeline(str(self.path), timeout=SOON)) as client:
                return work(client)

        return await asyncio.to_thread(there)


@contextlib.asynccontextmanager
async def scene(folder: Path, **options: Any) -> AsyncIterator[Scene]:
    """A scene, with options of `LifelineServer`; all of it ends with the block."""
    server = LifelineServer(**options)
    server.boot = bytes(range(16))
    path = folder / "s.lifeline"
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
    """The moment of an event, by the loop's clock; `when` takes what is to be called then."""
    loop = asyncio.get_running_loop()
    happened: asyncio.Future[float] = loop.create_future()
    when(lambda: None if happened.done() else happened.set_result(loop.time()))
    return await asyncio.wait_for(happened, SOON)


async def settled(condition: Callable[[], bool]) -> None:
    """Wait until something holds; every look lets the loop work."""
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0)


def descriptors() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))
