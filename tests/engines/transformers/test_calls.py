"""Calls of `generate` in every form that people write: the same result with the cache, and no error of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.testing._internal.two_tensor import TwoTensor

from hicache.errors import ConfigError
from hicache_transformers import PrefixCache
from hicache_transformers.weights import same_as_files, weights_revision

PAGE = 16
NEW = {"max_new_tokens": 8, "do_sample": False}

Opened = Callable[..., PrefixCache]


@pytest.mark.parametrize(
    "given",
    [
        {"past_key_values": None},
        {"cache_implementation": "dynamic"},
        {"cache_implementation": None, "use_cache": True},
        {"generation_config": None, "attention_mask": torch.ones(1, 60)},
        {"logits_to_keep": 1, "return_dict_in_generate": False},
        {"stop_strings": None, "compile_config": None, "disable_compile": True},
    ],
    ids=" ".join,
)
def test_what_changes_nothing_may_be_said(llama: Any, opened: Opened, prompt: Any, given: dict[str, Any]) -> None:
    ids, cache = prompt(60), opened(llama)
    expected = llama.generate(ids, **NEW, **given)
    for _ in range(2):
        assert torch.equal(cache.generate(ids, **NEW, **given), expected)
    assert cache.statistics().reused_tokens == 48
    assert not cache.statistics().bypassed


def test_arguments_by_place(llama: Any, opened: Opened, prompt: Any) -> None:
    """Whatever stands behind the configuration is handed on, and the call goes past the cache."""
    ids, cache = prompt(60), opened(llama)
    config = transformers.GenerationConfig(**NEW)
    processors = transformers.LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(1.3)])
    expected = llama.generate(ids, config, processors)
    for _ in range(2):
        assert torch.equal(cache.generate(ids, config, processors), expected)
    assert cache.statistics().bypassed == {"arguments": 2}
    for _ in range(2):
        assert torch.equal(cache.generate(ids, config), llama.generate(ids, config))
    assert cache.statistics().reused_tokens == 48


def test_a_cache_of_the_callers_own_goes_past(llama: Any, opened: Opened, prompt: Any) -> None:
    """It may hold anything: what comes back is the caller's cache, filled up."""
    ids, cache = prompt(60), opened(llama)
    cache.generate(ids, **NEW)
    own = transformers.DynamicCache(config=llama.config)
    assert torch.equal(cache.generate(ids, past_key_values=own, **NEW), llama.generate(ids, **NEW))
    assert own.get_seq_length() == 60 + 7
    assert cache.statistics().bypassed == {"past_key_values": 1}


def test_what_comes_back_holds_the_whole_prompt(llama: Any, opened: Opened, prompt: Any) -> None:
    """Also the model's cache in a result that is more than tokens."""
    ids, cache = prompt(60), opened(llama)
    settings = NEW | {"return_dict_in_generate": True}
    expected = llama.generate(ids, **settings)
    for _ in range(2):
        found = cache.generate(ids, **settings)
        assert torch.equal(found.sequences, expected.sequences)
        assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
        for one, other in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert torch.allclose(one.keys, other.keys, atol=1e-3)
    assert cache.statistics().reused_tokens == 48


def test_embeddings_as_input_go_past(llama: Any, opened: Opened, prompt: Any) -> None:
    """Alone, and beside tokens that are only kept for what reads them."""
    ids, cache = prompt(60), opened(llama)
    cache.generate(ids, **NEW)
    embedded = llama.get_input_embeddings()(ids.flip(1)).detach()
    for given in ({"inputs_embeds": embedded}, {"input_ids": ids, "inputs_embeds": embedded}):
        assert torch.equal(cache.generate(**given, **NEW), llama.generate(**given, **NEW))
    assert sum(cache.statistics().bypassed.values()) == 2
    assert cache.statistics().reused_tokens == 0


def test_assisted_decoding_goes_past(llama: Any, opened: Opened, prompt: Any, make: Any) -> None:
    ids, cache, assistant = prompt(60), opened(llama), make("Llama", num_hidden_layers=1)
    cache.generate(ids, **NEW)
    expected = llama.generate(ids, assistant_model=assistant, **NEW)
    assert torch.equal(cache.generate(ids, assistant_model=assistant, **NEW), expected)
    assert cache.statistics().bypassed == {"assistant_model": 1}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_in_every_mode_of_gradients(llama: Any, opened: Opened, prompt: Any, mode: Any) -> None:
    """Also a cache that one mode has filled and another reads."""
    ids, cache = prompt(60), opened(llama)
    expected = llama.generate(ids, **NEW)
    for inside in (mode, torch.inference_mode, torch.no_grad):
        with inside():
            assert torch.equal(cache.generate(ids, **NEW), expected)
    assert cache.statistics().reused_tokens == 2 * 48
    assert not cache.statistics().failures


def test_prompts_beyond_the_models_window(llama: Any, opened: Opened, prompt: Any) -> None:
    """Rotary positions go on behind it, with the cache as without."""
    ids, cache = prompt(700), opened(llama)
    assert ids.shape[1] > llama.config.max_position_embeddings
    expected = llama.generate(ids, **NEW)
    for _ in range(2):
        assert torch.equal(cache.generate(ids, **NEW), expected)
    assert cache.statistics().reused_tokens == 699 // PAGE * PAGE


def test_more_than_one_learned_position_is_the_models_error(opened: Opened, prompt: Any, model: Any) -> None:
    """What a model refuses it refuses with the cache too, and nothing stays behind."""
    if not hasattr(model.config, "n_positions"):
        pytest.skip("positions are not learned")
    ids, cache = prompt(600), opened(model)
    for generate in (model.generate, cache.generate):
        with pytest.raises((IndexError, RuntimeError)):
            generate(ids, **NEW)
    assert cache.cache.statistics().open_requests == 0
    assert cache.statistics().stored_pages == 0


def test_a_compiled_model_shares_the_pages_of_the_plain_one(
    llama: Any, opened: Opened, prompt: Any, batch: Any
) -> None:
    """`generate` of what `torch.compile` returns runs the model inside; so does the cache, and it opens at once."""
    compiled = torch.compile(llama, backend=lambda *_: pytest.fail("it was compiled"))
    cache = opened(compiled)
    given = batch(prompt(60), prompt(41, seed=2))
    expected = llama.generate(**given, **NEW)
    for _ in range(2):
        assert torch.equal(cache.generate(**given, **NEW), expected)
    assert cache.statistics().reused_tokens > 0
    assert cache.namespace == opened(llama).namespace


def test_weights_that_were_quantised_after_loading(tiny_folder: str, opened: Opened) -> None:
    """Packed layers are no parameters, so the folder's name is not theirs; what they compute depends on later tokens.

    torch scales all tokens of a call together there, so nothing of it can be reused.
    """
    plain, packed = (transformers.AutoModelForCausalLM.from_pretrained(tiny_folder) for _ in range(2))
    torch.ao.quantization.quantize_dynamic(packed, {torch.nn.Linear}, inplace=True).eval()
    assert same_as_files(plain, tiny_folder) is True
    assert same_as_files(packed, tiny_folder) is None
    assert weights_revision(packed) != weights_revision(plain)
    with pytest.raises(ConfigError, match="depends on later tokens"):
        opened(packed)


def test_tensors_that_stand_for_several_are_seen_through(make: Any, opened: Opened, prompt: Any) -> None:
    """As quantised weights of torchao do: their parts are watched and named."""
    model, ids = make("Llama"), prompt(60)
    parts = [torch.ones(8, 8) for _ in range(2)]
    model.beside = torch.nn.Parameter(TwoTensor(*parts))
    before, cache = weights_revision(model), opened(model)
    for _ in range(2):
        cache.generate(ids, **NEW)
    parts[1].mul_(2)
    assert weights_revision(model) != before
    cache.generate(ids, **NEW)
    assert cache.statistics().reused_tokens == 48
    assert cache.statistics().bypassed == {"weights": 1}


def test_every_supported_models_files_can_be_compared(model: Any, opened: Opened, tmp_path: Path) -> None:
    """What is saved and loaded again is what the files hold: the name that other engines find it by too."""
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    cache = opened(loaded)
    assert not cache.warnings
    assert str(cache.namespace.revision).startswith("folder-")
    with torch.no_grad():
        next(loaded.parameters()).add_(1)
    assert str(opened(loaded).namespace.revision).startswith("weights-")


def test_learned_prompts_go_past(tiny_folder: str, opened: Opened) -> None:
    """PEFT puts columns in front that are nobody's tokens."""
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder)
    cache = opened(model)
    ids = torch.randint(3, 800, (1, 60), generator=torch.Generator().manual_seed(3))
    cache.generate(ids, **NEW)
    tuned = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    model.peft_config = tuned.peft_config
    cache.generate(ids, adapter=SimpleNamespace(name="tuned", digest=b"d" * 32), **NEW)
    assert cache.statistics().bypassed == {"adapter": 1}
