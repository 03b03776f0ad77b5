"""What a hosted cache knows of a prompt, and of the pages that it does not have. Changes nothing anyone could see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from hicache.core.prompt import Prompt
from hicache.core.registry import HOST
from hicache.core.tree import HiRadixTree
from hicache.records import Match, MissReason
from hicache.runtime.wiring import HASH_SIZE

if TYPE_CHECKING:
    from hicache.core.node import Path
    from hicache.runtime.hosting import HostedCache
    from hicache.runtime.scopes import Scope

__all__ = ["Gone", "Look", "look"]

_BRANCHES: Final = 64
"""Pages beside the first one that is not there whose tokens are compared with it."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Pages in a row of which the cache knows the same.

    Attributes:
        first, end: page indexes.
        reason: why they went; None where nothing is known of them.
        seconds_ago: how long ago, as far as that is known.
    """

    first: int
    end: int
    reason: MissReason | None
    seconds_ago: float | None


@dataclass(frozen=True, slots=True)
class Look:
    """A prompt in one namespace of a hosted cache.

    Attributes:
        generation: the namespace's, None while it is not known.
        match: leading pages that are usable, by tier; storage as it is believed.
        stored: leading pages that storage is believed to have.
        filling: pages behind those of HOST that are being written or fetched now.
        gone: what is known of the pages behind `match`.
        shared_tokens: tokens of the first page that is nowhere which another prompt's page in its place has too; None
            where there is no such page, or its tokens are not known.
    """

    generation: int | None = None
    match: Match = Match()  # noqa: RUF009  frozen
    stored: int = 0
    filling: int = 0
    gone: tuple[Gone, ...] = ()
    shared_tokens: int | None = None


def look(cache: HostedCache, scope: Scope | None, page_hashes: bytes, tokens: bytes) -> Look:
    """Look at a prompt. Takes the lock for about as long as a request does; any thread.

    Args:
        cache: of the model.
        scope: the namespace, as `HostedCache.known` gives it; None for one that no request has used.
        page_hashes: of all whole pages.
        tokens: of these, u32 little endian.
    """
    prompt = None if scope is None else cache.prompt(scope, page_hashes)
    pages = len(page_hashes) // HASH_SIZE
    with cache.parts.reducer.lock:
        if scope is None or prompt is None or scope.tree is None:
            return Look(gone=(Gone(0, pages, None, None),) if pages else ())
        tree, core = scope.tree, cache.parts.core
        match = core.match(tree, prompt)
        path = tree.walk(prompt)
        held, resident = tree.held(path, HOST)
        stored = tree.believed_pages(path) if core.registry.stores else 0
        gone = tuple(_gone(cache, tree.namespace, prompt, match.pages))
        shared = _shared(cache, tree, path, tokens) if _end(path) == match.pages < pages else None
        return Look(tree.generation, match, stored, len(held) - resident, gone, shared)


def _gone(cache: HostedCache, namespace: bytes, prompt: Prompt, first: int) -> Iterator[Gone]:
    ghosts, now = cache.parts.core.registry.ghosts, cache.parts.clock.now()
    known = [ghosts.going(namespace, page_hash) for page_hash in prompt.hashes(first, prompt.pages)]
    at = 0
    while at < len(known):
        reason = None if known[at] is None else known[at][0]  # type: ignore[index]
        end = at + 1
        while end < len(known) and (None if (entry := known[end]) is None else entry[0]) == reason:
            end += 1
        yield Gone(first + at, first + end, reason, _ago(cache, known[at:end], now))
        at = end


def _ago(cache: HostedCache, going: Sequence[tuple[MissReason, int] | None], now: float) -> float | None:
    """How long ago the first of some pages went: what went later is missed anyhow, as it lies behind."""
    if going[0] is None:
        return None
    moment = cache.moments.of(going[0][1])
    return None if moment is None else max(0.0, now - moment)


def _shared(cache: HostedCache, tree: HiRadixTree, path: Path, tokens: bytes) -> int | None:
    """The most tokens of the page behind the path that a page of another prompt, in its place, begins with."""
    store = cache.parts.tokens
    width = 4 * cache.page_size
    at = _end(path)
    ours = np.frombuffer(tokens[at * width : (at + 1) * width], "<u4")
    if store is None or not len(ours):
        return None
    slots = np.fromiter(_beside(tree, path), np.int64)
    slots = slots[store.known(slots)] if len(slots) else slots
    if not len(slots):
        return None
    theirs = np.frombuffer(store.rows(slots)[0], "<u4").reshape(len(slots), -1)
    same = theirs == ours
    return int(np.where(same.all(1), same.shape[1], same.argmin(1)).max())


def _end(path: Path) -> int:
    return path[-1][0].first + path[-1][1] if path else 0


def _beside(tree: HiRadixTree, path: Path) -> Iterator[int]:
    """HOST slots of the pages with which known prompts go on behind the path, some of them."""
    if path and path[-1][1] < path[-1][0].pages:
        node, pages = path[-1]
        yield from node.slots[HOST][pages : pages + 1].tolist()
        return
    node = path[-1][0] if path else tree.root
    for child in islice(node.children.values(), _BRANCHES):
        yield from child.slots[HOST][:1].tolist()
