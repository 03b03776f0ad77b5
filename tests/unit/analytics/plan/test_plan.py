"""The arithmetic of plans: by hand, against the cache's own geometry, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.analytics.plan.configs import read_model, shape_of
from hicache.analytics.plan.footprint import Footprint, Layout, copies
from hicache.analytics.plan.formulas import steps
from hicache.analytics.plan.presets import PRESETS, preset
from hicache.analytics.plan.report import Wish, plan
from hicache.analytics.plan.shapes import FULL, LATENT, RECURRENT, WINDOW, Layer, ModelShape
from hicache.core.layout import KVGeometry
from hicache.errors import ConfigError

KIB, MIB, GIB = 2**10, 2**20, 2**30
DTYPES = ["float32", "bfloat16", "float8_e4m3fn"]


def model(*layers: Layer) -> ModelShape:
    return ModelShape("m", "a test", layers)


def heads(count: int, dim: int, layers: int) -> ModelShape:
    return model(*[Layer(FULL, count, dim, dim)] * layers)


def test_values_that_everybody_knows() -> None:
    grouped = Footprint(preset("llama-3.1-8b"), Layout())
    assert grouped.token_bytes == 128 * KIB
    assert grouped.request_bytes(8192) == GIB
    assert grouped.bytes_of(32, 8192) == 32 * GIB
    assert grouped.bytes_of(32, 8192, shared=4096) == 16.5 * GIB
    every = Footprint(heads(32, 128, 32), Layout())
    assert every.token_bytes == 512 * KIB
    assert every.request_bytes(4096) == 2 * GIB


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("llama-3.1-8b", 2 * 32 * 8 * 128 * 2),
        ("llama-3.1-70b", 2 * 80 * 8 * 128 * 2),
        ("qwen3-235b-a22b", 2 * 94 * 4 * 128 * 2),
        ("deepseek-v3", 61 * (512 + 64) * 2),
        ("gemma-3-27b", 2 * 62 * 16 * 128 * 2),
        ("jamba-v0.1", 2 * 4 * 8 * 128 * 2),
        ("qwen3-next-80b-a3b", 2 * 12 * 2 * 256 * 2),
    ],
)
def test_presets_by_hand(name: str, token_bytes: int) -> None:
    found = Footprint(preset(name), Layout())
    assert found.token_bytes == found.rank_token_bytes == token_bytes
    assert PRESETS[name].model in found.model.source


def test_windows_stop_growing() -> None:
    found = Footprint(preset("gemma-3-27b"), Layout(page_size=16))
    window, full = 2 * 52 * 16 * 128 * 2, 2 * 10 * 16 * 128 * 2
    assert found.request_bytes(512) == 512 * (window + full)
    assert found.request_bytes(32_768) == (1024 + 16) * window + 32_768 * full  # a window may begin inside a page


def test_recurrent_state_is_the_same_at_any_length() -> None:
    found = Footprint(preset("jamba-v0.1"), Layout())
    state = 28 * (8192 * 16 + 8192 * 3) * 2
    assert found.state_bytes == state
    assert found.request_bytes(16) - found.request_bytes(32) == -16 * found.token_bytes
    assert found.bytes_of(4, 1600, shared=1600) == 1600 * found.token_bytes + 4 * state
    gated = Footprint(preset("qwen3-next-80b-a3b"), Layout(state_dtype="float32"))
    assert gated.state_bytes == 36 * 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))


@given(
    layers=st.integers(1, 80),
    kv_heads=st.sampled_from([1, 2, 4, 8, 32]),
    dim=st.sampled_from([64, 80, 128, 256]),
    dtype=st.sampled_from(DTYPES),
    page=st.sampled_from([1, 16, 64]),
)
def test_pages_are_those_of_the_cache(layers: int, kv_heads: int, dim: int, dtype: str, page: int) -> None:
    geometry = KVGeometry.mha(layers=layers, kv_heads=kv_heads, head_dim=dim, dtype=dtype)
    found = Footprint(heads(kv_heads, dim, layers), Layout(dtype=dtype, page_size=page))
    assert (found.token_bytes, found.page_bytes) == (geometry.token_bytes, geometry.page_bytes(page))


@given(
    layers=st.integers(1, 80),
    latent=st.integers(1, 1024),
    rope=st.integers(0, 128),
    row=st.one_of(st.none(), st.integers(1, 2000)),
)
def test_latent_pages_are_those_of_the_cache(layers: int, latent: int, rope: int, row: int | None) -> None:
    geometry = KVGeometry.mla(layers=layers, latent_dim=latent, rope_dim=rope, dtype="bfloat16", row_bytes=row)
    found = Footprint(model(*[Layer(LATENT, 0, latent + rope)] * layers), Layout(row_bytes=row))
    assert (found.token_bytes, found.page_bytes) == (geometry.token_bytes, geometry.page_bytes(16))


@given(
    layers=st.integers(1, 40),
    heads_log=st.integers(0, 5),
    tp_log=st.integers(0, 6),
    pp=st.integers(1, 8),
)
def test_ranks_together_have_everything(layers: int, heads_log: int, tp_log: int, pp: int) -> None:
    """What all ranks keep is the whole model, as often as it is kept; the fullest has its share at least."""
    shape, pp, tp = heads(2**heads_log, 128, layers), min(pp, layers), 2**tp_log
    found = Footprint(shape, Layout(tp=tp, pp=pp))
    often = copies(shape.layers[0], tp)
    assert found.group_token_bytes == found.token_bytes * often
    assert sum(part.layers for stage in found.stages for part in stage) == layers
    assert found.rank_token_bytes * tp * pp >= found.group_token_bytes
    # A rank's geometry is a range of the layers, and its heads.
    most = -(-layers // pp)
    geometry = KVGeometry.mha(layers=most, kv_heads=max(1, 2**heads_log // tp), head_dim=128, dtype="bfloat16")
    assert found.rank_token_bytes == geometry.token_bytes


@given(
    tokens=st.integers(1, 5000),
    shared=st.integers(0, 5000),
    count=st.integers(1, 40),
    page=st.integers(1, 100),
    window=st.integers(1, 3000),
)
def test_sharing_saves_and_costs_nothing(tokens: int, shared: int, count: int, page: int, window: int) -> None:
    shape = model(Layer(FULL, 1, 1, 1), Layer(WINDOW, 1, 1, 1, window), Layer(RECURRENT, state_elements=7))
    found = Footprint(shape, Layout(page_size=page, dtype="int8", state_dtype="int8"))
    shared = min(shared, tokens)
    apart, together = found.bytes_of(count, tokens), found.bytes_of(count, tokens, shared=shared)
    assert apart == count * found.request_bytes(tokens)
    assert found.request_bytes(tokens) <= together <= apart
    assert 0 <= found.tail_bytes(tokens) < found.page_bytes
    budget = found.rank_bytes(count, tokens, shared=shared)
    assert found.most_requests(budget, tokens, shared=shared) >= count
    most = found.most_requests(budget, tokens, shared=shared)
    assert found.rank_bytes(most + 1, tokens, shared=shared) > budget
    assert found.most_requests(found.rank_bytes(1, tokens) - 1, tokens) == 0


def test_quantised_rows_have_scales() -> None:
    shape = heads(8, 128, 32)
    assert Footprint(shape, Layout(dtype="fp8")).token_bytes == 2 * 32 * 8 * 128
    assert Footprint(shape, Layout(dtype="int4", scale_bytes=4)).token_bytes == 2 * 32 * 8 * (64 + 4)
    packed = Footprint(preset("deepseek-v3"), Layout(row_bytes=656))
    assert packed.token_bytes == 61 * 656


def test_context_parallel_ranks_share_out_pages() -> None:
    found = Footprint(heads(8, 128, 32), Layout(cp=4, page_size=16))
    assert found.rank_bytes(1, 64 * 100) == 1600 * found.token_bytes
    assert found.rank_bytes(1, 17) == 16 * found.token_bytes  # two pages, each on another rank
    assert found.request_bytes(64 * 100) == 6400 * found.token_bytes


def test_a_gpu_has_room_for_what_is_left() -> None:
    wish = Wish(tokens=8192, shared=4096, gpu_memory=80 * GIB, overhead=0, weights=8 * GIB, memory_share=1.0)
    found = plan(preset("llama-3.1-8b"), Layout(), wish)
    assert found.gpu is not None
    assert found.gpu.kv_budget_bytes == 72 * GIB
    assert (found.gpu.most_requests, found.gpu.most_requests_shared) == (72, 143)
    assert found.gpu.most_tokens == 72 * 8192
    small = plan(preset("llama-3.1-70b"), Layout(), Wish(gpu_memory=80 * GIB))
    assert small.gpu is not None
    assert small.gpu.kv_budget_bytes < 0
    assert small.gpu.most_requests == small.gpu.most_tokens == 0


def test_tiers_hold_whole_pages() -> None:
    found = plan(preset("llama-3.1-8b"), Layout(page_size=16), Wish(tiers={"host": 4 * GIB + MIB}))
    (host,) = found.tiers
    assert (host.pages, host.tokens, host.requests) == (2048, 32_768, 4)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_step_is_explained(name: str) -> None:
    wish = Wish(requests=4, shared=100, gpu_memory=2000 * GIB)
    found = plan(preset(name), Layout(tp=2, pp=2, scale_bytes=4), wish)
    explained = list(steps(found))
    assert all(step.what and step.formula and step.numbers and step.source for step in explained)
    assert any(f"{found.footprint.token_bytes:,} B" in step.numbers for step in explained)
    json.dumps(found.document(), allow_nan=False)


BASE: dict[str, Any] = {"num_hidden_layers": 6, "num_attention_heads": 8, "hidden_size": 512}


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ({}, {FULL: (6, 8)}),  # without a number of kv heads each head has its own
        ({"num_key_value_heads": 2}, {FULL: (6, 2)}),
        ({"multi_query": True, "num_kv_heads": 8}, {FULL: (6, 1)}),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 4}, {FULL: (6, 4)}),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}, {FULL: (4, 8), WINDOW: (2, 8)}),
        ({"kv_lora_rank": 64, "qk_rope_head_dim": 8}, {LATENT: (6, 0)}),
        ({"sliding_window": 64}, {WINDOW: (6, 8)}),
        ({"sliding_window": 64, "use_sliding_window": False}, {FULL: (6, 8)}),
        ({"sliding_window": 64, "sliding_window_pattern": 3}, {WINDOW: (4, 8), FULL: (2, 8)}),
        (
            {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 3},
            {WINDOW: (3, 8), FULL: (3, 8)},
        ),
        (
            {
                "hybrid_override_pattern": "M-M*M-",
                "mamba_num_heads": 4,
                "mamba_head_dim": 8,
                "ssm_state_size": 16,
                "n_groups": 2,
                "conv_kernel": 4,
            },
            {RECURRENT: (3, 0), FULL: (1, 8)},
        ),
        (
            {"attn_layer_indices": [1, 4], "mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2},
            {RECURRENT: (4, 0), FULL: (2, 8)},
        ),
    ],
)
def test_configs_of_many_kinds(more: dict[str, Any], kinds: dict[str, tuple[int, int]]) -> None:
    shape = shape_of(BASE | more, name="m", source="config.json")
    found = {layer.kind: (count, layer.kv_heads) for layer, count in shape.kinds()}
    assert {kind: found[kind] for kind in kinds} == kinds
    assert shape.query_heads == 8


def test_state_of_mamba_2_by_hand() -> None:
    more = {"layer_types": ["mamba"] * 6, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16}
    config = BASE | more | {"mamba_n_groups": 2, "mamba_d_conv": 4}
    (layer,) = {*shape_of(config, name="m", source="s").layers}
    assert (layer.state_elements, layer.conv_elements) == (4 * 8 * 16, (32 + 2 * 2 * 16) * 3)


def test_models_without_any_attention() -> None:
    config = {"num_hidden_layers": 6, "hidden_size": 64, "state_size": 16, "conv_kernel": 4, "expand": 2}
    (first,) = {*shape_of(config, name="m", source="s").layers}
    assert (first.state_elements, first.conv_elements) == (128 * 16, 128 * 3)
    (second,) = {*shape_of(config | {"num_heads": 8, "head_dim": 16, "n_groups": 1}, name="m", source="s").layers}
    assert (second.state_elements, second.conv_elements) == (128 * 16, (128 + 2 * 16) * 3)


def test_a_folder_with_an_index_of_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": BASE, "dtype": "float16"}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345}}))
    shape = read_model(tmp_path)
    assert (shape.weight_bytes, shape.dtype, len(shape.layers)) == (12345, "float16", 6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "must be a JSON object"),
        ("{", "no valid JSON"),
        ("[" * 100_000, "no valid JSON"),
        ("{}", "num_hidden_layers is missing"),
        ('{"num_hidden_layers": 6}', "num_attention_heads is missing"),
        ('{"num_hidden_layers": "6"}', "num_hidden_layers 6 must be a whole number"),
        ('{"num_hidden_layers": NaN}', "num_hidden_layers nan must be a whole number"),
        ('{"num_hidden_layers": -6}', "num_hidden_layers -6 must be a whole number"),
        ('{"num_hidden_layers": 1000000}', "more than 65535 layers"),
        (json.dumps(BASE | {"layer_types": ["chunked_attention"] * 6}), "layers of type 'chunked_attention'"),
        (json.dumps(BASE | {"num_kv_shared_layers": 4}), "layers that use the state of others"),
        (json.dumps(BASE | {"is_encoder_decoder": True}), "an encoder"),
        (json.dumps(BASE | {"index_topk": 2048}), "an indexer"),
        (json.dumps(BASE | {"mamba_d_state": 16}), "nothing here says in which layers"),
        (json.dumps(BASE | {"layer_types": ["full_attention"]}), "layer_types has 1 entries, and the model 6 layers"),
        (json.dumps(BASE | {"layer_types": 5}), "layer_types must be a list"),
        (json.dumps(BASE | {"attn_layer_indices": 5}), "attn_layer_indices must be a list"),
        (json.dumps(BASE | {"hidden_size": 4}), "leaves no head"),
    ],
)
def test_configs_that_cannot_be_counted(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        read_model(file)
    assert str(file) in str(error.value)


def test_a_config_without_end_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as opened:
        opened.truncate(2**34)
    with pytest.raises(ConfigError, match="more than 16 MiB"):
        read_model(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_model(tmp_path / "away")


@pytest.mark.parametrize(
    ("layout", "words"),
    [({"tp": 3}, "--tp 3: 8 kv heads"), ({"pp": 33}, "--pp 33: the model has 32 layers"), ({"cp": 0}, "--cp 0")],
)
def test_layouts_that_cannot_be(layout: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Footprint(preset("llama-3.1-8b"), Layout(**layout))


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"tokens": 0}, "--tokens 0"),
        ({"shared": 9000}, "--shared 9000: is above --tokens 8192"),
        ({"memory_share": 1.5}, "--memory-share 1.5"),
    ],
)
def test_wishes_that_cannot_be(wish: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Wish(**wish)


def test_unknown_weights_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="give it by --weights"):
        plan(heads(8, 128, 32), Layout(), Wish(gpu_memory=80 * GIB))
