"""A real model: a chat whose turns compute their new tokens only, the example, and half precision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

SYSTEM = "You know this town. " + " ".join(f"House {n} stands in street {n % 9}." for n in range(30))
TURNS = ("Who are you?", "Where is house 3?", "And house 14?", "Which houses stand in street 5?") * 2


def test_eight_turns_of_a_chat_compute_only_what_is_new(smollm2_folder: str, opened: Any, storage: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype="float32")
    cache = opened(model, storage=storage, device="256MiB", host="256MiB")
    messages = [{"role": "system", "content": SYSTEM}]
    seen = torch.empty(0, dtype=torch.long)
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = prompt["input_ids"][0]
        common = min(len(ids), len(seen))
        new = len(ids) - int((ids[:common] == seen[:common]).long().cumprod(0).sum())
        before = cache.statistics().computed_tokens
        settings = {"max_new_tokens": 8, "do_sample": False}
        output = cache.generate(**prompt, **settings)[0]
        assert torch.equal(output, model.generate(**prompt, **settings)[0])
        assert cache.statistics().computed_tokens - before < new + 16  # the rest of a page
        seen = output[:-1]
        messages.append({"role": "assistant", "content": tokenizer.decode(output[len(ids) :], True).strip()})
    assert not cache.statistics().bypassed
    assert not cache.statistics().failures


def test_bfloat16_stays_within_its_rounding(smollm2_folder: str, opened: Any, record_property: Any) -> None:
    """With the model's own dtype, text may part where two tokens are as likely; how far logprobs part is bounded."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype="bfloat16")
    cache = opened(model, device="256MiB", host="256MiB")
    prompt = tokenizer(SYSTEM, return_tensors="pt")
    settings = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    cold = model.generate(**prompt, **settings).logits[0].float().log_softmax(-1)
    cache.generate(**prompt, max_new_tokens=1)
    hit = cache.generate(**prompt, **settings).logits[0].float().log_softmax(-1)
    assert cache.statistics().reused_tokens > 200
    likely = cold.topk(10).indices
    worst = float((cold - hit).gather(-1, likely).abs().max())
    record_property("difference of the likeliest tokens' logprobs", f"{worst:.3f}")
    assert worst < 0.25


def test_the_example_shows_the_gain(tiny_folder: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hicache_transformers.example", tiny_folder, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) == 9
    assert all(line[-2:] == ["same", "text"] for line in lines)
    reused = [int(run.stdout.splitlines()[at].split(" reused")[0].split()[-1]) for at in range(9)]
    assert reused[:4] == [0, 0, 0, 0]
    assert min(reused[4:]) > 1000
