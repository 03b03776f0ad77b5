from __future__ import annotations

from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.core.identity import Namespace
from hicache.core.layout import KVGeometry
from hicache.runtime.fingerprint import revision_of
from hicache.runtime.modelconfig import (
    deciding_settings,
    model_and_revision,
    quantization_of,
    rope_settings,
    rope_types,
)

LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


@pytest.mark.case("KEY-8")
@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (config(rope_theta=10000.0), config(rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})),
        (
            config(rope_theta=5e5, rope_scaling=LLAMA3 | {"type": "llama3"}),
            config(rope_parameters=LLAMA3 | {"rope_theta": 5e5, "rope_type": "llama3"}),
        ),
        (
            config(rotary_emb_base=10000, rotary_pct=0.25),
            config(rope_parameters={"rope_theta": 10000, "rope_type": "default", "partial_rotary_factor": 0.25}),
        ),
        (
            config(rope_theta=1e4, rope_scaling={"type": "yarn", "factor": 2.0}, max_position_embeddings=4096),
            config(
                rope_parameters={
                    "rope_theta": 1e4,
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 4096,
                }
            ),
        ),
        (
            config(rope_theta=1e4, rope_scaling={"type": "su"}, original_max_position_embeddings=4096),
            config(
                rope_parameters={"rope_theta": 1e4, "rope_type": "longrope", "original_max_position_embeddings": 4096}
            ),
        ),
    ],
)
def test_releases_spell_positions_differently_and_mean_the_same(older: Any, newer: Any) -> None:
    assert rope_settings(older) == rope_settings(newer) != {}
    assert rope_types(older) == rope_types(newer)


def test_what_an_engine_fills_in_changes_nothing() -> None:
    plain = config(rope_parameters={"rope_theta": 1e4, "rope_type": "default"}, max_position_embeddings=2048)
    filled = config(
        rope_parameters={
            "rope_theta": 1e4,
            "rope_type": "default",
            "factor": None,
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 2048,
        },
        rope_theta=1e4,
        partial_rotary_factor=1.0,
    )
    assert rope_settings(plain) == rope_settings(filled)


def test_layers_may_differ_and_what_stands_beside_them_is_no_layer() -> None:
    by_layer = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4},
        "chunked_attention": None,
        "rope_type": "default",
    }
    found = rope_settings(config(rope_parameters=by_layer))
    assert found == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert rope_types(config(rope_parameters=by_layer)) == {"linear", "default"}


def test_models_without_rotary_positions_have_no_settings() -> None:
    assert rope_settings(config()) == {}
    assert rope_types(config()) == set()
    assert deciding_settings(config()) is None


class Method(Enum):
    AWQ = "awq"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        (SimpleNamespace(quant_method=Method.AWQ), "awq"),
        ({}, "unnamed"),
    ],
)
def test_quantisation_has_a_name(given: Any, expected: str | None) -> None:
    assert quantization_of(config(quantization_config=given)) == expected


def test_quantisation_and_positions_decide_about_the_namespace() -> None:
    def digest(found: dict[str, Any] | None) -> bytes:
        geometry = KVGeometry.mha(2, kv_heads=2, head_dim=8, dtype="float32")
        return Namespace("org/model", geometry=geometry, page_size=16, rope=found).digest

    plain = config(rope_theta=1e4)
    others = [
        deciding_settings(plain),
        deciding_settings(plain, quantization="fp8"),
        deciding_settings(config(rope_theta=1e4, quantization_config={"quant_method": "gptq"})),
        deciding_settings(config(rope_theta=1e5)),
        deciding_settings(config()),
    ]
    assert len({digest(found) for found in others}) == len(others)


def test_a_folder_is_told_by_its_content_a_name_by_its_commit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    local = config(_name_or_path=str(tmp_path), _commit_hash=None)
    assert model_and_revision(None, None, local) == (str(tmp_path), revision_of(tmp_path), [])
    assert model_and_revision("org/name", None, local) == ("org/name", revision_of(tmp_path), [])
    assert model_and_revision(str(tmp_path), "1.0", local) == (str(tmp_path), "1.0", [])
    hub = config(_name_or_path="org/model", _commit_hash="8c22764")
    assert model_and_revision(None, None, hub) == ("org/model", "8c22764", [])


def test_a_model_that_only_has_a_name_gets_a_warning_and_one_without_has_none() -> None:
    name, revision, (warning,) = model_and_revision("org/model", None)
    assert (name, revision) == ("org/model", None)
    assert "give a revision" in warning
    assert model_and_revision(None, None, config(_name_or_path="")) == (None, None, [])
