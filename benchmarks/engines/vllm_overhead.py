"""What the connector costs where there is nothing to hit: throughput of vLLM with and without it, in alternating pairs.

`.engines/vllm/bin/python benchmarks/engines/vllm_overhead.py`; with `--files` pages go to a folder too. With
`--control` neither engine has a connector: what two processes differ by all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/engines/vllm"))

from vllm_engine import SMOLLM2, Engine  # noqa: E402  found by the line above

LEAST = 0.97
"""Of the throughput without the connector, with the host tier only."""

PROMPTS, TOKENS, NEW = 4, 256, 32
OPTIONS: dict[str, Any] = {"model": SMOLLM2, "dtype": "bfloat16", "max_model_len": 1024}


def measured(engine: Engine, draw: random.Random) -> float:
    """Tokens a second for a batch that no cache has seen."""
    asked = [[draw.randrange(100, 40_000) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    begun = time.perf_counter()
    engine.generate(*asked, tokens=NEW)
    return PROMPTS * (TOKENS + NEW) / (time.perf_counter() - begun)


def cpu_seconds(engine: Engine) -> float:
    """Of the engine's process and of what it has started, so far."""
    found = 0.0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(path.name) == engine.process.pid or int(fields[1]) == engine.process.pid:
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def interval(ratios: list[float], draw: random.Random) -> tuple[float, float]:
    """Where the median lies in 95 of 100 draws with replacement."""
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--files", action="store_true", help="with storage in a folder")
    parser.add_argument("--control", action="store_true", help="compare two engines without a connector")
    options = parser.parse_args()
    second = "without too" if options.control else f"with, host tier{' and files' if options.files else ' only'}"
    draw = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="hicache-overhead-") as place:
        folder = Path(place)
        storage = {"storage": f"file://{folder}/kv?capacity=2GiB"} if options.files else {}
        extra = None if options.control else {"host": "1GiB"} | storage
        ratios, plain, cached = [], [], []
        used = {"plain": 0.0, "cached": 0.0}
        with Engine(None, folder / "plain.log", **OPTIONS) as one, Engine(extra, folder / "ours.log", **OPTIONS) as two:
            for engine in (one, two):
                measured(engine, draw)
            for pair in range(options.pairs):
                order = [(one, plain, "plain"), (two, cached, "cached")]
                for engine, found, name in order if pair % 2 else reversed(order):
                    before = cpu_seconds(engine)
                    found.append(measured(engine, draw))
                    used[name] += cpu_seconds(engine) - before
                ratios.append(cached[-1] / plain[-1])
    low, high = interval(ratios, draw)
    print(f"SmolLM2-135M, bf16, batches of {PROMPTS} x ({TOKENS} + {NEW}) tokens, {options.pairs} alternating pairs")
    print(f"without   {statistics.median(plain):8.1f} tokens/s")
    print(f"second    {statistics.median(cached):8.1f} tokens/s, {second}")
    print(f"ratio     {statistics.median(ratios):8.3f} (95 %: {low:.3f} to {high:.3f})")
    print(f"processor {used['plain']:.1f} s without, {used['cached']:.1f} s in the second, its service's included")
    if "ENGINES_ROWS" in os.environ:
        from benchmarks.measure import row

        name = f"throughput with nothing to hit, of that without ({low:.3f} to {high:.3f})"
        bar = 0.0 if options.files else LEAST
        rows = [
            row(name, statistics.median(ratios), "", bar=bar, at_least=True),
            row("processor time for it", used["cached"], "s", bar=float("inf"), reference=used["plain"]),
        ]
        Path(os.environ["ENGINES_ROWS"]).write_text(json.dumps([one.as_dict() for one in rows]))


if __name__ == "__main__":
    main()
