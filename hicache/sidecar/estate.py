"""What a service leaves to the next one: memory that stays where it is, and a document that says what is in it.

The document travels in a memfd of its own, with the descriptors of arenas and words beside it, over a socket or by way
of systemd's store. Nothing in it is trusted more than bytes from storage are: a page that is taken over is hashed
before its first use, and compared with what the service before has noted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from hicache.core.residency import Slots
from hicache.errors import ConfigError
from hicache.memory.arenapool import ArenaHostPool
from hicache.memory.shared import create_memfd
from hicache.runtime.inheriting import HeldScope

__all__ = ["Estate", "HeldPool", "HeldProcess", "KeptSlots", "Proofs", "sums_of"]

VERSION: Final = 1

_THREADS: Final = min(8, os.cpu_count() or 1)


class HeldProcess(msgspec.Struct, frozen=True, array_like=True):
    """A process that may still touch memory: its number, and when it began, as numbers are used again."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> HeldProcess:
        """The process that has this number now."""
        return cls(pid, started(pid) or 0)

    def pidfd(self) -> int | None:
        """A descriptor that becomes readable when it is gone; None if it is."""
        try:
            found = os.pidfd_open(self.pid)
        except OSError:
            return None
        if started(self.pid) == self.started:
            return found
        os.close(found)
        return None


class KeptSlots(msgspec.Struct, frozen=True, array_like=True):
    """Slots that processes may still touch: nobody gets them before those are gone.

    Attributes:
        slots: int64 little endian.
        processes: those that have a number here.
        descriptors: how many pidfds of others come with the pool's descriptors.
        unseen: how many there are beside, of which nothing can be known.
    """

    slots: bytes
    processes: list[HeldProcess]
    descriptors: int = 0
    unseen: int = 0


class HeldPool(msgspec.Struct, frozen=True, array_like=True):
    """One pool.

    Attributes:
        namespace: the base namespace, as it travels in `Attach`.
        tenant: whose it is.
        tp_size, pp_first_layers: topology.
        slots: of every arena.
        strides: of the arenas, in order.
        huge_pages: whether they are in huge pages.
        scopes: pages, by derived namespace.
        sums: xxh3 of the page in each slot of `scopes`, u64 little endian.
        kept: slots in quarantine.
    """

    namespace: bytes
    tenant: str | None
    tp_size: int
    pp_first_layers: tuple[int, ...]
    slots: int
    strides: tuple[int, ...]
    huge_pages: bool
    scopes: list[HeldScope]
    sums: bytes
    kept: list[KeptSlots]

    @property
    def descriptors(self) -> int:
        """How many it comes with: the words, then the arenas, then those of `kept`."""
        return 1 + len(self.strides) + sum(kept.descriptors for kept in self.kept)


class _Document(msgspec.Struct, frozen=True):
    version: int
    server: str
    storage: str
    pools: list[HeldPool]


@dataclass(frozen=True, slots=True)
class Estate:
    """Everything that is left.

    Attributes:
        server: version of the service that left it.
        storage: names its storage without its secrets; other storage is not believed to have anything.
        pools: what lies in memory.
        descriptors: those of all pools, in order. Whoever holds the estate closes them.
    """

    server: str
    storage: str
    pools: list[HeldPool]
    descriptors: list[int]

    @property
    def bytes(self) -> int:
        """Host memory of all pools."""
        return sum(pool.slots * sum(pool.strides) for pool in self.pools)

    def document(self) -> int:
        """A memfd with all but the descriptors; the caller closes it."""
        data = msgspec.msgpack.encode(_Document(VERSION, self.server, self.storage, self.pools))
        fd = create_memfd("hicache-estate")
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        return fd

    @classmethod
    def read(cls, document: int, descriptors: Sequence[int]) -> Estate:
        """From what `document` gave; all descriptors become the estate's.

        Raises:
            ConfigError: another version's, or none at all. The descriptors stay the caller's.
        """
        with open(os.dup(document), "rb") as file:
            file.seek(0)
            data = file.read()
        try:
            found = msgspec.msgpack.decode(data, type=_Document)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"what the service before has left cannot be read ({error}): starting without it"
            ) from None
        if found.version != VERSION:
            raise ConfigError(
                f"what the service before has left is of version {found.version}, this one reads {VERSION}: "
                "starting without it"
            )
        if sum(pool.descriptors for pool in found.pools) != len(descriptors):
            raise ConfigError("the service before has left other descriptors than it says: starting without them")
        return cls(found.server, found.storage, found.pools, list(descriptors))

    def close(self) -> None:
        """Close all descriptors that nobody has taken. Idempotent."""
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors.clear()


def started(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def sums_of(host: ArenaHostPool, slots: Slots) -> NDArray[np.uint64]:
    """xxh3 of the pages in slots, as they lie in the arenas one after the other. Blocks; hashes on several threads."""
    rows = [(arena.rows, shape.slot_bytes) for arena, shape in zip(host.arenas, host.plan.arenas, strict=True)]

    def one(slot: int) -> int:
        if len(rows) == 1:
            memory, size = rows[0]
            return xxhash.xxh3_64_intdigest(memory[slot, :size].data)
        whole = xxhash.xxh3_64()
        for memory, size in rows:
            whole.update(memory[slot, :size].data)
        return whole.intdigest()

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hicache-sums") as threads:
        found = threads.map(one, slots.tolist(), chunksize=64)
        return np.fromiter(found, np.uint64, len(slots))


class Proofs:
    """Pages that were taken over, and what they must be. On the loop's thread, but for `failing`.

    Args:
        host: the pool.
        words: its generation words: a slot that was given away since has nothing to prove.
    """

    def __init__(self, host: ArenaHostPool, words: NDArray[np.uint64]) -> None:
        self._host = host
        self._words = words
        self._open = np.zeros(host.slots, np.bool_)
        self._sums = np.zeros(host.slots, np.uint64)
        self._noted = np.zeros(host.slots, np.uint64)
        self.left = 0

    def demand(self, slots: Slots, sums: NDArray[np.uint64]) -> None:
        """These slots must have these sums before they are used."""
        self._open[slots] = True
        self._sums[slots] = sums
        self._noted[slots] = self._words[slots]
        self.left += len(slots)

    def pending(self, slots: Slots) -> Slots:
        """Those of the slots that must be looked at."""
        if not self.left:
            return slots[:0]
        pending: Slots = slots[self._open[slots] & (self._noted[slots] == self._words[slots])]
        return pending

    def failing(self, slots: Slots) -> Slots:
        """Those of the slots that hold something else. Blocks; the slots are pinned."""
        failing: Slots = slots[sums_of(self._host, slots) != self._sums[slots]]
        return failing

    def close(self) -> None:
        """Let go of the words' memory. Nothing is pending any more."""
        self.left = 0
        self._words = np.zeros(0, np.uint64)

    def settle(self, slots: Slots) -> None:
        """These have been looked at."""
        self.left -= int(np.count_nonzero(self._open[slots]))
        self._open[slots] = False
