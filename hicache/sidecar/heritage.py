"""Between a service and the estate that it leaves or takes over."""

from __future__ import annotations

import asyncio
import logging
import os
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np

from hicache.core.arenas import ArenaPlan
from hicache.core.residency import NO_SLOTS
from hicache.errors import HicacheError
from hicache.memory.arena import Arena, Words
from hicache.memory.arenapool import ArenaHostPool
from hicache.rpc.convert.identity import namespace_from_bytes, namespace_to_bytes
from hicache.runtime.inheriting import bequeath, inherit, slots_in
from hicache.sidecar.estate import Estate, HeldPool, KeptSlots, sums_of
from hicache.sidecar.kept import Kept, kept_for, slots_of
from hicache.sidecar.waiting import Changes

if TYPE_CHECKING:
    from hicache.sidecar.groups import Life
    from hicache.sidecar.leases import HeldLease
    from hicache.sidecar.pool import Pool
    from hicache.sidecar.pools import PoolTable

_log = logging.getLogger("hicache.sidecar")


# ---- leaving


Left = list[tuple[KeptSlots, list[int]]]
"""Slots that the next service has to keep, each with pidfds."""


def left_of(pool: Pool, leases: list[HeldLease]) -> Left:
    """The slots of a pool that processes may still touch, before its cache ends."""
    slots = [NO_SLOTS]
    lives: list[Life] = []
    for lease in leases:
        touching = lease.group.touching() if lease.ended is None else lease.awaits
        if lease.group.pool is pool and touching:
            slots += [lease.request.usable, lease.request.own]
            lives += [member.life for member in touching if member.life is not None]
    found = [left for kept in pool.kept if (left := kept.left()) is not None]
    held = np.unique(np.concatenate(slots))
    return [*found, kept_for(held, lives)] if len(held) else found


def leave(pool: Pool, left: Left) -> tuple[HeldPool, list[int]]:
    """What a pool leaves, when its cache has ended, and its descriptors. Blocks: every page is hashed."""
    slots = np.concatenate([NO_SLOTS, *(slots_of(kept) for kept, _ in left)])
    pool.words.retire()
    scopes = bequeath(pool.cache, without=slots)
    held = HeldPool(
        namespace=namespace_to_bytes(pool.namespace),
        tenant=pool.tenant,
        tp_size=pool.key[1],
        pp_first_layers=pool.key[2],
        slots=pool.slots,
        strides=tuple(arena.stride for arena in pool.host.arenas),
        huge_pages=pool.huge_pages,
        scopes=scopes,
        sums=sums_of(pool.host, slots_in(scopes)).astype("<u8").tobytes(),
        kept=[kept for kept, _ in left],
    )
    pidfds = [fd for _, fds in left for fd in fds]
    return held, [pool.words.fd, *(arena.fd for arena in pool.host.arenas), *pidfds]


def estate_of(parts: list[tuple[HeldPool, list[int]]], *, storage: str) -> Estate:
    """The estate of these pools. Its descriptors stay the pools'."""
    descriptors = [fd for _, fds in parts for fd in fds]
    return Estate(version("hicache"), storage, [held for held, _ in parts], descriptors)


# ---- taking over


async def take_over(table: PoolTable, estate: Estate, *, storage: str) -> int:
    """Make the pools of an estate. What cannot be used is given up, with a line in the log.

    Args:
        table: of a service that nobody uses yet.
        estate: its descriptors are closed.
        storage: names the storage of now.

    Returns:
        The pages taken over.
    """
    pages = 0
    try:
        for held in estate.pools:
            fds, estate.descriptors[: held.descriptors] = estate.descriptors[: held.descriptors], []
            try:
                pages += await _take_over(table, held, fds, stored=estate.storage == storage)
            except HicacheError as error:
                _log.warning("a pool of the service before is not taken over: %s", error)
            finally:
                for fd in fds:
                    os.close(fd)
    finally:
        estate.close()
    return pages


async def _take_over(table: PoolTable, held: HeldPool, fds: list[int], *, stored: bool) -> int:
    changes = Changes(asyncio.get_running_loop())
    pool = await asyncio.to_thread(_pool, table, held, fds, changes)
    try:
        pages = await asyncio.to_thread(inherit, pool.cache, held.scopes, stored=stored)
        pool.proofs.demand(slots_in(held.scopes), np.frombuffer(held.sums, "<u8"))
        for kept in held.kept:
            pidfds, fds[1:] = fds[1 : 1 + kept.descriptors], fds[1 + kept.descriptors :]
            try:
                pool.kept.append(Kept(pool.cache, kept, pidfds, grace=table.grace))
            finally:
                for fd in pidfds:
                    os.close(fd)
        table.enter(pool, f"model {pool.namespace.model!r:.60}, taken over")
    except BaseException:
        await asyncio.to_thread(pool.close, 0.0)
        raise
    return pages


def _pool(table: PoolTable, held: HeldPool, fds: list[int], changes: Changes) -> Pool:
    """Takes what it uses of `fds` away from them."""
    namespace = namespace_from_bytes(held.namespace)
    plan = ArenaPlan.of(
        namespace.geometry, namespace.page_size, tp_size=held.tp_size, pp_first_layers=held.pp_first_layers
    )
    words = Words.adopt(fds[0], held.slots)
    arenas: list[Arena] = []
    try:
        for stride in held.strides:
            arenas.append(Arena.adopt(fds[1], held.slots, stride, huge_pages=held.huge_pages))
            del fds[1]
        host = ArenaHostPool(plan, arenas)
        key = (namespace.digest, held.tp_size, held.pp_first_layers, held.tenant)
        return table.open(key, namespace, host, words, changes, huge_pages=held.huge_pages)
    except BaseException:
        words.close()
        for arena in arenas:
            arena.close()
        raise
