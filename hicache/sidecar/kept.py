"""Slots that clients of an earlier service may still touch: nobody gets them before those processes are gone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hicache.runtime.inheriting import free, keep
from hicache.sidecar.estate import HeldProcess, KeptSlots
from hicache.sidecar.processes import ProcessWatch

if TYPE_CHECKING:
    from hicache.core.residency import Slots
    from hicache.runtime.hosting import HostedCache
    from hicache.sidecar.groups import Life

__all__ = ["Kept", "kept_for"]


class Kept:
    """Slots of a cache in quarantine. On the loop's thread, but for `close`.

    Args:
        cache: whose free slots they are until then.
        held: the slots, and who may touch them.
        pidfds: of the processes that have no number here; they stay the caller's.
        grace: seconds for which processes that cannot be seen are waited for.
    """

    def __init__(self, cache: HostedCache, held: KeptSlots, pidfds: Sequence[int], *, grace: float) -> None:
        self._cache = cache
        self._slots = slots_of(held)
        self._watches: dict[ProcessWatch, HeldProcess | None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._unseen = held.unseen
        keep(cache, self._slots)
        loop = asyncio.get_running_loop()
        for process in held.processes:
            if (fd := process.pidfd()) is not None:
                self._watch(loop, fd, process)
        for fd in pidfds:
            self._watch(loop, os.dup(fd), None)
        if held.unseen:
            self._timer = loop.call_later(grace, self._waited)
        self._free_if_let_go()

    def _watch(self, loop: asyncio.AbstractEventLoop, fd: int, process: HeldProcess | None) -> None:
        watch = ProcessWatch(loop, fd, lambda: self._gone(watch))
        self._watches[watch] = process

    def _gone(self, watch: ProcessWatch) -> None:
        del self._watches[watch]
        self._free_if_let_go()

    def _waited(self) -> None:
        self._timer = None
        self._unseen = 0
        self._free_if_let_go()

    def _free_if_let_go(self) -> None:
        if not self._watches and not self._unseen and not self._cache.closed:
            slots, self._slots = self._slots, self._slots[:0]
            free(self._cache, slots)

    def left(self) -> tuple[KeptSlots, list[int]] | None:
        """What the next service has to keep, and pidfds, which stay this one's; None for nothing."""
        if not len(self._slots):
            return None
        pidfds = [watch.pidfd for watch, process in self._watches.items() if process is None]
        processes = [process for process in self._watches.values() if process is not None]
        return KeptSlots(self._slots.astype("<i8").tobytes(), processes, len(pidfds), self._unseen), pidfds

    def close(self) -> None:
        """Wait for nothing more. Idempotent."""
        for watch in self._watches:
            watch.close()
        if self._timer is not None:
            self._timer.cancel()


def kept_for(slots: Slots, lives: Iterable[Life]) -> tuple[KeptSlots, list[int]]:
    """Slots that are to be kept until these processes are gone, and pidfds, which stay the lifelines'."""
    processes: set[HeldProcess] = set()
    pidfds: list[int] = []
    unseen = 0
    for life in set(lives):
        if life.peer.pid:
            processes.add(HeldProcess.of(life.peer.pid))
        elif life.pidfd is not None:  # as from another container
            pidfds.append(life.pidfd)
        else:
            unseen += 1
    ordered = sorted(processes, key=lambda process: process.pid)
    return KeptSlots(slots.astype("<i8").tobytes(), ordered, len(pidfds), unseen), pidfds


def slots_of(held: KeptSlots) -> Slots:
    """The slots, as the core numbers them."""
    return np.frombuffer(held.slots, "<i8").astype(np.int64)
