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


def drained(folder: Path, prompts: int = 10) -> float:
    """Seconds in which some 200 files a prompt are written."""
    with open_small(f"file://{folder}?capacity=1GiB", device=600, host=600) as cache:
        engine = FakeEngine(cache)
        for seed in range(prompts):
            engine.run(prompt(seed, 200), logits=False)
        began = time.monotonic()
        assert cache.flush()
        return time.monotonic() - began


def hashes_a_million_tokens() -> None:
    symbols = np.arange(1_000_000 // 64 * 64, dtype="<u4").tobytes()
    PageHasher("sha256", page_size=64).extend(None, symbols, len(symbols) // 256)


@pytest.mark.case("THR-3")
@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a thread that holds the interpreter without end slows each write to its turns of 5 ms; see the README",
)
def test_writes_go_on_while_a_thread_hashes_without_end(tmp_path: Path) -> None:
    alone = min(drained(tmp_path / f"alone{run}", prompts=2) for run in range(2))
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            hashes_a_million_tokens()

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        beside = min(drained(tmp_path / f"beside{run}", prompts=2) for run in range(2))
    finally:
        stop.set()
        thread.join()
    assert beside < 3 * alone + 0.5
