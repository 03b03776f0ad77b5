"""What a cache of prefixes gains, on a model of yours: `python -m hicache_transformers.example MODEL [FOLDER]`.

Three questions about one document, each asked without a cache, with one, and with one that finds the pages in FOLDER.
"""

import sys
import tempfile
import time

from hicache_transformers import PrefixCache

DOCUMENT = " ".join(f"Room {n} is on floor {n % 7} and is painted in colour {n % 11}." for n in range(80))
QUESTIONS = ("Which floor is room 7 on?", "Which colour is room 12?", "How many rooms are there?")


def main(name: str, folder: str) -> None:
    """Print a table of seconds and reused tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    prompts = [tokenizer(f"{DOCUMENT}\n\n{question}\n", return_tensors="pt") for question in QUESTIONS]
    expected = [model.generate(**prompt, max_new_tokens=4, do_sample=False) for prompt in prompts]
    for way in ("without", "with", "from storage"):
        # A call waits for storage only as long as it is told to; without a word that is less than a slow disk needs.
        with PrefixCache(model, storage=f"file://{folder}?capacity=4GiB", deadline=10.0) as cache:
            for prompt, answer in zip(prompts, expected, strict=True):
                before, started = cache.statistics().reused_tokens, time.perf_counter()
                output = (model if way == "without" else cache).generate(**prompt, max_new_tokens=4, do_sample=False)
                seconds, reused = time.perf_counter() - started, cache.statistics().reused_tokens - before
                tokens, same = prompt["input_ids"].shape[1], "same text" if output.equal(answer) else "ANOTHER TEXT"
                print(f"{way:12}  {tokens:5} tokens, {reused:5} reused  {seconds:6.2f} s  {same}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m hicache_transformers.example MODEL [FOLDER]")
    with tempfile.TemporaryDirectory(prefix="hicache-example-") as place:
        main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else place)
