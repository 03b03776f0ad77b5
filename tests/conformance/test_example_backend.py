"""A whole storage backend by somebody else, and the ten lines that prove it: copy this file to begin your own.

A distribution names the class in its entry points, and `--storage sqlite:///path` works wherever it is installed:

    [project.entry-points."hicache.storage_backends"]
    sqlite = "my_package:SqliteBackend"
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from hicache.errors import CacheClosed, ConfigError
from hicache.storage import codec
from hicache.storage.base import (
    ObjectKey,
    ObjectResult,
    ObjectStatus,
    StorageBackend,
    StorageStatistics,
    StorageUrl,
    StoredObject,
)
from hicache.testing.storage import StorageBackendTests

TABLES = """
CREATE TABLE IF NOT EXISTS object (name TEXT PRIMARY KEY, header BLOB, payload BLOB, used INTEGER);
CREATE TABLE IF NOT EXISTS generation (namespace BLOB PRIMARY KEY, number TEXT);
"""


class SqliteBackend(StorageBackend):
    """Objects in one SQLite file, without a limit."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()  # one connection for all threads, one call at a time
        self._database: sqlite3.Connection | None = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._database.executescript(TABLES)
        self._gets = self._puts = self._hits = 0

    @classmethod
    def from_url(cls, url: StorageUrl) -> Self:
        """`sqlite:///path`."""
        if url.host or not url.path.startswith("/"):
            raise ConfigError("sqlite storage: write sqlite:///absolute/path, with three slashes")
        url.done()
        return cls(url.path)

    def _ask(self, words: str, *values: object) -> list[Any]:
        with self._lock:
            if self._database is None:
                raise CacheClosed("sqlite storage is closed")
            return self._database.execute(words, values).fetchall()

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        return [self._get(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def _get(self, key: ObjectKey, buffer: memoryview) -> ObjectResult:
        self._gets += 1
        rows = self._ask("SELECT header, payload FROM object WHERE name = ?", key.name)
        if not rows:
            return ObjectResult(ObjectStatus.MISSING, "absent")
        header, payload = rows[0]
        verdict = codec.verify(key, header, payload)
        if not verdict.ok:
            if verdict.kind is codec.VerdictKind.CORRUPT:  # ours and damaged: withdraw it; anything else is left alone
                self.delete([key])
            return ObjectResult.of(verdict)
        if len(payload) != buffer.nbytes:
            return ObjectResult(ObjectStatus.FAILED, "size")
        np.copyto(np.asarray(buffer), np.frombuffer(payload, np.uint8))  # releases the interpreter's lock
        self._hits += 1
        return ObjectResult.of(verdict)

    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        return [self._put(stored) for stored in objects]

    def _put(self, stored: StoredObject) -> ObjectResult:
        self._puts += 1
        if not codec.verify(stored.key, stored.header, stored.payload).ok:
            return ObjectResult(ObjectStatus.FAILED, "header")
        words = "INSERT OR REPLACE INTO object VALUES (?, ?, ?, 0)"
        self._ask(words, stored.key.name, stored.header, stored.payload)
        return ObjectResult(ObjectStatus.OK)

    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        return [bool(self._ask("SELECT 1 FROM object WHERE name = ?", key.name)) for key in keys]

    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        words = "UPDATE object SET used = (SELECT MAX(used) FROM object) + 1 WHERE name = ? RETURNING 1"
        return [bool(self._ask(words, key.name)) for key in keys]

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [bool(self._ask("DELETE FROM object WHERE name = ? RETURNING 1", key.name)) for key in keys]

    def generation(self, namespace: bytes) -> int:
        rows = self._ask("SELECT number FROM generation WHERE namespace = ?", namespace)
        return int(rows[0][0]) if rows else 0

    def clear(self, namespace: bytes, generation: int) -> None:
        floor = max(generation, self.generation(namespace))
        self._ask("INSERT OR REPLACE INTO generation VALUES (?, ?)", namespace, str(floor))

    def statistics(self) -> StorageStatistics:
        ((objects, size),) = self._ask("SELECT COUNT(*), SUM(LENGTH(header) + LENGTH(payload)) FROM object")
        return StorageStatistics(
            objects=objects, bytes_used=size or 0, gets=self._gets, puts=self._puts, hits=self._hits
        )

    def close(self) -> None:
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None


# --- the ten lines; the two hooks below them are optional, and make the suite ask more -------------------------------


class TestSqliteBackend(StorageBackendTests):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = str(tmp_path / "objects.sqlite")
        self.backend = self.make_backend()

    def setup_method(self) -> None:
        pass  # the folder comes first

    def make_backend(self) -> StorageBackend:
        return SqliteBackend(self.path)

    def reopen(self) -> StorageBackend:
        self.backend.close()
        return self.make_backend()

    def plant(self, key: ObjectKey, header: bytes, payload: bytes) -> bool:
        self._behind("INSERT OR REPLACE INTO object VALUES (?, ?, ?, 0)", key.name, header, payload)
        return True

    def corrupt(self, key: ObjectKey) -> bool:
        self._behind("UPDATE object SET payload = zeroblob(LENGTH(payload)) WHERE name = ?", key.name)
        return True

    def _behind(self, words: str, *values: object) -> None:
        database = sqlite3.connect(self.path, isolation_level=None)
        database.execute(words, values)
        database.close()


def test_it_opens_by_url(tmp_path: Path) -> None:
    make: Callable[[str], SqliteBackend] = lambda text: SqliteBackend.from_url(StorageUrl.parse(text))  # noqa: E731
    make(f"sqlite://{tmp_path}/objects.sqlite").close()
    with pytest.raises(ConfigError, match="unknown parameter capacity"):
        make("sqlite:///x?capacity=1GiB")
