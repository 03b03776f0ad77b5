"""Models whose pages cannot be reused are refused in words; those that change while in use go past the cache."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hicache
from hicache.errors import ConfigError
from hicache_transformers.identity import identify
from hicache_transformers.model import describe_model
from hicache_transformers.weights import differ_from_folder, weights_revision

PROMPT = torch.arange(2, 40)[None]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "brand-new"}}, "brand-new"),
        ({"sliding_window": 8}, "DynamicSlidingWindowLayer"),
        ({"get_text_config": lambda decoder: SimpleNamespace()}, "multimodal"),
    ],
)
def test_kinds_of_models_that_are_not_supported(tiny_model: Any, opened: Any, config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        opened(tiny_model(**config))


def test_attention_that_sees_later_tokens_is_found_out(tiny_model: Any, opened: Any) -> None:
    model = tiny_model()
    model.visible = lambda queries, keys: torch.ones(queries, keys).bool()
    with pytest.raises(ConfigError, match="depends on later tokens"):
        opened(model)


def test_a_model_that_is_only_a_part_is_refused(tiny_model: Any, opened: Any) -> None:
    split = tiny_model()
    split.config.num_key_value_heads = 8
    with pytest.raises(ConfigError, match="2 kv heads, its configuration says 8"):
        opened(split)
    parallel = tiny_model()
    parallel.tp_size = 2
    with pytest.raises(ConfigError, match="tensor parallelism"):
        opened(parallel)
    with pytest.raises(ConfigError, match="device meta"):
        opened(tiny_model().to("meta"))
    with pytest.raises(ConfigError, match=r"model.eval\(\)"):
        opened(tiny_model().train())


def test_what_is_no_model_or_keeps_nothing_is_refused(tiny_model: Any, opened: Any) -> None:
    with pytest.raises(ConfigError, match="no transformers model"):
        opened(torch.nn.Linear(2, 2))
    forgetful = tiny_model()
    forgetful.forward = lambda input_ids, **_: None
    with pytest.raises(ConfigError, match="DynamicCache"):
        opened(forgetful)
    broken = tiny_model()
    broken.table = None
    with pytest.raises(ConfigError, match="cannot be run"):
        opened(broken)


def test_uneven_layers_are_refused(tiny_model: Any, opened: Any) -> None:
    model = tiny_model()
    forward = model.forward

    def uneven(input_ids: Any, past_key_values: Any, **given: Any) -> Any:
        result = forward(input_ids, past_key_values=past_key_values, **given)
        past_key_values.layers[1].values = past_key_values.layers[1].values[..., :4]
        return result

    model.forward = uneven
    with pytest.raises(ConfigError, match="different shapes"):
        opened(model)


def test_the_shape_is_measured(tiny_model: Any) -> None:
    found = describe_model(tiny_model(kv_heads=1, dtype=torch.bfloat16))
    assert (found.layers, found.kv_heads, found.head_dim, found.dtype_name) == (2, 1, 8, "bfloat16")
    assert (found.attention, found.takes_positions) == ("eager", True)


def changed_weights(model: Any) -> None:
    with torch.no_grad():
        model.table.weight.add_(1)


def written_data(model: Any) -> None:
    model.projections[0][1].weight.data += 1  # as merging an adapter does: no new version


def written_behind_a_transposed_view(model: Any) -> None:
    model.table.weight.data *= 2


def exchanged_weights(model: Any) -> None:
    model.table.weight = torch.nn.Parameter(model.table.weight + 1)


def attention(model: Any) -> None:
    model.config._attn_implementation = "sdpa"


def adapters(model: Any) -> None:
    model.peft_config = {"default": object()}


@pytest.mark.case("KEY-8")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed_weights, "weights"),
        (exchanged_weights, "weights"),
        (written_data, "weights"),
        (written_behind_a_transposed_view, "weights"),
        (attention, "attention"),
        (adapters, "adapter"),
        (torch.nn.Module.train, "training"),
        (torch.nn.Module.double, "weights"),
    ],
)
def test_a_model_that_changed_generates_without_the_cache(model: Any, opened: Any, change: Any, reason: str) -> None:
    model.table.weight = torch.nn.Parameter(model.table.weight.detach().T.contiguous().T)  # not in one run
    cache = opened()
    cache.generate(PROMPT)
    change(model)
    expected = model.generate(PROMPT)
    assert torch.equal(cache.generate(PROMPT), expected)
    assert cache.statistics().bypassed == {reason: 1}
    assert cache.statistics().reused_tokens == 0


def test_adapters_go_by_what_the_caller_says_of_them(model: Any, opened: Any) -> None:
    cache = opened()
    adapters(model)
    for _ in range(2):
        cache.generate(PROMPT, adapter=hicache.Adapter("sql", digest=b"d" * 32))
    assert cache.statistics().reused_tokens == 36


def test_autocast_goes_past_the_cache(model: Any, opened: Any) -> None:
    cache = opened()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache.generate(PROMPT)
    assert cache.statistics().bypassed == {"autocast": 1}


def test_padding_needs_a_model_that_takes_positions(model: Any, opened: Any, batch: Any) -> None:
    forward = model.forward
    model.forward = lambda input_ids, attention_mask=None, past_key_values=None, use_cache=True: forward(
        input_ids, attention_mask=attention_mask, past_key_values=past_key_values
    )
    cache = opened()
    model.forward = forward
    ids, mask = batch(PROMPT[0], PROMPT[0, :9])
    assert torch.equal(cache.generate(ids, attention_mask=mask), model.generate(ids, attention_mask=mask))
    assert cache.statistics().bypassed == {"padding": 1}
    cache.generate(ids[:1], attention_mask=mask[:1])
    assert cache.statistics().prompts == 1


# ---- identity


def named(model: Any, **settings: Any) -> Any:
    return identify(model, describe_model(model), **({"page_size": 16} | settings))


@pytest.mark.case("KEY-5")
@pytest.mark.case("KEY-8")
def test_whatever_decides_about_pages_is_in_their_name(tiny_model: Any) -> None:
    other_rope, quantised, sdpa = tiny_model(), tiny_model(), tiny_model()
    other_rope.config.rope_theta = 5e5
    quantised.config.quantization_config = {"quant_method": "gptq"}
    sdpa.config._attn_implementation = "sdpa"
    found = [
        named(tiny_model()),
        named(tiny_model(seed=1)),
        named(tiny_model(kv_heads=4)),
        named(tiny_model(dtype=torch.bfloat16)),
        named(tiny_model(), page_size=32),
        named(tiny_model(), name="org/tiny"),
        named(tiny_model(), revision="2"),
        named(tiny_model(), numerics="any"),
        named(tiny_model(), head_group=1),
        named(tiny_model(), layer_partition=1),
        named(other_rope),
        named(quantised),
        named(sdpa),
    ]
    assert len({namespace.digest for namespace, _ in found}) == len(found)
    assert named(tiny_model()) == named(tiny_model())
    assert found[0][0].numerics == "transformers/eager/float32"
    assert found[11][0].numerics == "transformers/eager/float32/quantization=gptq"
    assert found[0][0].hash == "sha256"
    assert found[0][0].model == "transformers/TinyModel"
    assert (found[0][0].revision or "").startswith("weights-")


def test_a_model_that_only_has_a_name_is_warned_about(tiny_model: Any, opened: Any) -> None:
    cache = opened(tiny_model(), name="org/tiny")
    assert any("give a revision" in line for line in cache.warnings)


def test_weights_that_cannot_be_read_need_a_name_and_a_revision(tiny_model: Any) -> None:
    with pytest.raises(ConfigError, match="give name= and revision="):
        weights_revision(tiny_model().to("meta"))


def saved(model: Any, folder: Path, *, dtype: torch.dtype | None = None, junk: bytes = b"") -> str:
    """The model's weights as a safetensors file, and a configuration beside it."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    payload = b""
    for name, tensor in model.named_parameters():
        data = tensor.detach().to(dtype or tensor.dtype).contiguous()
        content = data.view(torch.uint8).numpy().tobytes()
        ends = [len(payload), len(payload) + len(content)]
        header[name] = {"dtype": names[data.dtype], "shape": list(data.shape), "data_offsets": ends}
        payload += content
    text = json.dumps(header).encode()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(junk or len(text).to_bytes(8, "little") + text + payload)
    model.config._name_or_path = str(folder)
    return str(folder)


@pytest.mark.case("KEY-8")
def test_weights_changed_before_opening_have_names_of_their_own(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model()
    folder = saved(model, tmp_path)
    loaded, warnings = named(model)
    assert (loaded.revision or "").startswith("folder-")
    assert loaded.model == folder
    assert not warnings
    with torch.no_grad():
        model.projections[1][2].weight.mul_(1.01)
    trained, (warning,) = named(model)
    assert trained.revision == weights_revision(model)
    assert "are not those in" in warning
    assert named(model, revision="mine")[0].revision == "mine"
    assert not named(model, revision="mine")[1]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_loading_in_another_dtype_is_no_change(tiny_model: Any, tmp_path: Path, dtypes: Any) -> None:
    kept, loaded = dtypes
    model = tiny_model()
    folder = saved(model, tmp_path, dtype=kept)
    assert not differ_from_folder(model.to(kept).to(loaded), folder)
    assert differ_from_folder(tiny_model(seed=1), folder)


@pytest.mark.parametrize(
    "junk", [b"x", b"\xff" * 64, (4).to_bytes(8, "little") + b"[[]]", (2).to_bytes(8, "little") + b"{}"]
)
def test_files_that_cannot_be_compared_say_nothing(tiny_model: Any, tmp_path: Path, junk: bytes) -> None:
    assert not differ_from_folder(tiny_model(), saved(tiny_model(), tmp_path, junk=junk))
