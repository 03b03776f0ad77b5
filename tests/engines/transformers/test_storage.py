"""Pages in a folder: read by another process, damaged, slow, gone. The text stays what it is without a cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hicache import StorageUnavailable
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import FaultyStorage, delay, fail
from hicache.testing.gates import Gate

NEW = {"max_new_tokens": 16, "do_sample": False}

ANOTHER_PROCESS = """
import json, sys
import torch, transformers
from hicache_transformers import PrefixCache

folder, storage, ids = sys.argv[1], sys.argv[2], torch.tensor([json.loads(sys.argv[3])])
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
with PrefixCache(model, storage=storage, device="16MiB", host="16MiB") as cache:
    output = cache.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    found = cache.statistics()
    print(json.dumps([output[0].tolist(), found.reused_tokens, found.failures, cache.namespace.digest.hex()]))
"""


@pytest.fixture(scope="module")
def tiny(tiny_folder: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_folder)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 1000, (1, 200), generator=torch.Generator().manual_seed(1))


def test_another_process_reuses_what_is_in_the_folder(tiny_folder: str, tiny: Any, storage: str, ids: Any) -> None:
    expected = tiny.generate(ids, attention_mask=torch.ones_like(ids), **NEW)[0].tolist()
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", ANOTHER_PROCESS, tiny_folder, storage, json.dumps(ids[0].tolist())]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        found.append(json.loads(run.stdout.splitlines()[-1]))
    assert [one[0] for one in found] == [expected, expected]
    assert [one[1] for one in found] == [0, 192]
    assert [one[2] for one in found] == [{}, {}]
    assert found[0][3] == found[1][3]


@pytest.mark.case("FILE-4")
def test_a_damaged_page_is_computed_again_with_what_is_behind_it(
    tiny: Any, opened: Any, storage: str, tmp_path: Path, ids: Any
) -> None:
    expected = tiny.generate(ids, **NEW)
    cache = opened(tiny, storage=storage)
    cache.generate(ids, **NEW)
    cache.close()
    objects = sorted((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    pages = [path for path in objects if path.stat().st_size == objects[-1].stat().st_size]
    assert len(pages) == 13
    for path in pages[:5]:
        with path.open("r+b") as file:
            file.seek(-1000, 2)
            file.write(b"damaged" * 20)
    again = opened(tiny, storage=storage)
    assert torch.equal(again.generate(ids, **NEW), expected)
    assert again.statistics().reused_tokens < 192
    assert not again.statistics().failures
    again.close()
    healed = opened(tiny, storage=storage)
    assert torch.equal(healed.generate(ids, **NEW), expected)
    assert healed.statistics().reused_tokens == 192


def test_a_folder_that_disappears(tiny: Any, opened: Any, storage: str, tmp_path: Path, ids: Any) -> None:
    expected = tiny.generate(ids, **NEW)
    cache = opened(tiny, storage=storage)
    (tmp_path / "kv").rename(tmp_path / "gone")  # at once, whatever is written there now
    for _ in range(2):
        assert torch.equal(cache.generate(ids, **NEW), expected)
    assert not cache.statistics().failures


def test_a_storage_that_stands_still_delays_by_the_deadline_at_most(tiny: Any, opened: Any, ids: Any) -> None:
    backend = MemoryBackend()
    filled = opened(tiny, storage=backend)
    filled.generate(ids, **NEW)
    filled.close()
    gate = Gate()
    frozen = FaultyStorage(backend)
    cache = opened(tiny, storage=frozen, deadline=0.05, canary=False)
    frozen.always("contains", delay(gate))
    frozen.always("get_into", delay(gate))
    assert torch.equal(cache.generate(ids, **NEW), tiny.generate(ids, **NEW))
    assert cache.statistics().reused_tokens == 0
    assert not cache.statistics().failures
    assert gate.arrived
    assert not gate.passed
    gate.open()


def test_a_storage_that_fails(tiny: Any, opened: Any, ids: Any) -> None:
    broken = FaultyStorage(MemoryBackend())
    cache = opened(tiny, storage=broken, canary=False, retry=None)
    for verb in ("contains", "get_into", "put"):
        broken.always(verb, fail(StorageUnavailable("gone")))
    for _ in range(2):
        assert torch.equal(cache.generate(ids, **NEW), tiny.generate(ids, **NEW))
    assert cache.statistics().reused_tokens == 192  # device and host memory work on
    assert not cache.statistics().failures


def test_every_tier_answers(tiny: Any, opened: Any, storage: str, ids: Any) -> None:
    expected = tiny.generate(ids, **NEW)
    cache = opened(tiny, storage=storage, device=16, host=24)
    others = [torch.randint(3, 1000, (1, 200), generator=torch.Generator().manual_seed(seed)) for seed in (2, 3)]
    cache.generate(ids, **NEW)
    for other in others[:1]:
        cache.generate(other, **NEW)
    cache.flush()
    assert torch.equal(cache.generate(ids, **NEW), expected)
    cache.flush()
    for other in others:
        cache.generate(other, **NEW)
        cache.flush()
    assert torch.equal(cache.generate(ids, **NEW), expected)
    found = cache.cache.statistics().pages
    assert found.host + found.device > 0
    assert found.storage > 0
