"""What `hicache fsck` and `hicache bench` need of a root: a walk through its objects, and a loop without frills."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import xxhash

from hicache.errors import StorageUnavailable
from hicache.storage.base import ListedObject, ObjectKey
from hicache.storage.codec import Verdict, VerdictKind

from .names import temp_writer
from .opening import Opened
from .parts import Parts
from .walk import Walk

__all__ = ["Inspected"]

_NEVER: Final = threading.Event()


class Inspected:
    """The capabilities `Listing` and `RawMedium` of a file backend."""

    _opened: Opened

    def list_objects(self) -> Iterator[ListedObject]:
        """See `Listing`.

        Raises:
            StorageUnavailable: a folder cannot be read.
        """
        parts = self._opened.parts
        walk = Walk(parts.fs, parts.names, _NEVER)
        for namespace in walk.namespaces():
            for generation in walk.generations(namespace):
                for leaf in walk.leaves(generation):
                    for entry in walk.entries(leaf.path):
                        if temp_writer(entry.name) is None and (size := _size(entry)) is not None:
                            key = parts.names.parse(leaf.namespace, leaf.generation, leaf.number, entry.name)
                            yield ListedObject(os.path.relpath(entry.path, parts.root.path), size, key)
                        walk.pause()
        if walk.errors:
            raise StorageUnavailable(f"{parts.root.path}: {walk.errors} folders cannot be read")

    def check_object(self, key: ObjectKey) -> Verdict | None:
        """See `Listing`.

        Raises:
            StorageUnavailable: it cannot be read.
        """
        parts = self._opened.parts
        path = parts.names.place(key).path
        try:
            seen = parts.files.peek(path, key)
            if not seen.verdict.ok or seen.verdict.header is None:
                return seen.verdict
            buffer = memoryview(bytearray(seen.verdict.header.payload_length))
            fd = parts.files.open(path)
            try:
                return parts.files.read(fd, key, buffer)
            finally:
                parts.fs.close(fd)
        except FileNotFoundError:
            return None
        except MemoryError:
            return Verdict(VerdictKind.CORRUPT, "payload_length")
        except OSError as error:
            raise StorageUnavailable(f"{path} cannot be read: {error.strerror}") from error

    def raw_loop(self, payloads: Sequence[memoryview], buffers: Sequence[memoryview]) -> tuple[float, float]:
        """See `RawMedium`: plain files through the page cache.

        Raises:
            StorageUnavailable: they cannot be written or read.
        """
        parts = self._opened.parts
        paths = [parts.root.temp_path(parts.root.path) for _ in payloads]
        try:
            start = time.perf_counter()
            for path, payload in zip(paths, payloads, strict=True):
                _write(parts, path, payload)
            middle = time.perf_counter()
            for path, buffer in zip(paths, buffers, strict=True):
                _read(parts, path, buffer)
            return middle - start, time.perf_counter() - middle
        except OSError as error:
            raise StorageUnavailable(f"{parts.root.path}: the raw loop broke off: {error.strerror}") from error
        finally:
            for path in paths:
                parts.files.remove_quietly(path)


def _size(entry: os.DirEntry[str]) -> int | None:
    """Bytes of what has the name; None where it is gone."""
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:
        return None


def _write(parts: Parts, path: str, payload: memoryview) -> None:
    xxhash.xxh3_64_intdigest(payload)
    fd = parts.fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        done = 0
        while done < payload.nbytes:
            done += os.pwrite(fd, payload[done:], done)
    finally:
        parts.fs.close(fd)


def _read(parts: Parts, path: str, buffer: memoryview) -> None:
    fd = parts.fs.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < buffer.nbytes:
            got = parts.fs.preadv(fd, [buffer[done:]], done)
            if got == 0:
                break
            done += got
    finally:
        parts.fs.close(fd)
    xxhash.xxh3_64_intdigest(buffer)
