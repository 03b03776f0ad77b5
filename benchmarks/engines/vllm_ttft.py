"""Time to first token of a real model in vLLM: cold, on a hit in the same process, and in a fresh engine.

`.engines/vllm/bin/python benchmarks/engines/vllm_ttft.py`; beside it vLLM's own ExampleConnector, in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/engines/vllm"))

from vllm_engine import SMOLLM2, Engine  # noqa: E402  found by the line above

MOST = 0.25
"""Of the cold time, on a hit."""

TOKENS = 1400
NEW = 16
OPTIONS: dict[str, Any] = {
    "model": SMOLLM2,
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
}


def prompts(count: int) -> list[list[int]]:
    """So many stories of TOKENS tokens, which begin differently."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    found = []
    for number in range(count):
        lines = [
            f"Entry {number}.{line}: keeper {line * 7 % 31} wrote down wind, tide and {line} passing ships."
            for line in range(120)
        ]
        found.append(tokenizer("\n".join(lines))["input_ids"][:TOKENS])
    return found


class Kind:
    """One connector: how an engine with it is made, over a folder that outlives it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self.times: dict[str, list[float]] = {"cold": [], "hit": [], "fresh": []}
        self.cached: dict[str, set[int]] = {}
        self.new: list[list[int]] = []

    def engine(self) -> Engine:
        log = self._folder / f"{self.name}.log"
        if self.name == "none":
            return Engine(None, log, **OPTIONS)
        if self.name == "hicache":
            return Engine({"host": "1GiB", "storage": f"file://{self._folder}/kv?capacity=4GiB"}, log, **OPTIONS)
        example = {
            "kv_connector": "ExampleConnector",
            "kv_connector_module_path": None,
            "kv_connector_extra_config": {"shared_storage_path": f"{self._folder}/example"},
        }
        return Engine({}, log, kv=example, **OPTIONS)

    def run(self, asked: list[list[int]]) -> None:
        """Cold and hit in one engine, then hits in another."""
        with self.engine() as engine:
            warm_up(engine)
            for prompt in asked:
                self._ask(engine, "cold", prompt)
                if self.name != "none":
                    assert engine.reset()
                    self._ask(engine, "hit", prompt)
        if self.name == "none":
            return
        with self.engine() as engine:
            warm_up(engine)
            for prompt in asked:
                self._ask(engine, "fresh", prompt)

    def _ask(self, engine: Engine, what: str, prompt: list[int]) -> None:
        (answer,) = engine.generate(prompt, tokens=NEW)
        self.times[what].append(answer.first)
        self.cached.setdefault(what, set()).add(answer.cached)
        if what == "cold":
            self.new.append(answer.new)
        else:
            assert answer.new == self.new[len(self.times[what]) - 1], f"{self.name}: {what} has another text"


def warm_up(engine: Engine) -> None:
    """Let kernels and allocators see these shapes once, with another prompt."""
    engine.generate([7 + number % 900 for number in range(TOKENS)], tokens=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=3, help="how many; the median of each column is shown")
    options = parser.parse_args()
    asked = prompts(options.prompts)
    with tempfile.TemporaryDirectory(prefix="hicache-ttft-") as folder:
        kinds = [Kind(name, Path(folder)) for name in ("none", "hicache", "example")]
        for kind in kinds:
            kind.run(asked)
    print(f"SmolLM2-135M, bf16, prompts of {len(asked[0])} tokens, median of {len(asked)}; the same text in each row")
    print(f"{'connector':<12}{'cold':>10}{'hit':>10}{'of cold':>9}{'fresh':>10}{'of cold':>9}{'cached':>8}")
    for kind in kinds:
        cold = statistics.median(kind.times["cold"])
        row = f"{kind.name:<12}{cold:>8.3f} s"
        for what in ("hit", "fresh"):
            if kind.times[what]:
                seconds = statistics.median(kind.times[what])
                row += f"{seconds:>8.3f} s{seconds / cold:>9.2f}"
        print(row + (f"{max(kind.cached['hit']):>8}" if "hit" in kind.cached else ""))
    if "ENGINES_ROWS" in os.environ:
        rows = figures(kinds)
        Path(os.environ["ENGINES_ROWS"]).write_text(json.dumps([one.as_dict() for one in rows]))


def figures(kinds: list[Kind]) -> list[Any]:
    """Rows for `make engines`."""
    from benchmarks.measure import row

    rows = []
    for kind in kinds[1:]:
        cold = statistics.median(kind.times["cold"])
        for what, where in (("hit", "same process"), ("fresh", "fresh engine")):
            seconds = statistics.median(kind.times[what])
            bar = MOST * cold if kind.name == "hicache" else float("inf")
            rows.append(row(f"first token on a hit, {where}, {kind.name}", seconds, "s", bar=bar, reference=cold))
    return rows


if __name__ == "__main__":
    main()
