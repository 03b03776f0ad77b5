"""States of the slots of one tier: one table of transitions, one function that uses it.

A page's copy in a tier is ABSENT (no slot), FILLING or RESIDENT. A slot knows three more states: FREE, PRIVATE
(allocated to a request, not yet committed) and QUARANTINED: taken away from the tree while something may still read
or write it. At every step, for each tier:

    free + private + filling + resident + quarantined = capacity

Who may touch the bytes of a slot, and who gives it back:

    state         bytes written by          read by                        given back by
    FREE          nobody                    nobody                         -
    PRIVATE       the request's engine      the request's engine           the request, at its close
    FILLING       one transfer or writer    nobody                         publication, or a cut
    RESIDENT      nobody                    leases and transfers that pin  eviction, clear, withdrawal
    QUARANTINED   whoever wrote it before   leases and transfers that pin  the last unpin
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hicache.errors import ConfigError, ResidencyError
from hicache.records import Tier

Slots = NDArray[np.int64]
Words = NDArray[np.uint64]

NO_SLOTS: Final[Slots] = np.empty(0, np.int64)
NO_SLOTS.setflags(write=False)
_ONE: Final = np.array(1, np.int32)  # arithmetic with an array is twice as fast as with a number


class SlotState(IntEnum):
    """State of one slot."""

    FREE = 0
    PRIVATE = 1
    FILLING = 2
    RESIDENT = 3
    QUARANTINED = 4


# The same numbers as plain integers: comparing arrays with them is twice as fast as with enum members.
FREE, PRIVATE, FILLING, RESIDENT, QUARANTINED = (int(state) for state in SlotState)


class SlotEvent(Enum):
    """What happens to a slot."""

    __hash__ = object.__hash__  # members are unique; the enum's own hash is a call of Python code in every event

    ALLOCATE = "allocate"  # a request or a transfer takes it
    GIVE_BACK = "give back"  # its request ends without having committed it
    RESERVE = "reserve"  # it is attached to a node, its bytes are on the way
    PUBLISH = "publish"  # complete, verified, and its parent is resident
    DETACH = "detach"  # evicted, withdrawn, failed, cancelled, cleared; or private, and its writer has not ended
    LET_GO = "let go"  # the same where nothing pins it
    RECLAIM = "reclaim"  # nothing pins it any more


TRANSITIONS: Final[dict[tuple[SlotState, SlotEvent], SlotState]] = {
    (SlotState.FREE, SlotEvent.ALLOCATE): SlotState.PRIVATE,
    (SlotState.PRIVATE, SlotEvent.GIVE_BACK): SlotState.FREE,
    (SlotState.PRIVATE, SlotEvent.DETACH): SlotState.QUARANTINED,
    (SlotState.PRIVATE, SlotEvent.RESERVE): SlotState.FILLING,
    (SlotState.FILLING, SlotEvent.PUBLISH): SlotState.RESIDENT,
    (SlotState.FILLING, SlotEvent.DETACH): SlotState.QUARANTINED,
    (SlotState.RESIDENT, SlotEvent.DETACH): SlotState.QUARANTINED,
    (SlotState.RESIDENT, SlotEvent.LET_GO): SlotState.FREE,
    (SlotState.QUARANTINED, SlotEvent.RECLAIM): SlotState.FREE,
}

_CODES: Final = {(int(source), event): int(target) for (source, event), target in TRANSITIONS.items()}


# Rows of equal states: comparing bytes with them takes a third of what an array comparison does for a short path.
_UNIFORM: Final = tuple(bytes([code]) * 4096 for code in range(len(SlotState)))


SLOT_BYTES: Final = 32
"""Bytes that a slot costs in its table, whatever its page holds."""


class SlotTable:
    """All slots of one tier, as arrays. Not thread-safe: the caller holds the one lock.

    Attributes:
        tier: whose slots these are.
        capacity: number of slots. A growing table (simulation) starts small and grows in `take`.
        state: uint8 `(capacity,)`, a `SlotState` each.
        pins: int32 `(capacity,)`: leases and transfers that touch the slot.
        owner: int32 `(capacity,)`: id of the node that the slot is attached to, -1 if none.
        depth: int32 `(capacity,)`: page index from the root, of attached slots.
        filler: int64 `(capacity,)`: id of the transfer that fills a FILLING slot.
        verified: bool `(capacity,)`: FILLING and complete, waits for its parent.
        stored: bool `(capacity,)`: a put of this page has been acknowledged.
        waiting: bool `(capacity,)`: a finished transfer waits for this page's publication.
        counts: slots by state. Slots of a cleared tree count as quarantined before they are swept.
        pinned: RESIDENT slots with at least one pin.
        words: uint64 `(capacity,)`, or None: raised by one whenever a slot is taken from FREE. It may be memory that
            others read, who so see whether the page they have copied was still the one they were given.
    """

    __slots__ = (
        "capacity",
        "counts",
        "depth",
        "filler",
        "free",
        "growing",
        "owner",
        "pinned",
        "pins",
        "state",
        "stored",
        "tier",
        "verified",
        "waiting",
        "words",
    )

    def __init__(self, tier: Tier, capacity: int | None, words: Words | None = None) -> None:
        if words is not None and (words.dtype != np.uint64 or words.shape != (capacity,)):
            raise ConfigError(f"words must be a uint64 array of {capacity} slots, not {words.dtype} {words.shape}")
        self.tier = tier
        self.growing = capacity is None
        self.capacity = 1024 if capacity is None else capacity
        size = self.capacity
        self.state: NDArray[np.uint8] = np.zeros(size, np.uint8)
        self.pins: NDArray[np.int32] = np.zeros(size, np.int32)
        self.owner: NDArray[np.int32] = np.full(size, -1, np.int32)
        self.depth: NDArray[np.int32] = np.zeros(size, np.int32)
        self.filler: NDArray[np.int64] = np.zeros(size, np.int64)
        self.verified: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.stored: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.waiting: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.free: Slots = np.arange(size - 1, -1, -1, dtype=np.int64)  # a stack: its first counts[FREE] are free
        self.counts = [size, 0, 0, 0, 0]
        self.pinned = 0
        self.words = words

    @property
    def evictable(self) -> int:
        """RESIDENT slots that nothing pins. Exact, because what a tier holds is closed under prefixes."""
        return self.counts[RESIDENT] - self.pinned

    @property
    def unsettled(self) -> int:
        """Slots that may be pinned and are not RESIDENT, beside those of requests."""
        return self.counts[FILLING] + self.counts[QUARANTINED]

    def pin(self, slots: Slots) -> Slots:
        """Pin a part of a chain once more. Returns those of the slots that nothing pinned before.

        All pin sets are root-prefixes, so pins never rise along a chain: it is a tail.
        """
        pins = self.pins[slots]
        self.pins[slots] = np.add(pins, _ONE)
        return _unpinned_tail(slots, pins)

    def unpin(self, slots: Slots) -> Slots:
        """Take one pin from each slot of a part of a chain. Returns those that nothing pins any more, a tail."""
        pins = self.pins[slots]
        np.subtract(pins, _ONE, pins)
        self.pins[slots] = pins
        return _unpinned_tail(slots, pins)

    def pinned_of(self, slots: Slots) -> int:
        """How many slots of a part of a chain are pinned: leading ones."""
        pins = self.pins[slots]
        if pins[-1]:
            return len(slots)
        return int(np.count_nonzero(pins)) if pins[0] else 0

    def advance(self, slots: Slots, source: int, event: SlotEvent) -> None:
        """Move all `slots` from `source` by `event`. The only code that writes states of attached slots.

        Raises:
            ResidencyError: the table has no such edge, or a slot is not in `source`. Nothing was changed.
        """
        after = _CODES.get((source, event))
        before = int(source)
        if after is None:
            raise ResidencyError(f"{self.tier.name}: no transition from {SlotState(source).name} by {event.value!r}")
        state = self.state
        moved = len(slots)
        if state[slots].tobytes() != _UNIFORM[before][:moved] and self.count(slots, before) != moved:
            wrong = slots[state[slots] != before][:5]
            raise ResidencyError(
                f"{self.tier.name}: {event.value!r} needs {SlotState(source).name} slots, but slot "
                + ", ".join(f"{s} is {SlotState(int(state[s])).name}" for s in wrong.tolist())
            )
        state[slots] = after
        self.counts[before] -= moved
        self.counts[after] += moved

    def count(self, slots: Slots, state: int) -> int:
        """How many of the slots are in a state."""
        states = self.state[slots]
        row = states.tobytes()
        if row == _UNIFORM[state][: len(row)]:
            return len(row)
        return row.count(state) if len(row) < 256 else int(np.count_nonzero(states == state))

    def allocate(self, pages: int) -> Slots:
        """Take `pages` FREE slots as PRIVATE. The caller has made sure that they are there, or the table grows."""
        left = self.counts[FREE] - pages
        if left < 0 and self.growing:
            self._grow(-left)
            left = self.counts[FREE] - pages
        if left < 0:
            raise ResidencyError(f"{self.tier.name}: {pages} slots taken, {self.counts[FREE]} free")
        slots = self.free[left : left + pages].copy()
        slots.sort()  # pages that lie side by side are copied in one piece
        self.advance(slots, FREE, SlotEvent.ALLOCATE)
        if self.words is not None:
            self.words[slots] += 1
        return slots

    def give_back(self, slots: Slots) -> None:
        """Free PRIVATE slots."""
        top = self.counts[FREE]
        self.advance(slots, PRIVATE, SlotEvent.GIVE_BACK)
        self.free[top : top + len(slots)] = slots

    def reclaim(self, slots: Slots) -> None:
        """Free QUARANTINED slots that nothing pins."""
        self._free(slots, QUARANTINED, SlotEvent.RECLAIM)

    def let_go(self, slots: Slots) -> None:
        """Free RESIDENT slots that nothing pins."""
        self._free(slots, RESIDENT, SlotEvent.LET_GO)

    def _free(self, slots: Slots, source: int, event: SlotEvent) -> None:
        top = self.counts[FREE]
        self.advance(slots, source, event)
        self.free[top : top + len(slots)] = slots
        self.verified[slots] = False
        self.stored[slots] = False

    def bury(self, *, filling: int, resident: int, pinned: int) -> None:
        """Count a cleared tree's slots as quarantined. Their states follow when `sweep` reaches them."""
        self.counts[FILLING] -= filling
        self.counts[RESIDENT] -= resident
        self.counts[QUARANTINED] += filling + resident
        self.pinned -= pinned

    def sweep(self, slots: Slots) -> Slots:
        """Detach a cleared node's slots and free those that nothing pins, which are returned."""
        # bury() has moved the counts already, so the state is set without them.
        legal = (self.state[slots] == RESIDENT) | (self.state[slots] == FILLING)
        if not legal.all():
            raise ResidencyError(f"{self.tier.name}: a cleared node holds slots that are neither filling nor resident")
        self.state[slots] = _CODES[RESIDENT, SlotEvent.DETACH]
        self.owner[slots] = -1
        loose: Slots = slots[self.pins[slots] == 0]
        if len(loose):
            self.reclaim(loose)
        return loose

    def _grow(self, missing: int) -> None:
        old = self.capacity
        extra = max(old, missing)

        def longer(array: NDArray[Any], fill: int) -> NDArray[Any]:
            return np.concatenate((array, np.full(extra, fill, array.dtype)))

        self.state, self.pins, self.owner = longer(self.state, 0), longer(self.pins, 0), longer(self.owner, -1)
        self.depth, self.filler = longer(self.depth, 0), longer(self.filler, 0)
        self.verified, self.stored, self.waiting = (
            longer(self.verified, 0),
            longer(self.stored, 0),
            longer(self.waiting, 0),
        )
        free = self.counts[FREE]
        fresh = np.arange(old + extra - 1, old - 1, -1, dtype=np.int64)
        self.free = np.concatenate((self.free[:free], fresh, np.zeros(old - free, np.int64)))
        self.capacity = old + extra
        self.counts[FREE] += extra


def _unpinned_tail(slots: Slots, pins: NDArray[np.int32]) -> Slots:
    if pins[-1]:
        return NO_SLOTS
    return slots[np.count_nonzero(pins) :] if pins[0] else slots
