"""Threads of storage get on while the engine's own threads are idle, or busy with Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hicache.core.hashing import PageHasher
from hicache.testing.embedded import open_small
from hicache.testing.engine import FakeEngine, prompt

pytestmark = [pytest.mark.alone, pytest.mark.slow]


COMPUTED = np.empty(8 << 20, np.uint8)


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


@contextmanager
def engine_thread(step: Callable[[], object]) -> Iterator[None]:
    """A thread that does this over and over."""
    stop = threading.Event()

    def steps() -> None:
        while not stop.is_set():
            step()

    thread = threading.Thread(target=steps)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def hashes_and_computes() -> None:
    """A step of an engine: prompts of a million tokens are hashed, then kernels run for as long."""
    began = time.perf_counter()
    hashes_a_million_tokens()
    end = 2 * time.perf_counter() - began
    while time.perf_counter() < end:
        np.copyto(COMPUTED, 1)  # without the interpreter, as kernels are


@pytest.mark.case("THR-3")
def test_writes_go_on_beside_an_engine_that_hashes_a_million_tokens_a_step(tmp_path: Path) -> None:
    alone = min(drained(tmp_path / f"alone{run}") for run in range(2))
    with engine_thread(hashes_and_computes):
        beside = min(drained(tmp_path / f"beside{run}") for run in range(2))
    assert beside < 3 * alone + 0.5
