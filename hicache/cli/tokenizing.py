"""From text to token ids, by a tokenizer in a local file or folder. Nothing is ever downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hicache.errors import ConfigError, InvalidInput

__all__ = ["load_tokenizer", "read_text"]

_FILE = "tokenizer.json"

Encode = Callable[[str], np.ndarray[tuple[int], np.dtype[np.uint32]]]


def load_tokenizer(path: str, *, special: bool = True) -> Encode:
    """What makes token ids of text, as the engine does that has this tokenizer.

    A `tokenizer.json`, or a folder with one, needs the package `tokenizers`; other folders of a model `transformers`.

    Args:
        path: of the file, or of the model's folder.
        special: whether the tokens are added that the tokenizer puts around a prompt, such as BOS.

    Raises:
        ConfigError: there is none, or the package for it is not installed.
    """
    where = Path(path)
    file = where / _FILE if where.is_dir() else where
    if not where.exists():
        raise ConfigError(f"--tokenizer {path!r:.200}: no such file or folder; give a local one, none is downloaded")
    try:
        if file.is_file():
            return _fast(str(file), special=special)
        return _slow(path, special=special)
    except ImportError as error:
        wanted = "tokenizers" if file.is_file() else "transformers"
        raise ConfigError(
            f"--tokenizer needs the package {wanted} ({error}): pip install {wanted}, or give token ids by --prompts"
        ) from None


def read_text(path: str) -> str:
    """The text of a file; `-` is standard input.

    Raises:
        InvalidInput: it cannot be read, or is no UTF-8.
    """
    try:
        with open(0 if path == "-" else path, encoding="utf-8", closefd=path != "-") as file:
            return file.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput(f"--text-file {path!r:.200} cannot be read: {reason}") from None


def _fast(path: str, *, special: bool) -> Encode:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the package raises plain Exception
        raise ConfigError(f"--tokenizer {path!r:.200} is no tokenizer.json: {error!s:.200}") from None
    return lambda text: _ids(tokenizer.encode(text, add_special_tokens=special).ids)


def _slow(path: str, *, special: bool) -> Encode:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a tokenizer's own code raises
        raise ConfigError(f"--tokenizer {path!r:.200} has no tokenizer that loads: {error!s:.200}") from None
    return lambda text: _ids(tokenizer.encode(text, add_special_tokens=special))


def _ids(ids: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(ids, np.uint32)
