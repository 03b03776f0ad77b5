"""Engines over one storage folder, made of SGLang's real cache modules; `make engines` runs these tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_pools import Engine


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv?capacity=64MiB"


@pytest.fixture
def short() -> Iterator[Path]:
    """A short path: sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hc") as name:
        yield Path(name)


@pytest.fixture
def engine(storage: str) -> Iterator[Callable[..., Engine]]:
    """Makes engines that share one storage folder; `extra` adds to the extra configuration."""
    made: list[Engine] = []

    def make(pool: Any, *, extra: dict[str, Any] | None = None, **config: Any) -> Engine:
        made.append(Engine(pool, {"storage": storage} | (extra or {}), **config))
        return made[-1]

    yield make
    for one in made:
        one.backend.close()
