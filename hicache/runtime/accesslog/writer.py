"""Writes the access log of one process: requests that end are noted in a bounded queue, and a thread writes them.

Noting costs about a microsecond, under the cache's lock, and never waits. What the queue has no room for, or no file
takes, is dropped and counted.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from hicache.runtime.accesslog.blocks import Block, Ended, Sampler, Words
from hicache.runtime.accesslog.files import LogFiles
from hicache.runtime.accesslog.format import VERSION, Head, NamespaceRecord
from hicache.runtime.accesslog.settings import AccessLog, read_key

if TYPE_CHECKING:
    from hicache.core.identity import DerivedNamespace

__all__ = ["AccessLogStatistics", "AccessLogWriter"]

_log = logging.getLogger("hicache.runtime")

MOST_WAITING: Final = 8192
MOST_PAGES_WAITING: Final = 2**20
"""Of the queue: page hashes of 32 MiB."""

_INTERVAL: Final = 1.0
"""Seconds between two looks at the queue."""

_AGE: Final = 5.0
"""Seconds after which a block is written that is not full: what a killed process loses."""

_SLICE: Final = 32
"""Requests between two moments at which other threads get the interpreter: about a millisecond."""

_PAUSE: Final = 0.0005


@dataclass(frozen=True, slots=True)
class AccessLogStatistics:
    """A snapshot. `requests == written + left_out + dropped + waiting`, but for what is worked at just now.

    Attributes:
        folder: where it is.
        requests: requests that have ended since it began.
        written: those that are in its files.
        left_out: those that are not in the sample.
        dropped: those that were lost, as the queue was full or no file could be written.
        waiting: those that are still to be written.
        bytes: written.
        files: begun.
        trouble: why the last block could not be written; empty: it was.
    """

    folder: str
    requests: int
    written: int
    left_out: int
    dropped: int
    waiting: int
    bytes: int
    files: int
    trouble: str

    @property
    def degraded(self) -> tuple[str, ...]:
        """Why the log is not all that it should be, in words; empty when all is well."""
        if not self.trouble:
            return ()
        return (f"access log: {self.folder:.200} cannot be written: {self.trouble}; {self.dropped:,} requests lost",)


class AccessLogWriter:
    """The access log of one process, for any number of caches. Thread-safe.

    Args:
        settings: what is written, and where.
        now: monotonic seconds; those of requests.
        wall: seconds since 1970.
        background: whether a thread writes; else `work` does, when it is called.

    Raises:
        ConfigError: the folder or the key's file cannot be used.
    """

    def __init__(
        self,
        settings: AccessLog,
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        background: bool = True,
    ) -> None:
        self.settings = settings
        self._key = read_key(settings)
        self._files = LogFiles(
            Path(settings.folder), file_bytes=settings.file_bytes, total_bytes=settings.total_bytes, wall=wall
        )
        self._now, self._wall = now, wall
        self._sampler = Sampler(settings)
        self._boot = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._queue: list[Ended] = []
        self._pages = 0
        self._requests = self._written = self._left_out = self._dropped = 0
        self._working = 0  # taken out of the queue, and neither written nor given up yet
        self._block = Block(self._key)
        self._block_began = 0.0
        self._bell = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._loop, name="hicache-access-log", daemon=True)
            self._thread.start()

    # ---- noting

    def note(self, ended: Ended) -> None:
        """A request has ended. Never waits."""
        with self._lock:
            self._requests += 1
            waiting, pages = len(self._queue), ended.prompt.pages
            if self._stop or waiting >= MOST_WAITING or self._pages + pages > MOST_PAGES_WAITING:
                self._dropped += 1
                return
            self._queue.append(ended)
            self._pages += pages
        if waiting == MOST_WAITING // 4:
            self._bell.set()

    def describe(self, namespace: DerivedNamespace, generation: int) -> NamespaceRecord:
        """A namespace as it stands in the log."""
        return NamespaceRecord(
            namespace=self._name(namespace.digest).hex(),
            generation=generation,
            page_size=namespace.base.page_size,
            model=namespace.base.model,
            tenant=self._tenant(namespace.tenant),
        )

    def _name(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=8, key=self._key).digest()

    def _tenant(self, tenant: str | None) -> str | None:
        if tenant is None or self.settings.tenants == "omit":
            return None
        return tenant if self.settings.tenants == "name" else self._name(b"tenant " + tenant.encode()).hex()

    # ---- writing

    def work(self, *, last: bool = False) -> None:
        """Write what has to be written by now. By one thread at a time.

        Args:
            last: all of it, at the end.
        """
        with self._lock:
            batch, self._queue, self._pages = self._queue, [], 0
            self._working += len(batch)
        wall = self._wall() - self._now()
        for at in range(0, len(batch), _SLICE):
            if at and not last:
                time.sleep(_PAUSE)
            for ended in batch[at : at + _SLICE]:
                self._take(ended, wall)
        if last or (self._block.entries and self._now() - self._block_began >= _AGE):
            self._end_block()

    def _take(self, ended: Ended, wall: float) -> None:
        hashes = _hashes(ended)
        if not self._sampler.takes(ended, hashes):
            self._settled(left_out=1)
            return
        if not self._block.entries:
            self._block_began = self._now()
        self._block.add(ended, hashes, wall=wall)
        if self._block.full:
            self._end_block()

    def _end_block(self) -> None:
        block, self._block = self._block, Block(self._key)
        count = len(block.entries)
        if not count:
            return
        settings = self.settings
        with self._lock:
            head = Head(
                version=VERSION,
                boot=self._boot,
                sample=settings.sample,
                sample_by=settings.sample_by,
                sample_tokens=settings.sample_tokens,
                key=self._name(b"key").hex() if self._key else "",
                requests=self._requests,
                written=self._written + count,
                left_out=self._left_out,
                dropped=self._dropped,
            )
        if self._files.append(block.pack(head)):
            self._settled(written=count)
        else:
            self._settled(dropped=count)

    def _settled(self, *, written: int = 0, left_out: int = 0, dropped: int = 0) -> None:
        with self._lock:
            self._written += written
            self._left_out += left_out
            self._dropped += dropped
            self._working -= written + left_out + dropped

    def _loop(self) -> None:
        while not self._stop:
            self._bell.wait(_INTERVAL)
            self._bell.clear()
            self._safely()
        self._safely(last=True)
        self._files.close()

    def _safely(self, *, last: bool = False) -> None:
        try:
            self.work(last=last)
        except Exception:
            _log.exception("an internal error of the access log; please report it")
            self._block = Block(self._key)
            self._settled(dropped=self._working)

    # ---- looking, and the end

    def statistics(self) -> AccessLogStatistics:
        """A snapshot."""
        files = self._files
        with self._lock:
            return AccessLogStatistics(
                folder=str(self.settings.folder),
                requests=self._requests,
                written=self._written,
                left_out=self._left_out,
                dropped=self._dropped,
                waiting=len(self._queue) + self._working,
                bytes=files.bytes,
                files=files.files,
                trouble=files.trouble,
            )

    def close(self, seconds: float = 2.0) -> bool:
        """Write what waits, and end. What a slow disk does not take in so many seconds is lost. Idempotent.

        Returns:
            Whether all of it was written or counted as dropped.
        """
        with self._lock:
            self._stop = True
        self._bell.set()
        if self._thread is None:
            self.work(last=True)
            self._files.close()
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()


def _hashes(ended: Ended) -> Words:
    """Of a request's pages, `(pages, n)`. Not the ones that the prompt keeps: transfers may be computing those."""
    prompt = ended.prompt
    size = prompt.hasher.size
    data = prompt.hasher.extend(None, prompt.symbols, prompt.pages) if prompt.pages else b""
    return np.frombuffer(data, "<u8").reshape(-1, size // 8) if data else np.empty((0, 2), np.uint64)
