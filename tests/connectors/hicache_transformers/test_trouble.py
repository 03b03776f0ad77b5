"""What goes wrong in the cache costs its hits, never the call; calls that a cache would change go past it."""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hicache
from hicache.config import Config, Drain, Host, Listen, Size
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import FaultyStorage, fail
from hicache.testing.serving import ServedApp
from hicache_transformers.cache import PrefixCache

PROMPT = torch.arange(2, 40)[None]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"assistant_model": object()}, "assistant_model"),
        ({"use_mtp": True}, "use_mtp"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        ({"dola_layers": "low"}, "dola_layers"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"use_cache": False}, "use_cache"),
        ({"prefill_chunk_size": 8}, "prefill_chunk_size"),
        ({"token_healing": True}, "token_healing"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"custom_generate": "folder"}, "custom_generate"),
        ({"past_key_values": None, "inputs_embeds": torch.zeros(1)}, "inputs_embeds"),
        ({"position_ids": torch.zeros(1)}, "position_ids"),
        ({"pixel_values": torch.zeros(1)}, "pixel_values"),
    ],
)
def test_calls_that_a_filled_cache_would_change_go_past_it(
    model: Any, opened: Any, arguments: Any, reason: str
) -> None:
    cache = opened()
    expected = model.generate(PROMPT, **arguments)
    for _ in range(2):
        assert torch.equal(cache.generate(PROMPT, **arguments), expected)
    assert cache.statistics().bypassed == {reason: 2}
    assert cache.statistics().stored_pages == 0


def test_settings_are_found_where_generate_finds_them(model: Any, opened: Any) -> None:
    cache = opened()
    cache.generate(PROMPT, SimpleNamespace(num_beams=4))
    model.generation_config.num_beams = 2
    cache.generate(PROMPT)
    cache.generate(PROMPT, SimpleNamespace(num_beams=1))
    assert cache.statistics().bypassed == {"num_beams": 2}
    assert cache.statistics().prompts == 1


def test_harmless_arguments_do_not(model: Any, opened: Any) -> None:
    cache = opened()
    for _ in range(2):
        cache.generate(PROMPT, temperature=0.5, output_scores=True, logits_processor=[], streamer=None, use_cache=True)
    assert cache.statistics().reused_tokens == 36


def test_what_generate_refuses_beside_a_cache_is_not_handed_on(model: Any, opened: Any) -> None:
    """transformers takes neither a kind of cache nor a second one beside the cache that it is given."""
    cache, generate = opened(), model.generate

    def strict(*given: Any, past_key_values: Any = None, **named: Any) -> Any:
        if past_key_values is not None and named.get("cache_implementation") is not None:
            raise ValueError("Passing both `cache_implementation` and `past_key_values` is unsupported")
        return generate(*given, past_key_values=past_key_values, **named)

    model.generate = strict
    for _ in range(2):
        cache.generate(PROMPT, cache_implementation="dynamic", past_key_values=None)
    assert cache.statistics().reused_tokens == 36
    model.generation_config.cache_implementation = "dynamic"  # where nothing can be left out of the call
    cache.generate(PROMPT)
    cache.generate(PROMPT, cache_implementation="dynamic")
    assert cache.statistics().bypassed == {"cache_implementation": 2}


def test_arguments_by_place_go_past_the_cache(model: Any, opened: Any) -> None:
    """Only the first two have names here; the others are handed on as they came."""
    cache, generate = opened(), model.generate
    seen: list[Any] = []

    def placed(inputs: Any, config: Any = None, *further: Any, **named: Any) -> Any:
        seen.append(further)
        return generate(inputs, config, **named)

    model.generate = placed
    expected = generate(PROMPT)
    assert torch.equal(cache.generate(PROMPT, None, ["processor"]), expected)
    assert torch.equal(cache.generate(PROMPT, None, None), expected)
    assert seen == [(["processor"],), ()]
    assert cache.statistics().bypassed == {"arguments": 2}


def test_padding_that_no_mask_tells_of(model: Any, opened: Any) -> None:
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], 1)
    cache = opened()
    cache.generate(padded)
    assert cache.statistics().bypassed == {"mask": 1}
    # Where padding and end are one token, generate takes it for a token of the prompt, and so does the cache.
    model.generation_config.eos_token_id = [1, 0]
    cache.generate(padded)
    model.generation_config.pad_token_id = None
    cache.generate(padded)
    assert cache.statistics().prompts == 2


def test_no_prompt_at_all_is_the_models_business(model: Any, opened: Any) -> None:
    cache = opened()
    with pytest.raises(AssertionError, match="no prompt"):
        cache.generate()
    assert cache.statistics().bypassed == {"input": 1}


def test_a_cache_that_comes_back_in_another_shape_is_not_stored(model: Any, opened: Any) -> None:
    cache = opened()
    with cache.prefix(PROMPT) as prefix:
        model.generate(PROMPT, past_key_values=prefix.past_key_values)
        prefix.past_key_values.batch_repeat_interleave(2)
    with cache.prefix(PROMPT) as prefix:
        pass  # never run
    with cache.prefix(PROMPT[:, :20]) as prefix:
        model.generate(PROMPT[:, :10], past_key_values=prefix.past_key_values, max_new_tokens=1)
    with cache.prefix(PROMPT) as prefix:  # what generate made of the prompt is another one
        prefix.commit(model.generate(PROMPT.flip(1), past_key_values=prefix.past_key_values))
    generate = model.generate
    model.generate = lambda *given, **named: generate(*given, **named)[:, : PROMPT.shape[1] + 1]
    cache.generate(PROMPT)  # columns that are no token's, as those of a learned prompt
    assert cache.statistics().stored_pages == 0
    assert cache.statistics().bypassed == {"state": 3}
    assert cache.cache.statistics().open_requests == 0


def test_a_closed_cache_generates_without(model: Any, opened: Any) -> None:
    cache = opened()
    with cache:
        cache.generate(PROMPT)
    assert "closed" in repr(cache)
    assert torch.equal(cache.generate(PROMPT), model.generate(PROMPT))
    with cache.prefix(PROMPT) as prefix:
        assert prefix.past_key_values is None
        prefix.commit(PROMPT)
    assert cache.statistics().bypassed == {"closed": 2}
    cache.close()


@pytest.mark.case("FAIL-5")
def test_a_failing_storage_costs_its_hits_and_never_the_call(model: Any, opened: Any) -> None:
    inner = MemoryBackend()
    expected = model.generate(PROMPT)
    opened(storage=inner).generate(PROMPT)
    storage = FaultyStorage(inner)
    first = opened(storage=inner)
    first.close()
    for verb in ("get_into", "contains", "put"):
        storage.always(verb, fail(hicache.StorageUnavailable("gone")))
        cache = opened(storage=storage, retry=None)
        assert torch.equal(cache.generate(PROMPT), expected)
        assert not cache.statistics().failures
        storage.always(verb, None)


def test_what_fails_inside_is_counted_and_said_once(
    model: Any, opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = opened()
    expected = model.generate(PROMPT)

    def broken(*_: Any, **__: Any) -> None:
        raise hicache.StorageUnavailable("the disk is gone")

    real = cache.cache.request
    cache.cache.request = broken
    for _ in range(2):
        assert torch.equal(cache.generate(PROMPT), expected)
    cache.cache.request = real
    for verb in ("extend", "close"):
        with monkeypatch.context() as patch:
            patch.setattr(hicache.Request, verb, broken)
            assert torch.equal(cache.generate(PROMPT), expected)
    assert cache.statistics().failures == {
        "looking up: StorageUnavailable": 2,
        "storing pages: StorageUnavailable": 2,
        "ending a request: StorageUnavailable": 1,
    }
    assert sum("looking up failed" in record.message for record in caplog.records) == 1


def test_a_result_that_is_not_understood_is_given_back_and_not_stored(model: Any, opened: Any) -> None:
    cache = opened()
    generate = model.generate
    model.generate = lambda *args, **kwargs: [generate(*args, **kwargs)] and 7
    assert cache.generate(PROMPT) == 7
    assert cache.statistics().failures == {"storing pages: TypeError": 1}
    assert cache.cache.statistics().open_requests == 0


def test_a_lookup_that_fails_midway_holds_nothing(model: Any, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened()

    def broken(_: Any) -> None:
        raise hicache.StorageUnavailable("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(hicache.Request, "load", broken)
        cache.generate(PROMPT)
    assert cache.cache.statistics().open_requests == 0
    assert cache.statistics().failures == {"looking up: StorageUnavailable": 1}


def test_a_batch_waits_for_one_deadline(model: Any, opened: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines run from the request on, so all rows are asked for before the first is waited for."""
    cache = opened(deadline=0.5)
    calls: list[Any] = []
    request, load = cache.cache.request, hicache.Request.load

    def asked(tokens: Any, *, deadline: float, **whose: Any) -> Any:
        calls.append(deadline)
        return request(tokens, deadline=deadline, **whose)

    def waited(of: Any) -> Any:
        calls.append("load")
        return load(of)

    cache.cache.request = asked
    monkeypatch.setattr(hicache.Request, "load", waited)
    ids, mask = batch(PROMPT[0], PROMPT[0, :9])
    cache.generate(ids, attention_mask=mask)
    assert calls == [0.5, 0.5, "load", "load"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "512B"}, "one page"),
        ({"address": "unix:///nowhere.sock"}, "host="),
        ({"address": "unix:///nowhere.sock", "host": None, "device": None, "tenant": "acme"}, "tenant="),
        ({"nonsense": 1}, "nonsense"),
        ({"storage": "nowhere://"}, "nowhere"),
        ({"page_size": 0}, "page"),
        ({"head_group": 3}, "head_group"),
    ],
)
def test_settings_that_cannot_work_are_said_at_once(opened: Any, settings: Any, words: str) -> None:
    with pytest.raises(hicache.HicacheError, match=words):
        opened(**settings)


def test_pages_kept_by_a_service(model: Any, tiny_model: Any) -> None:
    expected = model.generate(PROMPT)
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        config = Config(
            listen=Listen(addresses=(f"unix://{folder}/s.sock",)),
            host=Host(bytes=Size(2**20)),
            drain=Drain(seconds=0.2),
        )
        with (
            ServedApp(config) as served,
            PrefixCache(model, address=served.address, page_size=4, required=True, timeout=20) as cache,
        ):
            for _ in range(2):
                assert torch.equal(cache.generate(PROMPT), expected)
            assert cache.statistics().reused_tokens == 36
            cache.flush()
            cache.clear()
            assert torch.equal(cache.generate(PROMPT), expected)
            assert cache.statistics().reused_tokens == 36
            served.stop()
            assert torch.equal(cache.generate(PROMPT), expected)
            assert not cache.statistics().failures
            assert cache.statistics().reused_tokens == 36
