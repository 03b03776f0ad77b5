"""Between a service and the estate that it leaves or takes over."""

from __future__ import annotations

import asyncio
import logging
import os
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np

from hicache.core.arenas import ArenaPlan
from hicache.core.residency import NO_SLOTS, Slots
from hicache.errors import HicacheError
from hicache.memory.arena import Arena, Words
from hicache.memory.arenapool import ArenaHostPool
from hicache.rpc.convert.identity import namespace_from_bytes, namespace_to_bytes
from hicache.runtime.inheriting import bequeath, free, inherit, keep, slots_in
from hicache.sidecar.estate import Estate, HeldPool, HeldProcess, KeptSlots, sums_of
from hicache.sidecar.processes import ProcessWatch
from hicache.sidecar.waiting import Changes

if TYPE_CHECKING:
    from hicache.sidecar.leases import HeldLease
    from hicache.sidecar.pool import Pool
    from hicache.sidecar.pools import PoolTable

_log = logging.getLogger("hicache.sidecar")


# ---- leaving


def left_of(pool: Pool, leases: list[HeldLease]) -> KeptSlots | None:
    """The slots of a pool that processes may still touch, before its cache ends; None for none."""
    slots = [NO_SLOTS]
    processes: set[HeldProcess] = set()
    for lease in leases:
        touching = lease.group.touching() if lease.ended is None else lease.awaits
        if lease.group.pool is pool and touching:
            slots += [lease.request.usable, lease.request.own]
            processes.update(HeldProcess.of(member.life.peer.pid) for member in touching if member.life is not None)
    kept = np.unique(np.concatenate(slots))
    return (
        KeptSlots(kept.astype("<i8").tobytes(), sorted(processes, key=lambda process: process.pid))
        if len(kept)
        else None
    )


def leave(pool: Pool, kept: KeptSlots | None) -> tuple[HeldPool, list[int]]:
    """What a pool leaves, when its cache has ended, and its descriptors. Blocks: every page is hashed."""
    slots = NO_SLOTS if kept is None else _slots(kept.slots)
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
        kept=[] if kept is None else [kept],
    )
    return held, [pool.words.fd, *(arena.fd for arena in pool.host.arenas)]


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
            _keep(pool, kept)
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


def _keep(pool: Pool, kept: KeptSlots) -> None:
    """Keep slots until each of the processes is gone."""
    slots = _slots(kept.slots)
    keep(pool.cache, slots)
    loop = asyncio.get_running_loop()
    living = {process: fd for process in kept.processes if (fd := process.pidfd()) is not None}

    def gone(process: HeldProcess) -> None:
        del living[process]
        if not living and not pool.cache.closed:
            free(pool.cache, slots)

    for process, fd in living.items():
        pool.watches.append(ProcessWatch(loop, fd, lambda process=process: gone(process)))  # type: ignore[misc]
    if not living:
        free(pool.cache, slots)


def _slots(data: bytes) -> Slots:
    return np.frombuffer(data, "<i8").astype(np.int64)
