"""The state of the servers: looked at when opening, and now and then for the statistics."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from redis import exceptions as errors

from hicache.errors import ConfigError

from .channel import Deadline
from .checks import DEFAULT_BULK, Facts, explain, look, refuse, refuse_sentinel, warnings
from .pool import NodePool
from .settings import Address, Mode, RedisSettings
from .topology import SentinelPrimary, Topology
from .trouble import Trouble, reason_of_error

__all__ = ["Health"]

_log = logging.getLogger("hicache.storage.redis")

FRESH_SECONDS: Final = 5.0
_ERRORS: Final = (OSError, errors.RedisError, errors.RedisClusterException)


class Health:
    """What the nodes say of themselves. Thread-safe.

    Args:
        settings: of the backend.
        topology: its nodes.
        now: a monotonic clock in seconds.

    Attributes:
        warnings: what was told when opening, one line each.
        largest_value: bytes of the longest value that every node takes.
    """

    def __init__(self, settings: RedisSettings, topology: Topology, *, now: Callable[[], float]) -> None:
        self._settings = settings
        self._topology = topology
        self._now = now
        self._lock = threading.Lock()
        self._facts: dict[Address, Facts] = {}
        self._evicted = 0
        self._looked_at = now()
        self._looking = False
        self.warnings: tuple[str, ...] = ()
        self.largest_value = DEFAULT_BULK

    def open(self, deadline: Deadline) -> None:
        """Look at the nodes for the first time. Servers that are not there are told, and tried again by later calls.

        Raises:
            ConfigError: they are there and cannot be used.
        """
        told: list[str] = []
        try:
            self._check_way(deadline)
            for pool in self._topology.primaries(deadline):
                inspect = functools.partial(self._inspect, pool)
                told += [f"{_shown(pool.address)}: {line}" for line in pool.ask(inspect, deadline)]
                pool.ask(self._probe, deadline)
        except (*_ERRORS, Trouble) as error:
            if reason := explain(self._settings, error):
                raise ConfigError(reason) from None
            hint = "; does this port speak TLS?" if self._settings.tls is not None else ""
            told.append(
                f"cannot be reached now ({reason_of_error(error)}): going on without it, and trying again{hint}"
            )
        self.warnings = tuple(told)
        for line in told:
            _log.warning("%s: %s", self._settings.shown, line)

    def nodes(self) -> dict[Address, Facts]:
        """What each node said last."""
        with self._lock:
            return dict(self._facts)

    def capacity(self) -> int | None:
        """Sum of `maxmemory`; None if a node has none."""
        facts = self.nodes().values()
        limits = [each.maxmemory for each in facts]
        return sum(limits) if limits and all(limits) else None

    def evicted(self) -> int:
        """Keys that the servers evicted since opening, whosever they were."""
        with self._lock:
            return self._evicted

    def claim_look(self) -> bool:
        """Whether it is time to look again, and nobody does; who gets True calls `look_again`."""
        with self._lock:
            if self._looking or self._now() - self._looked_at < FRESH_SECONDS:
                return False
            self._looking = True
            return True

    def look_again(self, deadline: Deadline) -> None:
        """Ask the nodes; those in trouble keep what they said last."""
        try:
            for pool in self._topology.primaries(deadline):
                pool.own(functools.partial(self._look, pool, settings=False), deadline)
        except Trouble:
            pass
        finally:
            with self._lock:
                self._looking = False
                self._looked_at = self._now()

    def _inspect(self, pool: NodePool, client: Any) -> list[str]:
        try:
            return list(warnings(self._settings, self._look(pool, client)))
        except errors.NoPermissionError:
            return ["this user may not read INFO: the server's settings were not checked"]

    def _look(self, pool: NodePool, client: Any, *, settings: bool = True) -> Facts:
        facts = look(client, db=self._settings.db, settings=settings)
        if settings:
            refuse(self._settings, facts)
            self.largest_value = min(self.largest_value, facts.largest_value)
        with self._lock:
            before = self._facts.get(pool.address)
            if before is not None:  # a restart begins at zero
                self._evicted += facts.evicted - (before.evicted if facts.evicted >= before.evicted else 0)
            self._facts[pool.address] = facts
        return facts

    def _check_way(self, deadline: Deadline) -> None:
        """Ask those who know the nodes what they are, since redis-py's errors do not tell."""
        if self._settings.mode is Mode.SENTINEL:
            assert isinstance(self._topology, SentinelPrimary)
            refuse_sentinel(self._settings, self._topology.ask_all(deadline))
        elif self._settings.mode is Mode.CLUSTER:
            self._check_nodes(deadline)

    def _check_nodes(self, deadline: Deadline) -> None:
        last: BaseException | None = None
        for address in self._settings.addresses:
            deadline.check()
            pool = NodePool(self._settings, address, now=self._now)
            try:
                refuse(self._settings, pool.ask(lambda client: look(client, db=0, settings=False), deadline))
            except (*_ERRORS, Trouble) as error:
                last = error
            else:
                return
            finally:
                pool.close()
        if last is not None:
            raise last

    def _probe(self, client: Any) -> None:
        """The commands that are needed, on a key that is not there: what the user may not do is told now."""
        name = f"{self._settings.prefix}:probe"
        for verb in ("GET", "EXISTS", "TOUCH", "UNLINK"):
            try:
                client.execute_command(verb, name)
            except errors.ResponseError as error:  # a replica refuses the last one, which was told already
                if explain(self._settings, error):
                    raise


def _shown(address: Address) -> str:
    return address[0] if address[1] == 0 else f"{address[0]}:{address[1]}"
