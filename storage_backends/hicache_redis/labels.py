"""Generations and manifests of namespaces, each under a key of its own."""

from __future__ import annotations

import functools
import operator
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from redis import exceptions as errors

from hicache.errors import StorageUnavailable

from .channel import Deadline
from .names import Names
from .pool import NodePool
from .topology import Topology
from .trouble import Trouble, reason_of_error, told

__all__ = ["Labels", "scan"]

_NUMBER = re.compile(rb"0|[1-9][0-9]{0,19}")
_REMEMBER_SECONDS: Final = 1.0
SCAN_COUNT: Final = 512
"""Keys that one step of a scan looks at: well below a millisecond of the server's time."""

# Numbers of up to 2^64-1 are compared as text, since Lua's would be rounded.
_RAISE: Final = """
local old = redis.call('GET', KEYS[1])
local new = ARGV[1]
if old and string.match(old, '^%d+$') and (#old > #new or (#old == #new and old >= new)) then return old end
redis.call('SET', KEYS[1], new)
return new
"""


def scan(pool: NodePool, pattern: bytes, deadline: Callable[[], Deadline]) -> Iterator[list[bytes]]:
    """Names of a node that match, in small steps with a deadline each; a name may come twice.

    Raises:
        Trouble: a step broke off.
    """
    cursor = 0
    while True:
        step = functools.partial(_scan_step, cursor=cursor, pattern=pattern)
        cursor, names = pool.own(step, deadline())
        yield names
        if int(cursor) == 0:
            return


def _scan_step(client: Any, *, cursor: int, pattern: bytes) -> tuple[int, list[bytes]]:
    cursor, names = client.scan(cursor=cursor, match=pattern, count=SCAN_COUNT)
    return cursor, names


class Labels:
    """Reads and writes them. Thread-safe.

    A server that evicts any key may also evict a generation. What this process has seen is therefore remembered as a
    floor, and written again where the server has less.

    Args:
        names: of keys.
        topology: where they are.
        shown: the place, for messages.
        now: a monotonic clock in seconds.
    """

    def __init__(self, names: Names, topology: Topology, *, shown: str, now: Callable[[], float]) -> None:
        self._names = names
        self._topology = topology
        self._shown = shown
        self._now = now
        self._lock = threading.Lock()
        self._floors: dict[bytes, int] = {}
        self._read_at: dict[bytes, float] = {}

    def generation(self, namespace: bytes, deadline: Deadline) -> int:
        """The current generation, from the server.

        Raises:
            StorageUnavailable: it cannot be read, or is no number.
        """
        name = self._names.generation(namespace)
        value = self._own(lambda client: client.get(name), name, deadline, "read")
        if value is not None and _NUMBER.fullmatch(value) is None:
            raise StorageUnavailable(f"{self._shown}: key {name.decode()} is no generation: delete it")
        found = int(value or 0)
        floor = self._note(namespace, found)
        if found < floor:
            return self.raise_to(namespace, floor, deadline)
        return found

    def raise_to(self, namespace: bytes, generation: int, deadline: Deadline) -> int:
        """Make the generation at least this.

        Returns:
            What it is now.

        Raises:
            StorageUnavailable: it cannot be written.
        """
        name = self._names.generation(namespace)
        value = self._own(lambda client: client.eval(_RAISE, 1, name, b"%d" % generation), name, deadline, "written")
        return self._note(namespace, int(value))

    def floor(self, namespace: bytes, deadline: Deadline) -> int:
        """The generation below which writing is in vain: read again after a second, 0 while that is not possible."""
        with self._lock:
            read_at = self._read_at.get(namespace)
            if read_at is not None and self._now() - read_at < _REMEMBER_SECONDS:
                return self._floors.get(namespace, 0)
            self._read_at[namespace] = self._now()  # others need not ask meanwhile
        try:
            return self.generation(namespace, deadline)
        except StorageUnavailable:
            return self._floors.get(namespace, 0)

    def write_manifest(self, namespace: bytes, document: bytes, deadline: Deadline) -> None:
        """Store a manifest.

        Raises:
            StorageUnavailable: it cannot be written.
        """
        name = self._names.manifest(namespace)
        self._own(lambda client: client.set(name, document), name, deadline, "written")

    def read_manifests(self, deadline: Deadline) -> dict[bytes, bytes]:
        """All manifests. Scans the whole database.

        Raises:
            StorageUnavailable: a node cannot be read.
        """
        found: dict[bytes, bytes] = {}
        try:
            for pool in self._topology.primaries(deadline):
                for names in scan(pool, self._names.manifests(), lambda: deadline):
                    for name in names:
                        namespace = self._names.label(name, "manifest")
                        value = None
                        if namespace is not None:
                            value = pool.own(operator.methodcaller("get", name), deadline)
                        if namespace is not None and value is not None:
                            found[namespace] = value
        except Trouble as trouble:
            raise StorageUnavailable(f"{self._shown}: manifests cannot be read: {trouble.reason}") from trouble
        return found

    def _note(self, namespace: bytes, generation: int) -> int:
        with self._lock:
            self._read_at[namespace] = self._now()
            floor = self._floors[namespace] = max(generation, self._floors.get(namespace, 0))
            return floor

    def _own(self, call: Callable[[Any], Any], name: bytes, deadline: Deadline, what: str) -> Any:
        """Call redis-py for one key, as it is found now; once more if the key has moved."""
        for last in (False, True):
            try:
                ((pool, _),) = self._topology.group([name], deadline)
                pool.gate.enter()
            except Trouble as trouble:
                raise self._unavailable(name, what, trouble.reason) from trouble
            try:
                value = self._topology.ask(name, call, deadline)
            except (OSError, errors.RedisError, errors.RedisClusterException, Trouble) as error:
                reason = reason_of_error(error)
                if reason in ("timeout", "connection", "auth", "loading"):
                    pool.gate.failed(reason)
                else:
                    pool.gate.worked()
                self._topology.noticed(pool, reason)
                if last or reason not in self._topology.redirects:
                    raise self._unavailable(name, what, reason) from error
            except BaseException:
                pool.gate.worked()
                raise
            else:
                pool.gate.worked()
                return value
        return None

    def _unavailable(self, name: bytes, what: str, reason: str) -> StorageUnavailable:
        return StorageUnavailable(f"{self._shown}: {name.decode()} cannot be {what}: {told(reason)}")
