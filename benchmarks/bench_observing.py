"""What it costs a service to observe itself: the access log, and the memory of what other sizes would hit.

Two services beside each other: one writes the access log and keeps that memory, the other does neither. A client asks
one and then the other, in turns; each row is a verb's median time at the first, beside that at the second. The ratio is
the median over the pairs of turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

import hicache
from benchmarks.measure import Row, row
from hicache.rpc.client.cache import ConnectedCache
from hicache.testing.sidecars import ServiceProcess, namespace_of

NAMESPACE: Final = namespace_of(8192, model="benchmark/model")
TOKENS: Final = 8192
PROMPTS: Final = 8
PAIRS: Final = 10
REQUESTS: Final = 150
MOST: Final = 1.05
"""Times the verb's median without."""

BLIND: Final = """
import sys
from hicache.cli import main
from hicache.runtime.insight import Insight
Insight.closed = lambda *_: None
sys.exit(main())
"""


def prompts() -> list[np.ndarray[Any, Any]]:
    return [np.random.default_rng(seed).integers(0, 2**32, TOKENS, dtype=np.uint32) for seed in range(PROMPTS)]


def fill(cache: ConnectedCache) -> None:
    for tokens in prompts():
        with cache.request(tokens, logits=False) as request:
            request.write_from([bytes(cache.host.page_bytes)] * len(request.allocate()))
            request.commit()


def turn(cache: ConnectedCache) -> dict[str, float]:
    """Median microseconds of each verb, over requests that are hit."""
    asked = prompts()
    taken: dict[str, list[float]] = {"match": [], "lease": [], "load": [], "release": []}
    for number in range(REQUESTS):
        tokens = asked[number % PROMPTS]
        marks = [time.perf_counter()]
        cache.match(tokens, logits=False)
        marks.append(time.perf_counter())
        request = cache.request(tokens, logits=False)
        marks.append(time.perf_counter())
        pages = len(request.load())
        marks.append(time.perf_counter())
        request.close()
        marks.append(time.perf_counter())
        assert pages == TOKENS // NAMESPACE.page_size
        for name, begin, end in zip(taken, marks, marks[1:], strict=False):
            taken[name].append(end - begin)
    return {name: 1e6 * statistics.median(seconds) for name, seconds in taken.items()}


def rows() -> list[Row]:
    on: list[dict[str, float]] = []
    off: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        (first := Path(folder, "on")).mkdir()
        (second := Path(folder, "off")).mkdir()
        quiet = ("--log-level", "error")
        with (
            ServiceProcess(first, "--access-log", str(first / "log"), *quiet, host="128MiB") as observed,
            ServiceProcess(second, *quiet, host="128MiB", program=("-c", BLIND)) as plain,
            hicache.connect(observed.address, NAMESPACE, required=True) as seen,
            hicache.connect(plain.address, NAMESPACE, required=True) as unseen,
        ):
            for cache in (seen, unseen):
                fill(cache)
                turn(cache)
            for pair in range(PAIRS):
                for found, cache in ((on, seen), (off, unseen))[:: 1 if pair % 2 else -1]:
                    found.append(turn(cache))
    rows = []
    for verb in (*on[0], "all four"):
        with_it, without = (
            [sum(each.values()) if verb == "all four" else each[verb] for each in found] for found in (on, off)
        )
        ratio = statistics.median(one / other for one, other in zip(with_it, without, strict=True))
        reference = statistics.median(without)
        name = f"observed_{verb.replace(' ', '_')}"
        rows.append(row(name, reference * ratio, "us", bar=MOST * reference, reference=reference))
    return rows
