"""LoRA adapters that an engine is started with, by what is in them: SGLang's page hashes name them by name and path."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from hicache.core.framing import frame, frame_text
from hicache.errors import ConfigError
from hicache.runtime.fingerprint import contents_digest

__all__ = ["adapters_digest"]


def adapters_digest(given: Any) -> str | None:
    """Digest of the adapters of `--lora-paths`: their names, paths, and the content of all of their files.

    An adapter that is loaded later gets an id that never comes again, so there is nothing to tell apart. Blocks on I/O.

    Args:
        given: as SGLang keeps them: records, mappings, or texts such as "name=path" and "path"; may be empty.

    Returns:
        64 hex digits; None without any adapter.

    Raises:
        ConfigError: an adapter whose files cannot be read; the same name and path may stand for other weights tomorrow.
    """
    entries = sorted(set(_entries(given)))
    if not entries:
        return None
    digest = sha256()
    for name, path in entries:
        try:
            digest.update(frame_text(name) + frame_text(path) + frame(_content(_folder(path))))
        except Exception as error:
            raise ConfigError(
                f"adapter {name!r:.60} at {path!r:.200} cannot be told from others of its name ({error}): give its "
                "folder in --lora-paths, or load it by /load_lora_adapter"
            ) from error
    return digest.hexdigest()


def _entries(given: Any) -> Iterator[tuple[str, str]]:
    if isinstance(given, Mapping):
        given = [given] if "lora_path" in given else [f"{name}={path}" for name, path in given.items()]
    for one in given or ():
        if isinstance(one, str):
            name, separator, path = one.partition("=")
            yield (name, path) if separator else (one, one)
        elif isinstance(one, Mapping):
            yield str(one["lora_name"]), str(one["lora_path"])
        else:
            yield str(one.lora_name), str(one.lora_path)


def _folder(path: str) -> Path:
    """Where an adapter's files are: its folder, or the copy that the engine has loaded from a hub."""
    if not os.path.isdir(path):
        from huggingface_hub import snapshot_download

        path = snapshot_download(path, local_files_only=True)
    return Path(path)


def _content(folder: Path) -> bytes:
    names = sorted(name for name in os.listdir(folder) if (folder / name).is_file())
    if not names:
        raise FileNotFoundError("there are no files")
    return contents_digest(folder, names)
