"""The tree: matching, evicting, pinning. References are SGLang's tree cores, where `.engines/sglang` has them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.measure import Row, microseconds, row
from benchmarks.sglang import reference
from hicache.core.cache import Core
from hicache.core.config import CoreConfig
from hicache.core.hashing import PageHasher
from hicache.core.prompt import Prompt
from hicache.core.symbols import symbols
from hicache.core.transfers import Lease
from hicache.core.tree import HiRadixTree

P = 64
HASHER = PageHasher("xxh3_128", page_size=P)


def prompt_of(tokens: Any) -> Prompt:
    return Prompt(symbols(tokens, P), 4 * P, HASHER)


def fill(core: Core, tree: HiRadixTree, prompt: Prompt) -> Lease:
    lease = core.lease(tree, prompt)
    core.allocate(lease, prompt.pages - lease.usable)
    core.commit(lease, prompt.pages, ready=True)
    core.release(lease)
    return lease


def new_core(pages: int | None = None, *, span_bytes: int = 1 << 20) -> tuple[Core, HiRadixTree]:
    # By default one span holds 32k tokens, as the compared cores keep them in one node.
    core = Core(CoreConfig(device_pages=pages, ghost_pages=0, span_bytes=span_bytes))
    return core, core.tree(b"n" * 16, width=4 * P, hasher=HASHER)


def tokens(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 128_000, count).astype(np.uint32)


def match_32k() -> float:
    """Microseconds to match a prompt of 32,768 tokens that lie in one node, from an array of tokens."""
    core, tree = new_core()
    prompt = tokens(32_768)
    fill(core, tree, prompt_of(prompt))
    assert core.match(tree, prompt_of(prompt)).device == 512
    return microseconds(lambda: core.match(tree, prompt_of(prompt)))


def match_131k_chain64() -> float:
    """Microseconds to match 131,072 tokens that lie in a chain of 64 nodes."""
    prompt = tokens(131_072)
    core, tree = new_core(span_bytes=4 * len(prompt) // 64)
    fill(core, tree, prompt_of(prompt))
    assert core.statistics().nodes == 65
    return microseconds(lambda: core.match(tree, prompt_of(prompt)))


def evict_1_of_10k() -> float:
    """Microseconds to evict one of 10,000 leaves: the median of 2,000 evictions."""
    core, tree = new_core(12_000)
    for i in range(10_000):
        fill(core, tree, Prompt(i.to_bytes(4, "little") * P, 4 * P, HASHER))
    times = []
    for _ in range(2_000):
        start = time.perf_counter()
        assert core.evict(0, 1) == 1
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def pin_unpin_2048() -> float:
    """Microseconds to pin and unpin a path of 2,048 pages, counts included."""
    core, tree = new_core(4_096)
    prompt = prompt_of(tokens(2_048 * P))
    fill(core, tree, prompt)
    held, _ = tree.held(tree.walk(prompt), 0)
    copies = core._copies
    return microseconds(lambda: copies.drop(copies.pin(0, tree, held)))


def rows() -> list[Row]:
    theirs = reference()
    result = []
    # The bar of a match is half of the reference; half of what another machine took where there is none here.
    for name, measure, bar, factor in (
        ("match_32k", match_32k, 13.0, 0.5),
        ("match_131k_chain64", match_131k_chain64, 110.0, 0.5),
        ("evict_1_of_10k", evict_1_of_10k, 25.0, None),
    ):
        known = theirs.microseconds[name] if theirs else None
        limit = known * factor if known is not None and factor is not None else bar
        reason = theirs.said(name) if theirs else "no .engines/sglang that runs: compared with a fixed number"
        result.append(row(name, measure(), "us", reference=known, bar=limit, reason=reason))
    result.append(row("pin_unpin_2048", pin_unpin_2048(), "us", bar=50.0))
    return result
