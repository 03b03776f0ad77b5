"""Pages that outlive their process: what a hosted cache leaves behind, and another takes over with the same slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from hicache.core.identity import Adapter
from hicache.core.inventory import HeldRun, adopt, claim, slots_of, take
from hicache.core.recorder import RecordedCore
from hicache.core.registry import HOST
from hicache.core.residency import NO_SLOTS, PRIVATE, RESIDENT, Slots
from hicache.errors import InvalidInput
from hicache.records import MissReason
from hicache.runtime.hosting import HostedCache
from hicache.runtime.wiring import HASH_SIZE

__all__ = ["HeldScope", "bequeath", "free", "inherit", "keep", "slots_in", "withdraw"]


class HeldScope(msgspec.Struct, frozen=True, array_like=True):
    """Resident pages of one derived namespace.

    Attributes:
        adapter: name and digest, or None.
        tenant, salt: or None.
        generation: of its content.
        runs: the pages.
        known: for each slot of all runs, one byte: whether its tokens are known.
        tokens, extras: of the slots whose tokens are known, glued together.
    """

    adapter: tuple[str, bytes] | None
    tenant: str | None
    salt: str | None
    generation: int
    runs: list[HeldRun]
    known: bytes
    tokens: bytes
    extras: bytes


def slots_in(scopes: Iterable[HeldScope]) -> Slots:
    """All slots of their pages."""
    return np.concatenate([NO_SLOTS, *(slots for scope in scopes for slots in slots_of(scope.runs))])


def bequeath(cache: HostedCache, *, without: Slots) -> list[HeldScope]:
    """Everything resident, when the cache does nothing any more: no request is open and no transfer under way.

    Args:
        cache: the cache; not changed.
        without: slots to leave out, with all that hangs on them.
    """
    store = cache.parts.tokens
    assert store is not None
    held = []
    with cache.parts.reducer.lock:
        for scope in cache.parts.scopes.resolved():
            if scope.tree is None or not scope.tree.root.children:
                continue
            derived = scope.namespace
            runs = take(scope.tree, without=without)
            slots = np.concatenate([NO_SLOTS, *slots_of(runs)])
            known = store.known(slots)
            tokens, extras = store.rows(slots[known])
            adapter = None if derived.adapter is None else (derived.adapter.name, derived.adapter.digest or b"")
            generation = scope.tree.generation
            held.append(
                HeldScope(adapter, derived.tenant, derived.salt, generation, runs, known.tobytes(), tokens, extras)
            )
    return held


def inherit(cache: HostedCache, scopes: Sequence[HeldScope], *, stored: bool) -> int:
    """Take pages over, before anybody uses the cache.

    Args:
        cache: a new cache with the same namespace, slots and memory.
        scopes: what `bequeath` gave.
        stored: whether storage is still the same.

    Returns:
        The pages taken over. A namespace that was cleared since brings none.

    Raises:
        InvalidInput: what cannot be: slots that are taken, runs that do not hang together. What was taken over
            before stays.
    """
    reducer, core = cache.parts.reducer, cache.parts.core
    store = cache.parts.tokens
    assert store is not None
    with reducer.lock:
        claim(core, slots_in(scopes))
    pages = 0
    for held in scopes:
        adapter = None if held.adapter is None else Adapter(held.adapter[0], held.adapter[1])
        scope = cache.scope(adapter, held.tenant, held.salt)
        slots = slots_in([held])
        known = np.frombuffer(held.known, np.bool_)
        if len(known) != len(slots):
            raise InvalidInput(f"{len(known)} marks of tokens for {len(slots)} slots")
        with reducer.lock:
            reducer.settle()
            tree = None if scope is None else scope.tree
            if scope is None or (tree is not None and (tree.generation > held.generation or tree.root.children)):
                core.registry.tables[HOST].give_back(slots)
                continue
            if tree is None:
                digest = scope.namespace.digest
                tree = core.tree(digest, width=HASH_SIZE, hasher=scope.hasher, generation=held.generation)
            elif tree.generation < held.generation:
                tree = scope.tree = core.clear(tree, held.generation)
            if known.any():
                store.set(slots[known], held.tokens, held.extras)
            pages += adopt(core, tree, held.runs, stored=stored)
            _recorded_anew(cache)
            reducer.settle()
    return pages


def keep(cache: HostedCache, slots: Slots) -> None:
    """Keep free slots from being used: a process may still write them. `free` ends it.

    Raises:
        InvalidInput: slots that are not free.
    """
    with cache.parts.reducer.lock:
        claim(cache.parts.core, slots)
        _recorded_anew(cache)


def free(cache: HostedCache, slots: Slots) -> None:
    """Slots that were kept may be used."""
    with cache.parts.reducer.lock:
        table = cache.parts.core.registry.tables[HOST]
        assert table.count(slots, PRIVATE) == len(slots)
        table.give_back(slots)
        _recorded_anew(cache)
        cache.parts.reducer.notify()


def withdraw(cache: HostedCache, slots: Slots) -> None:
    """These resident pages are not what they should be: they leave HOST, with all that hangs on them."""
    core, reducer = cache.parts.core, cache.parts.reducer
    with reducer.lock:
        reducer.settle()
        table = core.registry.tables[HOST]
        for slot in slots.tolist():
            if table.state[slot] == RESIDENT and table.owner[slot] >= 0:
                node = core.registry.node(int(table.owner[slot]))
                core.log.copies.cut(HOST, node, int(table.depth[slot]) - node.first, MissReason.FAILED)
        core.log.end_settled()
        _recorded_anew(cache)
        reducer.settle()


def _recorded_anew(cache: HostedCache) -> None:
    if isinstance(cache.parts.core, RecordedCore):
        cache.parts.core.begin_anew()
