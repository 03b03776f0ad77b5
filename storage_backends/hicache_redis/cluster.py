"""The nodes of a cluster, and the choice of the topology that a URL names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from redis import cluster
from redis.exceptions import RedisClusterException, RedisError

from .aside import Aside
from .channel import Deadline
from .pool import Gate, NodePool, connection_of
from .settings import Mode, RedisSettings
from .topology import Groups, Pools, SentinelPrimary, SingleServer, Topology
from .trouble import Trouble, reason_of_error

__all__ = ["ClusterNodes", "make_topology"]

T = TypeVar("T")

REDRAW_SECONDS: Final = 1.0
_PATIENCE: Final = 10.0

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
        self._closed = False
        self._stale = False
        self._aside = Aside()
        self._now = now
        self._drawn_at = 0.0
        self._drawing: threading.Thread | None = None

    def group(self, names: Sequence[bytes], deadline: Deadline) -> Groups:
        """See `Topology`."""
        client = self._connected(deadline)
        groups: dict[NodePool, list[int]] = {}
        for index, name in enumerate(names):
            groups.setdefault(self._serving(client, name), []).append(index)
        return list(groups.items())

    def ask(self, name: bytes, work: Callable[[Any], T], deadline: Deadline) -> T:
        """See `Topology`. Follows MOVED and ASK, and corrects the map of slots on the way."""
        del name
        client = self._connected(deadline)
        return self._aside.run(lambda: work(client), deadline)

    def primaries(self, deadline: Deadline) -> list[NodePool]:
        """See `Topology`."""
        nodes = self._connected(deadline).get_primaries()
        return [self._pools.get((node.host, int(node.port))) for node in nodes]

    def noticed(self, pool: NodePool, reason: str) -> None:
        """See `Topology`. A moved slot alone is corrected by redis-py when it follows the redirection."""
        del pool
        if reason in ("timeout", "connection", "clusterdown", "readonly", "loading", "masterdown"):
            self._stale = True

    def resting(self) -> bool:
        """See `Topology`."""
        return self._gate.resting() if self._client is None else self._pools.resting()

    def close(self) -> None:
        """See `Topology`."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
            drawing = self._drawing
        if drawing is not None:
            drawing.join(_PATIENCE)
        self._pools.close()
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
        if client is None:
            return self._connect(deadline)
        if self._stale:
            self._draw_again(client)
        return client

    def _connect(self, deadline: Deadline) -> Any:
        deadline.check()
        self._gate.enter()
        try:
            return self._aside.run(self._open, deadline)
        except (OSError, RedisError, RedisClusterException, Trouble) as error:
            reason = reason_of_error(error.__cause__ or error)
            self._gate.failed(reason)
            raise Trouble(reason) from error
        except BaseException:
            self._gate.worked()
            raise

    def _open(self) -> Any:
        """Connect to the cluster. The client is kept although it may come too late for who asked."""
        client = self._make()
        self._gate.worked()
        with self._lock:
            if self._closed:
                pass
            elif self._client is None:
                self._client, self._drawn_at = client, self._now()
                return client
            known = self._client
        client.close()  # another caller was faster, or it comes too late for anybody
        return known

    def _draw_again(self, client: Any) -> None:
        """Have the map drawn anew in a thread, since asking nodes in trouble takes time that calls do not have."""
        with self._lock:
            if self._drawing is not None or self._client is not client or self._now() - self._drawn_at < REDRAW_SECONDS:
                return
            self._stale = False
            self._drawn_at = self._now()
            self._drawing = threading.Thread(target=self._draw, args=(client,), name="hicache-redis-slots", daemon=True)
            self._drawing.start()

    def _draw(self, client: Any) -> None:
        try:
            client.nodes_manager.initialize()
        except (OSError, RedisError, RedisClusterException):
            self._stale = True  # the old map stays; the next call that finds it wrong tries again
        finally:
            with self._lock:
                self._drawing = None

    def _make(self) -> Any:
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
