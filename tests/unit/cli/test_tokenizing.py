"""Text becomes token ids only by a local tokenizer, and what is missing is said in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hicache.cli.tokenizing import load_tokenizer, read_text
from hicache.errors import ConfigError, InvalidInput


def words(folder: Path) -> Path:
    """A tokenizer of whole words, with a token in front of each prompt."""
    path = folder / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"<s>": 0, "the": 1, "cat": 2, "?": 3}, "unk_token": "?"}
    front = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    around = {
        "type": "TemplateProcessing",
        "single": [front, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": around, "decoder": None, "model": model,
    }  # fmt: skip
    path.write_text(json.dumps(whole))
    return path


def test_a_tokenizer_json(tmp_path: Path) -> None:
    """By its file or its folder, with the tokens around a prompt or without them."""
    path = words(tmp_path)
    assert load_tokenizer(str(path))("the cat the dog").tolist() == [0, 1, 2, 1, 3]
    assert load_tokenizer(str(tmp_path), special=False)("cat").tolist() == [2]
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"is no tokenizer\.json"):
        load_tokenizer(str(path))


def test_without_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package that is missing is named, and what to do without it."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as where it is not installed
    with pytest.raises(ConfigError, match="pip install tokenizers, or give token ids by --prompts"):
        load_tokenizer(str(words(tmp_path)))


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without tokenizer.json needs the other package."""
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    with pytest.raises(ConfigError, match="pip install transformers"):
        load_tokenizer(str(tmp_path))


def test_texts(tmp_path: Path) -> None:
    """A file is read as UTF-8; what is none is refused."""
    file = tmp_path / "text"
    file.write_text("Grüße\n", encoding="utf-8")
    assert read_text(str(file)) == "Grüße\n"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_text(str(file))
    with pytest.raises(InvalidInput, match="No such file"):
        read_text(str(tmp_path / "none"))
