"""Which pages are the same: everything that decides about their bytes is in their name, and bad input is one line."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache.runtime.fingerprint import revision_of

KEYS = [sha256(b"page").hexdigest()]
SLOTS = torch.arange(4)

Plugin = Callable[..., Any]


def digest(one: Any) -> bytes:
    return one._opened.store._namespace


BASE: dict[str, Any] = {"extra": {"revision": "1"}}


@pytest.mark.case("PLUG-2")
@pytest.mark.parametrize(
    ("pool", "options"),
    [
        ({"dtype": torch.float16}, {}),
        ({"heads": 2}, {}),
        ({"dim": 16}, {}),
        ({"page": 8}, {}),
        ({"layers": 2}, {}),
        ({"first_layer": 3}, {}),
        ({}, {"model_name": "example/other"}),
        ({}, {"extra": {"revision": "2"}}),
        ({}, {"extra": {"revision": "1", "numerics": "sglang/other/bfloat16"}}),
        ({}, {"extra": {"revision": "1", "scales": "ab" * 32}}),
        ({}, {"extra": {"revision": "1", "head_group": 2}}),
        ({}, {"extra": {"revision": "1", "layer_partition": 1}}),
        ({}, {"arguments": SimpleNamespace(attention_backend="flashinfer")}),
        ({}, {"arguments": SimpleNamespace(quantization="fp8")}),
        ({}, {"arguments": SimpleNamespace(json_model_override_args='{"rope_scaling": {"factor": 4}}')}),
        ({"heads": 2}, {"tp_size": 2}),
        ({}, {"arguments": SimpleNamespace(load_format="dummy")}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_decides_about_bytes_is_in_the_name(
    pool: dict[str, Any], options: dict[str, Any], plugin: Plugin, pools: Any
) -> None:
    """A difference anywhere is another namespace: what one stores the other does not find."""
    one = plugin(pools.mha(), **BASE)
    assert one.batch_set_v1(KEYS, SLOTS) == [True]
    other = plugin(pools.mha(**pool), **(BASE | options))
    assert digest(other) != digest(one)
    assert other.batch_exists(KEYS) == 0


@pytest.mark.parametrize("options", [{"dp_rank": 1}, {"tp_lcm_size": 8}, {"enable_storage_metrics": False}], ids=str)
def test_what_does_not_decide_is_not_in_the_name(options: dict[str, Any], plugin: Plugin, pools: Any) -> None:
    """Data-parallel replicas, and how the engine is watched, share pages."""
    one = plugin(pools.mha(), **BASE)
    assert one.batch_set_v1(KEYS, SLOTS) == [True]
    assert plugin(pools.mha("layer_first"), **BASE, **options).batch_exists(KEYS) == 1


def test_two_kinds_of_fp8_are_never_the_same(plugin: Plugin, pools: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Pools keep FP8 as plain bytes: which kind it is comes from the engine or the user, else there is no cache."""
    named = [
        plugin(pools.mha(dtype=torch.uint8), arguments=SimpleNamespace(kv_cache_dtype=kind), **BASE)
        for kind in ("fp8_e4m3", "fp8_e5m2")
    ]
    given = plugin(pools.mha(dtype=torch.uint8), extra={"revision": "1", "kv_dtype": "fp8_e4m3"})
    assert len({digest(one) for one in named}) == 2
    assert digest(given) == digest(named[0])
    unknown = plugin(pools.mha(dtype=torch.uint8), **BASE)
    assert unknown.batch_set_v1(KEYS, SLOTS) == [False]
    assert '"kv_dtype": "fp8_e4m3"' in caplog.text


@pytest.mark.parametrize("name", ["quantization", "torchao_config", "modelopt_quant", "rl_quant_profile"])
def test_weights_that_are_recast_when_loaded_are_other_weights(name: str, plugin: Plugin, pools: Any) -> None:
    """Whatever the user says of numerics."""
    said = {"extra": {"revision": "1", "numerics": "agreed"}}
    one = plugin(pools.mha(), **said)
    assert digest(plugin(pools.mha(), arguments=SimpleNamespace(**{name: "x"}), **said)) != digest(one)
    assert digest(plugin(pools.mha(), arguments=SimpleNamespace(**{name: ""}), **said)) == digest(one)


def test_scales_are_told_apart_by_their_file(plugin: Plugin, pools: Any, tmp_path: Any, caplog: Any) -> None:
    """FP8 caches of one kind with other static scales hold other bytes; a digest of the user's own counts first."""
    path = tmp_path / "scales.json"
    arguments = SimpleNamespace(quantization_param_path=str(path))
    found = [digest(plugin(pools.mha(), **BASE))]
    for text in ("1", "2"):
        path.write_text(text)
        found.append(digest(plugin(pools.mha(), arguments=arguments, **BASE)))
    own = {"extra": {"revision": "1", "scales": sha256(b"1").hexdigest()}}
    assert digest(plugin(pools.mha(), arguments=arguments, **own)) == found[1]
    assert len(set(found)) == 3
    path.unlink()
    assert plugin(pools.mha(), arguments=arguments, **BASE).batch_set_v1(KEYS, SLOTS) == [False]
    assert 'give their digest by "scales"' in caplog.text


def test_model_and_revision_come_from_the_engine(plugin: Plugin, pools: Any, tmp_path: Any) -> None:
    """The engine's revision counts; a local folder is told apart by what it holds."""
    arguments = SimpleNamespace(model_path="example/tiny", revision="1")
    assert digest(plugin(pools.mha(), arguments=arguments)) == digest(plugin(pools.mha(), **BASE))
    (tmp_path / "config.json").write_text("{}")
    folder = SimpleNamespace(model_path=str(tmp_path))
    before = digest(plugin(pools.mha(), arguments=folder))
    (tmp_path / "config.json").write_text('{"rope_theta": 2}')
    after = digest(plugin(pools.mha(), arguments=folder))
    assert after != before
    served = {"model": str(tmp_path), "revision": revision_of(tmp_path)}
    assert digest(plugin(pools.mha(), extra=served)) == digest(plugin(pools.mha(), extra={"model": str(tmp_path)}))


def test_weights_that_only_a_name_tells_apart_are_warned_about(
    plugin: Plugin, pools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plugin(pools.mha())
    assert "told apart by name only: give a revision" in caplog.text


def test_draft_layers_are_part_of_the_name(plugin: Plugin, pools: Any) -> None:
    """A pool with a draft model's layers packed behind the target's is another geometry and another numerics."""
    pool = pools.mha(layers=4)
    pool.target_layer_num = 3
    packed = plugin(pool, **BASE)
    assert digest(packed) != digest(plugin(pools.mha(layers=4), **BASE))
    assert packed.batch_set_v1(KEYS, SLOTS) == [True]


def test_a_whole_models_layers_join_stages(plugin: Plugin, pools: Any) -> None:
    """With `layers` and `layer_partition` agreed, a stage reads what another arrangement of stages has stored."""
    agreed = {"extra": {"revision": "1", "layers": 6, "layer_partition": 3}}
    whole = pools.mha(layers=6)
    assert plugin(whole, **agreed).batch_set_v1(KEYS, SLOTS) == [True]
    second = pools.mha(layers=3, first_layer=3)
    assert plugin(second, pp_rank=1, pp_size=2, **agreed).batch_get_v1(KEYS, SLOTS + 8) == [True]
    assert second._page(8).contiguous().view(torch.uint8).equal(whole._page(0)[:, :, 3:].contiguous().view(torch.uint8))


def mha(**changes: Any) -> Callable[[Any], Any]:
    def make(pools: Any) -> Any:
        pool = pools.mha()
        for name, value in changes.items():
            setattr(pool, name, value)
        return pool

    return make


@pytest.mark.parametrize(
    ("pool", "options", "line"),
    [
        (mha(), {"extra": {"storage": ""}}, 'add "storage": "file:///path?capacity=100GiB"'),
        (mha(), {"extra": {"capcity": 1}}, "unknown field `capcity`"),
        (mha(), {"extra": {"head_group": "2"}}, "Expected `int | null`, got `str` - at `$.head_group`"),
        (mha(), {"extra": {"head_group": 0}}, "head_group is 0, must be 1 or more"),
        (mha(), {"extra": {"head_group": 3}}, "use head_group=2"),
        (mha(), {"extra": {"layer_partition": 2}, "pp_size": 2}, ""),
        (mha(), {"extra": {"timeout": 0}}, "timeout is 0.0 seconds, must be above 0"),
        (mha(), {"extra": {"scales": "xyz"}}, "scales must be a digest as hex digits"),
        (mha(), {"extra": {"kv_heads": 8}}, "correct kv_heads or layers"),
        (mha(), {"model_name": None}, 'add "model": "org/name"'),
        (mha(), {"is_mla_model": True}, "is_mla_model=True, its host pool is mha"),
        (mha(), {"attn_cp_size": 2}, "context parallelism splits pages"),
        (mha(dcp_size=2), {}, "decode context parallelism splits pages"),
        (mha(layout="page_unified"), {}, "layout page_unified of MHATokenToKVPoolHost is not understood"),
        (mha(v_head_dim=16), {}, "keys of 8 and values of 16 elements"),
        (mha(head_num=2), {}, "has a buffer of"),
        (mha(kv_buffer=None), {}, "no contiguous buffer in host memory"),
        (mha(get_page_buffer_meta=lambda _: ([0, 0], [0, 0])), {}, "lies otherwise than described"),
        (lambda _: SimpleNamespace(layout="page_first"), {}, "host pool SimpleNamespace is not understood"),
        (lambda pools: type("Mine", (type(pools.mha()),), {})(), {}, "host pool Mine is not understood"),
        (mha(), {"arguments": SimpleNamespace(enable_lora=True), "seeds": False}, "leaves LoRA adapters out"),
        (mha(dtype="strange"), {}, "runs without a cache"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_clear_line(
    pool: Callable[[Any], Any],
    options: dict[str, Any],
    line: str,
    plugin: Plugin,
    pools: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine starts, answers are misses, and one line of the log says what to change."""
    one = plugin(pool(pools), **options)
    if not line:
        assert one.batch_set_v1(KEYS, SLOTS) == [True]
        return
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said.startswith("hicache: runs without a cache: ")
    assert line in said
    assert "\n" not in said
    assert one.batch_exists(KEYS) == 0
    assert one.statistics().disabled in said


@pytest.mark.parametrize("seeds", [True, False])
def test_a_release_whose_hashes_leave_salts_out_is_warned_about(
    seeds: bool, plugin: Plugin, pools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests share pages whatever separates them; the plug-in sees hashes only."""
    plugin(pools.mha(), seeds=seeds)
    assert ("leaves cache_salt and extra_key out" in caplog.text) is not seeds


def test_a_storage_that_cannot_be_opened_is_one_line(
    install: Callable[..., Any], pools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown scheme is named, with those that there are."""
    fields = {"tp_rank": 0, "tp_size": 1, "is_mla_model": False, "model_name": "m"}
    config = SimpleNamespace(**fields, extra_config={"storage": "nowhere://x"})
    one = install().HiCacheStorageBackend(config, {})
    one.register_mem_pool_host(pools.mha())
    assert "storage scheme 'nowhere' is served by no installed package" in caplog.text
    assert one.batch_exists(KEYS) == 0


@pytest.mark.parametrize(
    ("version", "warns"), [("0.5.11", True), ("0.5.12", False), ("0.5.23.post1", False), ("0.6.0", True)]
)
def test_an_engine_outside_the_range_is_warned_about(
    version: str,
    warns: bool,
    install: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A release that was not compared still runs, and the log names the range."""
    module = install()
    monkeypatch.setattr(module, "version", lambda _: version)
    module.HiCacheStorageBackend(SimpleNamespace(extra_config={"storage": "memory://"}), {})
    assert ("outside 0.5.12 to 0.5.23" in caplog.text) is warns


def test_the_package_loads_without_the_engine() -> None:
    """Its names can be listed; only the class itself needs SGLang."""
    import hicache_sglang

    assert "HiCacheStorageBackend" in dir(hicache_sglang)
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = hicache_sglang.Other
