"""Everything behind the prefix, for `hicache fsck`, and a loop without frills, for `hicache bench`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

import xxhash
from redis import exceptions as errors

from hicache.errors import StorageUnavailable
from hicache.storage.base import ListedObject, ObjectKey, ObjectResult, ObjectStatus
from hicache.storage.codec import Verdict, VerdictKind

from .channel import Channel, Deadline
from .labels import scan
from .names import Names
from .pool import NodePool
from .sweep import remove
from .topology import Topology
from .transfers import ask, command, judge_value
from .trouble import Trouble, reason_of_error, told

__all__ = ["Lister", "raw_loop"]

_LABELS = ("generation", "manifest")
_WINDOW = 8 << 20


class Lister:
    """Walks through the nodes in small steps. Thread-safe.

    Args:
        names: of keys.
        topology: where they are.
        deadline: makes the deadline of one step.
        shown: the place, for messages.
    """

    def __init__(self, names: Names, topology: Topology, *, deadline: Callable[[], Deadline], shown: str) -> None:
        self._names = names
        self._topology = topology
        self._deadline = deadline
        self._shown = shown

    def objects(self) -> Iterator[ListedObject]:
        """See `Listing.list_objects`."""
        try:
            for pool in self._topology.primaries(self._deadline()):
                for names in scan(pool, self._names.everything(), self._deadline):
                    yield from self._described(pool, names)
        except Trouble as trouble:
            raise StorageUnavailable(f"{self._shown} cannot be listed: {told(trouble.reason)}") from trouble

    def check(self, key: ObjectKey) -> Verdict | None:
        """See `Listing.check_object`. Counts as a use for the server's recency."""
        name = self._names.object(key)
        try:
            value = self._topology.ask(name, lambda client: client.get(name), self._deadline())
        except (Trouble, OSError, errors.RedisError, errors.RedisClusterException) as error:
            if (reason := reason_of_error(error)) == "wrongtype":
                return Verdict(VerdictKind.FOREIGN, "wrongtype")
            raise StorageUnavailable(f"{self._shown}: {name.decode()} cannot be read: {reason}") from error
        return None if value is None else _verdict(judge_value(key, memoryview(value), None)[0])

    def _described(self, pool: NodePool, names: Sequence[bytes]) -> Iterator[ListedObject]:
        ours = [name for name in names if self._names.owns(name) and not self._is_label(name)]
        if not ours:
            return
        with pool.channel(self._deadline()) as channel:
            sizes = ask(channel, [command(b"STRLEN", name) for name in ours])
        for name, size in zip(ours, sizes, strict=True):
            if size == 0:
                continue  # gone meanwhile
            key = self._names.parse(name) if isinstance(size, int) else None
            yield ListedObject(name.decode("utf-8", "backslashreplace"), size if isinstance(size, int) else 0, key)

    def _is_label(self, name: bytes) -> bool:
        return any(self._names.label(name, kind) is not None for kind in _LABELS)


def _verdict(result: ObjectResult) -> Verdict:
    if result.status is ObjectStatus.OK:
        return Verdict(VerdictKind.OK, "", result.header)
    if result.status is ObjectStatus.CORRUPT:
        return Verdict(VerdictKind.CORRUPT, result.reason)
    return Verdict(VerdictKind(result.reason), result.reason)


def raw_loop(
    names: Names, topology: Topology, payloads: Sequence[memoryview], buffers: Sequence[memoryview], deadline: Deadline
) -> tuple[float, float]:
    """See `RawMedium.raw_loop`: one connection to one node, lengths known, each byte hashed once.

    Raises:
        Trouble: it broke off.
    """
    pool = topology.primaries(deadline)[0]
    found: list[bytes] = []
    while len(found) < len(payloads):
        name = names.scratch(os.urandom(8))
        if topology.group([name], deadline)[0][0] is pool:
            found.append(name)
    try:
        with pool.channel(deadline) as channel:
            start = time.perf_counter()
            _write(channel, found, payloads)
            middle = time.perf_counter()
            _read(channel, found, buffers)
            return middle - start, time.perf_counter() - middle
    finally:
        remove(pool, found, deadline)


def _write(channel: Channel, names: Sequence[bytes], payloads: Sequence[memoryview]) -> None:
    tail = b""
    for name, payload in zip(names, payloads, strict=True):
        xxhash.xxh3_64_intdigest(payload)
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, payload.nbytes)
        channel.send([tail + head, payload])
        tail = b"\r\n"
    channel.send([tail])
    for _ in names:
        if channel.line() != b"+OK":
            raise Trouble("refused")


def _read(channel: Channel, names: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
    ahead = max(1, _WINDOW // max(1, buffers[0].nbytes)) if buffers else 0
    requests = [command(b"GET", name) for name in names]
    channel.send([b"".join(requests[:ahead])])
    for i, buffer in enumerate(buffers):
        channel.hint = len(b"$%d\r\n" % buffer.nbytes) + (2 if i else 0)
        channel.line()
        channel.fill(buffer)
        if i + 1 == len(buffers):
            channel.hint = 2
        channel.end_value()
        if i + ahead < len(requests):
            channel.send([requests[i + ahead]])
        xxhash.xxh3_64_intdigest(buffer)
