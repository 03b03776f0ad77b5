"""A cluster that is resharded, a node of it that dies, a primary that is replaced: nothing wrong, all comes back."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache.storage.base import ObjectStatus, StorageUrl, StoredObject
from hicache.testing.objects import make_chain, make_key, read, status_of
from hicache.testing.proxy import Fault, Proxy
from hicache.testing.servers import Cluster, Server, binaries, sentinel_of
from hicache_redis import RedisBackend

pytestmark = [pytest.mark.chaos, pytest.mark.redis, pytest.mark.slow]

SIZE = 16 * 1024
OK, FAILED = ObjectStatus.OK, ObjectStatus.FAILED
PATIENCE = 30.0
LIMITS = "timeout=0.5&connect_timeout=0.5&deadline=2"


# One server: what its relatives do alike, the conformance suite shows of each, and a failover takes seconds.
@pytest.fixture(params=[pytest.param(name) for name in list(binaries())[:1] or ("none",)])
def binary(request: pytest.FixtureRequest) -> str:
    return binaries()[request.param]


@pytest.fixture
def cluster(binary: str, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(binary, tmp_path / "cluster") as running:
        yield running


def opened(url: str) -> RedisBackend:
    return RedisBackend.from_url(StorageUrl.parse(url))


def until(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, what
        threading.Event().wait(0.05)


class Load:
    """Reads and writes in a thread until it is told to stop; every byte is checked."""

    def __init__(self, backend: RedisBackend, objects: list[StoredObject]) -> None:
        self._backend = backend
        self._objects = objects
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.rounds = 0
        self.wrong = 0
        self.slowest = 0.0
        self.error: BaseException | None = None

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        assert self.error is None
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                start = time.monotonic()
                results = self._backend.put(self._objects)
                self.slowest = max(self.slowest, time.monotonic() - start)
                assert len(results) == len(self._objects)
                buffers = [memoryview(bytearray(SIZE)) for _ in self._objects]
                start = time.monotonic()
                results = self._backend.get_into([stored.key for stored in self._objects], buffers)
                self.slowest = max(self.slowest, time.monotonic() - start)
                self.wrong += sum(
                    result.status is OK and bytes(buffer) != bytes(stored.payload)
                    for stored, buffer, result in zip(self._objects, buffers, results, strict=True)
                )
                self.rounds += 1
        except BaseException as error:
            self.error = error


@pytest.mark.case("REDIS-3")
def test_slots_move_under_load(cluster: Cluster) -> None:
    backend = opened(f"redis+cluster://127.0.0.1:{cluster.servers[0].port}?deadline=20&timeout=20")
    objects = make_chain(48, SIZE)
    slots = sorted(
        {
            int(str(cluster.servers[0].call("CLUSTER", "KEYSLOT", f"hicache:{stored.key.name}"))): stored
            for stored in objects
        }
    )
    first = [slot for slot in slots if slot < Cluster.SLOTS // 3]
    try:
        assert status_of(backend.put(objects)) == [OK] * 48
        with Load(backend, objects) as load:
            cluster.move_slots(first, 0, 1)
            until(lambda: load.rounds > 3, "the load stands still")
        assert load.wrong == 0
        assert status_of(backend.put(objects)) == [OK] * 48
        assert all(read(backend, stored.key, SIZE)[0].status is OK for stored in objects)
        assert backend.contains([stored.key for stored in objects]) == [True] * 48
        # A slot that is half moved: keys that have gone and keys that have not are both found.
        slot = next(slot for slot in slots if slot not in first)
        source = 1 if slot < 2 * Cluster.SLOTS // 3 else 2
        steps = cluster.moving(slot, source, 0)
        assert next(steps) == "open"
        keys = [stored.key for stored in objects]
        assert backend.contains(keys) == [True] * 48
        assert status_of(backend.get_into(keys, [memoryview(bytearray(SIZE)) for _ in keys])) == [OK] * 48
        assert next(steps) == "closed"
        assert backend.touch(keys) == [True] * 48
        assert backend.delete(keys) == [True] * 48
    finally:
        backend.close()


def test_one_look_up_is_one_round_trip_to_each_node_at_the_same_time(binary: str, tmp_path: Path) -> None:
    """All nodes have been asked for all keys before any of them has answered."""
    cluster = Cluster(binary, tmp_path / "cluster")
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(server.address)) for server in cluster.servers]
        for server, proxy in zip(cluster.servers, proxies, strict=True):
            server.announce(proxy.port, server.port + 10_000)
        stack.enter_context(cluster)
        backend = opened(f"redis+cluster://127.0.0.1:{proxies[0].port}?deadline=20&timeout=20&connect_timeout=20")
        stack.callback(backend.close)
        keys = [make_key(i) for i in range(512)]
        assert backend.contains(keys) == [False] * 512
        for server, proxy in zip(cluster.servers, proxies, strict=True):
            server.call("CONFIG", "RESETSTAT")
            proxy.set(Fault(hold_replies=True))
        with ThreadPoolExecutor(1) as caller:
            answers = caller.submit(backend.contains, keys)
            until(lambda: sum(_asked(server) for server in cluster.servers) == 512, "some are asked for later")
            for proxy in proxies:
                proxy.set()
            assert answers.result(PATIENCE) == [False] * 512


def _asked(server: Server) -> int:
    """How many keys it was asked for."""
    with contextlib.suppress(KeyError):
        return int(server.info("commandstats", "cmdstat_exists").split(",")[0].removeprefix("calls="))
    return 0


def test_a_node_that_dies_costs_its_own_keys_only(cluster: Cluster) -> None:
    backend = opened(f"redis+cluster://127.0.0.1:{cluster.servers[0].port}?{LIMITS}")
    objects = make_chain(48, SIZE)
    keys = [stored.key for stored in objects]
    try:
        assert status_of(backend.put(objects)) == [OK] * 48
        lost = int(str(cluster.servers[2].call("DBSIZE")))
        with Load(backend, objects) as load:
            cluster.servers[2].kill()
            before = load.rounds
            until(lambda: load.rounds > before + 5, "the load stands still")
            results = backend.get_into(keys, [memoryview(bytearray(SIZE)) for _ in keys])
            assert status_of(results).count(OK) == 48 - lost
            assert {result.reason for result in results} <= {"", "connection", "clusterdown", "timeout"}
            cluster.servers[2].start()
            cluster.wait_ok()
            until(lambda: status_of(backend.put(objects)) == [OK] * 48, "the node does not come back")
        assert load.wrong == 0
        assert load.slowest < 2 + 1.5
        assert all(read(backend, stored.key, SIZE)[0].status is OK for stored in objects)
    finally:
        backend.close()


def test_a_frozen_node_does_not_hold_up_the_others(cluster: Cluster) -> None:
    backend = opened(f"redis+cluster://127.0.0.1:{cluster.servers[0].port}?{LIMITS}")
    objects = make_chain(48, SIZE)
    keys = [stored.key for stored in objects]
    try:
        assert status_of(backend.put(objects)) == [OK] * 48
        lost = int(str(cluster.servers[1].call("DBSIZE")))
        cluster.servers[1].pause()
        try:
            start = time.monotonic()
            for _ in range(20):
                results = backend.get_into(keys, [memoryview(bytearray(SIZE)) for _ in keys])
                assert status_of(results).count(OK) == 48 - lost
            assert time.monotonic() - start < 20 * 0.5 / 2, "most calls did not wait for it"
            assert backend.touch(keys) == [True] * 48, "nobody knows that they are absent"
        finally:
            cluster.servers[1].resume()
        until(lambda: status_of(backend.put(objects)) == [OK] * 48, "the node does not come back")
    finally:
        backend.close()


def test_a_cluster_that_is_absent_at_start(binary: str, tmp_path: Path) -> None:
    cluster = Cluster(binary, tmp_path / "cluster")
    backend = opened(f"redis+cluster://127.0.0.1:{cluster.servers[0].port}?{LIMITS}")
    objects = make_chain(4, SIZE)
    try:
        assert "cannot be reached" in backend.health.warnings[0]
        assert set(status_of(backend.put(objects))) == {FAILED}
        with cluster:
            until(lambda: status_of(backend.put(objects)) == [OK] * 4, "the cluster is not found")
            assert all(read(backend, stored.key, SIZE)[0].status is OK for stored in objects)
    finally:
        backend.close()


@pytest.mark.case("REDIS-7")
def test_a_sentinel_replaces_the_primary_under_load(binary: str, tmp_path: Path) -> None:
    objects = make_chain(12, SIZE)
    with (
        Server(binary, tmp_path / "primary") as primary,
        Server(binary, tmp_path / "replica", {"replicaof": f"127.0.0.1 {primary.port}"}) as replica,
        sentinel_of(primary, tmp_path / "sentinel", down_after=0.5) as sentinel,
    ):
        until(lambda: replica.info("replication", "master_link_status") == "up", "the replica does not follow")
        until(lambda: _knows_a_replica(sentinel), "the sentinel does not find the replica")
        backend = opened(f"redis+sentinel://127.0.0.1:{sentinel.port}/mymaster/0?{LIMITS}")
        try:
            assert status_of(backend.put(objects)) == [OK] * 12
            with Load(backend, objects) as load:
                primary.kill()
                until(lambda: _leads(replica), "nobody is made the primary")
                until(lambda: status_of(backend.put(objects)) == [OK] * 12, "the new primary is not found")
            assert load.wrong == 0
            assert load.slowest < 2 + 1.5
            assert all(read(backend, stored.key, SIZE)[0].status is OK for stored in objects)
        finally:
            backend.close()


def _leads(server: Server) -> bool:
    with contextlib.suppress(OSError):  # its connections are closed when it is promoted
        return server.info("replication", "role") == "master"
    return False


def _knows_a_replica(sentinel: Server) -> bool:
    found = sentinel.call("SENTINEL", "REPLICAS", "mymaster")
    return isinstance(found, list) and len(found) == 1


def test_a_node_that_is_full_does_not_stop_the_others(cluster: Cluster) -> None:
    full = cluster.servers[0]
    full.call("CONFIG", "SET", "maxmemory", int(full.info("memory", "used_memory")) // 2)
    backend = opened(f"redis+cluster://127.0.0.1:{full.port}?deadline=20&timeout=20&window=1")
    try:
        results = backend.put(make_chain(48, SIZE))
        assert {result.reason for result in results} == {"", "oom"}
        held = sum(int(str(node.call("DBSIZE"))) for node in cluster.servers[1:])
        assert status_of(results).count(OK) == held > 16
        assert full.call("DBSIZE") == 0
    finally:
        backend.close()
