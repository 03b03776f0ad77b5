"""Real servers: what is refused and told when opening, TLS, users, clearing, survival of what is used."""

from __future__ import annotations

import logging
import os
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

import hicache
from hicache.cli import main
from hicache.errors import ConfigError, InvalidInput, StorageUnavailable
from hicache.storage.base import ObjectStatus, StorageBackend, StorageUrl
from hicache.storage.fsck import check_storage
from hicache.testing.certificates import make_certificates
from hicache.testing.objects import NAMESPACE, make_chain, make_key, make_object, pattern, read, status_of
from hicache.testing.servers import Cluster, Server, binaries, free_port, has_tls, sentinel_of
from hicache_redis import RedisBackend

pytestmark = pytest.mark.redis

SIZE = 16 * 1024
OK = ObjectStatus.OK
SECRET = "hunter2-should-never-be-seen"
Open = Callable[[str], RedisBackend]
KINDS = [pytest.param(name) for name in binaries() or ("none",)]


@pytest.fixture(params=KINDS)
def binary(request: pytest.FixtureRequest) -> str:
    return binaries()[request.param]


@pytest.fixture
def server(binary: str, tmp_path: Path) -> Iterator[Server]:
    with Server(binary, tmp_path / "server", {"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"}) as running:
        yield running


@pytest.fixture
def open_url() -> Iterator[Open]:
    opened: list[RedisBackend] = []

    def make(url: str) -> RedisBackend:
        opened.append(RedisBackend.from_url(StorageUrl.parse(url)))
        return opened[-1]

    yield make
    for backend in opened:
        backend.close()


def moves_objects(backend: StorageBackend, count: int = 4) -> None:
    objects = make_chain(count, SIZE)
    keys = [stored.key for stored in objects]
    assert status_of(backend.put(objects)) == [OK] * count
    assert backend.contains(keys) == [True] * count
    assert backend.touch(keys) == [True] * count
    assert all(bytes(read(backend, stored.key, SIZE)[1]) == bytes(stored.payload) for stored in objects)
    assert backend.delete(keys) == [True] * count


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(url: str) -> str:
    """The one line, which never has the secret."""
    with pytest.raises(ConfigError) as caught:
        RedisBackend.from_url(StorageUrl.parse(url))
    text = str(caught.value)
    assert "\n" not in text
    chain: BaseException | None = caught.value
    while chain is not None:
        assert SECRET not in repr(chain)
        chain = chain.__cause__ if chain.__cause__ or chain.__suppress_context__ else chain.__context__
    return text


def test_wrong_passwords_databases_and_modes_are_one_line(server: Server, tmp_path: Path) -> None:
    place = f"127.0.0.1:{server.port}"
    assert "is no cluster" in refused(f"redis+cluster://{place}")
    assert "is no sentinel" in refused(f"redis+sentinel://{place}/mymaster/0")
    assert "no database 99" in refused(f"redis://{place}/99")
    assert "refuses the user or password" in refused(f"redis://someone:{SECRET}@{place}/0")
    server.call("ACL", "SETUSER", "default", "resetpass", ">right")
    assert "refuses the user or password" in refused(f"redis://:{SECRET}@{place}/0")
    assert "refuses the user or password" in refused(f"redis://{place}/0")
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    assert "refuses the user or password" in refused(f"redis://{place}/0?password_file={file}")


def test_a_node_of_a_cluster_is_no_single_server(binary: str, tmp_path: Path) -> None:
    with Server(binary, tmp_path / "node", {"cluster-enabled": "yes"}) as node:
        assert "is a node of a cluster: write redis+cluster://" in refused(f"redis://127.0.0.1:{node.port}/0")


class _OldServer(socketserver.StreamRequestHandler):
    """Answers as a Redis of long ago would."""

    info = b"redis_version:5.0.14\r\nredis_mode:standalone\r\nrole:master\r\n"

    def handle(self) -> None:
        while (line := self.rfile.readline()).startswith(b"*"):
            words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
            known = words[0].upper() == b"INFO"
            self.wfile.write(b"$%d\r\n%b\r\n" % (len(self.info), self.info) if known else b"-ERR unknown command\r\n")


def test_a_server_that_is_too_old(capsys: pytest.CaptureFixture[str]) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _OldServer) as old:
        old.daemon_threads = True
        thread = threading.Thread(target=old.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            url = f"redis://127.0.0.1:{old.server_address[1]}/0"
            assert "is Redis 5.0.14: hicache needs 6.0 or newer" in refused(url)
            assert main(["fsck", url]) == 2
            assert capsys.readouterr().err.count("\n") == 1
        finally:
            old.shutdown()
            thread.join()


def test_a_user_who_may_too_little_is_told(server: Server) -> None:
    server.call("ACL", "SETUSER", "reader", "on", ">pass", "~other:*", "+@all")
    assert "the user may not do what is needed" in refused(f"redis://reader:pass@127.0.0.1:{server.port}/0")


def test_a_user_with_just_the_rights_of_the_readme(server: Server, open_url: Open) -> None:
    rights = "+@read +@write +@connection +info +eval +scan +config|get"
    server.call("ACL", "SETUSER", "kv", "on", ">pass", "~hicache:*", *rights.split())
    backend = open_url(f"redis://kv:pass@127.0.0.1:{server.port}/0")
    moves_objects(backend)
    backend.clear(NAMESPACE, 1)
    assert backend.generation(NAMESPACE) == 1
    backend.write_manifest(NAMESPACE, b"{}")
    assert backend.read_manifests() == {NAMESPACE: b"{}"}
    assert backend.wait_swept(10)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"maxmemory": "0"}, "no maxmemory"),
        ({"maxmemory-policy": "noeviction"}, "noeviction"),
        ({"maxmemory-policy": "volatile-lru"}, "add ttl=7d"),
        ({"maxmemory-policy": "allkeys-random"}, "use an lru or lfu one"),
        ({"maxmemory": "100mb"}, "less than the pages"),
        ({"client-output-buffer-limit": "normal 1mb 0 0"}, "client-output-buffer-limit"),
        ({"proto-max-bulk-len": "2mb"}, "proto-max-bulk-len"),
        ({"appendonly": "yes"}, "persists"),
        ({"replicaof": "127.0.0.1 1"}, "replica"),
    ],
)
def test_settings_that_would_hurt_are_told(
    server: Server, open_url: Open, settings: dict[str, str], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hicache.storage.redis"):
        assert open_url(f"redis://127.0.0.1:{server.port}/0").health.warnings == ()
        assert caplog.messages == []
        for name, value in settings.items():
            if name == "replicaof":
                server.call("REPLICAOF", *value.split())
            else:
                server.call("CONFIG", "SET", name, value)
        (warning,) = open_url(f"redis://127.0.0.1:{server.port}/0").health.warnings
    assert text in warning
    assert len(caplog.messages) == 1
    server.call("CONFIG", "SET", "appendonly", "no")  # while it writes its first file, it does not end
    server.kill()  # one that writes its first append-only file does not end when it is asked to


def test_a_maxmemory_below_what_is_asked_of_it_is_told(
    binary: str, tmp_path: Path, open_url: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """By what the server has evicted; and by the host tier of the cache that opens it."""
    with Server(binary, tmp_path / "small", {"maxmemory": "300mb", "maxmemory-policy": "allkeys-lru"}) as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        backend = open_url(url)
        assert backend.health.warnings == ()
        server.call("CONFIG", "SET", "maxmemory", "8mb")
        for step in range(20):
            backend.put([make_object(make_key(20 * step + i), bytes(SIZE * 4)) for i in range(20)])
        server.call("CONFIG", "SET", "maxmemory", "300mb")
        (warning,) = open_url(url).health.warnings
        assert "smaller than what is asked of it" in warning
        server.call("FLUSHALL")
        server.call("CONFIG", "RESETSTAT")
        geometry = hicache.KVGeometry.opaque(engine="t", backend="t", version="1", shape="pages", page_bytes=1 << 20)
        namespace = hicache.Namespace(model="m", revision="1", geometry=geometry, page_size=4)
        for host, told in ((299, 0), (301, 1)):
            caplog.clear()
            with (
                caplog.at_level(logging.WARNING, logger="hicache.runtime"),
                hicache.open(namespace, device=4, host=host, storage=url, canary=False),
            ):
                assert sum("one namespace's working set" in text for text in caplog.messages) == told


def test_what_is_longer_than_the_server_takes_is_refused_before_it_is_sent(server: Server, open_url: Open) -> None:
    server.call("CONFIG", "SET", "proto-max-bulk-len", 1 << 20)
    backend = open_url(f"redis://127.0.0.1:{server.port}/0")
    large = make_object(make_key(1), bytes(1 << 20))
    small = make_object(make_key(2), bytes(1000))
    results = backend.put([large, small])
    assert [(result.status.value, result.reason) for result in results] == [("failed", "too_large"), ("ok", "")]


def test_the_secret_is_shown_nowhere(server: Server, caplog: pytest.LogCaptureFixture, open_url: Open) -> None:
    server.call("ACL", "SETUSER", "kv", "on", f">{SECRET}", "~*", "+@all")
    with caplog.at_level(logging.DEBUG):
        backend = open_url(f"redis://kv:{SECRET}@127.0.0.1:{server.port}/0?timeout=0.2")
        moves_objects(backend)
        server.kill()
        with pytest.raises(StorageUnavailable) as caught:
            backend.contains([make_key(1)])
    seen = [repr(backend.settings), backend.settings.shown, repr(caught.value), repr(backend.statistics()), caplog.text]
    assert not any(SECRET in text for text in seen)


# --- ways to a server -------------------------------------------------------------------------------------------------


@pytest.mark.redis_tls
def test_tls_with_client_certificates(tmp_path: Path, open_url: Open) -> None:
    binary = next(binary for binary in binaries().values() if has_tls(binary))
    made = make_certificates(tmp_path / "tls")
    others = make_certificates(tmp_path / "others")
    port = free_port()
    options = {
        "tls-port": str(port),
        "tls-cert-file": str(made.server),
        "tls-key-file": str(made.server_key),
        "tls-ca-cert-file": str(made.ca),
        "tls-auth-clients": "yes",
    }
    with Server(binary, tmp_path / "server", options):
        place = f"rediss://127.0.0.1:{port}/0"
        mine = f"ca={made.ca}&cert={made.client}&key={made.client_key}"
        moves_objects(open_url(f"{place}?{mine}"), 8)
        moves_objects(open_url(f"{place}?{mine}&protocol=3&window=1"), 8)
        assert "TLS failed" in refused(f"{place}?ca={others.ca}&cert={made.client}&key={made.client_key}")
        assert "TLS failed" in refused(place)
        assert "TLS failed" in refused(f"{place}?ca={made.ca}&cert={others.client}&key={others.client_key}")
        assert "TLS failed" in refused(f"{place}?ca={made.ca}")


def test_a_port_without_tls(server: Server, open_url: Open) -> None:
    """What a server makes of a handshake depends on chance: it is refused, or told as one that does not answer."""
    url = f"rediss://127.0.0.1:{server.port}/0?timeout=0.2&connect_timeout=0.2"
    try:
        told = open_url(url).health.warnings[0]
    except ConfigError as error:
        told = str(error)
    assert "TLS" in told


@pytest.mark.case("REDIS-3")
@pytest.mark.slow
def test_keys_of_a_chain_spread_over_the_nodes_of_a_cluster(binary: str, tmp_path: Path, open_url: Open) -> None:
    with Cluster(binary, tmp_path / "cluster") as cluster:
        backend = open_url(f"redis+cluster://127.0.0.1:{cluster.servers[0].port}")
        objects = make_chain(64, SIZE)
        assert status_of(backend.put(objects)) == [OK] * 64
        assert all(node.call("DBSIZE") for node in cluster.servers)
        assert sum(int(str(node.call("DBSIZE"))) for node in cluster.servers) == 64
        moves_objects(backend, 64)
        backend.put(objects)
        backend.write_manifest(NAMESPACE, b"{}")
        assert backend.read_manifests() == {NAMESPACE: b"{}"}
        result = check_storage(backend)
        assert (result.objects, result.ok, result.foreign) == (64, 64, 0)
        backend.clear(NAMESPACE, 7)
        assert backend.generation(NAMESPACE) == 7
        assert backend.wait_swept(20)
        assert check_storage(backend).objects == 0
        assert min(backend.raw_loop([memoryview(bytes(SIZE))] * 8, [memoryview(bytearray(SIZE))] * 8)) > 0


@pytest.mark.slow
def test_a_sentinel_names_the_primary(binary: str, tmp_path: Path, open_url: Open) -> None:
    with Server(binary, tmp_path / "primary") as primary, sentinel_of(primary, tmp_path / "sentinel") as sentinel:
        moves_objects(open_url(f"redis+sentinel://127.0.0.1:{sentinel.port}/mymaster/0"))
        assert "know no service 'other'" in refused(f"redis+sentinel://127.0.0.1:{sentinel.port}/other/0")
        assert "is a sentinel" in refused(f"redis://127.0.0.1:{sentinel.port}/0")
        nodes = f"nodes=127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}&connect_timeout=0.5"
        moves_objects(open_url(f"redis+sentinel://127.0.0.1:{free_port()}/mymaster/0?{nodes}"))


# --- clearing and generations -----------------------------------------------------------------------------------------


@pytest.mark.case("REDIS-8")
@pytest.mark.parametrize("prefix", ["a*", "a[b]", "ab", "a?", "a\\"])
def test_clear_removes_only_its_own(server: Server, open_url: Open, prefix: str) -> None:
    prefixes = ["a*", "a[b]", "ab", "a?", "a\\"]
    place = f"redis://127.0.0.1:{server.port}/0?prefix="
    backends = {each: open_url(place + _quoted(each)) for each in prefixes}
    mine = make_chain(5, 100)
    others = [make_object(make_key(i, namespace=bytes(16)), pattern(i, 100)) for i in range(5)]
    for backend in backends.values():
        backend.put([*mine, *others])
    foreign = [f"{prefix}:{NAMESPACE.hex()}/0/foreign", f"{prefix}:{NAMESPACE.hex()}", "somebody:else", f"{prefix}:x"]
    for name in foreign:
        server.call("SET", name, "value")
    backends[prefix].clear(NAMESPACE, 1)
    assert backends[prefix].wait_swept(20)
    for each, backend in backends.items():
        assert backend.contains([stored.key for stored in mine]) == [each != prefix] * 5
        assert backend.contains([stored.key for stored in others]) == [True] * 5
    assert server.call("EXISTS", *foreign) == len(foreign)


def _quoted(text: str) -> str:
    return quote(text)


@pytest.mark.case("REDIS-8")
@pytest.mark.slow
@pytest.mark.alone
def test_a_large_clear_never_holds_the_server_up(server: Server, open_url: Open) -> None:
    backend = open_url(f"redis://127.0.0.1:{server.port}/0")
    name = f"hicache:{make_key(0).name}"
    start, _, rest = name.partition(make_key(0).page_hash.hex())
    script = "for i = 1, 50000 do redis.call('SET', ARGV[1] .. string.format('%032x', i) .. ARGV[2], 'x') end"
    server.call("EVAL", script, 0, start, rest)
    server.call("SET", "foreign", "x")
    server.call("CONFIG", "SET", "slowlog-log-slower-than", 50_000)
    server.call("SLOWLOG", "RESET")
    backend.clear(NAMESPACE, 1)
    assert backend.wait_swept(60)
    assert server.call("SLOWLOG", "LEN") == 0
    assert server.call("DBSIZE") == 2, "the generation, and what is not ours"


def test_generations_are_exact_and_outlive_their_eviction(server: Server, open_url: Open) -> None:
    backend = open_url(f"redis://127.0.0.1:{server.port}/0")
    highest = 2**64 - 1
    backend.clear(NAMESPACE, highest - 1)
    backend.clear(NAMESPACE, highest)
    backend.clear(NAMESPACE, 9)
    assert backend.generation(NAMESPACE) == highest
    name = f"hicache:generation/{NAMESPACE.hex()}"
    server.call("DEL", name)
    assert backend.generation(NAMESPACE) == highest
    assert server.call("GET", name) == str(highest).encode()
    server.call("SET", name, "nonsense")
    with pytest.raises(StorageUnavailable, match="no generation"):
        backend.generation(NAMESPACE)
    with pytest.raises(InvalidInput, match="manifest"):
        backend.write_manifest(NAMESPACE, bytes(64 * 1024 + 1))


def test_writes_of_an_ended_generation_are_refused(server: Server, open_url: Open) -> None:
    one, two = (open_url(f"redis://127.0.0.1:{server.port}/0") for _ in range(2))
    two.clear(NAMESPACE, 1)
    (result,) = one.put(make_chain(1, SIZE))
    assert result.reason == "cleared"


# --- keeping what is used ---------------------------------------------------------------------------------------------


def test_objects_expire_after_their_last_use(server: Server, open_url: Open) -> None:
    backend = open_url(f"redis://127.0.0.1:{server.port}/0?ttl=100")
    assert backend.statistics().ttl == 100
    one, two = make_chain(2, SIZE)
    names = [f"hicache:{stored.key.name}" for stored in (one, two)]
    backend.put([one, two])
    for refresh in (lambda: backend.touch([one.key]), lambda: backend.put([one])):
        for name in names:
            assert 90 < int(str(server.call("TTL", name))) <= 100
            server.call("EXPIRE", name, 50)
        refresh()
        assert [int(str(server.call("TTL", name))) > 90 for name in names] == [True, False]
        server.call("EXPIRE", names[1], 100)
    server.call("PEXPIRE", names[0], 1)
    end = time.monotonic() + 10
    while backend.contains([one.key])[0]:
        assert time.monotonic() < end
    assert not backend.touch([one.key])[0]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_hot_prefix_survives_three_times_maxmemory(tmp_path: Path, open_url: Open, policy: str) -> None:
    binary = next(iter(binaries().values()))
    options = {"maxmemory": "24mb", "maxmemory-policy": policy, "maxmemory-samples": "10"}
    with Server(binary, tmp_path / "small", options) as server:
        backend = open_url(f"redis://127.0.0.1:{server.port}/0?ttl=1h")
        hot = make_chain(16, SIZE * 4)
        assert status_of(backend.put(hot)) == [OK] * 16
        keys = [stored.key for stored in hot]
        lost = 0
        for step in range(72):
            cold = [make_object(make_key(1000 + 16 * step + i), pattern(i, SIZE * 4)) for i in range(16)]
            backend.put(cold)
            there = backend.touch(keys[::-1])[::-1]  # leaf to root, as the runtime does
            lost += there.count(False)
            backend.put([stored for stored, here in zip(hot, there, strict=True) if not here])  # healing
            if step % 24 == 0:  # the server counts recency in whole seconds
                _next_second(server)
        assert backend.statistics().by_reason.get("oom", 0) == 0
        assert int(server.info("stats", "evicted_keys")) > 600
        fresh = open_url(f"redis://127.0.0.1:{server.port}/0?ttl=1h")
        held = [read(fresh, stored.key, SIZE * 4)[0].status is OK for stored in hot]
        assert sum(held) >= 14, (held, lost)
        assert held[0], "the head of the chain"


def _next_second(server: Server) -> None:
    """Wait for the server's clock, in which recency counts, to go on."""
    before = server.info("server", "lru_clock")
    end = time.monotonic() + 10
    while server.info("server", "lru_clock") == before:
        assert time.monotonic() < end


def test_what_the_server_evicts_between_look_and_read_is_a_miss(server: Server, open_url: Open) -> None:
    backend = open_url(f"redis://127.0.0.1:{server.port}/0")
    (stored,) = make_chain(1, SIZE)
    backend.put([stored])
    assert backend.contains([stored.key]) == [True]
    server.call("FLUSHALL")
    result, _ = read(backend, stored.key, SIZE)
    assert (result.status, result.reason) == (ObjectStatus.MISSING, "absent")


def test_statistics_know_the_server(server: Server, open_url: Open) -> None:
    backend = open_url(f"redis://127.0.0.1:{server.port}/0")
    assert backend.statistics().capacity == 1 << 30
    (facts,) = backend.health.nodes().values()
    assert facts.policy == "allkeys-lru"
    assert facts.largest_value == 512 << 20


def test_a_fork_may_not_use_its_parents_connections(
    server: Server, open_url: Open, monkeypatch: pytest.MonkeyPatch
) -> None:

    backend = open_url(f"redis://127.0.0.1:{server.port}/0")
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    with pytest.raises(Exception, match="forked process"):
        backend.contains([make_key(1)])
    monkeypatch.undo()
