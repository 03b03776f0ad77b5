"""Reading and writing much takes no memory beside the pools: bytes go straight between sockets and slots."""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

import hicache
from hicache.storage.base import ObjectStatus, StorageUrl
from hicache.testing.engine import FakeEngine, prompt
from hicache.testing.objects import make_key, make_object, status_of
from hicache.testing.servers import Server, binaries
from hicache_redis import RedisBackend

pytestmark = [pytest.mark.redis, pytest.mark.slow]

GIB = 1 << 30
MOST = 16 << 20
OK = ObjectStatus.OK
PATIENT = "deadline=60&timeout=60&connect_timeout=60"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    options = {"maxmemory": "2gb", "maxmemory-policy": "allkeys-lru"}
    with Server(next(iter(binaries().values())), tmp_path / "server", options) as running:
        yield running


@contextlib.contextmanager
def allocates_little() -> Iterator[None]:
    """What is done within takes little more memory, as the system and as Python count it."""
    tracemalloc.start()
    before = resident()
    try:
        yield
        grown, (_, peak) = resident() - before, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST
    assert grown < MOST


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_objects(server: Server) -> None:
    backend = RedisBackend.from_url(StorageUrl.parse(f"redis://127.0.0.1:{server.port}/0?{PATIENT}"))
    size, count = 4 << 20, 8
    objects = [make_object(make_key(i), bytes([i]) * size) for i in range(count)]
    keys = [stored.key for stored in objects]
    buffers = [memoryview(bytearray(size)) for _ in keys]
    try:
        assert status_of(backend.put(objects)) == [OK] * count
        assert status_of(backend.get_into(keys, buffers)) == [OK] * count
        with allocates_little():
            for _ in range(GIB // (size * count)):
                assert status_of(backend.get_into(keys, buffers)) == [OK] * count
        with allocates_little():
            for _ in range(4):
                server.call("FLUSHALL")
                assert status_of(backend.put(objects)) == [OK] * count
    finally:
        backend.close()


def test_pages_of_a_cache(server: Server) -> None:
    """Prompts that are larger than both pools together, read in turn: all of them come from Redis, again and again."""
    page = 1 << 20
    geometry = hicache.KVGeometry.opaque(engine="test", backend="test", version="1", shape="pages", page_bytes=page)
    namespace = hicache.Namespace(model="test", revision="1", geometry=geometry, page_size=4)
    prompts = [prompt(number, 4 * 40 + 1) for number in range(4)]
    url = f"redis://127.0.0.1:{server.port}/0?{PATIENT}"
    with hicache.open(
        namespace, device=48, host=48, storage=url, prefetch="wait_complete", canary=False, call_timeout=60.0
    ) as cache:
        engine = FakeEngine(cache)
        for tokens in prompts:
            engine.run(tokens)
            assert cache.flush()
        for tokens in prompts:
            assert engine.run(tokens).storage > 0
        before = cache.statistics().bytes_from_storage
        with allocates_little():
            while cache.statistics().bytes_from_storage - before < GIB:
                for tokens in prompts:
                    with cache.request(tokens) as request:
                        assert len(request.load()) == 40
        cache.check()
