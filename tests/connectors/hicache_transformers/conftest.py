"""Stand-ins for transformers: its cache as 5.19 has it, and a small causal model with a generate loop.

What the real ones do is tried by `make engines`; these keep the same shapes, so the connector's own code is run by
`make test`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hicache_transformers.cache import PrefixCache

sys.path.insert(0, str(Path(__file__).parent))  # the stand-ins beside this file

PAGE = 4
VOCABULARY = 97


class DynamicLayer:
    """Grows by concatenation; `(batch, kv_heads, tokens, head_dim)`."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=-2)
        self.values = values if self.values is None else torch.cat([self.values, values], dim=-2)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[-2])


class DynamicSlidingWindowLayer(DynamicLayer):
    """What models with a sliding window get."""


class DynamicCache:
    def __init__(self, ddp_cache_data: Any = None, config: Any = None, **options: Any) -> None:
        kind = DynamicSlidingWindowLayer if getattr(config, "sliding_window", None) else DynamicLayer
        self.layers = [kind() for _ in range(config.num_hidden_layers)]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers[layer_idx].update(keys, values)

    def get_seq_length(self) -> int:
        return self.layers[0].get_seq_length()

    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in self.layers:
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys = layer.keys.repeat_interleave(repeats, dim=0)
            layer.values = layer.values.repeat_interleave(repeats, dim=0)


class TinyModel(torch.nn.Module):
    """Two layers of grouped-query attention over embeddings that know their position."""

    def __init__(self, *, seed: int = 0, kv_heads: int = 2, dtype: torch.dtype = torch.float32, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kv_heads, self.heads, self.dim, width = kv_heads, 4, 8, 32
        self.config = SimpleNamespace(
            num_hidden_layers=2,
            num_key_value_heads=kv_heads,
            max_position_embeddings=256,
            rope_theta=10000.0,
            _name_or_path="",
            _attn_implementation="eager",
            **config,
        )
        self.generation_config = SimpleNamespace(
            max_new_tokens=8,
            num_return_sequences=None,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=1,
            output_scores=None,
            temperature=None,
        )
        self.table = torch.nn.Embedding(VOCABULARY, width)
        self.places = torch.nn.Embedding(512, width)
        sizes = (self.heads * self.dim, kv_heads * self.dim, kv_heads * self.dim)
        self.projections = torch.nn.ModuleList(
            torch.nn.ModuleList([torch.nn.Linear(width, size) for size in sizes] + [torch.nn.Linear(sizes[0], width)])
            for _ in range(2)
        )
        self.head = torch.nn.Linear(width, VOCABULARY)
        for weight in self.parameters():  # so that every token before decides about the next one
            torch.nn.init.normal_(weight, std=0.6)
        self.to(dtype)
        self.eval()
        self.computed: list[tuple[int, int]] = []  # rows and columns of each forward pass

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def visible(self, queries: int, keys: int) -> torch.Tensor:
        return torch.ones(queries, keys, device=self.device).tril(keys - queries).bool()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = True,
    ) -> SimpleNamespace:
        rows, columns = input_ids.shape
        self.computed.append((rows, columns))
        past = past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(past, past + columns, device=self.device).expand(rows, columns)
        state = self.table(input_ids) + self.places(position_ids)
        seen = self.visible(columns, past + columns)[None, None]
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, : past + columns].bool()
        for at, (query, key, value, out) in enumerate(self.projections):

            def heads(tensor: torch.Tensor, count: int) -> torch.Tensor:
                return tensor.view(rows, columns, count, self.dim).transpose(1, 2)

            keys, values = past_key_values.update(
                heads(key(state), self.kv_heads), heads(value(state), self.kv_heads), at
            )
            repeat = self.heads // self.kv_heads
            attended = torch.nn.functional.scaled_dot_product_attention(
                heads(query(state), self.heads),
                keys.repeat_interleave(repeat, 1),
                values.repeat_interleave(repeat, 1),
                attn_mask=seen,
            )
            state = torch.nn.functional.layer_norm(
                state + out(attended.nan_to_num().transpose(1, 2).reshape(rows, columns, -1)), (state.shape[-1],)
            )
        return SimpleNamespace(logits=self.head(state), past_key_values=past_key_values)

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        max_new_tokens: int = 8,
        num_return_sequences: int = 1,
        num_beams: int = 1,
        **ignored: Any,
    ) -> torch.Tensor:
        inputs = input_ids if inputs is None else inputs
        assert inputs is not None, "no prompt"
        mask = torch.ones_like(inputs) if attention_mask is None else attention_mask
        state = DynamicCache(config=self.config) if past_key_values is None else past_key_values
        ids, mask = (tensor.repeat_interleave(num_return_sequences, 0) for tensor in (inputs, mask))
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for _ in range(max_new_tokens):
            places = (mask.cumsum(-1) - 1).clamp(min=0)
            past = state.get_seq_length()
            out = self(ids[:, past:], attention_mask=mask, position_ids=places[:, past:], past_key_values=state)
            chosen = out.logits[:, -1].argmax(-1).masked_fill(ended, self.generation_config.pad_token_id or 0)
            ids = torch.cat([ids, chosen[:, None]], 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            ended |= chosen == self.generation_config.eos_token_id
            if ended.all():
                break
        return ids


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the package."""
    module: Any = ModuleType("transformers")
    module.DynamicCache = DynamicCache
    module.GenerationMixin = TinyModel
    monkeypatch.setitem(sys.modules, "transformers", module)


@pytest.fixture
def model() -> TinyModel:
    return TinyModel()


@pytest.fixture
def tiny_model() -> type[TinyModel]:
    return TinyModel


@pytest.fixture
def opened(model: TinyModel) -> Iterator[Callable[..., PrefixCache]]:
    """Opens caches, of `model` where no other is given, and closes them."""
    made: list[PrefixCache] = []

    def make(of: Any = None, **settings: Any) -> PrefixCache:
        settings = {"page_size": PAGE, "device": "64KiB", "host": "64KiB", "canary": False} | settings
        made.append(PrefixCache(model if of is None else of, **settings))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


@pytest.fixture
def batch() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Prompts padded on the left, and their mask."""

    def make(*prompts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        return ids, mask

    return make
