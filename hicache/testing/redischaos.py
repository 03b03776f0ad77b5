"""What happens to Redis: servers behind proxies, and all the trouble that they and the way to them can be in."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from hicache.testing.certificates import make_certificates
from hicache.testing.chaos import Step
from hicache.testing.proxy import Fault, Proxy
from hicache.testing.servers import Cluster, Server, free_port, sentinel_of

__all__ = ["Place", "cluster_place", "sentinel_place", "single_place", "tls_place"]

PATIENCE: Final = 30.0
_BUS: Final = 10_000  # from a node's port to that of its cluster bus


@dataclass(frozen=True, slots=True)
class Place:
    """Running servers, and what can be done to them.

    Attributes:
        url: names them; further parameters may be put behind it with "&".
        steps: the trouble, in an order in which each finds the servers well.
    """

    url: str
    steps: tuple[Step, ...]


@contextlib.contextmanager
def single_place(binary: str, folder: Path, *, maxmemory: int, hold: float, freeze: float) -> Iterator[Place]:
    """One server behind a proxy.

    Args:
        binary: of the server.
        folder: an empty one.
        maxmemory: of the server, in bytes; it evicts by `allkeys-lru`.
        hold: seconds for which most trouble lasts.
        freeze: seconds for which the server is frozen.
    """
    with Server(binary, folder, _settings(maxmemory)) as server, Proxy(server.address) as proxy:
        steps = _all_steps([server], [proxy], maxmemory=maxmemory, hold=hold, freeze=freeze)
        yield Place(f"redis://127.0.0.1:{proxy.port}/0?prefix=chaos", tuple(steps))


@contextlib.contextmanager
def tls_place(binary: str, folder: Path, *, maxmemory: int, hold: float, freeze: float) -> Iterator[Place]:
    """As `single_place`, by TLS with a certificate on both sides."""
    made = make_certificates(folder / "tls")
    port = free_port()
    settings = _settings(maxmemory) | {
        "tls-port": str(port),
        "tls-cert-file": str(made.server),
        "tls-key-file": str(made.server_key),
        "tls-ca-cert-file": str(made.ca),
        "tls-auth-clients": "yes",
    }
    with Server(binary, folder / "server", settings) as server, Proxy(("127.0.0.1", port)) as proxy:
        steps = _all_steps([server], [proxy], maxmemory=maxmemory, hold=hold, freeze=freeze)
        mine = f"ca={made.ca}&cert={made.client}&key={made.client_key}"
        yield Place(f"rediss://127.0.0.1:{proxy.port}/0?prefix=chaos&{mine}", tuple(steps))


@contextlib.contextmanager
def cluster_place(binary: str, folder: Path, *, maxmemory: int, hold: float, freeze: float) -> Iterator[Place]:
    """Three nodes, each behind a proxy under whose port it is known; also moves slots and kills one node."""
    cluster = Cluster(binary, folder, options=_settings(maxmemory // 3))
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(server.address)) for server in cluster.servers]
        for server, proxy in zip(cluster.servers, proxies, strict=True):
            server.announce(proxy.port, server.port + _BUS)
        stack.enter_context(cluster)
        steps = _all_steps(
            cluster.servers, proxies, maxmemory=maxmemory // 3, hold=hold, freeze=freeze, ready=cluster.wait_ok
        )
        one, two = cluster.servers[1], cluster.servers[2]
        moved = itertools.count()

        def move() -> None:
            # A batch of neighbours from the first node to the second, while all of them are read and written.
            first = 16 * next(moved)
            cluster.move_slots(range(first, first + 16), 0, 1)

        def revive(server: Server) -> None:
            server.start()
            cluster.wait_ok()

        steps += [
            Step("slots move", move, hold, again=move),
            Step("one node is killed", two.kill, hold, lambda: revive(two)),
            Step("one node is frozen", one.pause, freeze, one.resume),
        ]
        nodes = ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies[1:])
        yield Place(f"redis+cluster://127.0.0.1:{proxies[0].port}?prefix=chaos&nodes={nodes}", tuple(steps))


@contextlib.contextmanager
def sentinel_place(binary: str, folder: Path, *, maxmemory: int) -> Iterator[Place]:
    """A primary with a replica, and a sentinel that replaces it when it is killed."""
    with (
        Server(binary, folder / "primary", _settings(maxmemory)) as primary,
        Server(
            binary, folder / "replica", _settings(maxmemory) | {"replicaof": f"127.0.0.1 {primary.port}"}
        ) as replica,
        sentinel_of(primary, folder / "sentinel", down_after=0.5) as sentinel,
    ):
        _until(lambda: replica.info("replication", "master_link_status") == "up")
        _until(lambda: _replicas(sentinel) == 1)

        def promoted() -> None:
            _until(lambda: _named(sentinel) == replica.port)

        step = Step("failover", primary.kill, 0.0, promoted)
        yield Place(f"redis+sentinel://127.0.0.1:{sentinel.port}/mymaster/0?prefix=chaos", (step,))


def _settings(maxmemory: int) -> dict[str, str]:
    return {"maxmemory": str(maxmemory), "maxmemory-policy": "allkeys-lru", "maxmemory-samples": "10"}


def _all_steps(
    servers: Sequence[Server],
    proxies: Sequence[Proxy],
    *,
    maxmemory: int,
    hold: float,
    freeze: float,
    ready: Callable[[], object] = lambda: None,
) -> list[Step]:
    draw = random.Random(1)  # noqa: S311  places of faults

    def all_of(work: Callable[[Server], object]) -> Callable[[], object]:
        return lambda: [work(server) for server in servers]

    def configure(policy: str, limit: Callable[[Server], int]) -> Callable[[], object]:
        def one(server: Server) -> None:
            server.call("CONFIG", "SET", "maxmemory-policy", policy)
            server.call("CONFIG", "SET", "maxmemory", limit(server))

        return all_of(one)

    def half(server: Server) -> int:
        return int(server.info("memory", "used_memory")) // 2

    def start() -> None:
        for server in servers:
            server.start()
        ready()

    def on_the_way(name: str, make: Callable[[], Fault], lasts: float = hold, *, renew: bool = False) -> Step:
        def spoil() -> None:
            for proxy in proxies:
                proxy.set(make())

        def restore() -> None:
            for proxy in proxies:
                proxy.set()

        return Step(name, spoil, lasts, restore, spoil if renew else lambda: None)

    as_it_was = configure("allkeys-lru", lambda _: maxmemory)
    return [
        Step("killed and restarted", all_of(lambda server: server.kill()), hold, start, loses=True),
        Step("frozen", all_of(lambda server: server.pause()), freeze, all_of(lambda server: server.resume())),
        Step("connections killed", partial(_strike, servers), hold, again=all_of(_kill_connections)),
        Step("full, noeviction", configure("noeviction", half), hold, as_it_was),
        Step("full, allkeys-lru", configure("allkeys-lru", half), hold, as_it_was),
        Step("FLUSHALL", all_of(lambda server: server.call("FLUSHALL")), 0.0, loses=True),
        on_the_way("cut after forwarding", lambda: Fault(cut_reply=0)),
        on_the_way("cut before forwarding", lambda: Fault(cut_request=5000)),
        on_the_way("delayed by 2 s", lambda: Fault(delay=2.0), max(hold, 1.0)),
        on_the_way("truncated", lambda: Fault(cut_reply=draw.randrange(1000, 300_000)), renew=True),
        on_the_way("bits flipped", lambda: Fault(flip=draw.randrange(300_000)), renew=True),
    ]


def _strike(servers: Sequence[Server]) -> None:
    """Kill the connections of clients, of which there must be some.

    A client that uses none of them just then opens them again, and nothing fails: that it was struck, the servers know.
    """
    if not sum(_kill_connections(server) for server in servers):
        raise RuntimeError("no connection was open that could be killed: this step would show nothing")


def _kill_connections(server: Server) -> int:
    """Returns how many there were."""
    killed = server.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert isinstance(killed, int)
    return killed


def _replicas(sentinel: Server) -> int:
    found = sentinel.call("SENTINEL", "REPLICAS", "mymaster")
    return len(found) if isinstance(found, list) else 0


def _named(sentinel: Server) -> int:
    """Port of the primary, as the sentinel says."""
    found = sentinel.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster")
    return int(found[1]) if isinstance(found, list) and isinstance(found[1], bytes) else 0


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > end:
            raise TimeoutError("the servers do not come together")
        time.sleep(0.01)
