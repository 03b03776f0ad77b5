"""Access logs for tests: requests that have ended, with pages named by small numbers."""

from __future__ import annotations

from typing import Final

import numpy as np

from hicache.core.prompt import Prompt, SymbolsAreHashes
from hicache.core.reasons import RequestCounts
from hicache.records import MissReason
from hicache.runtime.accesslog.blocks import Ended
from hicache.runtime.accesslog.format import NamespaceRecord

__all__ = ["NAMESPACE", "PAGE", "ended", "page_hashes"]

PAGE: Final = 16
NAMESPACE: Final = NamespaceRecord(namespace="00ff", page_size=PAGE, model="example/tiny")


def page_hashes(*names: int) -> bytes:
    """Hashes of 32 bytes, evenly spread and chained like those of pages: each stands for all in front of it too."""
    found, seed = [], 0
    for name in names:
        seed = (seed * 1_000_003 + name + 1) % 2**63
        found.append(np.random.default_rng(seed).bytes(32))
    return b"".join(found)


def ended(*names: int, hits: int = 0, at: float = 0.0, namespace: NamespaceRecord = NAMESPACE) -> Ended:
    """A request for these pages and three tokens more, of which the first `hits` came from HOST; the others are cold.

    It began at `at`, had loaded a quarter of a second later, and ended another quarter later.
    """
    prompt = Prompt(page_hashes(*names), 32, SymbolsAreHashes(32))
    missed = {MissReason.COLD: len(names) - hits} if len(names) > hits else {}
    counts = RequestCounts(len(names), host=hits, missed=missed)
    return Ended(namespace, prompt, at, at + 0.5, at + 0.25, PAGE * len(names) + 3, 0, counts, len(names), 7)
