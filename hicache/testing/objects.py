"""Keys and objects for tests, threads that start together, and reads in one line."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from hicache.storage import codec
from hicache.storage.base import ObjectKey, ObjectResult, ObjectStatus, Shard, StorageBackend, StoredObject

__all__ = [
    "NAMESPACE",
    "SHARD",
    "in_threads",
    "make_chain",
    "make_key",
    "make_object",
    "pattern",
    "read",
    "status_of",
]

T = TypeVar("T")

NAMESPACE = hashlib.sha256(b"a namespace").digest()[:16]
SHARD = Shard("hg1-0123456789abcdef", (0, 4), 0)
_PATIENCE = 60.0  # seconds after which a thread counts as stuck


def pattern(seed: object, length: int) -> bytes:
    """Bytes that differ for every seed, at every 32 bytes."""
    state = hashlib.blake2b(repr(seed).encode(), digest_size=32).digest()
    return b"".join(
        hashlib.blake2b(state, digest_size=32, salt=i.to_bytes(8, "little")).digest() for i in range(-(-length // 32))
    )[:length]


def make_key(
    number: int, *, namespace: bytes = NAMESPACE, generation: int = 0, shard: Shard = SHARD, hash_size: int = 16
) -> ObjectKey:
    """A key that differs for every number."""
    return ObjectKey(namespace, generation, hashlib.sha256(f"page {number}".encode()).digest()[:hash_size], shard)


def make_object(key: ObjectKey, payload: bytes, *, depth: int = 0) -> StoredObject:
    """An object with this payload, as a writer would hand it over."""
    parent = None if depth == 0 else hashlib.sha256(b"parent" + key.page_hash).digest()[: len(key.page_hash)]
    header = codec.encode_header(key, parent_hash=parent, depth=depth, tokens=b"", payload=payload)
    return StoredObject(key, header, memoryview(payload))


def make_chain(pages: int, length: int, *, first: int = 0) -> list[StoredObject]:
    """Objects of consecutive depths, root first."""
    return [make_object(make_key(first + i), pattern(first + i, length), depth=i) for i in range(pages)]


def read(backend: StorageBackend, key: ObjectKey, length: int) -> tuple[ObjectResult, bytes]:
    """Result and buffer of one read."""
    buffer = bytearray(length)
    (result,) = backend.get_into([key], [memoryview(buffer)])
    return result, bytes(buffer)


def status_of(results: Iterable[ObjectResult]) -> list[ObjectStatus]:
    """The statuses alone."""
    return [result.status for result in results]


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Run `work(0)` to `work(count - 1)` at the same time; their results in order, or the first exception."""
    barrier = threading.Barrier(count, timeout=_PATIENCE)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            barrier.wait()
            results[index] = work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
        assert not thread.is_alive(), "a thread is stuck"
    if errors:
        raise errors[0]
    return [results[i] for i in range(count)]
