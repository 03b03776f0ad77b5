"""The file backend: objects as files below one root folder, for one process, with a hard byte limit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Self

from hicache.errors import CacheClosed, ConfigError, InvalidInput, StorageUnavailable
from hicache.storage import codec
from hicache.storage.base import (
    MAX_MANIFEST,
    ObjectKey,
    ObjectResult,
    ObjectStatus,
    StorageBackend,
    StorageStatistics,
    StorageUrl,
    StoredObject,
)
from hicache.storage.codec import VerdictKind

from .directories import Directories
from .files import ObjectFiles
from .filesystem import FileSystem
from .janitor import Janitor
from .labels import Labels
from .names import Names, Place
from .parts import Parts
from .reader import Reader, failed
from .removal import CLAIM_WAIT, Removal
from .root import Root
from .space import Space
from .writer import Refused, Writer

__all__ = ["FileBackend"]

_OK: Final = ObjectResult(ObjectStatus.OK)
_TRIES: Final = 4
_CLOSE_WAIT: Final = 30.0


class FileBackend(StorageBackend):
    """Objects as files. Thread-safe; calls work in the caller's thread, several at once.

    The folder never holds more than `capacity` bytes of objects beyond what is being written at the moment. What was
    used longest ago goes first, and of what was used at about the same time the deepest page. Order survives a
    restart to one minute. Opening does not wait for the index: a thread builds it, `get_into` and `contains` look at
    the file system meanwhile, and a put makes room from what is indexed so far or fails ("rebuilding").

    Bytes are not forced to the device unless `fsync` is set: after a power failure a torn file is a miss.

    Args:
        path: the root folder; made if absent. It must be empty or a root of hicache.
        capacity: most bytes, or None.
        fsync: force each object to the device before it counts as stored.
        fs: the operating system's calls.
        now: monotonic clock in seconds.
        wall: wall clock in seconds; only stamps files, never orders what this process does.

    Raises:
        ConfigError: the folder cannot be used; the text says why and what to do.
    """

    def __init__(
        self,
        path: str,
        *,
        capacity: int | None = None,
        fsync: bool = False,
        fs: FileSystem | None = None,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        fs = fs or FileSystem()
        self._closed = False
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._root = Root(fs, path, capacity=capacity)
        unseen = 0 if self._root.created else self._root.take_usage()
        self._space = Space(capacity=capacity, wall=wall, unseen=unseen, ready=self._root.created)
        self._names = Names(self._root.path, self._root.fan_out)
        self._directories = Directories(fs, self._names, self._alive)
        self._files = ObjectFiles(fs, fsync=fsync)
        self._removal = Removal(fs, self._names, self._space)
        self._labels = Labels(fs, self._root, self._names, self._directories)
        parts = Parts(
            fs=fs,
            root=self._root,
            names=self._names,
            space=self._space,
            directories=self._directories,
            files=self._files,
            removal=self._removal,
            labels=self._labels,
            now=now,
            wall=wall,
        )
        self._reader = Reader(parts)
        self._writer = Writer(parts)
        self._janitor = Janitor(parts)
        self._janitor.start()

    @classmethod
    def from_url(cls, url: StorageUrl) -> Self:
        """`file:///path?capacity=20GiB&fsync=1`."""
        if url.host not in ("", "localhost") or not url.path.startswith("/"):
            raise ConfigError("file storage: write file:///absolute/path, with three slashes")
        capacity = url.take_size("capacity")
        fsync = url.take_flag("fsync")
        url.done()
        return cls(url.path, capacity=capacity, fsync=fsync)

    @property
    def path(self) -> str:
        """The resolved root folder."""
        return self._root.path

    # --- verbs --------------------------------------------------------------------------------------------------

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """See `StorageBackend`. A buffer of another length than the stored payload is FAILED ("size")."""
        self._check_open()
        bucket = self._space.bucket()
        results = [self._reader.get(key, buffer, bucket) for key, buffer in zip(keys, buffers, strict=True)]
        moved = sum(b.nbytes for b, result in zip(buffers, results, strict=True) if result.status is ObjectStatus.OK)
        self._count("gets", "hits", "bytes_read", results, moved)
        return results

    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        """See `StorageBackend`.

        FAILED reasons: "too_large", "no_room" (all is busy), "rebuilding", "no_space" (the disk is full),
        "unavailable" (the folder is gone), "newer" and "foreign_file" (the name is taken by what is not ours to
        replace), "cleared" (the generation has ended), "busy", "evict", or the system's error, e.g. "eacces".
        """
        self._check_open()
        bucket = self._space.bucket()
        results = [self._put(stored, bucket) for stored in objects]
        self._count("puts", "stored", "", results, 0)
        return results

    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        """See `StorageBackend`. Looks at the file system, so it is right before the index is."""
        self._check_open()
        answers: list[bool] = []
        for key in keys:
            if stop_at_first_miss and answers and not answers[-1]:
                answers.append(False)
            else:
                answers.append(self._reader.exists(self._names.place(key)))
        return answers

    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        self._check_open()
        bucket = self._space.bucket()
        return [self._reader.touch(self._names.place(key), bucket) for key in keys]

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`. What is not ours under the name stays."""
        self._check_open()
        return [self._delete(key) for key in keys]

    def generation(self, namespace: bytes) -> int:
        """See `StorageBackend`.

        Raises:
            StorageUnavailable: it cannot be read.
        """
        self._check_open()
        try:
            return self._labels.generation(namespace)
        except OSError as error:
            raise StorageUnavailable(f"{self.path}: the generation cannot be read: {error.strerror}") from error

    def clear(self, namespace: bytes, generation: int) -> None:
        """See `StorageBackend`. Older objects are removed in the background.

        Raises:
            StorageUnavailable: the new generation could not be written.
        """
        self._check_open()
        try:
            self._labels.raise_to(namespace, generation)
        except OSError as error:
            raise StorageUnavailable(f"{self.path}: the generation cannot be written: {error.strerror}") from error
        self._janitor.sweep(namespace)

    def write_manifest(self, namespace: bytes, document: bytes) -> None:
        """See `Manifests`.

        Raises:
            InvalidInput: longer than 64 KiB.
            StorageUnavailable: it could not be written.
        """
        self._check_open()
        if len(document) > MAX_MANIFEST:
            raise InvalidInput(f"manifest of {len(document)} bytes is above {MAX_MANIFEST}: leave out what is long")
        try:
            self._labels.write_manifest(namespace, document)
        except OSError as error:
            raise StorageUnavailable(f"{self.path}: the manifest cannot be written: {error.strerror}") from error

    def read_manifests(self) -> dict[bytes, bytes]:
        """See `Manifests`. What cannot be read is left out."""
        self._check_open()
        return self._labels.read_manifests()

    def statistics(self) -> StorageStatistics:
        """See `StorageBackend`. `bytes_used` are the files' sizes."""
        objects, used, _ = self._space.usage()
        with self._lock:
            return StorageStatistics(
                objects=objects,
                bytes_used=used,
                capacity=self._space.capacity,
                puts=self._counts["puts"],
                gets=self._counts["gets"],
                hits=self._counts["hits"],
                bytes_written=self._writer.bytes_written,
                bytes_read=self._counts["bytes_read"],
                evicted=self._space.evicted,
                by_reason=dict(self._reasons),
                ready=self._space.ready,
            )

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the index is complete; False if it took longer than `timeout` seconds."""
        return self._janitor.wait_ready(timeout)

    def wait_swept(self, timeout: float) -> bool:
        """Wait until the remains of cleared generations are gone; False if it took longer."""
        return self._janitor.wait_idle(timeout)

    def close(self) -> None:
        """See `StorageBackend`. Notes how full the folder is, so that the next opening knows."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._janitor.stop(_CLOSE_WAIT)
        self._root.leave(self._space.usage()[2] if self._space.exact else None)

    # --- one object ---------------------------------------------------------------------------------------------

    def _put(self, stored: StoredObject, bucket: int) -> ObjectResult:
        depth, reason = _check(stored)
        if reason:
            return ObjectResult(ObjectStatus.FAILED, reason)
        place = self._names.place(stored.key)
        for _ in range(_TRIES):
            if self._reader.is_stored(place, bucket):
                return _OK
            ticket = self._space.claim(place.id)
            if ticket is None:
                return self._put_claimed(stored, place, depth, bucket)
            if not ticket.wait(CLAIM_WAIT):
                break
            if ticket.result is not None:
                return ticket.result  # another thread stored the same object meanwhile
        return ObjectResult(ObjectStatus.FAILED, "busy")

    def _put_claimed(self, stored: StoredObject, place: Place, depth: int, bucket: int) -> ObjectResult:
        result = ObjectResult(ObjectStatus.FAILED, "interrupted")
        try:
            if self._reader.is_stored(place, bucket):
                result = _OK
            else:
                self._space.forget(place.id)
                self._writer.store(stored, place, depth=depth, bucket=bucket)
                result = _OK
        except Refused as refusal:
            result = ObjectResult(ObjectStatus.FAILED, refusal.reason)
        except StorageUnavailable:
            result = ObjectResult(ObjectStatus.FAILED, "unavailable")
        except OSError as error:
            result = failed(error)
        finally:
            self._space.release(place.id, result)
        return result

    def _delete(self, key: ObjectKey) -> bool:
        place = self._names.place(key)
        try:
            if not self._directories.check(place):
                return False
            if self._files.peek(place.path, key).verdict.kind not in (VerdictKind.OK, VerdictKind.CORRUPT):
                return False
        except OSError:
            return False
        return self._removal.remove(place)

    # --- small things -------------------------------------------------------------------------------------------

    def _alive(self) -> bool:
        if self._root.alive():
            return True
        if self._root.revive():
            self._space.reset()
            return True
        return False

    def _check_open(self) -> None:
        if self._closed:
            raise CacheClosed(f"file storage {self.path} is closed")

    def _count(self, asked: str, good: str, moved: str, results: list[ObjectResult], amount: int) -> None:
        with self._lock:
            self._counts[asked] += len(results)
            self._counts[moved] += amount
            for result in results:
                if result.status is ObjectStatus.OK:
                    self._counts[good] += 1
                else:
                    self._reasons[result.reason] += 1


def _check(stored: StoredObject) -> tuple[int, str]:
    """Depth of the object, and why its header cannot be stored."""
    try:
        header = codec.decode_header(stored.header, likely=stored.key)
    except codec.HeaderError as error:
        return 0, f"header:{error.reason}"
    if (
        header.key != stored.key
        or header.payload_length != stored.payload.nbytes
        or header.length != len(stored.header)
    ):
        return 0, "header:identity"
    return header.depth, ""
