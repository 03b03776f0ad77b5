"""A chat of several turns in transformers, with and without hicache, and a table of the time of each turn.

    PYTHONPATH=. python benchmarks/engines/transformers_chat.py MODEL

It runs where transformers and hicache are installed; `make engines` runs it too. Both ways answer each turn from the
same messages, one after the other, and swap who begins. Exit code 1 where the text differs, or a turn computes more
than its new tokens and the rest of a page.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.measure import Row, row
from hicache_transformers import PrefixCache

SYSTEM = (
    "You are a patient guide to a small town. "
    + " ".join(
        f"House {n} stands in street {n % 9}, has {n % 5 + 1} floors and belongs to family {n % 13}." for n in range(24)
    )
    + " Answer in one short sentence."
)
TURNS = (
    "Hello! Who are you, and what do you know about?",
    "How many floors has house 3?",
    "And which family does house 14 belong to?",
    "Tell me which street house 20 stands in, please.",
    "Which of the two houses 5 and 9 has more floors?",
    "Describe the way from street 1 to street 7 in a few words.",
    "What would you show a visitor first, and why?",
    "Thank you. Sum up what we talked about.",
)


@dataclass(frozen=True)
class Turn:
    """One turn: tokens of the prompt, those that are new, those that were computed; seconds without a cache and with.

    `first` is the time to the first new token, `all` that to the last.
    """

    number: int
    prompt: int
    new: int
    computed: int
    first_without: float
    first_with: float
    all_without: float
    all_with: float
    same: bool


class FirstToken:
    """A streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.puts = 0
        self.seconds = 0.0

    def put(self, _: Any) -> None:
        self.puts += 1
        if self.puts == 2:  # the first is the prompt
            self.seconds = time.perf_counter() - self.started

    def end(self) -> None:
        """Nothing to do."""


def chat(model: Any, tokenizer: Any, cache: PrefixCache, *, turns: int, new_tokens: int) -> list[Turn]:
    messages = [{"role": "system", "content": SYSTEM}]
    settings = {"max_new_tokens": new_tokens, "do_sample": False}
    fed = 0  # leading tokens of the prompt that the model has seen in the turn before
    before: torch.Tensor = torch.empty(0, dtype=torch.long)
    found = []
    for number in range(turns):
        messages.append({"role": "user", "content": TURNS[number % len(TURNS)]})
        prompt = tokenize(tokenizer, messages)
        ids = prompt["input_ids"][0]
        common = min(len(ids), len(before))
        fed = int((ids[:common] == before[:common]).long().cumprod(0).sum())
        first, seconds, outputs = {}, {}, {}
        for way in ("with", "without") if number % 2 else ("without", "with"):
            reused = cache.statistics().reused_tokens
            streamer = FirstToken()
            outputs[way] = (cache if way == "with" else model).generate(**prompt, **settings, streamer=streamer)[0]
            seconds[way] = time.perf_counter() - streamer.started
            first[way] = streamer.seconds
            if way == "with":
                computed = len(ids) - (cache.statistics().reused_tokens - reused)
        same = torch.equal(outputs["with"], outputs["without"])
        times = (first["without"], first["with"], seconds["without"], seconds["with"])
        found.append(Turn(number + 1, len(ids), len(ids) - fed, computed, *times, same))
        before = outputs["with"][:-1]  # the last one was never fed
        messages.append({"role": "assistant", "content": tokenizer.decode(outputs["with"][len(ids) :], True).strip()})
    return found


def tokenize(tokenizer: Any, messages: list[dict[str, str]]) -> Any:
    if tokenizer.chat_template is None:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return tokenizer(text, return_tensors="pt")
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def measured(given: argparse.Namespace) -> list[Turn]:
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=given.dtype)
    with tempfile.TemporaryDirectory(prefix="hicache-chat-") as folder:
        storage = f"file://{folder}?capacity=4GiB"
        with PrefixCache(model, storage=storage, page_size=given.page_size) as cache:
            model.generate(**tokenizer("warm", return_tensors="pt"), max_new_tokens=2, do_sample=False)
            return chat(model, tokenizer, cache, turns=given.turns, new_tokens=given.new_tokens)


def figures(turns: list[Turn], page_size: int) -> list[Row]:
    """Rows for `make engines`: what must hold, and the times."""
    most = max(turn.computed - turn.new for turn in turns)
    rows = [
        row(
            "chat: turns with the text of no cache",
            sum(turn.same for turn in turns),
            "turns",
            bar=len(turns),
            at_least=True,
        ),
        row("chat: most tokens computed beside a turn's new ones", most, "tokens", bar=page_size - 1),
    ]
    for turn in turns[1:]:
        name = f"chat: turn {turn.number}, {turn.prompt} tokens, {turn.computed} computed, to the first token"
        rows.append(row(name, turn.first_with, "s", bar=turn.first_without, reference=turn.first_without))
    without, with_cache = (sum(getattr(turn, name) for turn in turns) for name in ("all_without", "all_with"))
    rows.append(row("chat: all turns, to the last token", with_cache, "s", bar=without, reference=without))
    return rows


def table(turns: list[Turn], given: argparse.Namespace) -> None:
    print("turn  prompt  new  computed    first token, s     whole turn, s  text")
    print("                            without     with  without     with")
    for turn in turns:
        text = "same" if turn.same else "ANOTHER"
        print(
            f"{turn.number:4}  {turn.prompt:6}  {turn.new:3}  {turn.computed:8}  {turn.first_without:7.2f}"
            f"  {turn.first_with:7.2f}  {turn.all_without:7.2f}  {turn.all_with:7.2f}  {text}"
        )
    names = ("first_without", "first_with", "all_without", "all_with")
    print("all" + " " * 25 + "".join(f"{sum(getattr(turn, name) for turn in turns):7.2f}  " for name in names))
    print(f"{given.dtype}, {torch.get_num_threads()} threads, pages of {given.page_size} tokens")


def main() -> int:
    engines = os.environ.get("ENGINES_FOLDER") or str(Path(__file__).resolve().parents[2] / ".engines")
    parser = argparse.ArgumentParser(description="A chat in transformers, with and without hicache.")
    parser.add_argument("model", nargs="?", default=f"{engines}/models/smollm2", help="folder of a model")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens that each turn answers with, at most")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--page-size", type=int, default=16)
    given = parser.parse_args()
    turns = measured(given)
    table(turns, given)
    rows = figures(turns, given.page_size)
    if "ENGINES_ROWS" in os.environ:
        Path(os.environ["ENGINES_ROWS"]).write_text(json.dumps([one.as_dict() for one in rows]))
    return 0 if all(one.ok for one in rows[:2]) else 1


if __name__ == "__main__":
    sys.exit(main())
