"""Real adapters of PEFT on a real model: each has pages of its own, and what is not said which is in use goes past."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

import hicache
from hicache_transformers import PrefixCache

NAMES = ("lora-1", "lora-2")
NEW = 12


@pytest.fixture(scope="module")
def adapted(tiny_folder: str) -> tuple[Any, dict[str, hicache.Adapter]]:
    """The tiny model with two adapters loaded, and what names them."""
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    folders = {name: Path(tiny_folder).parent / name for name in NAMES}
    model = PeftModel.from_pretrained(base, folders[NAMES[0]], adapter_name=NAMES[0])
    model.load_adapter(folders[NAMES[1]], adapter_name=NAMES[1])
    digests = {name: sha256((folders[name] / "adapter_model.safetensors").read_bytes()).digest() for name in NAMES}
    return model.eval(), {name: hicache.Adapter(name, digest=digest) for name, digest in digests.items()}


def test_adapters_have_pages_of_their_own(
    adapted: tuple[Any, dict[str, hicache.Adapter]], opened: Callable[..., PrefixCache], storage: str
) -> None:
    """Cold and again, in one cache and in a fresh one over its storage: text as without, and no page of another's."""
    model, named = adapted
    ids = torch.randint(3, 800, (1, 100), generator=torch.Generator().manual_seed(7))
    wanted = {}
    for name in NAMES:
        model.set_adapter(name)
        wanted[name] = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert not torch.equal(*wanted.values()), "the adapters change nothing"
    for fresh in (False, True):
        cache = opened(model, storage=storage)
        for hits in (96, 96) if fresh else (0, 96):
            for name in NAMES:
                model.set_adapter(name)
                before = cache.statistics().reused_tokens
                found = cache.generate(ids, max_new_tokens=NEW, do_sample=False, adapter=named[name])
                assert torch.equal(found, wanted[name]), name
                assert cache.statistics().reused_tokens - before == hits, name
        cache.close()


def test_adapter_that_is_not_named_goes_past(
    adapted: tuple[Any, dict[str, hicache.Adapter]], opened: Callable[..., PrefixCache]
) -> None:
    model, _ = adapted
    model.set_adapter(NAMES[0])
    cache = opened(model)
    ids = torch.randint(3, 800, (1, 60), generator=torch.Generator().manual_seed(8))
    wanted = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    for _ in range(2):
        assert torch.equal(cache.generate(ids, max_new_tokens=NEW, do_sample=False), wanted)
    assert cache.statistics().bypassed == {"adapter": 2}
    assert cache.statistics().reused_tokens == 0
