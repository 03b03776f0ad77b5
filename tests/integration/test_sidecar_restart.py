"""What a service leaves to the next: the same pages, proven before they are used, and slots that nobody may use yet."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from hicache.config import Config, Host, Leases, Listen, Size
from hicache.core.residency import NO_SLOTS
from hicache.errors import ConfigError
from hicache.memory.arena import Arena
from hicache.memory.host import MmapHostPool
from hicache.rpc.service import Caller, RequestScope, Target
from hicache.runtime.hosting import HostedCache, open_hosted
from hicache.runtime.inheriting import bequeath, inherit
from hicache.runtime.scopes import Scope
from hicache.sidecar.app import App
from hicache.sidecar.document import document
from hicache.sidecar.estate import Estate, HeldProcess, started
from hicache.sidecar.processes import Peer
from hicache.storage.memory import MemoryBackend
from hicache.testing.sessions import NAMESPACE, PAGE, PLAIN, Client, Left, hashes, prompt, running


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(cast("Any", test()))


def file_storage(folder: Path) -> str:
    return f"file://{folder}?capacity=1GiB"


def open_files() -> list[str]:
    """What the descriptors of this process are."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(link for link in found if not link.startswith("/proc"))


async def used(left: Left, *, storage: str | None = None) -> None:
    """A service that has stored two prompts, one of them under a salt, and ends."""
    async with running(leave=left, storage=storage) as (service, _):
        client = await Client.attach(service)
        await client.store(prompt(6))
        await client.store(prompt(4, 1), RequestScope(salt="s"))


async def nothing_private(pool: Any) -> None:
    """Wait until no slot of the pool is kept for a writer."""
    until = asyncio.get_running_loop().time() + 10
    while pool.cache.statistics().core.host.private:
        assert asyncio.get_running_loop().time() < until
        await pool.changes.wait(until)


def test_pages_are_there_again() -> None:
    """Every page of every namespace is a hit in HOST, with its bytes and its tokens; what is left over is closed."""

    async def test() -> None:
        before = open_files()
        left = Left()
        await used(left)
        async with running(inherits=left.estate) as (service, _):
            client = await Client.attach(service)
            assert client.session.match(1, PLAIN, hashes(prompt(6))).host == 6
            assert await client.check(prompt(6)) == 6
            assert await client.check(prompt(4, 1), RequestScope(salt="s")) == 4
            assert await client.check(prompt(4, 1)) == 0
            (pool,) = service.pools
            assert pool.proofs.left == 0
            assert await client.store(prompt(8)) == 6  # and it goes on from there
        assert open_files() == before

    run(test)


def test_page_with_other_bytes_is_withdrawn(tmp_path: Path) -> None:
    """What somebody has written into meanwhile is not served: it is fetched from storage again, with what follows."""

    async def test() -> None:
        left = Left()
        await used(left, storage=file_storage(tmp_path))
        (held,) = left.estate.pools
        (plain,) = [scope for scope in held.scopes if scope.salt is None]
        slot = int(np.frombuffer(plain.runs[0].slots, "<i8")[2])
        arena = Arena.adopt(os.dup(left.estate.descriptors[1]), held.slots, held.strides[0])
        arena.rows[slot, 77] ^= 1
        arena.close()
        async with running(inherits=left.estate, storage=file_storage(tmp_path)) as (service, _):
            client = await Client.attach(service)
            assert await client.check(prompt(6)) == 6
            counts = document(service, Caller())["pools"][0]["statistics"]["pages"]
            assert (counts["host"], counts["storage"]) == (2, 4)
            assert await client.check(prompt(4, 1), RequestScope(salt="s")) == 4

    run(test)


def test_cleared_meanwhile_is_not_taken_over(tmp_path: Path) -> None:
    """Another process has cleared the namespace in storage: what lies in memory is old, and no hit."""

    async def test() -> None:
        left = Left()
        url = file_storage(tmp_path)
        await used(left, storage=url)
        async with running(storage=url) as (service, _):
            await Client.attach(service)
            await service.clear(Caller(), Target(model=NAMESPACE.model))
        async with running(inherits=left.estate, storage=url) as (service, _):
            client = await Client.attach(service)
            assert await client.check(prompt(6)) == 0
            assert await client.check(prompt(4, 1), RequestScope(salt="s")) == 4

    run(test)


def test_other_storage_is_told_everything_anew(tmp_path: Path) -> None:
    """With another store nothing counts as stored: the next use puts it there."""

    async def test() -> None:
        left = Left()
        await used(left, storage=file_storage(tmp_path / "one"))
        async with running(inherits=left.estate, storage=file_storage(tmp_path / "two")) as (service, _):
            assert await (await Client.attach(service)).check(prompt(6)) == 6
        async with running(storage=file_storage(tmp_path / "two")) as (service, _):
            assert await (await Client.attach(service)).check(prompt(6)) == 6

    run(test)


def test_slots_of_living_clients_stay_theirs() -> None:
    """A client that might still write keeps its slots through the restart, until its process is gone."""

    async def test() -> None:
        left = Left()
        writer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            async with running(leave=left, orderly=False) as (service, lifelines):
                key, line = lifelines.connect()
                line.peer = Peer(writer.pid, os.getuid(), os.getgid())
                client = await Client.attach(service, Caller(lifeline_key=key), streamed=False)
                lease = await client.lease(prompt(5))
                await client.session.reserve(lease.lease, 5, until=None)
            async with running(inherits=left.estate) as (service, _):
                (pool,) = service.pools
                assert pool.cache.statistics().core.host.private == 5
                await (await Client.attach(service)).store(prompt(6))
                writer.kill()
                writer.wait()
                await nothing_private(pool)
        finally:
            writer.kill()
            writer.communicate()

    run(test)


@pytest.mark.parametrize("seen", [True, False])
def test_slots_stay_theirs_over_several_restarts(seen: bool) -> None:
    """Also where the process has no number here, as one of another container, and the next service ends as well."""

    async def test() -> None:
        before = open_files()
        one, two = Left(), Left()
        at_once = Leases(grace=0.0)  # what nothing is known of is not waited for
        writer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            pidfd = os.pidfd_open(writer.pid)
            async with running(leave=one, orderly=False) as (service, lifelines):
                key, line = lifelines.connect()
                line.peer = Peer(writer.pid if seen else 0, os.getuid(), os.getgid())
                line.pidfd = pidfd
                client = await Client.attach(service, Caller(lifeline_key=key), streamed=False)
                lease = await client.lease(prompt(5))
                await client.session.reserve(lease.lease, 5, until=None)
            os.close(pidfd)
            async with running(inherits=one.estate, leave=two, leases=at_once) as (service, _):
                (pool,) = service.pools
                await (await Client.attach(service)).store(prompt(6))
                assert pool.cache.statistics().core.host.private == 5
            async with running(inherits=two.estate, leases=at_once) as (service, _):
                (pool,) = service.pools
                assert await (await Client.attach(service)).check(prompt(6)) == 6
                assert pool.cache.statistics().core.host.private == 5
                writer.kill()
                writer.wait()
                await nothing_private(pool)
        finally:
            writer.kill()
            writer.communicate()
        assert open_files() == before

    run(test)


def test_processes_that_cannot_be_seen_are_waited_for() -> None:
    """Where nothing tells whether a client lives, its slots are free after the grace."""

    async def test() -> None:
        left = Left()
        async with running(leave=left, orderly=False) as (service, lifelines):
            key, _ = lifelines.connect()
            client = await Client.attach(service, Caller(lifeline_key=key), streamed=False)
            lease = await client.lease(prompt(5))
            await client.session.reserve(lease.lease, 5, until=None)
        async with running(inherits=left.estate, leases=Leases(grace=0.05)) as (service, _):
            (pool,) = service.pools
            assert pool.cache.statistics().core.host.private == 5
            until = asyncio.get_running_loop().time() + 10
            while pool.cache.statistics().core.host.private:
                assert asyncio.get_running_loop().time() < until
                await pool.changes.wait(until)

    run(test)


def test_takeover_where_nothing_is_to_be_had_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It begins as it would without, and says in one line that it has taken nothing over."""

    async def test() -> None:
        listen = Listen(addresses=(f"unix://{tmp_path}/s",))
        app = App(Config(listen=listen, host=Host(bytes=Size(2**22))))
        await app.start(takeover=True)
        await app.close()

    with caplog.at_level("INFO", "hicache.sidecar"):
        run(test)
    assert caplog.text.count(f"nothing to take over at {tmp_path}/s") == 1


def test_too_little_memory_leaves_pools_behind() -> None:
    """A service that may take less than the one before starts without the pool, and says so."""

    async def test() -> None:
        left = Left()
        await used(left)
        async with running(inherits=left.estate, host=Host(bytes=Size(1 << 20), populate=False)) as (service, _):
            assert list(service.pools) == []
            assert await (await Client.attach(service)).check(prompt(6)) == 0

    run(test)


def test_estates_that_cannot_be_read_are_refused() -> None:
    """Another version, other descriptors, or no document at all: an error that says so, and nothing is lost."""
    good = Estate("1", "", [], [])
    document = good.document()
    assert Estate.read(document, []) == good
    with pytest.raises(ConfigError, match="descriptors"):
        Estate.read(document, [0])
    os.close(document)
    for data, reason in (
        (msgspec.msgpack.encode({"version": 9, "server": "2", "storage": "", "pools": []}), "version 9"),
        (b"\xff", "cannot be read"),
    ):
        fd = os.memfd_create("test")
        os.write(fd, data)
        with pytest.raises(ConfigError, match=reason):
            Estate.read(fd, [])
        os.close(fd)


def test_numbers_of_processes_are_used_again() -> None:
    """A process is told from a later one with the same number by when it began."""
    mine = HeldProcess.of(os.getpid())
    fd = mine.pidfd()
    assert fd is not None
    os.close(fd)
    assert HeldProcess(mine.pid, mine.started + 1).pidfd() is None
    assert started(2**22 + 1) is None


class SlowToTell(MemoryBackend):
    """A store that tells generations when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()
        self.let.set()

    def generation(self, namespace: bytes) -> int:
        self.let.wait(10)
        return super().generation(namespace)


def test_clear_that_is_heard_of_later_takes_what_was_inherited() -> None:
    """Pages are taken over before storage has answered; its answer, a higher generation, ends them."""
    page = NAMESPACE.geometry.page_bytes(PAGE)
    storage = SlowToTell()
    first = open_hosted(NAMESPACE, host=MmapHostPool(8, page), storage=storage)
    scope = wait_for_tree(first)
    request = first.request(scope, hashes(prompt(3)), tokens=3 * PAGE)
    request.reserve(3)
    request.commit(3, tokens=prompt(3).tobytes(), first=0)
    request.close()
    first.close()
    held = bequeath(first, without=NO_SLOTS)
    storage.clear(NAMESPACE.digest, 1)
    storage.let.clear()
    second = open_hosted(NAMESPACE, host=MmapHostPool(8, page), storage=storage)
    assert inherit(second, held, stored=True) == 3
    storage.let.set()
    assert second.match(wait_for_tree(second), hashes(prompt(3))).pages == 0
    second.check()
    second.close()


def wait_for_tree(cache: HostedCache) -> Scope:
    """The namespace, once storage has told its generation."""
    changed = threading.Event()
    cache.on_change = changed.set
    end = time.monotonic() + 10
    while (scope := cache.scope()) is None or scope.tree is None:
        assert time.monotonic() < end
        changed.wait(0.05)
        changed.clear()
        cache.settle()
    return scope
