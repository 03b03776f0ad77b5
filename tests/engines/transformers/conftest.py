"""Real models of transformers, small and random, each with what the connector has to keep apart; and a real small one.

`make engines` runs these tests in vLLM's environment, which has transformers. `HICACHE_TINY_MODEL` and
`HICACHE_SMOLLM2` name other folders than those that `tests/engines/prepare.py` makes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hicache_transformers import PrefixCache

torch.set_num_threads(1)  # threads of a pool that wait for each other take minutes where others use the cores too

ENGINES = Path(os.environ.get("ENGINES_FOLDER") or Path(__file__).resolve().parents[3] / ".engines")
PAGE = 16
VOCABULARY = 211

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # wide enough for varied greedy output
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def _of(kind: str, **changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**(_SIZES | changes))
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval()

    return make


def _gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=512,
        n_embd=64,
        n_layer=3,
        n_head=4,
        initializer_range=0.25,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "llama-mha": _of("Llama", num_key_value_heads=4),
    "llama-gqa": _of("Llama"),
    "llama-mqa": _of("Llama", num_key_value_heads=1),
    "llama3-rope": _of(
        "Llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": _of("Qwen2", use_sliding_window=False),
    "qwen3": _of("Qwen3", head_dim=16),
    "gemma": _of("Gemma", num_key_value_heads=1, head_dim=16),
    "mistral-full": _of("Mistral", sliding_window=None),
    "gpt2": _gpt2,
}


@pytest.fixture(scope="session", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    """Each kind of model that is supported."""
    return MODELS[request.param]()


@pytest.fixture(scope="session")
def llama() -> Any:
    """One of them."""
    return MODELS["llama-gqa"]()


@pytest.fixture
def make() -> Callable[..., Any]:
    """Makes a model of a kind: its class in transformers without `ForCausalLM`, and changes to its configuration."""
    return lambda kind, **changes: _of(kind, **changes)()


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv?capacity=64MiB"


@pytest.fixture
def opened() -> Iterator[Callable[..., PrefixCache]]:
    """Opens caches, and closes them."""
    made: list[PrefixCache] = []

    def make(model: Any, **settings: Any) -> PrefixCache:
        made.append(PrefixCache(model, **({"device": "16MiB", "host": "16MiB", "page_size": PAGE} | settings)))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


@pytest.fixture(scope="session")
def prompt() -> Callable[..., torch.Tensor]:
    """Random prompts `(1, tokens)` without special tokens."""

    def make(tokens: int, *, seed: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, VOCABULARY, (1, tokens), generator=generator)

    return make


@pytest.fixture(scope="session")
def batch() -> Callable[..., dict[str, torch.Tensor]]:
    """Prompts padded on the left, as arguments of `generate`."""

    def make(*prompts: torch.Tensor) -> dict[str, torch.Tensor]:
        width = max(prompt.shape[1] for prompt in prompts)
        ids = torch.full((len(prompts), width), 2)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(prompts):
            ids[row, width - one.shape[1] :] = one[0]
            mask[row, width - one.shape[1] :] = 1
        return {"input_ids": ids, "attention_mask": mask}

    return make


def _folder(variable: str, name: str) -> str:
    folder = os.environ.get(variable) or str(ENGINES / "models" / name)
    assert os.path.isfile(os.path.join(folder, "config.json")), f"{folder}: no model, run tests/engines/prepare.py"
    return folder


@pytest.fixture(scope="session")
def tiny_folder() -> str:
    """A random Llama with a tokenizer."""
    return _folder("HICACHE_TINY_MODEL", "tiny")


@pytest.fixture(scope="session")
def smollm2_folder() -> str:
    """SmolLM2-135M-Instruct."""
    return _folder("HICACHE_SMOLLM2", "smollm2")
