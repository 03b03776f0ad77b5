"""What the connector costs where there is nothing to hit: throughput of vLLM with and without it, in alternating pairs.

`.engines/vllm/bin/python benchmarks/engines/vllm_overhead.py`; with `--files` pages go to a folder too.
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


def interval(ratios: list[float], draw: random.Random) -> tuple[float, float]:
    """Where the median lies in 95 of 100 draws with replacement."""
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--files", action="store_true", help="with storage in a folder")
    options = parser.parse_args()
    draw = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="hicache-overhead-") as name:
        folder = Path(name)
        extra = {"host": "1GiB"} | ({"storage": f"file://{folder}/kv?capacity=2GiB"} if options.files else {})
        ratios, plain, cached = [], [], []
        with Engine(None, folder / "plain.log", **OPTIONS) as one, Engine(extra, folder / "ours.log", **OPTIONS) as two:
            for engine in (one, two):
                measured(engine, draw)
            for pair in range(options.pairs):
                order = [(one, plain), (two, cached)]
                for engine, found in order if pair % 2 else reversed(order):
                    found.append(measured(engine, draw))
                ratios.append(cached[-1] / plain[-1])
    low, high = interval(ratios, draw)
    print(f"SmolLM2-135M, bf16, batches of {PROMPTS} x ({TOKENS} + {NEW}) tokens, {options.pairs} alternating pairs")
    print(f"without   {statistics.median(plain):8.1f} tokens/s")
    print(f"with      {statistics.median(cached):8.1f} tokens/s, host tier{' and files' if options.files else ' only'}")
    print(f"ratio     {statistics.median(ratios):8.3f} (95 %: {low:.3f} to {high:.3f})")
    if "ENGINES_ROWS" in os.environ:
        from benchmarks.measure import row

        name = f"throughput with nothing to hit, of that without ({low:.3f} to {high:.3f})"
        found = row(name, statistics.median(ratios), "", bar=0.0 if options.files else LEAST, at_least=True)
        Path(os.environ["ENGINES_ROWS"]).write_text(json.dumps([found.as_dict()]))


if __name__ == "__main__":
    main()
