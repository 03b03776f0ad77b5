"""Threads of storage get on while the engine's own threads are idle, or busy with Python."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hicache.core.hashing import PageHasher
from hicache.testing.embedded import open_small
from hicache.testing.engine import FakeEngine, prompt

pytestmark = [pytest.mark.alone, pytest.mark.slow]


def drained(folder: Path) -> float:
    """Seconds in which some 2,000 files are written."""
    with open_small(f"file://{folder}?capacity=1GiB", device=600, host=600) as cache:
        engine = FakeEngine(cache)
        for seed in range(10):
            engine.run(prompt(seed, 200), logits=False)
        began = time.monotonic()
        assert cache.flush()
        return time.monotonic() - began


@pytest.mark.case("THR-3")
def test_writes_go_on_while_a_thread_hashes(tmp_path: Path) -> None:
    """A foreground that hashes prompts without end does not keep files from being written."""
    alone = min(drained(tmp_path / f"alone{run}") for run in range(2))
    stop = threading.Event()
    hasher = PageHasher("sha256", page_size=64)
    symbols = np.arange(1_000_000 // 64 * 64, dtype="<u4").tobytes()

    def busy() -> None:
        while not stop.is_set():
            hasher.extend(None, symbols, len(symbols) // 256)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        beside = min(drained(tmp_path / f"beside{run}") for run in range(2))
    finally:
        stop.set()
        thread.join()
    assert beside < 3 * alone + 0.5
