from __future__ import annotations

import os
from pathlib import Path

import pytest

from hicache.core.identity import Namespace
from hicache.core.layout import KVGeometry
from hicache.errors import NamespaceError
from hicache.runtime.fingerprint import revision_of, with_revision


def model(folder: Path, *, config: bytes = b"{}", index: bytes | None = b"{}", weights: bytes = b"w" * 300_000) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes(config)
    if index is not None:
        (folder / "model.safetensors.index.json").write_bytes(index)
    (folder / "model-00001.safetensors").write_bytes(weights)
    return folder


@pytest.mark.case("KEY-8")
def test_revisions_follow_the_content_not_the_place(tmp_path: Path) -> None:
    first = revision_of(model(tmp_path / "a"))
    assert first.startswith("folder-")
    assert len(first) == 39
    copy = model(tmp_path / "b")
    os.utime(copy / "config.json", (0, 0))
    (copy / "README.md").write_text("not part of the model")
    assert revision_of(copy) == revision_of(str(copy)) == first
    os.symlink(copy, tmp_path / "snapshot")
    assert revision_of(tmp_path / "snapshot") == first


def test_whatever_differs_is_another_revision(tmp_path: Path) -> None:
    tuned = bytearray(b"w" * 300_000)
    tuned[299_999] ^= 1
    folders = [
        model(tmp_path / "a"),
        model(tmp_path / "b", config=b"{} "),
        model(tmp_path / "c", index=b"{} "),
        model(tmp_path / "d", index=None),
        model(tmp_path / "e", weights=b"w" * 300_001),
        model(tmp_path / "f", weights=bytes(tuned)),  # a fine-tune: same configuration, same sizes
        model(tmp_path / "g", weights=b""),
        model(tmp_path / "i", index=b""),  # an empty index is not an absent one
    ]
    (model(tmp_path / "h") / "model-00001.safetensors").rename(tmp_path / "h" / "model-00002.safetensors")
    folders.append(tmp_path / "h")
    assert len({revision_of(folder) for folder in folders}) == len(folders)


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NamespaceError, match="neither"):
        revision_of(tmp_path)
    with pytest.raises(NamespaceError, match="cannot be read"):
        revision_of(tmp_path / "absent")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(NamespaceError, match="cannot be read"):
        revision_of(tmp_path)


def test_a_namespace_gets_its_folders_revision_only_where_it_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = KVGeometry.mha(2, kv_heads=2, head_dim=4, dtype="float32")
    folder = model(tmp_path / "a")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(folder), f"{folder}/", "~/a"):
        found = with_revision(Namespace(name, geometry=geometry, page_size=4))
        assert found.revision == revision_of(folder)
    given = Namespace(str(folder), revision="r1", geometry=geometry, page_size=4)
    assert with_revision(given) is given
    hub = Namespace("org/x", geometry=geometry, page_size=4)
    assert with_revision(hub) is hub
