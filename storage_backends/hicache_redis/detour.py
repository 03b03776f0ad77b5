"""redis-py's own path, one key at a time: for keys that have moved, and for a second look at what seemed wrong."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from redis import exceptions as errors

from hicache.storage.base import ObjectResult, ObjectStatus

from .channel import Deadline
from .pool import NodePool
from .topology import Topology
from .transfers import ABSENT, OK, Reads, Writes, judge_value
from .trouble import Trouble, reason_of_error

__all__ = ["Detour"]

MOST: Final = 4096
"""Names that are remembered as disbelieved; what is forgotten costs one read that finds it wrong again."""

_ERRORS: Final = (Trouble, OSError, errors.RedisError, errors.RedisClusterException)


class Detour:
    """Follows redirections through redis-py, and keeps the names of objects that were wrong. Thread-safe.

    An object that arrived damaged, or under another's name, may be well in the store: a bit may have turned on the
    way, or a reply may have been an earlier question's. So it is read once more, on another connection, before it is
    believed to be wrong. What is damaged there too is removed.

    Args:
        topology: finds nodes.
        ttl: seconds that an object stays unused, or None.
    """

    def __init__(self, topology: Topology, *, ttl: int | None) -> None:
        self._topology = topology
        self._ttl = ttl
        self._lock = threading.Lock()
        self._wrong: OrderedDict[bytes, None] = OrderedDict()

    def disbelieved(self, names: Iterable[bytes]) -> frozenset[bytes]:
        """Those of the names whose object was wrong when it was last read: a put must not skip them."""
        with self._lock:
            return frozenset(name for name in names if name in self._wrong) if self._wrong else frozenset()

    def believe(self, names: Iterable[bytes]) -> None:
        """These were written anew."""
        if self._wrong:
            with self._lock:
                for name in names:
                    self._wrong.pop(name, None)

    def get(self, batch: Reads, index: int, pool: NodePool, deadline: Deadline) -> ObjectResult:
        """The result for a key whose reply was an error, or whose object seemed wrong."""
        word = batch.errors.get(index, "")
        if word == "wrongtype":
            return ObjectResult(ObjectStatus.MISSING, "foreign")
        if word and word not in self._topology.redirects:
            return _failed(word)
        self._topology.noticed(pool, word)
        name, key, buffer = batch.names[index], batch.keys[index], batch.buffers[index]
        try:
            deadline.check()
            value = self._topology.ask(name, lambda client: client.get(name), deadline)
        except _ERRORS as error:
            return _failed(reason_of_error(error))
        if value is None:
            return ABSENT
        result, payload = judge_value(key, memoryview(value), buffer)
        if result.status is ObjectStatus.OK:
            np.copyto(np.asarray(buffer), np.asarray(payload))
        elif result.status is not ObjectStatus.FAILED:
            self._disbelieve(name)
            if result.status is ObjectStatus.CORRUPT:
                self._withdraw(name, deadline)
        return result

    def put(self, batch: Writes, index: int, pool: NodePool, deadline: Deadline) -> ObjectResult:
        """The result for an object whose write was answered by an error."""
        word = batch.errors[index]
        if word not in self._topology.redirects:
            return _failed(word)
        self._topology.noticed(pool, word)
        name, stored = batch.names[index], batch.objects[index]
        try:
            deadline.check()
            value = b"".join((stored.header, stored.payload))
            self._topology.ask(name, lambda client: client.set(name, value, ex=self._ttl), deadline)
        except _ERRORS as error:
            return _failed(reason_of_error(error))
        return OK

    def ask(self, pool: NodePool, name: bytes, deadline: Deadline, words: Sequence[bytes], word: str) -> int | str:
        """The number that a command for one key answers, or the word for why it does not.

        Args:
            pool: of the node that did not answer it.
            name: the key.
            deadline: of the call.
            words: the command, and what stands behind the key.
            word: what the node answered.
        """
        self._topology.noticed(pool, word)
        try:
            deadline.check()
            verb, *arguments = words
            answer = self._topology.ask(
                name, lambda client: client.execute_command(verb.decode(), name, *arguments), deadline
            )
            return int(answer)
        except _ERRORS as error:
            return reason_of_error(error)

    def _disbelieve(self, name: bytes) -> None:
        with self._lock:
            self._wrong[name] = None
            if len(self._wrong) > MOST:
                self._wrong.popitem(last=False)

    def _withdraw(self, name: bytes, deadline: Deadline) -> None:
        """Remove a damaged object. If that fails it is found again."""
        try:
            deadline.check()
            self._topology.ask(name, lambda client: client.unlink(name), deadline)
        except _ERRORS:
            return


def _failed(reason: str) -> ObjectResult:
    return ObjectResult(ObjectStatus.FAILED, reason)
