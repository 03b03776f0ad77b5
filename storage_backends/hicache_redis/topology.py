"""Where a key lives: one server, the primary that sentinels name, or the node of a cluster that serves its slot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from redis import cluster, sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError
from redis.retry import Retry

from .channel import Deadline
from .pool import Gate, NodePool, connection_of
from .settings import Address, Mode, RedisSettings
from .trouble import Trouble, reason_of_error

__all__ = ["ClusterNodes", "SentinelPrimary", "SingleServer", "Topology", "make_topology"]

# redis-py has types for some parts, and for others in each version: for the checker these classes are anything.
_Cluster: Any = cluster.RedisCluster
_ClusterNode: Any = cluster.ClusterNode
_Sentinel: Any = sentinel.Sentinel

Groups = list[tuple[NodePool, list[int]]]
"""Node by node, the indexes of the keys that it serves."""


class Topology(Protocol):
    """Finds nodes. Thread-safe."""

    redirects: frozenset[str]
    """Words of error replies after which the key is worth asking for elsewhere, by `client_for`."""

    def group(self, names: Sequence[bytes], deadline: Deadline) -> Groups:
        """The nodes of these keys.

        Raises:
            Trouble: nobody says which they are.
        """
        ...

    def client_for(self, name: bytes, deadline: Deadline) -> Any:
        """redis-py's own client that finds the key wherever it is now.

        Raises:
            Trouble: there is none now.
        """
        ...

    def primaries(self, deadline: Deadline) -> list[NodePool]:
        """Every node that holds keys.

        Raises:
            Trouble: nobody says which they are.
        """
        ...

    def noticed(self, pool: NodePool, reason: str) -> None:
        """A node gave trouble: look around before the next call, if that may help."""
        ...

    def close(self) -> None:
        """Drop all connections."""
        ...


def make_topology(settings: RedisSettings, *, now: Callable[[], float]) -> Topology:
    """The topology that the settings name; connects to nothing yet."""
    makers: dict[Mode, Callable[..., Topology]] = {
        Mode.SINGLE: SingleServer,
        Mode.SENTINEL: SentinelPrimary,
        Mode.CLUSTER: ClusterNodes,
    }
    return makers[settings.mode](settings, now=now)


class SingleServer:
    """One address."""

    redirects: frozenset[str] = frozenset()

    def __init__(self, settings: RedisSettings, *, now: Callable[[], float]) -> None:
        self._pool = NodePool(settings, settings.addresses[0], now=now)

    def group(self, names: Sequence[bytes], deadline: Deadline) -> Groups:
        """See `Topology`."""
        del deadline
        return [(self._pool, list(range(len(names))))]

    def client_for(self, name: bytes, deadline: Deadline) -> Any:
        """See `Topology`."""
        del name, deadline
        return self._pool.client

    def primaries(self, deadline: Deadline) -> list[NodePool]:
        """See `Topology`."""
        del deadline
        return [self._pool]

    def noticed(self, pool: NodePool, reason: str) -> None:
        """See `Topology`: there is nowhere else to look."""

    def close(self) -> None:
        """See `Topology`."""
        self._pool.close()


class _Pools:
    """One pool an address, made on first use. Thread-safe."""

    def __init__(self, settings: RedisSettings, *, now: Callable[[], float]) -> None:
        self._settings = settings
        self._now = now
        self._lock = threading.Lock()
        self._pools: dict[Address, NodePool] = {}

    def get(self, address: Address) -> NodePool:
        with self._lock:
            pool = self._pools.get(address)
            if pool is None:
                pool = self._pools[address] = NodePool(self._settings, address, now=self._now)
            return pool

    def keep(self, addresses: set[Address]) -> None:
        """Close pools of nodes that are gone."""
        with self._lock:
            gone = [address for address in self._pools if address not in addresses]
            closing = [self._pools.pop(address) for address in gone]
        for pool in closing:
            pool.close()

    def close(self) -> None:
        self.keep(set())


class SentinelPrimary:
    """The primary of a service; the sentinels are asked again when it fails or turns out to be a replica."""

    redirects: frozenset[str] = frozenset({"readonly"})

    def __init__(self, settings: RedisSettings, *, now: Callable[[], float]) -> None:
        self._service = settings.service
        self._pools = _Pools(settings, now=now)
        self._gate = Gate(now=now)
        self._lock = threading.Lock()
        self._primary: NodePool | None = None
        common: dict[str, Any] = {
            "socket_timeout": settings.timeout,
            "socket_connect_timeout": settings.connect_timeout,
            "retry": Retry(NoBackoff(), 0),
            "protocol": settings.protocol,
        }
        secrets = {"username": settings.sentinel_username, "password": settings.sentinel_password}
        if settings.tls is not None:
            _, arguments = connection_of(settings, settings.addresses[0])
            common |= {"ssl": True} | {name: value for name, value in arguments.items() if name.startswith("ssl_")}
        self._sentinels: Final[Any] = _Sentinel(list(settings.addresses), sentinel_kwargs=common | secrets)

    def group(self, names: Sequence[bytes], deadline: Deadline) -> Groups:
        """See `Topology`."""
        return [(self._find(deadline), list(range(len(names))))]

    def client_for(self, name: bytes, deadline: Deadline) -> Any:
        """See `Topology`."""
        del name
        return self._find(deadline).client

    def primaries(self, deadline: Deadline) -> list[NodePool]:
        """See `Topology`."""
        return [self._find(deadline)]

    def noticed(self, pool: NodePool, reason: str) -> None:
        """See `Topology`."""
        if reason in ("timeout", "connection", "readonly", "loading", "masterdown"):
            with self._lock:
                if self._primary is pool:
                    self._primary = None

    def close(self) -> None:
        """See `Topology`."""
        self._pools.close()
        for one in self._sentinels.sentinels:
            one.connection_pool.disconnect()

    def _find(self, deadline: Deadline) -> NodePool:
        pool = self._primary
        if pool is not None:
            return pool
        deadline.check()
        self._gate.enter()
        try:
            host, port = self._sentinels.discover_master(self._service)
        except (OSError, RedisError) as error:
            reason = reason_of_error(error)
            self._gate.failed(reason)
            raise Trouble(reason) from error
        except BaseException:
            self._gate.worked()
            raise
        self._gate.worked()
        pool = self._pools.get((host, int(port)))
        self._pools.keep({pool.address})
        with self._lock:
            self._primary = pool
        return pool


class ClusterNodes:
    """The primaries of a cluster, by redis-py's map of slots; the map is drawn anew when a node fails."""

    redirects: frozenset[str] = frozenset({"moved", "ask", "tryagain"})

    def __init__(self, settings: RedisSettings, *, now: Callable[[], float]) -> None:
        self._settings = settings
        self._pools = _Pools(settings, now=now)
        self._gate = Gate(now=now)
        self._lock = threading.Lock()
        self._client: Any = None
        self._stale = False

    def group(self, names: Sequence[bytes], deadline: Deadline) -> Groups:
        """See `Topology`."""
        client = self._connected(deadline)
        groups: dict[NodePool, list[int]] = {}
        for index, name in enumerate(names):
            groups.setdefault(self._serving(client, name), []).append(index)
        return list(groups.items())

    def client_for(self, name: bytes, deadline: Deadline) -> Any:
        """See `Topology`. Follows MOVED and ASK, and corrects the map of slots on the way."""
        del name
        return self._connected(deadline)

    def primaries(self, deadline: Deadline) -> list[NodePool]:
        """See `Topology`."""
        nodes = self._connected(deadline).get_primaries()
        return [self._pools.get((node.host, int(node.port))) for node in nodes]

    def noticed(self, pool: NodePool, reason: str) -> None:
        """See `Topology`."""
        del pool
        if reason in ("timeout", "connection", "clusterdown", "moved", "readonly", "loading", "masterdown"):
            self._stale = True

    def close(self) -> None:
        """See `Topology`."""
        self._pools.close()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _serving(self, client: Any, name: bytes) -> NodePool:
        try:
            node = client.get_node_from_key(name)
        except (RedisError, RedisClusterException) as error:
            self._stale = True
            raise Trouble("clusterdown") from error
        if node is None:
            raise Trouble("clusterdown")
        return self._pools.get((node.host, int(node.port)))

    def _connected(self, deadline: Deadline) -> Any:
        client = self._client
        if client is not None and not self._stale:
            return client
        deadline.check()
        try:
            self._gate.enter()
        except Trouble:
            if client is not None:
                return client  # the old map, while another caller draws the new one or it is too soon
            raise
        try:
            return self._draw(client)
        except (OSError, RedisError, RedisClusterException) as error:
            reason = reason_of_error(error.__cause__ or error)
            self._gate.failed(reason)
            if client is not None:
                return client
            raise Trouble(reason) from error
        except BaseException:
            self._gate.worked()
            raise

    def _draw(self, client: Any) -> Any:
        if client is None:
            client = self._open()
            with self._lock:
                self._client = client
        else:
            client.nodes_manager.initialize()
        self._stale = False
        self._gate.worked()
        return client

    def _open(self) -> Any:
        settings = self._settings
        _, arguments = connection_of(settings, settings.addresses[0])
        for name in ("host", "port", "db"):
            arguments.pop(name, None)
        if settings.tls is not None:
            arguments["ssl"] = True
        return _Cluster(
            startup_nodes=[_ClusterNode(host, port) for host, port in settings.addresses],
            require_full_coverage=False,
            **arguments,
        )
