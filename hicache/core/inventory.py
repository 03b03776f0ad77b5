"""What HOST holds, as plain values, and back into a new core: how pages outlive the process that has filled them.

A checkpoint is everything about one core, for a repeat of what it did. This is only what is worth taking along, in
terms that any later version understands: names of pages, their slots, what storage has of them, and how hot they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from hicache.core.cache import Core
from hicache.core.prompt import Prompt
from hicache.core.registry import HOST
from hicache.core.residency import FREE, RESIDENT, SlotEvent, Slots
from hicache.core.tree import HiRadixTree
from hicache.errors import InvalidInput

__all__ = ["HeldRun", "adopt", "claim", "take"]


class HeldRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive resident pages of one node.

    Attributes:
        parent: number of the run in front of it, -1 at the root; always lower than its own.
        page_hashes: glued together.
        slots: where they are, int64 little endian.
        believed: leading pages that storage is believed to have.
        stamp: recency; only its order counts.
        hits: uses.
        priority: the highest of a request that used it.
    """

    parent: int
    page_hashes: bytes
    slots: bytes
    believed: int
    stamp: int
    hits: int
    priority: int


def take(tree: HiRadixTree, *, without: Slots) -> list[HeldRun]:
    """The resident pages of a tree, parents first.

    Args:
        tree: a live tree.
        without: slots to leave out, with all that is below them.
    """
    runs: list[HeldRun] = []
    todo = [(child, -1) for child in tree.root.children.values()]
    while todo:
        node, parent = todo.pop()
        slots = node.slots[HOST][: node.resident[HOST]]
        barred = np.isin(slots, without)
        pages = int(barred.argmax()) if barred.any() else len(slots)
        if not pages:
            continue
        hashes = b"".join(tree.hashes(node, 0, pages))
        run = HeldRun(
            parent,
            hashes,
            slots[:pages].astype("<i8").tobytes(),
            min(node.believed, pages),
            node.stamp,
            node.hits,
            node.priority,
        )
        runs.append(run)
        if pages == node.pages:
            todo += [(child, len(runs) - 1) for child in node.children.values()]
    return runs


def claim(core: Core, slots: Slots) -> None:
    """Take exactly these free HOST slots as PRIVATE: for `adopt`, or to keep them from being used at all.

    Raises:
        InvalidInput: a slot that there is not, is not free, or is there twice. Nothing was taken.
    """
    table = core.registry.tables[HOST]
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < table.capacity:
        raise InvalidInput(f"slots {int(slots.min())} to {int(slots.max())} are not all among the {table.capacity}")
    if len(np.unique(slots)) != len(slots) or table.count(slots, FREE) != len(slots):
        raise InvalidInput("a slot is there twice, or is not free")
    free = table.free[: table.counts[FREE]]
    kept = free[~np.isin(free, slots)]
    table.free[: len(kept)] = kept
    table.advance(slots, FREE, SlotEvent.ALLOCATE)


def adopt(core: Core, tree: HiRadixTree, runs: Iterable[HeldRun], *, stored: bool) -> int:
    """Make claimed slots the resident pages of an empty tree.

    Args:
        core: a core whose top tier is HOST, which nobody uses yet.
        tree: one of its trees, of page hashes.
        runs: as `take` gave them; their slots are claimed.
        stored: whether storage is still the same, so that what it is believed to have counts.

    Returns:
        The pages adopted.

    Raises:
        InvalidInput: runs that do not hang together. What was adopted before stays.
    """
    copies, registry = core.log.copies, core.registry
    paths: list[bytes] = []
    adopted = 0
    for run in runs:
        if not -1 <= run.parent < len(paths):
            raise InvalidInput(f"run {len(paths)} hangs on run {run.parent}, which is not in front of it")
        before = paths[run.parent] if run.parent >= 0 else b""
        paths.append(before + run.page_hashes)
        slots: Slots = np.frombuffer(run.slots, "<i8").astype(np.int64)
        prompt = Prompt(paths[-1], tree.width, tree.hasher)
        first = len(before) // tree.width
        if len(slots) != prompt.pages - first or not len(slots):
            raise InvalidInput(f"run {len(paths) - 1} has {len(slots)} slots for {prompt.pages - first} pages")
        registry.tick = max(registry.tick, run.stamp)
        path = copies.fill(HOST, tree, prompt, first, slots, hits=run.hits)
        table = registry.tables[HOST]
        table.verified[slots] = True
        if stored:
            table.stored[slots[: run.believed]] = True
        for node, _ in path:
            if node.first + node.pages > first:
                node.stamp, node.priority = run.stamp, run.priority
                copies.publish(HOST, node)
                copies.raise_belief(node)
                registry.file(node)
        if table.count(slots, RESIDENT) != len(slots):
            raise InvalidInput(f"run {len(paths) - 1} is not resident: what is in front of it is missing")
        adopted += len(slots)
    return adopted


def slots_of(runs: Iterable[HeldRun]) -> Iterator[Slots]:
    """The slots of each run."""
    return (np.frombuffer(run.slots, "<i8").astype(np.int64) for run in runs)
