"""Digests of models and adapters in local folders, where no commit says what the weights are."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Final

from hicache.core.framing import frame, frame_number, frame_text
from hicache.core.identity import Namespace
from hicache.errors import NamespaceError

__all__ = ["contents_digest", "revision_of", "with_revision"]

_TAG: Final = b"hicache-folder-v1"
_DESCRIPTIONS: Final = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096
_MOST_DESCRIPTION: Final = 64 * 1024 * 1024


def revision_of(folder: str | os.PathLike[str]) -> str:
    """Digest of what a model folder holds: configuration, index, and each weight file's name, size and samples.

    Two fine-tunes of one model have equal configurations, indices and sizes, so 16 samples of 4 KiB spread over each
    weight file are read too. Names of the folder and times of the files don't count: copies are equal. Blocks on I/O;
    call it once, when a model is opened.

    Returns:
        `folder-` and 32 hex digits.

    Raises:
        NamespaceError: the folder cannot be read or holds no model.
    """
    root = Path(folder)
    try:
        names = sorted(os.listdir(root))
        weights = [name for name in names if name.endswith(_WEIGHTS) and (root / name).is_file()]
        if "config.json" not in names and not weights:
            raise NamespaceError(f"folder {str(root)!r} holds neither config.json nor weights: give the revision")
        digest = sha256(frame(_TAG))
        for name in _DESCRIPTIONS:
            digest.update(frame(_description(root / name) if name in names else None))
        for name in weights:
            digest.update(frame_text(name) + _sampled(root / name))
    except (OSError, UnicodeEncodeError) as error:
        raise NamespaceError(f"folder {str(root)!r} cannot be read ({error}): give the revision") from error
    return f"folder-{digest.hexdigest()[:32]}"


def with_revision(namespace: Namespace) -> Namespace:
    """The namespace itself, or with `revision_of` its folder where it has no revision and its model is a folder."""
    folder = os.path.expanduser(namespace.model)
    if namespace.revision is not None or not os.path.isdir(folder):
        return namespace
    return replace(namespace, revision=revision_of(folder))


def contents_digest(folder: Path, names: Iterable[str]) -> bytes:
    """SHA-256 over names and contents of files of a folder, in the order given; reads all of them, so not for models.

    Raises:
        OSError: a file cannot be read.
    """
    whole = sha256()
    for name in names:
        with (folder / name).open("rb") as file:
            whole.update(frame_text(name) + frame(file_digest(file, "sha256").digest()))
    return whole.digest()


def _description(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MOST_DESCRIPTION)


def _sampled(path: Path) -> bytes:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, size - _SAMPLE_BYTES)
        parts = [frame_number(size)]
        for at in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
            file.seek(at)
            parts.append(frame(file.read(_SAMPLE_BYTES)))
    return b"".join(parts)
