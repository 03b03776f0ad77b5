"""Hashing 131,072 tokens into 2,048 page hashes. The reference is one pass of the same function over the same bytes."""

from __future__ import annotations

import hashlib

import numpy as np
import xxhash

from benchmarks.measure import Row, microseconds, row
from hicache.core.hashing import PageHasher
from hicache.core.symbols import symbols

P, TOKENS = 64, 131_072


def rows() -> list[Row]:
    prompt = symbols(np.random.default_rng(1).integers(0, 128_000, TOKENS).astype(np.uint32), P)
    result = []
    for name, algorithm, one_pass, bar in (
        ("hash_131k_xxh3", "xxh3_128", lambda: xxhash.xxh3_128_digest(prompt), 500.0),
        ("hash_131k_sha256", "sha256", lambda: hashlib.sha256(prompt).digest(), 2_000.0),
    ):
        hasher = PageHasher(algorithm, page_size=P)
        value = microseconds(lambda hasher=hasher: hasher.extend(None, prompt, TOKENS // P))
        result.append(row(name, value, "us", reference=microseconds(one_pass), bar=bar))
    return result
