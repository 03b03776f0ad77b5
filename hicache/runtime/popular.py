"""The prefixes that most requests begin with, in bounded memory, and what the tree knows of each."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hicache.core.registry import HOST

if TYPE_CHECKING:
    from hicache.core.node import Node
    from hicache.core.tree import HiRadixTree

__all__ = ["Popular", "Prefix", "described"]

KEPT: Final = 128
"""Prefixes that are surely remembered if they are in more than one of so many requests."""

_STEPS: Final = 64
"""Nodes along which a prefix is followed."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Prompts that begin with the same page.

    Attributes:
        namespace: digest of their derived namespace.
        page_hash: of the first page.
        requests: requests that ended, since it is remembered.
        uncertain: how many there may have been before that.
        asked_pages, hit_pages: of these requests.
        pages: length of the prefix: as far as at least half of its uses went the same way.
        host_pages, stored_pages: of these, leading pages that are in HOST, and that storage is believed to have.
    """

    namespace: bytes
    page_hash: bytes
    requests: int
    uncertain: int
    asked_pages: int
    hit_pages: int
    pages: int = 0
    host_pages: int = 0
    stored_pages: int = 0


class Popular:
    """Counts requests by their first page, as "space saving" does, in batches. Not thread-safe; 0.5 us a request."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._counts: dict[tuple[bytes, bytes], list[int]] = {}  # requests, asked, hit, requests it may have had before
        self._floor = 0

    def note(self, namespace: bytes, page_hash: bytes, *, asked: int, hit: int) -> None:
        """A request that begins with this page has ended."""
        row = self._counts.get((namespace, page_hash))
        if row is None:
            self._counts[namespace, page_hash] = [1, asked, hit, self._floor]
            if len(self._counts) > 2 * self._kept:
                self._forget()
            return
        row[0] += 1
        row[1] += asked
        row[2] += hit

    def _forget(self) -> None:
        """Keep those that may have most; what is met anew may have had as many as the largest that goes."""
        ranked = sorted(self._counts.items(), key=lambda entry: entry[1][0] + entry[1][3], reverse=True)
        _, (requests, _, _, before) = ranked[self._kept]
        self._floor = requests + before
        self._counts = dict(ranked[: self._kept])

    def top(self, most: int) -> list[Prefix]:
        """The ones with most requests, in order."""
        rows = heapq.nlargest(most, self._counts.items(), key=lambda entry: (entry[1][0], entry[0]))
        return [
            Prefix(namespace, page_hash, requests, before, asked, hit)
            for (namespace, page_hash), (requests, asked, hit, before) in rows
        ]


def described(prefix: Prefix, tree: HiRadixTree | None) -> Prefix:
    """The prefix with what a tree of hashes knows of it. Steps are bounded; the reducer's lock is held."""
    node = None if tree is None else tree.root.children.get(prefix.page_hash)
    if node is None:
        return prefix
    half = max(1, node.hits // 2)
    pages = host = stored = 0
    for _ in range(_STEPS):
        if host == pages:
            host += node.resident[HOST]
        if stored == pages:
            stored += node.believed
        pages += node.pages
        following = _most_used(node)
        if following is None or following.hits < half:
            break
        node = following
    return Prefix(
        prefix.namespace, prefix.page_hash, prefix.requests, prefix.uncertain, prefix.asked_pages, prefix.hit_pages,
        pages, host, stored,
    )  # fmt: skip


def _most_used(node: Node) -> Node | None:
    children = list(node.children.values()) if len(node.children) <= _STEPS else []
    return max(children, key=lambda child: child.hits, default=None)
