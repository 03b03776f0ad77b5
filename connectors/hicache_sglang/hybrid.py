"""Models with further pools beside the KV cache: which lengths of a prompt can be restored from all of them.

A pool of full attention needs every page of a prefix; one of a sliding window only those at its end, which were stored
where a prompt ended. So a prompt may be restorable to 5 pages and not to 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from hicache_sglang.pool import HostPages
from hicache_sglang.store import StoragePages

__all__ = ["Asked", "Pool", "asked_of", "fold"]

ALL_PAGES: Final = "all_pages"
TRAILING_PAGES: Final = "trailing_pages"


@dataclass(frozen=True, slots=True)
class Pool:
    """A host pool beside the KV cache, and its pages in storage under a namespace of their own."""

    pages: HostPages
    store: StoragePages


@dataclass(frozen=True, slots=True)
class Asked:
    """What an engine wants to know of one pool.

    Attributes:
        name: of the pool.
        policy: "all_pages", "trailing_pages", or one that is not known here.
        window: pages at the end of a prefix that have to be there, for trailing pages.
    """

    name: str
    policy: str
    window: int


def asked_of(transfer: Any) -> Asked:
    """SGLang's `PoolTransfer` as a question."""
    policy = getattr(transfer, "hit_policy", ALL_PAGES)
    policy = getattr(policy, "value", policy)
    return Asked(str(transfer.name), str(policy), max(1, len(transfer.keys or ())))


def fold(pages: int, pools: Sequence[tuple[Asked, Sequence[bool]]]) -> tuple[list[int], list[int]]:
    """Where pools and KV cache agree.

    Args:
        pages: leading pages that the KV cache has, 0 or more.
        pools: of each further pool whether it has each of these pages.

    Returns:
        For each pool the longest prefix that it alone can restore, and the lengths that all can, rising.
    """
    common = set(range(1, pages + 1))
    longest = []
    for asked, there in pools:
        own = set(_lengths(asked, there[:pages]))
        longest.append(max(own, default=0))
        common &= own
    return longest, sorted(common)


def _lengths(asked: Asked, there: Sequence[bool]) -> list[int]:
    if asked.policy not in (ALL_PAGES, TRAILING_PAGES):
        return []
    run, lengths = 0, []  # pages without a hole that end here
    for length, found in enumerate(there, 1):
        run = run + 1 if found else 0
        needed = length if asked.policy == ALL_PAGES else min(asked.window, length)
        if run >= needed:
            lengths.append(length)
    return lengths
