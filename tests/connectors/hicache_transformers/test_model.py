"""Models whose pages cannot be reused are refused in words; those that change while in use go past the cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import hicache
from hicache.errors import ConfigError
from hicache_transformers.identity import identify
from hicache_transformers.model import describe_model
from hicache_transformers.weights import same_as_files, weights_revision

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
    partly = tiny_model()
    partly.projections[1].train()
    with pytest.raises(ConfigError, match=r"a part of it, is in training mode: call model.eval\(\)"):
        opened(partly)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ConfigError, match="autocast is on"):
        opened(tiny_model())


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


def buffers(model: Any) -> None:
    model.scales.data += 1


def a_part(model: Any) -> None:
    model.head.train()


def learned_prompts(model: Any) -> None:
    model.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}


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
        (buffers, "weights"),
        (attention, "attention"),
        (adapters, "adapter"),
        (a_part, "training"),
        (torch.nn.Module.train, "training"),
        (torch.nn.Module.double, "weights"),
    ],
)
def test_a_model_that_changed_generates_without_the_cache(model: Any, opened: Any, change: Any, reason: str) -> None:
    model.table.weight = torch.nn.Parameter(model.table.weight.detach().T.contiguous().T)  # not in one run
    model.register_buffer("scales", torch.ones(3))
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


def test_prompts_that_an_adapter_learned_go_past_the_cache(model: Any, opened: Any) -> None:
    """They stand in front of the prompt's own columns, whatever the caller says of the adapter."""
    cache = opened()
    learned_prompts(model)
    cache.generate(PROMPT, adapter=hicache.Adapter("tuned", digest=b"d" * 32))
    assert cache.statistics().bypassed == {"adapter": 1}


def test_a_compiled_model_is_the_one_inside(model: Any, opened: Any) -> None:
    """What `torch.compile` returns generates with the model that it wraps, and shares its pages."""
    compiled = torch.nn.Module()
    compiled._orig_mod = model
    cache = opened(compiled)
    for _ in range(2):
        assert torch.equal(cache.generate(PROMPT), model.generate(PROMPT))
    assert cache.statistics().reused_tokens == 36
    assert cache.namespace == opened().namespace


@pytest.mark.parametrize(
    ("found", "warns"),
    [("4.56.2", True), ("4.57.1", False), ("5.0.0rc1", False), ("5.19.0", False), ("5.20.0.dev0", True), ("6.0", True)],
)
def test_a_release_outside_the_range_is_warned_about(
    found: str, warns: bool, opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line names the range, and the cache works."""
    monkeypatch.setattr("hicache_transformers.versions.version", lambda _: found)
    cache = opened()
    said = [line for line in caplog.messages if f"transformers {found} is outside 4.57 to 5.19" in line]
    assert len(said) == warns
    assert any("outside 4.57 to 5.19" in line for line in cache.warnings) is warns
    for _ in range(2):
        cache.generate(PROMPT)
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


def test_a_model_that_only_has_a_name_is_told_apart_by_its_weights(tiny_model: Any, opened: Any) -> None:
    one, other = opened(tiny_model(), name="org/tiny"), opened(tiny_model(seed=1), name="org/tiny")
    assert one.namespace.model == other.namespace.model == "org/tiny"
    assert one.namespace.revision != other.namespace.revision
    assert not one.warnings


def test_weights_that_cannot_be_read_need_a_name_and_a_revision(tiny_model: Any) -> None:
    with pytest.raises(ConfigError, match="give name= and revision="):
        weights_revision(tiny_model().to("meta"))


def saved(
    model: Any,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    junk: bytes = b"",
    rename: Callable[[str], str] = str,
) -> str:
    """The model's weights as a safetensors file, and a configuration beside it."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    payload = b""
    for name, tensor in model.named_parameters(remove_duplicate=False):
        data = tensor.detach().to(dtype or tensor.dtype).contiguous()
        content = data.view(torch.uint8).numpy().tobytes()
        ends = [len(payload), len(payload) + len(content)]
        header[rename(name)] = {"dtype": names[data.dtype], "shape": list(data.shape), "data_offsets": ends}
        payload += content
    text = json.dumps(header).encode()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(junk or len(text).to_bytes(8, "little") + text + payload)
    model.config._name_or_path = str(folder)
    return str(folder)


@pytest.mark.case("KEY-8")
def test_weights_changed_before_opening_have_names_of_their_own(
    tiny_model: Any, opened: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert opened(model).warnings == [warning]
    assert caplog.messages == [f"hicache: {warning}"]
    assert named(model, revision="mine")[0].revision == "mine"
    assert not named(model, revision="mine")[1]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_loading_in_another_dtype_is_no_change(tiny_model: Any, tmp_path: Path, dtypes: Any) -> None:
    kept, loaded = dtypes
    model = tiny_model()
    folder = saved(model, tmp_path, dtype=kept)
    assert same_as_files(model.to(kept).to(loaded), folder) is True
    assert same_as_files(tiny_model(seed=1), folder) is False


def without_a_layer(model: Any) -> None:
    model.head = torch.nn.Identity()


def with_another(model: Any) -> None:
    model.extra = torch.nn.Linear(2, 2)


def resized(model: Any) -> None:
    model.head = torch.nn.Linear(32, 98)


@pytest.mark.case("KEY-8")
@pytest.mark.parametrize("change", [without_a_layer, with_another, resized])
def test_weights_that_are_not_all_in_the_files_are_named_by_memory(
    tiny_model: Any, tmp_path: Path, change: Any
) -> None:
    """Whatever a layer was made into, its pages are not those of the model in the folder."""
    model = tiny_model()
    folder = saved(model, tmp_path)
    change(model)
    assert same_as_files(model, folder) is None


@pytest.mark.parametrize(
    "junk", [b"x", b"\xff" * 64, (4).to_bytes(8, "little") + b"[[]]", (2).to_bytes(8, "little") + b"{}"]
)
def test_files_that_cannot_be_compared_say_nothing(tiny_model: Any, tmp_path: Path, junk: bytes) -> None:
    model = tiny_model()
    assert same_as_files(model, saved(model, tmp_path, junk=junk)) is None
    found, (warning,) = named(model)
    assert found.revision == weights_revision(model)
    assert "cannot be compared with files in" in warning


def test_names_in_files_may_lack_what_stands_before_a_head(tiny_model: Any, tmp_path: Path) -> None:
    """A file of the model without its head; tied weights are there once; and what such models never read."""
    model = tiny_model()
    folder = saved(model, tmp_path, rename=lambda name: name.removeprefix("projections."))
    assert same_as_files(model, folder) is None
    model.base_model_prefix = "projections"
    assert same_as_files(model, folder) is True
    model.tied = model.head
    assert same_as_files(model, folder) is True
    folder = saved(model, tmp_path, rename=lambda name: name.replace("tied.", "old."))
    assert same_as_files(model, folder) is None
    model._keys_to_ignore_on_load_unexpected = [r"^old\."]
    assert same_as_files(model, folder) is True


def test_names_are_those_without_an_adapter(tiny_model: Any, tmp_path: Path) -> None:
    """As PEFT renames them; the adapter's own weights are no part of the model's."""
    model = tiny_model()
    folder = saved(model, tmp_path)
    inner = model.projections[0][0]
    layer = torch.nn.Module()
    layer.base_layer, layer.lora_A = inner, torch.nn.Linear(2, 2)
    model.projections[0][0] = layer
    assert same_as_files(model, folder) is None
    adapters(model)
    assert same_as_files(model, folder) is True


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's, of what people still use
def test_quantised_weights_are_in_the_digest(tiny_model: Any) -> None:
    """Packed weights are neither parameters nor plain tensors."""
    revisions = set()
    for seed in range(2):
        model = tiny_model()
        torch.manual_seed(seed)
        plain = torch.nn.Linear(32, 97)
        plain.qconfig = torch.ao.quantization.default_dynamic_qconfig
        for kind in (plain.qconfig, torch.ao.quantization.per_channel_dynamic_qconfig):
            plain.qconfig = kind
            model.head = torch.ao.nn.quantized.dynamic.Linear.from_float(plain)
            revisions.add(weights_revision(model))
    assert len(revisions) == 4


@pytest.mark.case("KEY-8")
def test_the_hubs_commit_names_weights_that_are_its_files(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in the hub's folder on this machine and compared; trained ones have names of their own."""
    model = tiny_model()
    saved(model, tmp_path)
    model.config._name_or_path, model.config._commit_hash = "org/tiny", "c0ffee"
    hub: Any = ModuleType("huggingface_hub")
    there = {("org/tiny", "config.json", "c0ffee"): str(tmp_path / "config.json")}
    hub.try_to_load_from_cache = lambda name, file, revision: there.get((name, file, revision))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    found, warnings = named(model)
    assert (found.model, found.revision, warnings) == ("org/tiny", "c0ffee", [])
    with torch.no_grad():
        model.head.weight.mul_(1.01)
    assert named(model)[0].revision == weights_revision(model)
    for nowhere in (hub, None):  # not there; and no hub at all
        there.clear()
        monkeypatch.setitem(sys.modules, "huggingface_hub", nowhere)
        assert named(model)[0].revision == weights_revision(model)
