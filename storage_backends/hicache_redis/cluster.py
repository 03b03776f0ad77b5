"""The nodes of a cluster, and the choice of the topology that a URL names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from redis import cluster
from redis.exceptions import RedisClusterException, RedisError

from .channel import Deadline
from .pool import Gate, NodePool, connection_of
from .settings import Mode, RedisSettings
from .topology import Groups, Pools, SentinelPrimary, SingleServer, Topology
from .trouble import Trouble, reason_of_error

__all__ = ["ClusterNodes", "make_topology"]

# redis-py has types for some parts, and for others in each version: for the checker these classes are anything.
_Cluster: Any = cluster.RedisCluster
_ClusterNode: Any = cluster.ClusterNode


def make_topology(settings: RedisSettings, *, now: Callable[[], float]) -> Topology:
    """The topology that the settings name; connects to nothing yet."""
    makers: dict[Mode, Callable[..., Topology]] = {
        Mode.SINGLE: SingleServer,
        Mode.SENTINEL: SentinelPrimary,
        Mode.CLUSTER: ClusterNodes,
    }
    return makers[settings.mode](settings, now=now)


class ClusterNodes:
    """The primaries of a cluster, by redis-py's map of slots; the map is drawn anew when a node fails."""

    redirects: frozenset[str] = frozenset({"moved", "ask", "tryagain"})

    def __init__(self, settings: RedisSettings, *, now: Callable[[], float]) -> None:
        self._settings = settings
        self._pools = Pools(settings, now=now)
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
        """See `Topology`. A moved slot alone is corrected by redis-py when it follows the redirection."""
        del pool
        if reason in ("timeout", "connection", "clusterdown", "readonly", "loading", "masterdown"):
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
