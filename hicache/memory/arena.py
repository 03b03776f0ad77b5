"""Arenas and generation words: memory that a service owns and its clients map.

The owner makes them, reserves and seals them, and hands out their descriptors; nothing has a name. A client maps what
it was handed after looking at it. Whoever ends, by a crash too, ends only its own mapping: the memory lives until the
owner and the last client are gone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.core.arenas import SLOT_ALIGNMENT
from hicache.errors import ConfigError
from hicache.memory.base import Bytes, Slots
from hicache.memory.placement import bind_to_node, check_place
from hicache.memory.shared import (
    HUGE_PAGE,
    OWNERS_ONLY,
    SEALED,
    Mapping,
    check_descriptor,
    create_memfd,
    reserve,
    seal,
)
from hicache.units import LARGEST_SIZE

__all__ = ["Arena", "MappedArena", "MappedWords", "WordArray", "Words", "arena_size"]

WordArray: TypeAlias = npt.NDArray[np.uint64]

_MOST_SLOTS = 2**32 - 1  # slots travel as u32


def arena_size(slots: int, stride: int, *, huge_pages: bool = False) -> int:
    """Bytes of an arena: whole huge pages, where it is in huge pages.

    Raises:
        ConfigError: numbers that no arena can have.
    """
    if type(slots) is not int or not 0 < slots <= _MOST_SLOTS:
        raise ConfigError(f"slots of an arena must be an integer of 1 to {_MOST_SLOTS}, not {slots!r:.40}")
    if type(stride) is not int or stride <= 0 or stride % SLOT_ALIGNMENT or slots * stride > LARGEST_SIZE:
        raise ConfigError(
            f"the {slots} slots of an arena cannot be {stride!r:.40} bytes apart: that must be a multiple of "
            f"{SLOT_ALIGNMENT}, and at most {LARGEST_SIZE} bytes in all"
        )
    size = slots * stride
    return -(-size // HUGE_PAGE) * HUGE_PAGE if huge_pages else size


class _Shared:
    """What owners' and clients' arenas have in common."""

    def __init__(self, slots: int, stride: int, mapping: Mapping) -> None:
        self.slots = slots
        self.stride = stride
        self.size = mapping.size
        self._mapping = mapping

    @property
    def rows(self) -> Bytes:
        """All slots, (slots, stride), not a copy.

        Raises:
            CacheClosed: the arena is closed.
        """
        return self._mapping.bytes[: self.slots * self.stride].reshape(self.slots, self.stride)

    def populate(self, step: int) -> bool:
        """Give this process the next of the arena's pages; whether there is more to do. See `Mapping.populate`."""
        return self._mapping.populate(step)

    def close(self) -> None:
        """Let go of the memory; while somebody still holds a view, it stays mapped. Idempotent."""
        self._mapping.close()


class Arena(_Shared):
    """One shared memory of a pool, as its owner has it. Any thread may read and write slots.

    The size is checked against what the machine and the control group leave before anything is allocated. Then the
    memory is reserved, so that touching it cannot fail, and sealed, so that no client can change its size.

    Args:
        slots: number of slots.
        stride: bytes from slot to slot, a multiple of 4 KiB.
        numa_node: take the memory from this node; None: wherever.
        huge_pages: take it from the machine's huge pages of 2 MiB.
        root: folder under which `proc` and `sys` are looked up for the limits.

    Attributes:
        slots, stride: as given.
        size: bytes of the memory.
        fd: its descriptor; the arena's until `close`.

    Raises:
        ConfigError: sizes that cannot be, more than there is, or a placement that is not possible; nothing is left.
    """

    def __init__(
        self,
        slots: int,
        stride: int,
        *,
        numa_node: int | None = None,
        huge_pages: bool = False,
        root: Path = Path("/"),
    ) -> None:
        size = arena_size(slots, stride, huge_pages=huge_pages)
        what = f"an arena of {slots} slots"
        nodes = () if numa_node is None else (numa_node,)
        check_place(size, what, nodes=nodes, huge_pages=huge_pages, root=root)
        self.fd = create_memfd("hicache-arena", huge_pages=huge_pages)
        try:
            super().__init__(slots, stride, self._take(size, what, numa_node))
        except BaseException:
            os.close(self.fd)
            raise

    def _take(self, size: int, what: str, numa_node: int | None) -> Mapping:
        _resize(self.fd, size, what)
        mapping = Mapping(self.fd, size, writable=True)
        try:
            if numa_node is not None:  # before the memory is taken: what is there is not moved
                bind_to_node(mapping.address, size, numa_node, what)
            reserve(self.fd, size, what)
            seal(self.fd, SEALED)
        except BaseException:
            mapping.close()
            raise
        return mapping

    @classmethod
    def adopt(cls, fd: int, slots: int, stride: int, *, huge_pages: bool = False) -> Arena:
        """An arena that an earlier process made, from the descriptor that it left. Its bytes are as they were.

        Args:
            fd: becomes the arena's; on an error it stays the caller's.
            slots: as it was made.
            stride: as it was made.
            huge_pages: as it was made.

        Raises:
            ConfigError: the descriptor is no such arena.
        """
        size = arena_size(slots, stride, huge_pages=huge_pages)
        check_descriptor(fd, size, seals=SEALED, what="an arena to take over")
        arena = cls.__new__(cls)
        _Shared.__init__(arena, slots, stride, Mapping(fd, size, writable=True))
        os.set_inheritable(fd, False)
        arena.fd = fd
        return arena

    def close(self) -> None:
        """Let go of the memory and its descriptor. Clients keep what they have mapped. Idempotent."""
        super().close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class MappedArena(_Shared):
    """An arena as a client has it.

    Args:
        fd: as the service handed it out; closed here, whether or not it can be used.
        slots: number of slots.
        stride: bytes from slot to slot.
        size: bytes of the memory, as the service says.
        writable: whether this client writes it; else its arrays are read-only, so that what another rank writes is
            not overwritten by mistake.

    Raises:
        ConfigError: the descriptor is not such an arena.
    """

    def __init__(self, fd: int, slots: int, stride: int, *, size: int, writable: bool) -> None:
        try:
            least = arena_size(slots, stride)
            if not least <= size < least + HUGE_PAGE:
                raise ConfigError(f"an arena of {slots} slots of {stride} bytes cannot have {size} bytes")
            check_descriptor(fd, size, seals=SEALED, what="an arena")
            super().__init__(slots, stride, Mapping(fd, size, writable=writable))
        finally:
            _close(fd)


class Words:
    """Generation words: one u64 a slot, raised whenever the slot is given to somebody else.

    The owner's mapping is the only one that can write. A reader notes a slot's word, copies, and looks again: where
    the word is another, what it copied may be anything.

    Args:
        slots: number of slots.

    Attributes:
        slots: as given.
        size: bytes of the memory.
        fd: its descriptor; theirs until `close`.

    Raises:
        ConfigError: a number that cannot be, or more than there is.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.size = _words_size(slots)
        self.fd = create_memfd("hicache-words")
        try:
            reserve(self.fd, self.size, f"generation words of {slots} slots")
            self._mapping = Mapping(self.fd, self.size, writable=True)
            seal(self.fd, SEALED | OWNERS_ONLY)
        except BaseException:
            os.close(self.fd)
            raise

    @classmethod
    def adopt(cls, fd: int, slots: int) -> Words:
        """Words that go on from those of an earlier process, in a memory of their own, since no other can write those.

        Each begins one above its predecessor, so no word that was noted before is ever right again. A reader that
        still maps the predecessor does not see later changes: it must also look whether its lifeline has ended.

        Args:
            fd: descriptor of the earlier words; stays the caller's.
            slots: as they were made.

        Raises:
            ConfigError: the descriptor is no such memory.
        """
        check_descriptor(fd, _words_size(slots), seals=SEALED | OWNERS_ONLY, what="words to take over")
        earlier = Mapping(fd, _words_size(slots), writable=False)
        words = cls(slots)
        np.add(earlier.bytes.view(np.uint64), np.uint64(1), out=words.values)
        earlier.close()
        return words

    @property
    def values(self) -> WordArray:
        """The words, (slots,), writable, not a copy.

        Raises:
            CacheClosed: they are closed.
        """
        return self._mapping.bytes.view(np.uint64)

    def retire(self) -> None:
        """Raise every word: what anybody is reading now is not to be believed. For the end of an orderly life."""
        values = self.values
        np.add(values, np.uint64(1), out=values)

    def close(self) -> None:
        """Let go of the memory and its descriptor. Idempotent."""
        self._mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class MappedWords:
    """Generation words as a client sees them: read-only.

    Args:
        fd: as the service handed it out; closed here, whether or not it can be used.
        slots: number of slots.

    Raises:
        ConfigError: the descriptor is no such memory.
    """

    def __init__(self, fd: int, slots: int) -> None:
        self.slots = slots
        try:
            size = _words_size(slots)
            check_descriptor(fd, size, seals=SEALED | OWNERS_ONLY, what="generation words")
            self._mapping = Mapping(fd, size, writable=False)
        finally:
            _close(fd)

    @property
    def values(self) -> WordArray:
        """The words, (slots,), read-only, not a copy. They change under the reader.

        Raises:
            CacheClosed: they are closed.
        """
        return self._mapping.bytes.view(np.uint64)

    def unchanged(self, slots: Slots, noted: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which of the slots still have the words that were noted, (n,). To be asked behind the copy.

        Raises:
            CacheClosed: they are closed.
            IndexError: a slot that does not exist.
        """
        changed: npt.NDArray[np.bool_] = self.values[slots] == noted
        return changed

    def close(self) -> None:
        """Unmap them. Idempotent."""
        self._mapping.close()


def _words_size(slots: int) -> int:
    if type(slots) is not int or not 0 < slots <= _MOST_SLOTS:
        raise ConfigError(f"slots with words must be an integer of 1 to {_MOST_SLOTS}, not {slots!r:.40}")
    return slots * np.dtype(np.uint64).itemsize


def _resize(fd: int, size: int, what: str) -> None:
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        raise ConfigError(f"{what} cannot have {size} bytes: {error.strerror}") from error


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except (OSError, TypeError, OverflowError):  # never was one: the check has said so
        return
