"""Whole public traces against their known values: `python tests/public_traces.py FOLDER [--jobs N]`, or `make traces`.

Reads conversation_trace.jsonl and synthetic_trace.jsonl (kvcache-ai/Mooncake) and agent-sessions/*.json
(callanjfox/kv-cache-tester) in the folder, and prints what it finds beside what is known: ideal rates, the LRU curve of
the stack algorithm beside a replay of the production tree at 20 sizes, the same sizes with other policies, and agents'
sessions as one population and one by one. A difference ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from hicache.analytics.analysis.columns import read_columns
from hicache.analytics.analysis.curves import exact_curve, sizes_of_interest
from hicache.analytics.analysis.distances import Uses
from hicache.analytics.analysis.report import Analysis, AnalyzeOptions, analyze
from hicache.analytics.run import ReplayOptions, replay
from hicache.analytics.simulate.run import Simulation
from hicache.analytics.simulate.settings import SimulationSettings
from hicache.analytics.traces import open_trace

# requests, input tokens, blocks asked, different; hit rates: blocks, tokens, means over requests of both
KNOWN = {
    "conversation_trace.jsonl": (12_031, 144_793_823, 288_500, 182_790, 0.3664, 0.3736, 0.3843, 0.4094),
    "synthetic_trace.jsonl": (3_993, 61_194_628, 121_877, 43_924, 0.6396, 0.6512, 0.4232, 0.4315),
}
POOLS = {10_000: (0.211, 0.001), 100_000: (0.3637, 0.00005)}
SIZES = 20
NEAR = 0.002
POLICIES = ("lru", "lfu", "slru", "priority")
POLICY_SIZES = (1_000, 10_000, 50_000)

Row = tuple[str, str, str, bool]
"""What, found, known, and whether they agree."""


def values(folder: Path) -> Iterator[Row]:
    for name, (requests, tokens, asked, different, *rates) in KNOWN.items():
        found = analyzed(folder / name)
        for what, value, known in (
            ("requests", found.requests, requests),
            ("input tokens", found.input_tokens, tokens),
            ("blocks asked", found.pages_asked, asked),
            ("blocks different", found.pages_different, different),
        ):
            yield f"{name}: {what}", f"{value:,}", f"{known:,}", value == known
        for what, rate, told in (
            ("block hit rate", found.ideal_hit_rate_pages, rates[0]),
            ("token hit rate", found.ideal_hit_rate_tokens, rates[1]),
            ("mean of block rates", found.ideal_hit_rate_requests, rates[2]),
            ("mean of token rates", found.ideal_hit_rate_requests_tokens, rates[3]),
        ):
            yield f"{name}: {what}", f"{rate:.4f}", f"{told:.4f}", abs(rate - told) <= 0.00005


def analyzed(*paths: Path) -> Analysis:
    return analyze(open_trace(paths), AnalyzeOptions())


def replayed(path: Path, pages: int) -> float:
    """Block hit rate of one pool of the production tree."""
    return replay(open_trace([path]), ReplayOptions(device_pages=pages)).hit_rate_pages


def simulated(path: Path, pages: int, policy: str) -> float:
    settings = SimulationSettings(device=pages, eviction=policy, instant=True)
    return Simulation(read_columns(open_trace([path])), settings).run().hit_rate_pages


def curves(folder: Path, pool: ProcessPoolExecutor) -> Iterator[Row]:
    path = folder / "conversation_trace.jsonl"
    columns = read_columns(open_trace([path]))
    sizes = sorted({*sizes_of_interest(columns)[:SIZES], *POOLS})
    points = exact_curve(columns, Uses(columns), sizes).points
    rates = list(pool.map(replayed, [path] * len(points), [point.pages for point in points]))
    for point, rate in zip(points, rates, strict=True):
        close = abs(rate - point.hit_rate_pages) <= NEAR
        yield f"lru {point.pages:,}: replay, stack", f"{rate:.4f}", f"{point.hit_rate_pages:.4f}", close
        if point.pages in POOLS:
            known, near = POOLS[point.pages]
            yield f"lru {point.pages:,}: replay, known", f"{rate:.4f}", f"{known:.4f}", abs(rate - known) <= near


def policies(folder: Path, pool: ProcessPoolExecutor) -> Iterator[Row]:
    path = folder / "conversation_trace.jsonl"
    cases = [(policy, size) for size in POLICY_SIZES for policy in POLICIES]
    rates = dict(
        zip(
            cases, pool.map(simulated, [path] * len(cases), *zip(*((n, p) for p, n in cases), strict=True)), strict=True
        )
    )
    for (policy, size), rate in rates.items():
        # Nobody published these; no policy is above what an unlimited cache hits, and LRU is the curve's.
        yield f"{policy} {size:,}: simulated", f"{rate:.4f}", "<= 0.3664", 0 < rate <= 0.36645


def sessions(folder: Path) -> Iterator[Row]:
    files = sorted((folder / "agent-sessions").glob("*.json"))
    each = [analyzed(file) for file in files]
    together = analyzed(*files)
    for file, one in zip(files, each, strict=True):
        told = f"{one.requests:,} requests, {one.pages_asked:,} blocks"
        yield f"{file.name}: {told}", f"{one.ideal_hit_rate_pages:.4f}", "", one.requests > 0
    yield "all sessions", f"{together.ideal_hit_rate_pages:.4f}", "", len(files) == 12
    for name in ("requests", "input_tokens", "pages_asked", "pages_different", "ideal_pages_hit", "ideal_tokens_hit"):
        whole, parts = getattr(together, name), sum(getattr(one, name) for one in each)
        # Ids are each file's own, so that nothing is shared between sessions.
        yield f"all sessions: {name}, sum of each", f"{whole:,}", f"{parts:,}", whole == parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes")
    options = parser.parse_args()
    if not (options.folder / "conversation_trace.jsonl").is_file():
        print(f"{options.folder}: the public traces are not there, so nothing was compared", file=sys.stderr)
        return 2
    wrong = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for rows in (values(options.folder), sessions(options.folder), curves(options.folder, pool)):
            wrong += show(rows)
        wrong += show(policies(options.folder, pool))
    print(f"{wrong} of these differ" if wrong else "all as known")
    return 1 if wrong else 0


def show(rows: Iterator[Row]) -> int:
    wrong = 0
    for what, found, known, agrees in rows:
        wrong += not agrees
        print(f"{what:<60} {found:>14} {known:>14}  {'' if agrees else 'DIFFERS'}".rstrip(), flush=True)
    print(flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
