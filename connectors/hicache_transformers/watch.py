"""Whether a model is still the one that the cache was opened with, asked at every call."""

from __future__ import annotations

from typing import Any, Final

import torch

from hicache.core.identity import Adapter
from hicache_transformers.model import attention_of, is_training, on_autocast
from hicache_transformers.rows import Bypass
from hicache_transformers.weights import has_adapter, stored_tensors

__all__ = ["ModelWatch"]

_WATCHED: Final = 16  # elements of each tensor


class ModelWatch:
    """Notices that a model is no longer what it was when the cache was opened. Thread-safe.

    Whatever writes to weights (an optimiser, loading a state, another dtype or device) leaves another tensor or a
    higher version of the same one. Writing to a tensor's `data`, as merging an adapter does, leaves neither: so some
    elements of each are compared as well. Buffers count too: quantised weights and rotary frequencies lie in them.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._attention = attention_of(model)
        self._weights = self._marks()
        self._samples = _sample_views(self._tensors())
        self._content = self._read()

    def check(self, adapter: Adapter | None) -> None:
        """See that the model may use the cache now.

        Args:
            adapter: whose weights are active, as far as the caller says.

        Raises:
            Bypass: it may not.
        """
        model = self._model
        if is_training(model):
            raise Bypass("training", "the model is in training mode, where dropout decides: call model.eval()")
        if adapter is not None and adapter.digest is None:
            raise Bypass(
                "adapter", f"adapter {adapter.name!r:.60} has no digest: the name alone may mean other weights"
            )
        if adapter is None and has_adapter(model):
            raise Bypass(
                "adapter", "the model has adapters: say which weights are in use by adapter=hicache.Adapter(...)"
            )
        if _learns_prompts(model):
            raise Bypass("adapter", "the model has an adapter that puts tokens of its own in front of prompts")
        if attention_of(model) != self._attention:
            raise Bypass("attention", "the attention implementation was changed: make a new PrefixCache")
        if self._marks() != self._weights or self._read() != self._content:
            raise Bypass("weights", "the model's weights were changed or moved: make a new PrefixCache, with revision=")
        if on_autocast(model):
            raise Bypass("autocast", "autocast changes what keys and values are: load the model in that dtype instead")

    def _tensors(self) -> list[torch.Tensor]:
        return [
            part for tensor in (*self._model.parameters(), *self._model.buffers()) for part in stored_tensors(tensor)
        ]

    def _marks(self) -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), _version(tensor)) for tensor in self._tensors()]

    def _read(self) -> list[bytes]:
        return [_content(views) for views in self._samples]


def _content(views: list[torch.Tensor]) -> bytes:
    with torch.no_grad():
        found: bytes = torch.cat(views).cpu().view(torch.uint8).numpy().tobytes()
    return found


def _sample_views(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """A few elements from the middle of each tensor, as views of it; by device and dtype, to be read in one go."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        weight = tensor.detach()
        if not weight.numel():
            continue
        flat = weight.view(-1) if weight.is_contiguous() else weight
        while flat.ndim > 1:  # of one that does not lie in one run, a row: anything else were a copy
            flat = flat[flat.shape[0] // 2]
        middle = max(0, flat.numel() - _WATCHED) // 2
        found.setdefault((weight.device, weight.dtype), []).append(flat[middle : middle + _WATCHED])
    return list(found.values())


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _learns_prompts(model: Any) -> bool:
    """Whether an adapter is of the kinds that are prompts or keys and values: those change columns, not weights."""
    configs = getattr(model, "peft_config", None)
    return isinstance(configs, dict) and any(
        getattr(config, "is_prompt_learning", False) for config in configs.values()
    )
