"""Weights that change under one name: adapters of other content, and weights that a running engine gets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hicache.runtime.fingerprint import revision_of

KEYS = [sha256(b"page").hexdigest()]
SLOTS = torch.arange(4)
REVISION = {"revision": "1"}

Plugin = Callable[..., Any]


def digest(one: Any) -> bytes:
    return one._opened.store._namespace


def adapter(folder: Path, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_text(content)
    return folder


@pytest.mark.parametrize(
    "given",
    [
        lambda path: [SimpleNamespace(lora_id="1", lora_name="sql", lora_path=path)],
        lambda path: [{"lora_name": "sql", "lora_path": path}],
        lambda path: {"lora_name": "sql", "lora_path": path},
        lambda path: {"sql": path},
        lambda path: [f"sql={path}"],
        lambda path: [path],
    ],
    ids=["record", "mapping", "one mapping", "names", "text", "path"],
)
def test_adapters_are_told_apart_by_what_is_in_them(
    given: Callable[[str], Any], plugin: Plugin, pools: Any, tmp_path: Path
) -> None:
    """SGLang's page hashes name an adapter by name and path, so its content is in the namespace."""
    arguments = SimpleNamespace(enable_lora=True, lora_paths=given(str(adapter(tmp_path / "sql", "one"))))
    one = plugin(pools.mha(), extra=REVISION, arguments=arguments)
    assert one.batch_set_v1(KEYS, SLOTS) == [True]
    assert plugin(pools.mha(), extra=REVISION, arguments=arguments).batch_exists(KEYS) == 1
    adapter(tmp_path / "sql", "two")
    trained = plugin(pools.mha(), extra=REVISION, arguments=arguments)
    assert digest(trained) != digest(one)
    assert trained.batch_exists(KEYS) == 0
    assert plugin(pools.mha(), extra=REVISION).batch_exists(KEYS) == 0


def test_no_adapters_are_no_part_of_the_name(plugin: Plugin, pools: Any) -> None:
    """Those that are loaded later have ids that never come again."""
    none = SimpleNamespace(enable_lora=True, lora_paths=[])
    assert digest(plugin(pools.mha(), extra=REVISION, arguments=none)) == digest(plugin(pools.mha(), extra=REVISION))


def test_an_adapter_of_a_hub_is_what_the_engine_has_loaded(
    plugin: Plugin, pools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter(tmp_path / "copy", "one")
    hub: Any = ModuleType("huggingface_hub")
    hub.snapshot_download = lambda name, local_files_only: str({"org/sql": folder}[name])
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    arguments = SimpleNamespace(lora_paths=["sql=org/sql"])
    before = digest(plugin(pools.mha(), extra=REVISION, arguments=arguments))
    adapter(folder, "two")
    assert digest(plugin(pools.mha(), extra=REVISION, arguments=arguments)) != before


@pytest.mark.parametrize("kind", ["nowhere", "empty"])
def test_an_adapter_that_cannot_be_read_is_no_cache(
    kind: str, plugin: Plugin, pools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Its name alone may stand for other weights tomorrow; one line says what to change."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "empty").mkdir()
    one = plugin(pools.mha(), extra=REVISION, arguments=SimpleNamespace(lora_paths=[f"sql={tmp_path / kind}"]))
    assert one.batch_set_v1(KEYS, SLOTS) == [False]
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "adapter 'sql' at " in said
    assert "give its folder in --lora-paths" in said


@pytest.mark.case("KEY-8")
def test_exchanged_weights_find_none_of_the_old_pages(
    plugin: Plugin, pools: Any, changed: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang flushes its own tiers and leaves storage as it is. A label names nothing: two runs may use the same."""
    arguments = SimpleNamespace(model_path="example/tiny", revision="1", weight_version="default")
    one = plugin(pools.mha(), arguments=arguments)
    assert one.batch_set_v1(KEYS, SLOTS) == [True]
    changed(hicache_ratio=2)
    assert one.batch_exists(KEYS) == 1
    for _ in range(2):
        changed(weight_version="step-1")
        assert one.batch_exists(KEYS) == 0
        assert one.batch_get_v1(KEYS, SLOTS + 8) == [False]
        assert one.batch_set_v1(KEYS, SLOTS) == [True]
        assert one.batch_exists(KEYS) == 1
    assert sum("weights were exchanged" in line for line in caplog.messages) == 2
    fresh = plugin(pools.mha(), arguments=arguments)  # attached to the engine as it is now
    assert fresh.batch_exists(KEYS) == 0


def test_weights_from_a_folder_are_named_by_what_is_in_it(
    plugin: Plugin, pools: Any, changed: Callable[..., None], tmp_path: Path
) -> None:
    """Also where it is the folder of before, with other files: and another engine of those finds the pages."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("one")
    arguments = SimpleNamespace(model_path=str(tmp_path))
    one = plugin(pools.mha(), arguments=arguments)
    assert one.batch_set_v1(KEYS, SLOTS) == [True]
    (tmp_path / "model.safetensors").write_text("two")
    changed(model_path=str(tmp_path), load_format="auto")
    assert one.batch_exists(KEYS) == 0
    assert one.batch_set_v1(KEYS, SLOTS) == [True]
    given = plugin(pools.mha(), extra={"revision": revision_of(tmp_path)}, arguments=SimpleNamespace())
    assert given._config.model_name == "example/tiny"
    assert digest(given) == digest(one)


def test_weights_are_exchanged_while_storage_is_away(
    plugin: Plugin, pools: Any, changed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is opened late is opened under the new name, and by one thread: others miss meanwhile."""
    one = plugin(pools.mha(), extra=REVISION)
    assert one.batch_set_v1(KEYS, SLOTS) == [True]
    with one._opening:
        changed(weight_version="step-1")
        assert one.batch_exists(KEYS) == 0
    one._close_store()
    one._open_again_at = 0.0
    assert one.batch_exists(KEYS) == 0
    assert one.statistics().disabled == ""
    assert one._settings.revision.startswith("exchanged-")
