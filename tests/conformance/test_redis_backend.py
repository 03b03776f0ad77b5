"""The Redis backend keeps the contract: on each server that is here, over TCP and a Unix socket, and on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from hicache.core.keys import ObjectKey
from hicache.storage.base import StorageBackend, StorageUrl
from hicache.storage.registry import open_storage
from hicache.testing.servers import Cluster, RespError, Server, binaries
from hicache.testing.storage import StorageBackendTests
from hicache.testing.wrapped import WRAPPERS
from hicache_redis import RedisBackend

PREFIX = "t"
SERVERS = [pytest.param(name, marks=pytest.mark.redis) for name in binaries() or ("none",)]


class RedisTests(StorageBackendTests):
    parameters: ClassVar[str] = "deadline=20&timeout=20&connect_timeout=20"
    nodes: ClassVar[int] = 1
    servers: list[Server]

    def setup_method(self) -> None:
        pass  # the server comes first

    @pytest.fixture(autouse=True)
    def opened(self, running: list[Server]) -> None:
        self.servers = running
        for server in running:
            server.call("FLUSHALL")
        self.backend = self.make_backend()

    def url(self) -> str:
        return f"redis://127.0.0.1:{self.servers[0].port}/0?prefix={PREFIX}&{self.parameters}"

    def make_backend(self) -> StorageBackend:
        return RedisBackend.from_url(StorageUrl.parse(self.url()))

    def reopen(self) -> StorageBackend:
        self.backend.close()
        return self.make_backend()

    def call_anywhere(self, *words: str | bytes | int) -> None:
        (server,) = self.servers
        server.call(*words)

    def corrupt(self, key: ObjectKey) -> bool:
        self.call_anywhere("SETRANGE", f"{PREFIX}:{key.name}", 4096, "spoilt")
        return True

    def plant(self, key: ObjectKey, header: bytes, payload: bytes) -> bool:
        self.call_anywhere("SET", f"{PREFIX}:{key.name}", header + payload)
        return True


def start(request: pytest.FixtureRequest, folder: Path) -> Iterator[list[Server]]:
    binary = binaries()[request.param]
    if request.cls.nodes > 1:
        with Cluster(binary, folder, nodes=request.cls.nodes) as cluster:
            yield cluster.servers
    else:
        with Server(binary, folder) as server:
            yield [server]


@pytest.fixture(scope="class", params=SERVERS)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    yield from start(request, tmp_path_factory.mktemp("r"))


@pytest.fixture(scope="class", params=SERVERS[:1])
def one_running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    yield from start(request, tmp_path_factory.mktemp("r"))


class TestRedisBackend(RedisTests):
    pass


class TestUnixSocket(RedisTests):
    def url(self) -> str:
        return f"redis:///3?socket={self.servers[0].unix}&prefix={PREFIX}&{self.parameters}"

    def call_anywhere(self, *words: str | bytes | int) -> None:
        raise NotImplementedError

    def corrupt(self, key: ObjectKey) -> bool:
        del key
        return False  # the tools write to database 0

    def plant(self, key: ObjectKey, header: bytes, payload: bytes) -> bool:
        del key, header, payload
        return False


class TestSmallWindowAndTtl(RedisTests):
    """One object under way at a time, and every object with an expiry, by the newer protocol."""

    parameters = "deadline=20&timeout=20&connect_timeout=20&window=1&ttl=1h&connections=2&protocol=3"


class TestByUrl(RedisTests):
    def make_backend(self) -> StorageBackend:
        return open_storage(self.url())


class TestClusterBackend(RedisTests):
    nodes = 3

    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.servers[1].port}?prefix={PREFIX}&{self.parameters}"

    def call_anywhere(self, *words: str | bytes | int) -> None:
        for server in self.servers:
            try:
                server.call(*words)
            except RespError as error:
                if "MOVED" not in str(error):
                    raise


class InWrappers(RedisTests):
    """On one of the servers: wrappers do not know which it is."""

    def wrap(self, wrapper: str, servers: list[Server]) -> None:
        self.wrapper = WRAPPERS[wrapper]
        self.servers = servers
        for server in servers:
            server.call("FLUSHALL")
        self.backend = self.make_backend()

    def make_backend(self) -> StorageBackend:
        return self.wrapper(RedisBackend.from_url(StorageUrl.parse(self.url())))


class TestInEachWrapper(InWrappers):
    @pytest.fixture(autouse=True, params=WRAPPERS)
    def opened(self, request: pytest.FixtureRequest, one_running: list[Server]) -> None:
        self.wrap(request.param, one_running)


class TestClusterInAllWrappers(InWrappers, TestClusterBackend):
    """One in the other, as a cache has them; what each does alone, one server, files and memory show."""

    @pytest.fixture(autouse=True)
    def opened(self, one_running: list[Server]) -> None:
        self.wrap("all of them", one_running)
