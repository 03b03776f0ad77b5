"""The contract of a storage backend: what a plug-in implements, and nothing else.

A backend keeps objects under their key and gives them back whole or not at all. It never interprets tokens or trees.
Results are per key, in the order and number of what was asked, whatever happens; an exception means that the whole
call failed and is treated as `FAILED` for each of its keys. All methods may be called from several threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol, Self, runtime_checkable

from hicache.core.keys import ObjectKey, Shard
from hicache.errors import ConfigError
from hicache.storage.codec import Header, Verdict, VerdictKind
from hicache.storage.url import StorageUrl

__all__ = [
    "MAX_MANIFEST",
    "BreakerState",
    "BreakerStatistics",
    "ListedObject",
    "Listing",
    "Manifests",
    "ObjectKey",
    "ObjectResult",
    "ObjectStatus",
    "RawMedium",
    "Resting",
    "Shard",
    "StorageBackend",
    "StorageStatistics",
    "StorageUrl",
    "StoredObject",
]

MAX_MANIFEST: Final = 64 * 1024
"""Bytes of the longest manifest."""


class ObjectStatus(StrEnum):
    """How one key of a batch ended."""

    OK = "ok"
    MISSING = "missing"  # no such object, or another identity, a newer version or a foreign file under its name
    CORRUPT = "corrupt"  # ours by identity, wrong by checksum or length; withdrawn
    FAILED = "failed"  # trouble that says nothing about the object: time-out, no space, permission, ...


@dataclass(frozen=True, slots=True)
class ObjectResult:
    """Result for one key.

    Attributes:
        status: how it ended.
        reason: one short word or phrase for counters and logs when it is not OK, e.g. "foreign", "newer", "no_space".
        header: what the object says of itself; set by `get_into` when OK. The caller compares tokens, parent and
            depth with what it asked for.
    """

    status: ObjectStatus
    reason: str = ""
    header: Header | None = None

    @classmethod
    def of(cls, verdict: Verdict) -> ObjectResult:
        """The result of a read that was verified: OK, CORRUPT with the cause, or MISSING ("foreign", "newer")."""
        if verdict.kind is VerdictKind.OK:
            return cls(ObjectStatus.OK, header=verdict.header)
        if verdict.kind is VerdictKind.CORRUPT:
            return cls(ObjectStatus.CORRUPT, verdict.reason)
        return cls(ObjectStatus.MISSING, verdict.kind.value)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object to be stored. The buffers belong to the caller and are not kept after the call returns.

    Attributes:
        key: its name.
        header: the encoded header (`codec.encode_header`), unpadded.
        payload: the shard's bytes, C-contiguous, format "B".
    """

    key: ObjectKey
    header: bytes
    payload: memoryview


class BreakerState(StrEnum):
    """What a breaker does with a call."""

    CLOSED = "closed"  # lets it through
    OPEN = "open"  # answers it at once, without the backend
    HALF_OPEN = "half_open"  # lets one at a time through, to see whether the backend is well again


@dataclass(frozen=True, slots=True)
class BreakerStatistics:
    """A snapshot of one breaker. All counts are since opening.

    Attributes:
        name: "read" or "write".
        state: what it does now.
        reason: why it is not closed; empty if it is.
        failures: failed calls in a row.
        opened: times that it went from closed to open.
        refused: objects that it answered without the backend.
        timeouts: calls that took too long.
        running: calls that have not come back, those that timed out included.
    """

    name: str
    state: BreakerState
    reason: str = ""
    failures: int = 0
    opened: int = 0
    refused: int = 0
    timeouts: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class StorageStatistics:
    """A snapshot of one backend. All counts are since opening.

    Attributes:
        objects: objects held now, as far as known.
        bytes_used: bytes held now, as far as known, headers and padding included.
        capacity: byte limit, or None.
        puts, gets, hits: objects asked for, and found.
        bytes_written, bytes_read: payload bytes moved.
        evicted: objects removed to keep the capacity.
        by_reason: counts of results that were not OK, by reason.
        ready: False while an index is still being rebuilt.
        ttl: seconds after its last use for which an object is kept; None = for ever, or it is not known.
        breakers: the breakers around the backend, if it has any.
        retried: objects whose transfer was repeated, once for each repeat; `recovered`: those that were then OK.
    """

    objects: int = 0
    bytes_used: int = 0
    capacity: int | None = None
    puts: int = 0
    gets: int = 0
    hits: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    evicted: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    ready: bool = True
    ttl: float | None = None
    breakers: tuple[BreakerStatistics, ...] = ()
    retried: int = 0
    recovered: int = 0


class StorageBackend(ABC):
    """Keeps self-proving objects. Thread-safe. Made by `open_storage(url)` through `from_url`."""

    @classmethod
    def from_url(cls, url: StorageUrl) -> Self:
        """Open by URL: take the parameters (`url.take`), then call `url.done()`, then open.

        Raises:
            ConfigError: something in the URL, or the place that it names, cannot work.
        """
        raise ConfigError(f"{cls.__name__} cannot be opened by a URL ({url.scheme}://): make the object and pass it")

    @abstractmethod
    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """Read objects into buffers of exactly the payloads' lengths, and verify them (`codec.verify`).

        A buffer's content is undefined unless its result is OK. Buffers are not touched after the call returns.
        """

    @abstractmethod
    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        """Store objects, each atomically. A put of what exists succeeds; of what is disbelieved it overwrites."""

    @abstractmethod
    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        """Whether each key is there, cheaply and without reading payloads. Moves no recency.

        With `stop_at_first_miss` keys behind the first absent one may be answered False without a look. An exception
        where none can be told: False says that the object is not there.
        """

    @abstractmethod
    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Mark as used now, the last key newest. False where the object is absent; an exception where none can tell."""

    @abstractmethod
    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Remove. True where something was removed; absence is no error."""

    @abstractmethod
    def generation(self, namespace: bytes) -> int:
        """The current generation of a namespace (its 16-byte digest); 0 if it was never cleared."""

    @abstractmethod
    def clear(self, namespace: bytes, generation: int) -> None:
        """Raise the namespace's generation to at least `generation`, durably. Older objects may go at any time."""

    @abstractmethod
    def statistics(self) -> StorageStatistics:
        """A snapshot."""

    @abstractmethod
    def close(self) -> None:
        """Stop threads and release handles. Idempotent."""


@runtime_checkable
class Manifests(Protocol):
    """Capability: keep a small JSON document per namespace beside its objects, for `hicache explain`."""

    def write_manifest(self, namespace: bytes, document: bytes) -> None:
        """Store the document, replacing an older one. At most 64 KiB."""
        ...

    def read_manifests(self) -> dict[bytes, bytes]:
        """All documents by namespace digest."""
        ...


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One entry of a listing.

    Attributes:
        name: what the store calls it, for people.
        size: bytes that it takes there, header and padding included.
        key: the object that has this name; None for what is no object of ours, which nobody may touch.
    """

    name: str
    size: int
    key: ObjectKey | None = None


@runtime_checkable
class Listing(Protocol):
    """Capability: walk through all that is stored, for `hicache fsck`. Changes nothing."""

    def list_objects(self) -> Iterator[ListedObject]:
        """Everything under this backend's root or prefix, in any order, of all namespaces and generations.

        What is stored or removed meanwhile may be listed or not; a name may come twice.

        Raises:
            StorageError: the store cannot be read any further.
        """
        ...

    def check_object(self, key: ObjectKey) -> Verdict | None:
        """Read a whole object and verify it; None if there is none. What is wrong is left as it is.

        Raises:
            StorageError: it could not be read.
        """
        ...


@runtime_checkable
class Resting(Protocol):
    """Storage that leaves its servers alone for moments after they failed, whoever calls."""

    def resting(self) -> bool:
        """Whether a call made now would be failed without asking any server. Never waits."""
        ...


@runtime_checkable
class RawMedium(Protocol):
    """Capability: move bytes over the backend's medium with as little as possible around them, for `hicache bench`."""

    def raw_loop(self, payloads: Sequence[memoryview], buffers: Sequence[memoryview]) -> tuple[float, float]:
        """Write payloads under names of its own, read them into buffers of the same lengths, and remove them.

        Each byte is hashed once in each direction, as every transfer of objects must.

        Returns:
            Seconds of writing and of reading.

        Raises:
            StorageError: the store is in trouble.
        """
        ...
