"""The file backend keeps the contract, with page cache and past it, bare and as `open_storage` gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.core.keys import ObjectKey
from hicache.storage.base import StorageBackend
from hicache.storage.codec import padded
from hicache.storage.registry import open_storage
from hicache.testing.storage import StorageBackendTests
from hicache.testing.wrapped import WRAPPERS
from hicache_file import FileBackend

OVERHEAD = 4096 + 256  # header block, and what a name counts


def file_of(root: Path, key: ObjectKey) -> Path:
    namespace, generation, name = key.name.split("/")
    folder = root / namespace[:2] / namespace / generation
    found = list(folder.glob(f"??/??/{name}"))
    if found:
        return found[0]
    raise FileNotFoundError(key.name)


class TestFileBackend(StorageBackendTests):
    root: Path
    made = 0

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def setup_method(self) -> None:
        pass  # the folder comes first

    @pytest.fixture(autouse=True)
    def opened(self, folder: None) -> None:
        self.backend = self.make_backend()

    def open(self, path: Path, capacity: int | None = None) -> StorageBackend:
        return FileBackend(str(path), capacity=capacity)

    def make_backend(self) -> StorageBackend:
        self.path = self.root / "root"
        return self.open(self.path)

    def reopen(self) -> StorageBackend:
        self.backend.close()
        return self.open(self.path)

    def make_small(self, objects: int) -> StorageBackend:
        return self.open(self.root / "small", objects * (padded(self.payload_length) + OVERHEAD))

    def corrupt(self, key: ObjectKey) -> bool:
        with file_of(self.path, key).open("r+b") as file:
            file.seek(4096 + 77)
            byte = file.read(1)[0]
            file.seek(4096 + 77)
            file.write(bytes([byte ^ 16]))
        return True

    def plant(self, key: ObjectKey, header: bytes, payload: bytes) -> bool:
        # The place is where a put would make it, so that nothing here repeats the mapping.
        other = FileBackend(str(self.path))
        path = Path(other._names.place(key).path)
        other.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(header.ljust(padded(len(header)), b"\0") + payload.ljust(padded(len(payload)), b"\0"))
        return True


class TestLargeObjects(TestFileBackend):
    """Past the page cache, where the file system allows."""

    payload_length = 256 * 1024


class TestByUrl(TestFileBackend):
    def open(self, path: Path, capacity: int | None = None) -> StorageBackend:
        return open_storage(f"file://{path}" + (f"?capacity={capacity}" if capacity else ""))


class TestDurable(TestFileBackend):
    def open(self, path: Path, capacity: int | None = None) -> StorageBackend:
        return FileBackend(str(path), capacity=capacity, fsync=True)


class TestInEachWrapper(TestFileBackend):
    @pytest.fixture(autouse=True, params=WRAPPERS)
    def opened(self, request: pytest.FixtureRequest, folder: None) -> None:
        self.wrapper = WRAPPERS[request.param]
        self.backend = self.make_backend()

    def open(self, path: Path, capacity: int | None = None) -> StorageBackend:
        return self.wrapper(super().open(path, capacity))
