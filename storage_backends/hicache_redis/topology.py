"""Where a key lives: one server, the primary that sentinels name, or the node of a cluster that serves its slot."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from redis import sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from .aside import Aside
from .channel import Deadline
from .pool import Gate, NodePool, connection_of
from .settings import Address, RedisSettings
from .trouble import Trouble, reason_of_error

__all__ = ["Groups", "Pools", "SentinelPrimary", "SingleServer", "Topology"]

# redis-py has types for some parts, and for others in each version: for the checker this class is anything.
_Sentinel: Any = sentinel.Sentinel

T = TypeVar("T")

Groups = list[tuple[NodePool, list[int]]]
"""Node by node, the indexes of the keys that it serves."""


class Topology(Protocol):
    """Finds nodes. Thread-safe."""

    redirects: frozenset[str]
    """Words of error replies after which the key is worth asking for elsewhere, by `ask`."""

    def group(self, names: Sequence[bytes], deadline: Deadline) -> Groups:
        """The nodes of these keys.

        Raises:
            Trouble: nobody says which they are.
        """
        ...

    def ask(self, name: bytes, work: Callable[[Any], T], deadline: Deadline) -> T:
        """What redis-py's own client gives, which finds the key wherever it is now.

        Raises:
            Trouble: there is none now, or it was not in time.
            OSError, redis.RedisError, redis.RedisClusterException: as redis-py says.
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

    def resting(self) -> bool:
        """Whether no node would be tried now. Never waits."""
        ...

    def close(self) -> None:
        """Drop all connections."""
        ...


class SingleServer:
    """One address."""

    redirects: frozenset[str] = frozenset()

    def __init__(self, settings: RedisSettings, *, now: Callable[[], float]) -> None:
        self._pool = NodePool(settings, settings.addresses[0], now=now)

    def group(self, names: Sequence[bytes], deadline: Deadline) -> Groups:
        """See `Topology`."""
        del deadline
        return [(self._pool, list(range(len(names))))]

    def ask(self, name: bytes, work: Callable[[Any], T], deadline: Deadline) -> T:
        """See `Topology`."""
        del name
        return self._pool.ask(work, deadline)

    def primaries(self, deadline: Deadline) -> list[NodePool]:
        """See `Topology`."""
        del deadline
        return [self._pool]

    def noticed(self, pool: NodePool, reason: str) -> None:
        """See `Topology`: there is nowhere else to look."""

    def resting(self) -> bool:
        """See `Topology`."""
        return self._pool.gate.resting()

    def close(self) -> None:
        """See `Topology`."""
        self._pool.close()


class Pools:
    """One pool an address, made on first use. Thread-safe."""

    def __init__(self, settings: RedisSettings, *, now: Callable[[], float]) -> None:
        self._settings = settings
        self._now = now
        self._lock = threading.Lock()
        self._pools: dict[Address, NodePool] = {}

    def get(self, address: Address) -> NodePool:
        """The pool of an address."""
        with self._lock:
            pool = self._pools.get(address)
            if pool is None:
                pool = self._pools[address] = NodePool(self._settings, address, now=self._now)
            return pool

    def resting(self) -> bool:
        """Whether there are some, and all of their nodes are left alone."""
        with self._lock:
            pools = list(self._pools.values())
        return bool(pools) and all(pool.gate.resting() for pool in pools)

    def keep(self, addresses: set[Address]) -> None:
        """Close pools of nodes that are gone."""
        with self._lock:
            gone = [address for address in self._pools if address not in addresses]
            closing = [self._pools.pop(address) for address in gone]
        for pool in closing:
            pool.close()

    def close(self) -> None:
        """Close them all."""
        self.keep(set())


class SentinelPrimary:
    """The primary of a service; the sentinels are asked again when it fails or turns out to be a replica."""

    redirects: frozenset[str] = frozenset({"readonly"})

    def __init__(self, settings: RedisSettings, *, now: Callable[[], float]) -> None:
        self._service = settings.service
        self._pools = Pools(settings, now=now)
        self._gate = Gate(now=now)
        self._aside = Aside()
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

    def ask(self, name: bytes, work: Callable[[Any], T], deadline: Deadline) -> T:
        """See `Topology`."""
        del name
        return self._find(deadline).ask(work, deadline)

    def primaries(self, deadline: Deadline) -> list[NodePool]:
        """See `Topology`."""
        return [self._find(deadline)]

    def noticed(self, pool: NodePool, reason: str) -> None:
        """See `Topology`."""
        if reason in ("timeout", "connection", "readonly", "loading", "masterdown"):
            with self._lock:
                if self._primary is pool:
                    self._primary = None

    def resting(self) -> bool:
        """See `Topology`."""
        pool = self._primary
        return (self._gate if pool is None else pool.gate).resting()

    def ask_all(self, deadline: Deadline) -> list[object]:
        """What each sentinel says about the service: an address, None, or the error of asking it."""
        answers: list[object] = []
        for one in self._sentinels.sentinels:
            ask = functools.partial(one.sentinel_get_master_addr_by_name, self._service)
            try:
                answers.append(self._aside.run(ask, deadline))
            except (OSError, RedisError, Trouble) as error:
                answers.append(error)
        return answers

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
            return self._aside.run(self._discover, deadline)
        except (OSError, RedisError, Trouble) as error:
            reason = reason_of_error(error)
            self._gate.failed(reason)
            raise Trouble(reason) from error
        except BaseException:
            self._gate.worked()
            raise

    def _discover(self) -> NodePool:
        """Ask the sentinels. What they say is used although it may come too late for who asked."""
        host, port = self._sentinels.discover_master(self._service)
        self._gate.worked()
        pool = self._pools.get((host, int(port)))
        self._pools.keep({pool.address})
        with self._lock:
            self._primary = pool
        return pool
