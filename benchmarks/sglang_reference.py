"""What SGLang's tree cores take for the operations of bench_core, in microseconds.

Run by benchmarks/sglang.py with the interpreter of an environment that holds SGLang; it imports nothing of hicache.
Its last line of output is a JSON object: `core` (the fastest tree core that loaded), `version`, a median by benchmark
name for that core, and `NAME_python` for the core written in Python.

What one call covers:
- match: the key and the parameters of a request are made anew, around the token array that a request of SGLang holds
  from its tokenization on; then `UnifiedRadixCache.match_prefix`, what the scheduler calls. The scheduler also caps the
  match one token below the prompt's end, which costs the Rust core a copy of the array; without that cap the
  reference is the faster one.
- evict: `UnifiedRadixCache.evict` of one page's tokens, which includes giving the page back to SGLang's paged
  allocator, the one it uses at this page size.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The sibling module sglang.py would hide the package of that name.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import sglang_cpu  # noqa: E402, F401  lets the package load without a GPU, so before anything of it

# isort: split
import json  # noqa: E402
import time  # noqa: E402
from array import array  # noqa: E402
from importlib.metadata import version  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

P = 64


def new_cache(core: str, pages: int) -> UnifiedRadixCache:
    allocator = PagedTokenToKVPoolAllocator(pages * P, P, torch.bfloat16, "cpu", None, need_sort=False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=allocator,
        page_size=P,
        tree_components=(ComponentType.FULL,),
        tree_core_backend=core,
    )
    return UnifiedRadixCache(params)


def fill(cache: UnifiedRadixCache, tokens: array) -> None:
    """Insert tokens whose pages, but for those already there, come from the allocator."""
    known = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens))).device_prefix_len
    fresh = cache.token_to_kv_pool_allocator.alloc(len(tokens) - known)
    # What the tree holds already is never read from the value, so any slots do there.
    value = torch.cat((torch.zeros(known, dtype=torch.int64), fresh))
    cache.insert(InsertParams(key=RadixKey(tokens), value=value, prev_prefix_len=known))


def microseconds(work: Callable[[], object], *, seconds: float = 0.4) -> float:
    """The median time of one call, over about that many seconds, after a warm-up."""
    for _ in range(3):
        work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 20:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def match(core: str, count: int, nodes: int) -> float:
    """Matching a prompt of `count` tokens that lie in a chain of `nodes` equal nodes."""
    cache = new_cache(core, count // P + 1)
    tokens = array("q", np.random.default_rng(1).integers(0, 128_000, count).tolist())
    step = count // nodes
    for end in range(step, count + 1, step):
        fill(cache, tokens[:end])
    found = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
    assert found.device_prefix_len == count
    (path,) = cache.tree_core.collect_path_info([found.last_device_node])
    assert len(path) == nodes
    return microseconds(lambda: cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens))))


def evict_1_of_10k(core: str, evictions: int) -> float:
    cache = new_cache(core, 12_000)
    for i in range(10_000):
        fill(cache, array("q", [i]) * P)
    times = []
    for _ in range(evictions):
        start = time.perf_counter()
        assert cache.evict(EvictParams(num_tokens=P)).num_tokens_evicted == P
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def measure(core: str, evictions: int) -> dict[str, float]:
    return {
        "match_32k": match(core, 32_768, 1),
        "match_131k_chain64": match(core, 131_072, 64),
        "evict_1_of_10k": evict_1_of_10k(core, evictions),
    }


def main() -> None:
    # SGLang falls back to its Python core by itself where the Rust one does not load.
    core = type(new_cache("rust", 1).tree_core).__name__
    # One eviction takes the Python core milliseconds: fewer of them tell the same.
    python = measure("python", 200)
    result = measure("rust", 2_000) if core.startswith("Rust") else python
    named = {f"{name}_python": value for name, value in python.items()}
    print(json.dumps({"core": core, "version": version("sglang"), **result, **named}))


if __name__ == "__main__":
    main()
