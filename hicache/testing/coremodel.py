"""What the core's driver remembers of requests and transfers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hicache.core.cache import Core
from hicache.core.residency import Slots
from hicache.core.transfers import Lease, Transfer
from hicache.records import PageResult, Tier
from hicache.testing.choices import Choices, tag


@dataclass(eq=False)
class ModelEngine:
    """A request as its engine sees it."""

    lease: Lease
    number: int
    mark: int  # tag of its private slots, which it may write at any time; a transfer's tag is -1 - its id
    reads: list[tuple[int, Slots, list[int]]] = field(default_factory=list)  # tier, slots, tags expected there


@dataclass
class RunningTransfer:
    """A transfer under way: whether its I/O has begun, and what a read of storage found then."""

    transfer: Transfer
    begun: bool = False
    got: list[bool] = field(default_factory=list)


NOBODY = 1 << 40
"""Tag of bytes in a slot that no node holds."""


def written_tags(core: Core, transfer: Transfer) -> list[int]:
    """What the engine wrote: the pages of the lease that owns the slots, whoever it is by now."""
    assert transfer.target_slots is not None
    table = core.registry.tables[transfer.kind.target]
    tags = []
    for slot in transfer.target_slots.tolist():
        owner = core.registry.nodes[table.owner[slot]] if table.owner[slot] >= 0 else None
        if owner is None:
            tags.append(NOBODY)  # detached: its bytes are nobody's any more
        else:
            page = int(table.depth[slot]) - owner.first
            tags.append(tag(owner.tree.hashes(owner, page, page + 1)[0]))
    return tags


def some_fail(choices: Choices, count: int) -> list[PageResult]:
    """Results of a transfer: mostly all good, else some FAILED."""
    if choices.integer(1, 4) != 1:
        return [PageResult.OK] * count
    return [PageResult.FAILED if choices.integer(1, 4) == 1 else PageResult.OK for _ in range(count)]


def check_orphans(running: Iterable[RunningTransfer]) -> None:
    """A storage has just gone: all of its transfers, and no others, know that."""
    for entry in running:
        orphan = Tier.STORAGE in entry.transfer.kind.value
        assert entry.transfer.orphaned == orphan, f"{entry.transfer}: orphaned is {entry.transfer.orphaned}"
