"""Clearing where storage is in trouble: whoever clears is told what ails it, and nobody's log gets a traceback."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import hicache
from hicache.storage.memory import MemoryBackend
from hicache.testing.engine import FakeEngine, prompt, small_namespace
from hicache.testing.faults import FaultyStorage, fail


def test_a_vanished_folder_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "store"
    with hicache.open(small_namespace(), device=16, host=16, storage=f"file://{folder}") as cache:
        FakeEngine(cache).run(prompt(1, 9))
        assert cache.flush()
        folder.rename(tmp_path / "elsewhere")
        with caplog.at_level(logging.DEBUG), pytest.raises(hicache.StorageError) as caught:
            cache.clear()
        assert cache.match(prompt(1, 9)).pages == 0  # in memory it is done all the same
    text = str(caught.value)
    assert str(folder) in text
    assert "call clear again" in text
    assert "\n" not in text
    assert not [record for record in caplog.records if record.exc_info]


def test_an_error_of_the_system_is_told(caplog: pytest.LogCaptureFixture) -> None:
    storage = FaultyStorage(MemoryBackend())
    with hicache.open(small_namespace(), device=16, host=16, storage=storage) as cache:
        storage.script("clear", fail(OSError("read only")))
        with caplog.at_level(logging.DEBUG), pytest.raises(hicache.StorageError, match=r"\(read only\)"):
            cache.clear()
        cache.clear()
    assert not [record for record in caplog.records if record.exc_info]
    storage.close()
