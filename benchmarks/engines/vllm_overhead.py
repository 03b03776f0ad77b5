"""What the connector costs where there is nothing to hit: throughput of vLLM with and without it, in alternating pairs.

`.engines/vllm/bin/python benchmarks/engines/vllm_overhead.py`: with the host tier only, and with files too; `--host` or
`--files` measure one of them. With `--control` neither engine has a connector: what two processes differ by anyway.
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


KINDS = {"host": "with, host tier only", "files": "with, host tier and files", "control": "without too"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    for kind, text in KINDS.items():
        parser.add_argument(f"--{kind}", action="store_true", help=f"the second engine is one {text}")
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if getattr(options, kind)] or ["host", "files"]
    rows = [one.as_dict() for kind in kinds for one in compared(kind, options.pairs)]
    if "ENGINES_ROWS" in os.environ:
        Path(os.environ["ENGINES_ROWS"]).write_text(json.dumps(rows))


def compared(kind: str, pairs: int) -> list[Any]:
    """One kind of second engine beside one without a connector; rows of `benchmarks.measure`, where those are asked."""
    draw = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="hicache-overhead-") as place:
        folder = Path(place)
        storage = {"storage": f"file://{folder}/kv?capacity=2GiB"} if kind == "files" else {}
        extra = None if kind == "control" else {"host": "1GiB"} | storage
        ratios, plain, cached = [], [], []
        used = {"plain": 0.0, "cached": 0.0}
        with Engine(None, folder / "plain.log", **OPTIONS) as one, Engine(extra, folder / "ours.log", **OPTIONS) as two:
            for engine in (one, two):
                measured(engine, draw)
            for pair in range(pairs):
                order = [(one, plain, "plain"), (two, cached, "cached")]
                for engine, found, name in order if pair % 2 else reversed(order):
                    before = cpu_seconds(engine)
                    found.append(measured(engine, draw))
                    used[name] += cpu_seconds(engine) - before
                ratios.append(cached[-1] / plain[-1])
    low, high = interval(ratios, draw)
    print(f"SmolLM2-135M, bf16, batches of {PROMPTS} x ({TOKENS} + {NEW}) tokens, {pairs} alternating pairs")
    print(f"without   {statistics.median(plain):8.1f} tokens/s")
    print(f"second    {statistics.median(cached):8.1f} tokens/s, {KINDS[kind]}")
    print(f"ratio     {statistics.median(ratios):8.3f} (95 %: {low:.3f} to {high:.3f})")
    print(f"processor {used['plain']:.1f} s without, {used['cached']:.1f} s in the second, its service's included")
    if "ENGINES_ROWS" not in os.environ:
        return []
    from benchmarks.measure import row

    name = f"throughput with nothing to hit, {KINDS[kind]}, of that without ({low:.3f} to {high:.3f})"
    return [
        row(name, statistics.median(ratios), "", bar=LEAST if kind == "host" else 0.0, at_least=True),
        row("processor time for it", used["cached"], "s", bar=float("inf"), reference=used["plain"]),
    ]


if __name__ == "__main__":
    main()
