"""What weights a model really has in memory: a digest of them, and whether they are those of a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hicache.errors import ConfigError

__all__ = ["has_adapter", "same_as_files", "stored_tensors", "weights_revision"]

_SAMPLES: Final = 16
_SAMPLE: Final = 1024  # elements of one sample of the digest
_COMPARED: Final = 256  # elements of each tensor that are compared with its file
_MOST_HEADER: Final = 100 * 1024 * 1024
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WRAPPED: Final = "base_model.model."  # what PEFT puts in front of the names of a model's parameters
_ADAPTED: Final = ".base_layer."  # and into those of layers that it adds to
_ADDED: Final = re.compile(r"\.lora_|\.modules_to_save\.|\.original_module\.")


def stored_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold memory: of one that stands for several, as quantised weights do, those inside it."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from stored_tensors(getattr(tensor, name))
    else:
        yield tensor


def has_adapter(model: Any) -> bool:
    """Whether adapters of PEFT have been added to a model, in use or not."""
    return bool(getattr(model, "peft_config", None)) or bool(getattr(model, "_hf_peft_config_loaded", False))


# ---- a digest


def weights_revision(model: Any) -> str:
    """Digest of what a model has in memory: of each tensor of its state name, shape, dtype, and 16 samples.

    Returns:
        `weights-` and 32 hex digits.

    Raises:
        ConfigError: they cannot be read.
    """
    digest = sha256(b"hicache-weights-v2")
    try:
        for name, value in sorted(model.state_dict().items()):
            digest.update(f"{name}|".encode())
            for part in _described(value):
                digest.update(part)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"the weights cannot be read for a digest ({error}): give name= and revision=") from error
    return f"weights-{digest.hexdigest()[:32]}"


def _described(value: Any) -> Iterator[bytes]:
    """What a value of a model's state adds to the digest; packed weights of quantised layers are tuples of tensors."""
    if isinstance(value, torch.Tensor):
        for tensor in stored_tensors(value):
            yield from _sampled(tensor.detach())
    elif isinstance(value, tuple | list):
        yield f"{len(value)}|".encode()
        for one in value:
            yield from _described(one)
    else:
        yield f"{value!r:.1000}|".encode()


def _sampled(tensor: torch.Tensor) -> Iterator[bytes]:
    yield f"{tuple(tensor.shape)}|{tensor.dtype}|".encode()
    if tensor.is_quantized:
        per_tensor = tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
        scales = torch.tensor([tensor.q_scale()]) if per_tensor else tensor.q_per_channel_scales()
        zeros = torch.tensor([tensor.q_zero_point()]) if per_tensor else tensor.q_per_channel_zero_points()
        yield from _sampled(scales)
        yield from _sampled(zeros)
        tensor = tensor.int_repr()
    flat = tensor.reshape(-1)
    last = max(0, flat.numel() - _SAMPLE)
    for at in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
        yield _bytes(flat[at : at + _SAMPLE])


# ---- comparing with files


def same_as_files(model: Any, folder: str) -> bool | None:
    """Whether the weights in memory are those in a folder's safetensors files, and all of them.

    Some elements from the middle of every tensor are compared. Nothing is known where names, shapes or kinds of
    elements differ (quantised, fused, another format of files).

    Returns:
        True or False; None where nothing is known.
    """
    tensors, missing = _by_name(model)
    known = bool(missing)
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            for name, sample in _samples(path, model, tensors):
                if sample is None:
                    known = False
                    continue
                flat = tensors[name].detach().reshape(-1)
                at = _middle(flat.numel())
                if _bytes(flat[at : at + _COMPARED]) != _bytes(sample.to(flat.dtype)):
                    return False
                missing.discard(name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, NotImplementedError):
            known = False  # no file of this format
    found = {id(tensor) for name, tensor in tensors.items() if name not in missing}
    whole = all(id(tensors[name]) in found for name in missing)  # tied weights are in files once
    return True if known and whole else None


def _by_name(model: Any) -> tuple[dict[str, torch.Tensor], set[str]]:
    """A model's own parameters and buffers by the names that they have without an adapter; names of parameters."""
    adapted = has_adapter(model)

    def own(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix(_WRAPPED).replace(_ADAPTED, "."): tensor
            for name, tensor in tensors
            if not (adapted and _ADDED.search(name))
        }

    parameters = own(model.named_parameters(remove_duplicate=False))
    return own(model.named_buffers()) | parameters, set(parameters)


def _samples(path: Path, model: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Elements of the tensors of a file by the model's names for them; None for one that has no equal counterpart.

    The format is a header in JSON, then the bytes.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(_MOST_HEADER, os.fstat(file.fileno()).st_size):
            raise ValueError("no header")
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for told, entry in header.items():
            name = _counterpart(told, model, tensors)
            if name is None:
                if not _unused(told, model):
                    yield told, None
                continue
            dtype, tensor = _DTYPES.get(entry.get("dtype")), tensors[name]
            if dtype is None or list(tensor.shape) != entry["shape"] or not tensor.is_floating_point():
                yield told, None
                continue
            file.seek(8 + size + entry["data_offsets"][0] + _middle(tensor.numel()) * dtype.itemsize)
            count = min(_COMPARED, tensor.numel() - _middle(tensor.numel()))
            yield name, torch.frombuffer(bytearray(file.read(count * dtype.itemsize)), dtype=dtype)


def _counterpart(told: str, model: Any, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The model's name of a file's tensor: files of a model without its head lack the front of their names."""
    front = f"{getattr(model, 'base_model_prefix', '')}."
    return next((name for name in (told, front + told, told.removeprefix(front)) if name in tensors), None)


def _unused(told: str, model: Any) -> bool:
    """Whether it is a tensor of the file that models of this kind do not read."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, told) for pattern in patterns)


def _middle(elements: int) -> int:
    """Where the sample of a tensor begins."""
    return max(0, elements - _COMPARED) // 2


def _bytes(tensor: torch.Tensor) -> bytes:
    found: bytes = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return found
