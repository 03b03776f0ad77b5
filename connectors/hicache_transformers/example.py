"""What a cache of prefixes gains, on a model of yours: `python -m hicache_transformers.example MODEL [FOLDER]`.

Three questions about one document, each asked without a cache, with one, and with one that finds the pages in FOLDER.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import hicache
from hicache_transformers import PrefixCache

DOCUMENT = " ".join(f"Room {n} is on floor {n % 7} and is painted in colour {n % 11}." for n in range(80))
QUESTIONS = ("Which floor is room 7 on?", "Which colour is room 12?", "How many rooms are there?")


def late_pages(cache: PrefixCache) -> int:
    """Pages that storage had, or may have had, and did not bring in the time that a call waits; see `deadline=`."""
    statistics = cache.cache.statistics()
    assert isinstance(statistics, hicache.CacheStatistics)  # there is no service here
    return statistics.pages.missed.get(hicache.MissReason.LATE, 0)


def main(arguments: list[str]) -> None:
    """Print a table of seconds and reused tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments[0])
    model = AutoModelForCausalLM.from_pretrained(arguments[0], dtype="float32")
    folder = arguments[1] if len(arguments) > 1 else tempfile.mkdtemp(prefix="hicache-example-")
    prompts = [tokenizer(f"{DOCUMENT}\n\n{question}\n", return_tensors="pt") for question in QUESTIONS]
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": False}
    expected = []
    model.generate(**prompts[0], **settings)  # the first call is slow for reasons of its own
    for way in ("without", "with", "from storage"):
        with PrefixCache(model, storage=f"file://{folder}?capacity=4GiB") as cache:
            for number, prompt in enumerate(prompts):
                before, late_before, started = cache.statistics().reused_tokens, late_pages(cache), time.perf_counter()
                output = (model if way == "without" else cache).generate(**prompt, **settings)
                seconds, reused = time.perf_counter() - started, cache.statistics().reused_tokens - before
                if way == "without":
                    expected.append(output)
                same = "same text" if output.equal(expected[number]) else "ANOTHER TEXT"
                tokens, late = prompt["input_ids"].shape[1], late_pages(cache) - late_before
                said = f"; {late * cache.namespace.page_size} tokens came too late from storage" if late else ""
                print(f"{way:12}  {tokens:5} tokens, {reused:5} reused  {seconds:6.2f} s  {same}{said}")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: python -m hicache_transformers.example MODEL [FOLDER]")
    main(sys.argv[1:])
