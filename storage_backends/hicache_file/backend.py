"""The file backend: objects as files below one root folder that processes may share, with a hard byte limit."""

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

from .files import DIRECT_FROM
from .filesystem import FileSystem
from .inspection import Inspected
from .keeper import Keeper
from .ledger import LedgerBusy
from .names import Place
from .opening import Opened, Settings
from .reader import Reader, failed
from .removal import CLAIM_WAIT
from .writer import Refused, Writer

__all__ = ["FileBackend"]

_OK: Final = ObjectResult(ObjectStatus.OK)
_TRIES: Final = 4
_CLOSE_WAIT: Final = 5.0


class FileBackend(Inspected, StorageBackend):
    """Objects as files. Thread-safe; calls work in the caller's thread, several at once.

    Several processes may use one folder at once. It never holds more than `capacity` bytes of objects, those included
    that are being written. What was used longest ago goes first, and of what was used at about the same time the
    deepest page. Order survives a restart, and is shared between processes, to one minute. Opening does not wait for
    the index: a thread builds it, `get_into` and `contains` look at the file system meanwhile, and a put makes room
    from what is indexed so far or fails ("rebuilding").

    Bytes are not forced to the device unless `fsync` is set: after a power failure a torn file is a miss.

    Args:
        path: the root folder; made if absent. It must be empty or a root of hicache.
        capacity: most bytes, or None. All processes should give the same one.
        fsync: force each object to the device before it counts as stored.
        io: "auto", "direct" or "buffered": how large objects are written.
        janitor: "auto", "always" or "never": whether this process may be the one that sweeps and counts.
        shared: "auto", "yes" or "no": whether other processes may use the folder at the same time. "no" keeps them
            out, where there are locks. "auto" is "yes" where there are locks, else "no".
        refresh: seconds between two looks at what other processes did; bounds how late a clear elsewhere is seen.
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
        io: str = "auto",
        janitor: str = "auto",
        shared: str = "auto",
        refresh: float = 1.0,
        fs: FileSystem | None = None,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        fs = fs or FileSystem()
        settings = Settings.of(io=io, janitor=janitor, shared=shared, refresh=refresh)
        self._closed = False
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        opened = Opened(fs, path, capacity=capacity, fsync=fsync, settings=settings, now=now, wall=wall)
        parts = opened.parts
        self._opened = opened
        self._root = parts.root
        self._space = parts.space
        self._names = parts.names
        self._directories = parts.directories
        self._files = parts.files
        self._removal = parts.removal
        self._labels = parts.labels
        self._accounts = parts.accounts
        self._reader = Reader(parts)
        self._writer = Writer(parts)
        self._keeper = Keeper(parts, opened.election, refresh=settings.refresh)
        self._keeper.start()

    @classmethod
    def from_url(cls, url: StorageUrl) -> Self:
        """`file:///path?capacity=20GiB&fsync=1&io=auto&janitor=auto&shared=auto&refresh=1`."""
        if url.host not in ("", "localhost") or not url.path.startswith("/"):
            raise ConfigError("file storage: write file:///absolute/path, with three slashes")
        capacity = url.take_size("capacity")
        fsync = url.take_flag("fsync")
        io, janitor, shared = (url.take(name, "auto", str) for name in ("io", "janitor", "shared"))
        refresh = url.take("refresh", 1.0, float)
        url.done()
        return cls(url.path, capacity=capacity, fsync=fsync, io=io, janitor=janitor, shared=shared, refresh=refresh)

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
        """See `StorageBackend`. Looks at the file system, so it is right before the index is.

        Raises:
            StorageUnavailable: the file system does not tell.
        """
        self._check_open()
        answers: list[bool] = []
        try:
            for key in keys:
                skip = stop_at_first_miss and answers and not answers[-1]
                answers.append(not skip and self._reader.exists(key))
        except OSError as error:
            raise self._untold(error) from error
        return answers

    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`.

        Raises:
            StorageUnavailable: the file system does not tell whether an object is there; those in front are touched.
        """
        self._check_open()
        bucket = self._space.bucket()
        try:
            return [self._reader.touch(key, bucket) for key in keys]
        except OSError as error:
            raise self._untold(error) from error

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
        except (OSError, LedgerBusy) as error:
            raise StorageUnavailable(f"{self.path}: the generation cannot be read: {error}") from error

    def clear(self, namespace: bytes, generation: int) -> None:
        """See `StorageBackend`. Older objects are removed in the background.

        Raises:
            StorageUnavailable: the new generation could not be written.
        """
        self._check_open()
        try:
            self._labels.raise_to(namespace, generation)
        except (OSError, LedgerBusy) as error:
            raise StorageUnavailable(f"{self.path}: the generation cannot be written: {error}") from error
        self._keeper.sweep(namespace)

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
        """See `StorageBackend`. `bytes_used` are the sizes of the files that this process knows.

        Beside the reasons of results, `by_reason` has "undeletable" (victims that could not be removed) and
        "background" (trouble of the thread).
        """
        objects, used = self._space.usage()
        with self._lock:
            trouble = {"undeletable": self._removal.undeletable, "background": self._keeper.all_errors}
            reasons = self._reasons | {name: count for name, count in trouble.items() if count}
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
                by_reason=dict(reasons),
                ready=self._space.ready,
            )

    @property
    def is_janitor(self) -> bool:
        """Whether this process is the one that sweeps and counts, as of its last look."""
        return self._keeper.is_janitor

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the index is complete; False if it took longer than `timeout` seconds."""
        return self._keeper.wait_ready(timeout)

    def wait_swept(self, timeout: float) -> bool:
        """Wait until this process has nothing to sweep or trim; False if it took longer."""
        return self._keeper.wait_idle(timeout)

    def close(self) -> None:
        """See `StorageBackend`. Gives back what this process might still have written."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._keeper.stop(_CLOSE_WAIT)
        self._opened.close()

    def _untold(self, error: OSError) -> StorageUnavailable:
        return StorageUnavailable(f"{self.path}: it cannot be told what is there: {error.strerror}")

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
                self._measure_io(stored)
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

    def _measure_io(self, stored: StoredObject) -> None:
        """With the first object that is large enough for it to matter, find out how such are written best."""
        io = self._opened.io
        if not io.measured and stored.payload.nbytes >= DIRECT_FROM:
            io.measured = True
            self._keeper.do(lambda: self._files.choose(io.measure(stopped=lambda: self._closed)))

    # --- small things -------------------------------------------------------------------------------------------

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
