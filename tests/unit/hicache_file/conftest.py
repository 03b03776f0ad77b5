from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.core.keys import ObjectKey
from hicache_file import FileBackend

PATIENCE = 30.0  # seconds that a background thread gets


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that is not there yet."""
    return tmp_path / "root"


@pytest.fixture
def open_root(root: Path) -> Iterator[Callable[..., FileBackend]]:
    """Opens the root, waits for its index, and closes it in the end."""
    opened: list[FileBackend] = []

    def open_it(*, ready: bool = True, path: Path = root, **options: Any) -> FileBackend:
        backend = FileBackend(str(path), **options)
        opened.append(backend)
        assert not ready or backend.wait_ready(PATIENCE)
        return backend

    yield open_it
    for backend in opened:
        backend.close()


@pytest.fixture
def path_of() -> Callable[[FileBackend, ObjectKey], Path]:
    """Where a key's object lies."""

    def find(backend: FileBackend, key: ObjectKey) -> Path:
        return Path(backend._names.place(key).path)

    return find
