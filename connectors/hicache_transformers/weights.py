"""What weights a model really has in memory: a digest of them, and whether they are those of a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch

from hicache.errors import ConfigError

__all__ = ["differ_from_folder", "weights_revision"]

_SAMPLES: Final = 16
_SAMPLE: Final = 1024  # elements of one sample of the digest
_COMPARED: Final = 256  # elements of each tensor that are compared with its file
_MOST_HEADER: Final = 100 * 1024 * 1024
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def weights_revision(model: Any) -> str:
    """Digest of a model's weights in memory: each parameter's name, shape, dtype, and 16 samples of its elements.

    Returns:
        `weights-` and 32 hex digits.

    Raises:
        ConfigError: they cannot be read.
    """
    digest = sha256(b"hicache-weights-v1")
    try:
        for name, tensor in sorted(model.named_parameters()):
            digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
            flat = tensor.detach().reshape(-1)
            last = max(0, flat.numel() - _SAMPLE)
            for at in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                digest.update(_bytes(flat[at : at + _SAMPLE]))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"the weights cannot be read for a digest ({error}): give name= and revision=") from error
    return f"weights-{digest.hexdigest()[:32]}"


def differ_from_folder(model: Any, folder: str) -> bool:
    """Whether weights in memory are others than those in a folder's safetensors files, as after training.

    Some elements from the middle of every tensor that both have under one name are compared. Where names, shapes or
    kinds of elements differ (quantised, fused, other formats of files), nothing is known, and False is the answer.
    """
    parameters = dict(model.named_parameters())
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            for name, sample in _samples(path, parameters):
                flat = parameters[name].detach().reshape(-1)
                at = _middle(flat.numel())
                if _bytes(flat[at : at + _COMPARED]) != _bytes(sample.to(flat.dtype)):
                    return True
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # no file of this format: it says nothing
    return False


def _samples(path: Path, parameters: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Elements of those tensors of a file that have a counterpart; the format is a header in JSON, then the bytes."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(_MOST_HEADER, os.fstat(file.fileno()).st_size):
            raise ValueError("no header")
        header = json.loads(file.read(size))
        for name, entry in header.items():
            dtype, tensor = _DTYPES.get(entry.get("dtype")), parameters.get(name)
            if (
                dtype is None
                or tensor is None
                or list(tensor.shape) != entry["shape"]
                or not tensor.is_floating_point()
            ):
                continue
            file.seek(8 + size + entry["data_offsets"][0] + _middle(tensor.numel()) * dtype.itemsize)
            count = min(_COMPARED, tensor.numel() - _middle(tensor.numel()))
            yield name, torch.frombuffer(bytearray(file.read(count * dtype.itemsize)), dtype=dtype)


def _middle(elements: int) -> int:
    """Where the sample of a tensor begins."""
    return max(0, elements - _COMPARED) // 2


def _bytes(tensor: torch.Tensor) -> bytes:
    found: bytes = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return found
