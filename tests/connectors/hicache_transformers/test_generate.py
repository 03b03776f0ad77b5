"""`generate` with a cache gives what it gives without one, and computes what it must."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import hicache
from hicache.storage.memory import MemoryBackend

PAGE = 4


def prompt(*, seed: int = 1, tokens: int = 41) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (1, tokens), generator=generator)


def columns_of_prefill(model: Any) -> list[tuple[int, int]]:
    """Forward passes over more than one column since the last question."""
    passes = [of for of in model.computed if of[1] > 1]
    model.computed.clear()
    return passes


def test_a_prompt_that_comes_again_is_computed_only_behind_its_last_whole_page(model: Any, opened: Any) -> None:
    expected = model.generate(prompt())
    cache = opened()
    columns_of_prefill(model)
    assert torch.equal(cache.generate(prompt()), expected)
    assert columns_of_prefill(model) == [(1, 41)]
    assert torch.equal(cache.generate(prompt()), expected)
    assert model.computed[0] == (1, 1)  # 40 of 41 tokens were there
    found = cache.statistics()
    assert (found.calls, found.prompts, found.prompt_tokens, found.reused_tokens) == (2, 2, 82, 40)
    assert found.computed_tokens == 42
    assert not found.bypassed
    assert not found.failures


@pytest.mark.case("PAGE-1")
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 9, 16])
def test_at_least_one_token_is_left_to_compute(model: Any, opened: Any, tokens: int) -> None:
    expected = model.generate(prompt(tokens=tokens))
    cache = opened()
    for _ in range(2):
        assert torch.equal(cache.generate(prompt(tokens=tokens)), expected)
    assert cache.statistics().reused_tokens == (tokens - 1) // PAGE * PAGE


def test_what_was_generated_is_reused_by_the_next_turn(model: Any, opened: Any) -> None:
    cache = opened()
    first = cache.generate(prompt(tokens=13), max_new_tokens=20)
    turn = torch.cat([first, prompt(seed=2, tokens=6)], 1)
    expected = model.generate(turn)
    model.computed.clear()
    assert torch.equal(cache.generate(turn), expected)
    # The last generated token was never fed to the model: 13 + 19 tokens have keys and values, all whole pages.
    assert columns_of_prefill(model) == [(1, 7)]


def test_a_prompt_that_parts_midway_reuses_what_is_common(model: Any, opened: Any) -> None:
    cache = opened()
    cache.generate(prompt())
    other = torch.cat([prompt()[:, :22], prompt(seed=3, tokens=9)], 1)
    assert torch.equal(cache.generate(other), model.generate(other))
    assert cache.statistics().reused_tokens == 20


@pytest.mark.parametrize("hits", [(), (0,), (0, 1), (0, 1, 2, 3), (2,)])
def test_rows_of_a_batch_may_have_hits_of_any_length(model: Any, opened: Any, batch: Any, hits: Any) -> None:
    prompts = [prompt(seed=5, tokens=30)[0], prompt(seed=6, tokens=9)[0], prompt(seed=7, tokens=3)[0]]
    prompts.append(torch.cat([prompts[0][:18], prompt(seed=8, tokens=31)[0]]))
    cache = opened(device="256KiB")
    for row in hits:
        cache.generate(prompts[row][None])
    ids, mask = batch(*prompts)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=12)
    for _ in range(2):
        assert torch.equal(cache.generate(ids, attention_mask=mask, max_new_tokens=12), expected)
    found = cache.statistics()
    assert not found.bypassed
    assert not found.failures
    # The second time all rows are there: only what one column less than the batch does not cover is computed.
    assert columns_of_prefill(model)[-1][0] < len(prompts) or model.computed == []


def test_what_is_stored_of_a_padded_row_is_what_it_is_alone(model: Any, opened: Any, batch: Any) -> None:
    prompts = [prompt(seed=5, tokens=30), prompt(seed=6, tokens=9), prompt(seed=7, tokens=19)]
    ids, mask = batch(*(one[0] for one in prompts))
    cache = opened()
    cache.generate(ids, attention_mask=mask)
    for one in prompts:
        with cache.prefix(one) as found, torch.no_grad():
            (cached,) = found.cached_tokens
            assert cached == (one.shape[1] - 1) // PAGE * PAGE
            alone = type(found.past_key_values)(config=model.config)
            model(one, past_key_values=alone)
            for layer, expected in zip(found.past_key_values.layers, alone.layers, strict=True):
                assert torch.allclose(layer.keys, expected.keys[:, :, :cached], atol=1e-4)
                assert torch.allclose(layer.values, expected.values[:, :, :cached], atol=1e-4)


def test_generated_tokens_depend_on_the_whole_prompt(model: Any) -> None:
    """Else the comparisons here would say little."""
    generated = []
    for at in range(20):
        ids = prompt()
        ids[0, at] = 2
        generated.append(tuple(model.generate(ids)[0, 41:].tolist()))
    assert len(set(generated)) > 15
    assert len(set(generated[0])) > 4


def test_a_row_that_lags_far_behind_is_brought_up_alone(model: Any, opened: Any, batch: Any) -> None:
    prompts = [prompt(seed=seed, tokens=161)[0] for seed in range(4)]
    cache = opened(device="1MiB", host="1MiB")
    for known in prompts[:3]:
        cache.generate(known[None])
    ids, mask = batch(*prompts)
    expected = model.generate(ids, attention_mask=mask)
    model.computed.clear()
    assert torch.equal(cache.generate(ids, attention_mask=mask), expected)
    assert model.computed[:2] == [(1, 160), (4, 1)]
    assert cache.statistics().reused_tokens == 3 * 160


def test_rows_that_end_early_leave_no_padding_in_the_cache(model: Any, opened: Any, batch: Any) -> None:
    first = prompt(seed=11, tokens=10)
    ending = int(model.generate(first, max_new_tokens=3)[0, -1])
    model.generation_config.eos_token_id = ending
    other = prompt(seed=12, tokens=15)
    ids, mask = batch(first[0], other[0])
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=16)
    assert (expected[0, -4:] == 0).all()  # the first row has ended, and is padded
    cache = opened()
    assert torch.equal(cache.generate(ids, attention_mask=mask, max_new_tokens=16), expected)
    stored = expected[0][mask[0].argmax() :]
    real = stored[: int((stored != 0).nonzero().max()) + 1]
    assert cache.cache.match(real.numpy().astype("uint32"), logits=False).pages == len(real) // PAGE
    assert cache.cache.match(stored.numpy().astype("uint32"), logits=False).pages == len(real) // PAGE


def test_several_sequences_of_one_prompt(model: Any, opened: Any, batch: Any) -> None:
    ids, mask = batch(prompt(tokens=19)[0], prompt(seed=4, tokens=27)[0])
    expected = model.generate(ids, attention_mask=mask, num_return_sequences=3)
    cache = opened()
    for _ in range(2):
        assert torch.equal(cache.generate(ids, attention_mask=mask, num_return_sequences=3), expected)
    assert cache.statistics().reused_tokens == 16 + 24


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_group", [None, 1])
def test_multi_head_grouped_and_multi_query(
    tiny_model: Any, opened: Any, kv_heads: int, head_group: int | None
) -> None:
    model = tiny_model(kv_heads=kv_heads)
    expected = model.generate(prompt())
    cache = opened(model, head_group=head_group)
    for _ in range(2):
        assert torch.equal(cache.generate(prompt()), expected)
    assert cache.statistics().reused_tokens == 40


def test_pages_outlive_the_process_in_storage(model: Any, opened: Any) -> None:
    backend = MemoryBackend()
    expected = model.generate(prompt())
    opened(storage=backend).generate(prompt())
    first = opened(storage=backend)
    first.close()
    second = opened(storage=backend)
    model.computed.clear()
    assert torch.equal(second.generate(prompt()), expected)
    assert model.computed[0] == (1, 1)
    assert second.cache.statistics().pages.storage == 10


@pytest.mark.case("KEY-3")
def test_tenants_salts_and_adapters_share_nothing_in_storage_either(model: Any, opened: Any) -> None:
    backend = MemoryBackend()
    owners: list[dict[str, Any]] = [
        {"tenant": "acme"},
        {"salt": "x"},
        {"adapter": hicache.Adapter("sql", digest=b"d" * 16)},
    ]
    first = opened(storage=backend)
    first.generate(prompt(), **owners[0])
    first.close()
    second = opened(storage=backend, tenant="other")
    for whose in ({}, *owners[1:]):
        second.generate(prompt(), **whose)
    assert second.statistics().reused_tokens == 0
    second.generate(prompt(), **owners[0])
    assert second.statistics().reused_tokens == 40
    assert second.cache.statistics().pages.storage == 10


def test_tenants_salts_and_adapters_do_not_share(model: Any, opened: Any) -> None:
    cache = opened()
    adapter = hicache.Adapter("sql", digest=b"d" * 16)
    for whose in ({}, {"tenant": "acme"}, {"salt": "x"}, {"adapter": adapter}):
        cache.generate(prompt(), **whose)
        assert cache.statistics().reused_tokens == 0
    for whose in ({}, {"tenant": "acme"}, {"salt": "x"}, {"adapter": adapter}):
        before = cache.statistics().reused_tokens
        cache.generate(prompt(), **whose)
        assert cache.statistics().reused_tokens == before + 40
    cache.clear(tenant="acme")
    before = cache.statistics().reused_tokens
    cache.generate(prompt(), tenant="acme")
    assert cache.statistics().reused_tokens == before


def test_an_adapter_without_a_digest_goes_past_the_cache(model: Any, opened: Any) -> None:
    cache = opened()
    for _ in range(2):
        cache.generate(prompt(), adapter=hicache.Adapter("sql"))
    assert cache.statistics().bypassed == {"adapter": 2}
    assert cache.statistics().stored_pages == 0


def test_a_device_tier_smaller_than_the_prompt_keeps_its_beginning(model: Any, opened: Any) -> None:
    cache = opened(device=3, host=0)
    assert any("device tier holds 12 tokens" in line for line in cache.warnings)
    expected = model.generate(prompt())
    for _ in range(2):
        assert torch.equal(cache.generate(prompt()), expected)
    found = cache.statistics()
    assert (found.reused_tokens, found.stored_pages, found.dropped_pages) == (12, 3, 9 + 9)
    assert not found.failures


def test_threads_may_generate_at_once(model: Any, opened: Any) -> None:
    cache = opened(device="256KiB")
    prompts = [torch.cat([prompt()[:, :20], prompt(seed=seed, tokens=8)], 1) for seed in range(2)]
    expected = [model.generate(ids) for ids in prompts]
    begin = threading.Barrier(2)
    wrong: list[int] = []

    def work(at: int) -> None:
        begin.wait()
        wrong.extend(at for _ in range(4) if not torch.equal(cache.generate(prompts[at]), expected[at]))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not cache.statistics().failures


def test_the_prompt_alone_is_stored_where_nobody_says_what_was_generated(model: Any, opened: Any) -> None:
    cache = opened()
    with cache.prefix(prompt()) as prefix:
        assert prefix.cached_tokens == (0,)
        first = model.generate(prompt(), past_key_values=prefix.past_key_values)
    with cache.prefix(first) as prefix:
        assert prefix.cached_tokens == (40,)
        model.generate(first, past_key_values=prefix.past_key_values)
        prefix.commit(first)
        prefix.commit(first)  # works once
    assert cache.statistics().stored_pages == 10 + 2


def test_what_ends_by_an_exception_stores_nothing(model: Any, opened: Any) -> None:
    cache = opened()

    def interrupted() -> None:
        with cache.prefix(prompt()) as prefix:
            model.generate(prompt(), past_key_values=prefix.past_key_values)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert cache.statistics().stored_pages == 0
    assert cache.cache.statistics().aborted == 1

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    generate, model.generate = model.generate, broken
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.generate(prompt())
    model.generate = generate
    assert cache.cache.statistics().aborted == 2
    assert cache.cache.statistics().open_requests == 0


def test_a_loop_that_keeps_gradients_can_be_stored(model: Any, opened: Any) -> None:
    cache = opened()
    for cached in (0, 40):
        with cache.prefix(prompt()) as prefix:
            assert prefix.cached_tokens == (cached,)
            assert model(prompt()[:, cached:], past_key_values=prefix.past_key_values).logits.requires_grad


def test_input_ids_by_name_and_results_with_more_than_sequences(model: Any, opened: Any) -> None:
    cache = opened()
    expected = model.generate(prompt())
    assert torch.equal(cache.generate(input_ids=prompt()), expected)
    plain = model.generate
    model.generate = lambda *args, **kwargs: type("Output", (), {"sequences": plain(*args, **kwargs)})()
    assert torch.equal(cache.generate(prompt()).sequences, expected)
    assert cache.statistics().reused_tokens == 40
