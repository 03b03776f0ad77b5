"""Token ids with the cache are those without, for every kind of attention that is supported, in fp32 and greedy."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

PAGE = 16
NEW = {"max_new_tokens": 16, "do_sample": False}


@pytest.mark.case("PAGE-1")
@pytest.mark.parametrize("tokens", [100, 96, 97, 15, 16, 17, 1])
def test_cold_and_hit(model: Any, opened: Any, prompt: Any, tokens: int) -> None:
    """Any length: a multiple of the page and one beside it, shorter than a page."""
    ids = prompt(tokens)
    expected = model.generate(ids, **NEW)
    cache = opened(model)
    for _ in range(2):
        assert torch.equal(cache.generate(ids, **NEW), expected)
    found = cache.statistics()
    assert found.reused_tokens == (tokens - 1) // PAGE * PAGE
    assert not found.bypassed
    assert not found.failures


def test_partial_hits_and_the_next_turn(model: Any, opened: Any, prompt: Any) -> None:
    cache = opened(model)
    first = cache.generate(prompt(70), **NEW)
    for other in (
        torch.cat([prompt(70)[:, :50], prompt(40, seed=2)], 1),
        torch.cat([first, prompt(9, seed=3)], 1),
        torch.cat([first[:, :80], prompt(30, seed=4)], 1),
    ):
        given = {"attention_mask": torch.ones_like(other)} | NEW  # what was generated may look like padding
        assert torch.equal(cache.generate(other, **given), model.generate(other, **given))
    # The second prompt has 50 tokens in common, the third all that the first call fed to the model.
    kept = (first.shape[1] - 1) // PAGE * PAGE
    assert cache.statistics().reused_tokens == 48 + kept + min(kept, 80)


def test_batches_of_different_lengths_and_hits(model: Any, opened: Any, prompt: Any, batch: Any) -> None:
    prompts = [prompt(130, seed=seed) for seed in (1, 2)]
    prompts += [torch.cat([prompts[0][:, :100], prompt(41, seed=3)], 1), prompt(7, seed=4)]
    for known in ((), (0,), (0, 1), (3,), (0, 1, 2, 3)):
        cache = opened(model)
        for row in known:
            cache.generate(prompts[row], **NEW)
        for rows in (prompts, prompts[:2], prompts[1:]):
            given = batch(*rows)
            assert torch.equal(cache.generate(**given, **NEW), model.generate(**given, **NEW))
        assert not cache.statistics().bypassed
        assert not cache.statistics().failures


def test_prompts_of_one_batch_that_share_a_prefix(model: Any, opened: Any, prompt: Any, batch: Any) -> None:
    common = prompt(64)
    given = batch(*(torch.cat([common, prompt(20, seed=seed)], 1) for seed in (2, 3, 4)))
    expected = model.generate(**given, **NEW)
    cache = opened(model)
    for _ in range(2):
        assert torch.equal(cache.generate(**given, **NEW), expected)
    # The common pages are held once.
    assert cache.cache.statistics().core.device.resident <= 4 + 3 * 3


def test_sampling_with_a_seed_is_the_same(model: Any, opened: Any, prompt: Any, batch: Any) -> None:
    given = batch(prompt(60), prompt(41, seed=2))
    settings = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.9, "top_k": 20, "num_return_sequences": 3}
    torch.manual_seed(7)
    expected = model.generate(**given, **settings)
    cache = opened(model)
    for _ in range(2):
        torch.manual_seed(7)
        assert torch.equal(cache.generate(**given, **settings), expected)
    assert cache.statistics().reused_tokens == 48 + 29  # 48 columns of the batch, of which the second row has 29


def test_scores_are_the_same_within_rounding(model: Any, opened: Any, prompt: Any) -> None:
    ids = prompt(90)
    settings = NEW | {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, **settings)
    cache = opened(model)
    cache.generate(ids, **NEW)
    found = cache.generate(ids, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.logits) == len(expected.logits)
    for one, other in zip(found.logits, expected.logits, strict=True):
        difference = (one.log_softmax(-1) - other.log_softmax(-1)).abs().max()
        assert difference < 1e-3  # fp32: sums in another order, over values of tens


def test_a_hit_runs_the_model_over_the_rest_only(llama: Any, opened: Any, prompt: Any) -> None:
    cache = opened(llama)
    lengths: list[int] = []
    hook = llama.model.register_forward_pre_hook(
        lambda _module, _args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    cache.generate(prompt(100), **NEW)
    assert lengths[0] == 100
    lengths.clear()
    cache.generate(prompt(100), **NEW)
    hook.remove()
    assert lengths[0] == 4


def test_the_lower_interface(llama: Any, opened: Any, prompt: Any) -> None:
    ids = prompt(80)
    expected = llama.generate(ids, **NEW)
    cache = opened(llama)
    for cached in (0, 64):
        with cache.prefix(ids) as prefix:
            assert prefix.cached_tokens == (cached,)
            output = llama.generate(ids, past_key_values=prefix.past_key_values, **NEW)
            assert torch.equal(output, expected)
            prefix.commit(output)
    with cache.prefix(ids) as prefix, torch.no_grad():
        logits = llama(ids[:, prefix.cached_tokens[0] :], past_key_values=prefix.past_key_values).logits
        assert torch.allclose(logits[:, -1], llama(ids).logits[:, -1], atol=1e-3)


def test_two_threads(llama: Any, opened: Any, prompt: Any) -> None:
    prompts = [torch.cat([prompt(64), prompt(20, seed=seed)], 1) for seed in (2, 3)]
    expected = [llama.generate(ids, **NEW) for ids in prompts]
    cache = opened(llama)
    begin = threading.Barrier(2)
    right: list[bool] = []

    def work(at: int) -> None:
        begin.wait()
        right.extend(torch.equal(cache.generate(prompts[at], **NEW), expected[at]) for _ in range(5))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 10
    assert not cache.statistics().failures


class Streamer:
    """Collects what is put."""

    def __init__(self) -> None:
        self.put_so_far: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.put_so_far.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.put_so_far.append([])


def test_streamers_processors_and_stops_see_what_they_always_see(llama: Any, opened: Any, prompt: Any) -> None:
    cache = opened(llama)
    ids = prompt(70)
    seen: list[list[tuple[int, ...]]] = []
    streamed = []
    for generate in (llama.generate, cache.generate, cache.generate):
        shapes: list[tuple[int, ...]] = []

        def processor(given: torch.Tensor, scores: torch.Tensor, shapes: Any = shapes) -> torch.Tensor:
            shapes.append(tuple(given.shape))
            return scores

        streamer = Streamer()
        generate(ids, **NEW, streamer=streamer, logits_processor=[processor], repetition_penalty=1.2)
        seen.append(shapes)
        streamed.append(streamer.put_so_far)
    assert seen[0] == seen[1] == seen[2]
    assert streamed[0] == streamed[1] == streamed[2]
    assert cache.statistics().reused_tokens == 64


def test_bfloat16_stays_within_its_rounding(make: Any, opened: Any, prompt: Any) -> None:
    """Half precision rounds each step, so tokens may part where two are as likely; how far logits part is bounded."""
    llama = make("Llama").to(torch.bfloat16)
    cache = opened(llama)
    settings = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    worst = 0.0
    for seed in range(8):
        ids = prompt(100, seed=seed)
        cold = llama.generate(ids, **settings).logits[0].float().log_softmax(-1)
        cache.generate(ids, max_new_tokens=1)
        hit = cache.generate(ids, **settings).logits[0].float().log_softmax(-1)
        likely = cold.topk(10).indices
        worst = max(worst, float((cold - hit).gather(-1, likely).abs().max()))
    assert cache.statistics().reused_tokens == 8 * 96
    assert worst < 0.5
