"""How size costs: memory a page, growth of match and evict with the number of pages, and what touching takes.

`python benchmarks/run.py scale --large` goes on to 10 million pages, which takes minutes and about 10 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import hicache
from benchmarks.measure import Row, row
from hicache.analytics.run import ReplayOptions, replay
from hicache.analytics.traces import open_trace
from hicache.core.cache import Core
from hicache.core.config import CoreConfig
from hicache.core.hashing import PageHasher
from hicache.core.prompt import Prompt
from hicache.core.transferlog import TransferLog
from hicache.core.tree import HiRadixTree
from hicache.core.writeback import Writer
from hicache.runtime.objects import PageObjects

P = 64
WIDTH = 4 * P
NODE_PAGES = 16
MILLION = 1_000_000
SMALL = 10_000
HASHER = PageHasher("xxh3_128", page_size=P)
SMALL_TRACE = Path(__file__).parent / "traces" / "conversation_1000.jsonl"
GROWTH = 1.5
LARGE = "BENCHMARKS_LARGE"
"""Set in the environment by `--large`."""


def large() -> bool:
    """Whether 10 million pages were asked for."""
    return bool(os.environ.get(LARGE))


# ---- in a process of its own: what memory holds is seen by the process's size


class Filled:
    """A core whose DEVICE tier is full: `pages` pages in prompts of one node each."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.prompts = pages // NODE_PAGES
        before = resident_bytes()
        self.core = Core(CoreConfig(device_pages=pages, ghost_pages=0))
        self.tree: HiRadixTree = self.core.tree(bytes(16), width=WIDTH, hasher=HASHER)
        for number in range(self.prompts):
            self.add(number)
        self.bytes_per_page = (resident_bytes() - before) / pages - WIDTH

    def symbols(self, number: int) -> bytes:
        """The prompt of that number; the same each time, with its number at its very start."""
        random = np.random.default_rng(number)
        tokens = random.integers(0, 2**32, NODE_PAGES * P, dtype=np.uint32)
        tokens[0] = number
        return tokens.tobytes()

    def add(self, number: int) -> None:
        """One request that computes a prompt."""
        prompt = Prompt(self.symbols(number), WIDTH, HASHER)
        lease = self.core.lease(self.tree, prompt)
        self.core.allocate(lease, NODE_PAGES)
        self.core.commit(lease, NODE_PAGES, ready=True)
        self.core.release(lease)


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def median_us(work: Callable[[int], object], numbers: list[int]) -> float:
    """The median time of one call in microseconds, over calls with each of these numbers."""
    times = []
    for number in numbers:
        start = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def measure(pages: int) -> dict[str, float]:
    """All figures of one size."""
    filled = Filled(pages)
    core, tree = filled.core, filled.tree
    numbers = np.random.default_rng(7).integers(0, filled.prompts, 2_000).tolist()
    asked = {number: filled.symbols(number) for number in numbers}
    # What no tree of this kind can do without: one look-up of the first page, one compare of the rest.
    bare = {node.span[:WIDTH]: node.span for node in tree.root.children.values()}

    def match(number: int) -> None:
        assert core.match(tree, Prompt(asked[number], WIDTH, HASHER)).device == NODE_PAGES

    def look_up(number: int) -> None:
        symbols = asked[number]
        assert symbols.startswith(bare[symbols[:WIDTH]])

    figures = {"match": median_us(match, numbers), "bare": median_us(look_up, numbers)}
    figures["evict"] = median_us(lambda _: core.evict(0, 1), numbers)
    return figures | {"bytes_per_page": filled.bytes_per_page}


def apart(pages: int) -> dict[str, float]:
    """`measure` in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_scale", str(pages)],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


# ---- touching


TOUCH_SECONDS = 60.0 / 60
"""The usual interval, shrunk as much as time: a replay takes less than a sixtieth of what its requests once took."""


def touch_overhead(rounds: int = 3) -> float:
    """Share of the time of a replay through three tiers that telling storage of pages in use takes: the median.

    Time is that of threads on the processors, within one run: two runs, one with and one without, differ by more on a
    machine that does something else as well than what is looked for.
    """
    return float(np.median([_touch_share() for _ in range(rounds)]))


def _touch_share() -> float:
    spent: list[float] = []
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder, ExitStack() as undo:
        for owner, name in ((Core, "touch"), (PageObjects, "touch"), (TransferLog, "_touch_ended"), (Writer, "heal")):
            undo.enter_context(_timed(owner, name, spent))
        undo.enter_context(_opening_with(touch_seconds=TOUCH_SECONDS))
        options = ReplayOptions(
            device_pages=800,
            host_pages=2_400,
            storage=f"file://{folder}/store?capacity=2GiB",
            page_bytes=4096,
            requests=400,
        )
        start = time.process_time()
        result = replay(open_trace([SMALL_TRACE]), options)
        whole = time.process_time() - start
        assert not result.pages_wrong
    return sum(spent) / whole


@contextmanager
def _timed(owner: type, name: str, spent: list[float]) -> Iterator[None]:
    """Add the processor time of each call of a method to `spent`."""
    usual = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return usual(*args, **kwargs)
        finally:
            spent.append(time.thread_time() - start)

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, usual)


@contextmanager
def _opening_with(**options: Any) -> Iterator[None]:
    """Options that a replay does not have."""
    usual = hicache.open
    hicache.open = partial(usual, **options)
    try:
        yield
    finally:
        hicache.open = usual


def rows() -> list[Row]:
    sizes = {"1m": MILLION} | ({"10m": 10 * MILLION} if large() else {})
    small = min((apart(SMALL) for _ in range(3)), key=lambda figures: figures["match"])
    result = []
    for name, pages in sizes.items():
        figures = apart(pages)
        result.append(row(f"metadata_bytes_per_page_{name}", figures["bytes_per_page"], "bytes", bar=150.0))
        bare = figures["bare"] / small["bare"]
        for what in ("match", "evict"):
            growth = figures[what] / small[what]
            said = f"{small[what]:.1f} to {figures[what]:.1f} us from 10^4 pages on; a bare look-up {bare:.2f} times"
            result.append(row(f"{what}_growth_{name}", growth, "times", reference=bare, bar=GROWTH * bare, reason=said))
    result.append(row("touch_overhead", 100 * touch_overhead(), "%", bar=2.0))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", type=int)
    print(json.dumps(measure(parser.parse_args().pages)))
