"""Files written behind the back of an engine whose thread is busy: 2,000 objects of a flush, beside an idle engine.

`flush_beside_engine` hashes a million tokens a step, and copies for as long, as kernels run, without the interpreter.
`flush_beside_python` runs Python without ever waiting: the threads of storage then get the interpreter only by its
switch interval. Both are times the flush beside a thread that does nothing; the median of three each, in turns.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.measure import Row, row
from hicache.core.hashing import PageHasher
from hicache.testing.embedded import open_small
from hicache.testing.engine import FakeEngine, prompt

TURNS = 3
BAR = 3.0
TOKENS = np.arange(1_000_000 // 64 * 64, dtype="<u4").tobytes()
COMPUTED = np.empty(8 << 20, np.uint8)


def hashes() -> None:
    PageHasher("sha256", page_size=64).extend(None, TOKENS, len(TOKENS) // 256)


def hashes_and_computes() -> None:
    began = time.perf_counter()
    hashes()
    end = 2 * time.perf_counter() - began
    while time.perf_counter() < end:
        np.copyto(COMPUTED, 1)


def flush(folder: str, step: Callable[[], object] | None) -> float:
    stop = threading.Event()

    def steps() -> None:
        while step is not None and not stop.is_set():
            step()

    with open_small(f"file://{folder}?capacity=1GiB", device=600, host=600) as cache:
        engine = FakeEngine(cache)
        for seed in range(10):
            engine.run(prompt(seed, 200), logits=False)
        thread = threading.Thread(target=steps)
        thread.start()
        began = time.perf_counter()
        assert cache.flush()
        taken = time.perf_counter() - began
        stop.set()
        thread.join()
    return taken


def rows() -> list[Row]:
    kinds: dict[str, Callable[[], object] | None] = {"": None, "engine": hashes_and_computes, "python": hashes}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="hc") as name:
        for turn in range(TURNS):
            for kind, step in kinds.items():
                seconds[kind].append(flush(str(Path(name) / f"{kind}{turn}"), step))
    idle = statistics.median(seconds.pop(""))
    return [
        row(f"flush_beside_{kind}", statistics.median(found), "s", reference=idle, bar=BAR * idle)
        for kind, found in seconds.items()
    ]
