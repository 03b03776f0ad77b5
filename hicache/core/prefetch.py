"""Bringing up: beliefs about STORAGE, STORAGE to HOST, HOST to DEVICE where that is owned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache.core.registry import DEVICE, HOST
from hicache.core.room import Room
from hicache.core.transferlog import TransferLog
from hicache.core.transfers import Lease, PinSet, TransferKind, lowest
from hicache.records import Match, MissReason

if TYPE_CHECKING:
    from hicache.core.node import Path
    from hicache.core.residency import Slots


class Loader:
    """Plans fetches and loads. Not thread-safe."""

    __slots__ = ("_copies", "_log", "_registry", "_room")

    def __init__(self, log: TransferLog, room: Room) -> None:
        self._log = log
        self._room = room
        self._copies = log.copies
        self._registry = log.copies.registry

    def believe(self, lease: Lease, upto: int) -> None:
        """Storage was asked: the lease's pages behind what it matched, up to page index `upto`, are there."""
        tree, match = lease.tree, lease.match
        upto = min(upto, lease.limit)
        if lease.closed or not tree.live or upto <= match.pages or not self._registry.stores:
            return
        lease.match = Match(match.device, match.host, upto - match.device - match.host)
        path = tree.walk(lease.prompt, upto)
        if tree.believed_pages(path) < match.device + match.host:
            return  # a put of what is above is still under way; the fetched pages join the belief behind it
        for node, pages in tree.grow(lease.prompt, upto, hits=0):
            if node.believed < pages:
                self._copies.set_belief(node, pages)
        self.forget_stubs()

    def forget_stubs(self) -> None:
        """Keep the pages that only STORAGE is believed to have within their bound."""
        registry = self._registry
        excess = registry.stub_pages - registry.config.stub_pages
        while excess > 0:
            node = registry.coldest_stub()
            if node is None:
                return
            before = registry.stub_pages
            # A believed page is no copy of ours: forgetting it loses nothing but the next probe.
            self._copies.set_belief(node, max(node.held, node.believed - excess))
            node.tree.trim(node, MissReason.COLD)
            excess -= before - registry.stub_pages

    def prefetch(self, lease: Lease, upto: int | None = None) -> int:
        """Begin what brings the lease's pages up to index `upto` into HOST. Returns the index that will be reached.

        A gap in HOST in front of the fetched pages is filled from DEVICE first, by a transfer of its own. With too
        few slots the tail is left out.
        """
        tree, prompt = lease.tree, lease.prompt
        goal = min(lease.match.pages if upto is None else upto, lease.limit)
        if lease.closed or not tree.live or not self._registry.stores:
            return lease.usable
        path = tree.walk(prompt, goal)
        device, on_device = tree.held(path, DEVICE)
        host, on_host = tree.held(path, HOST)
        at = len(host)
        self._log.join_fillers(lease, HOST, host[on_host:])
        if at >= goal:
            return goal
        copies = self._copies
        source = copies.pin(DEVICE, tree, device[:on_device], lease.pins[DEVICE])
        tip = copies.pin(HOST, tree, host, lease.pins[HOST])
        slots = self._room.take(HOST, goal - at)
        if len(slots) < goal - at:
            lease.short_at = lowest(lease.short_at, at + len(slots))
        gap = min(max(0, on_device - at), len(slots))
        if gap:
            tip = self._fill_host(lease, tip, at, slots[:gap], device[at : at + gap], source)
        most = self._registry.config.fetch_pages
        for first in range(gap, len(slots), most):
            tip = self._fill_host(lease, tip, at + first, slots[first : first + most], None, None)
        copies.drop(source)
        copies.drop(tip)
        return at + len(slots)

    def _fill_host(
        self, lease: Lease, tip: PinSet, at: int, slots: Slots, device: Slots | None, source: PinSet | None
    ) -> PinSet:
        """One transfer into HOST behind `tip`, whose hold it takes. Returns the set up to its own last page."""
        tree, prompt = lease.tree, lease.prompt
        copies = self._copies
        path = copies.fill(HOST, tree, prompt, at, slots, hits=0)
        held, _ = tree.held(path, HOST)
        whole = copies.pin(HOST, tree, held, tip)
        copies.drop(tip)
        whole.holders += 1
        pins = [whole]
        if source is not None:
            source.holders += 1
            pins.append(source)
        self._log.begin(
            TransferKind.FETCH if device is None else TransferKind.WRITE_BACK,
            tree,
            first=at,
            source_slots=device,
            target_slots=slots,
            pages=prompt.identities(at, at + len(slots)) if device is None else (),
            pins=pins,
            lease=lease,
        )
        return whole

    def load(self, lease: Lease, upto: int | None = None) -> int:
        """Begin copying up what HOST has behind DEVICE. Returns the page index that the top tier will reach.

        What others are loading is waited for, not loaded twice. After the first allocation nothing is loaded any
        more: the request's own slots stand there. Where HOST is the top tier nothing is copied, and what others
        have brought there is taken over.
        """
        tree = lease.tree
        top = self._registry.top
        if lease.closed or not tree.live or lease.start is not None:
            return lease.usable
        if not self._registry.config.host_pages and not tree.filling[DEVICE]:
            return lease.usable  # nothing to copy up, and nobody to wait for
        path = tree.walk(lease.prompt, lease.limit if upto is None else min(upto, lease.limit))
        resident = tree.resident_pages(path, top)
        if resident > lease.usable:
            self._log.hand_over(lease, top)
        if not tree.filling[top] and (top == HOST or tree.resident_pages(path, HOST) <= resident):
            return resident  # nobody to wait for, and nothing to copy up
        held, _ = tree.held(path, top)
        self._log.join_fillers(lease, top, held[resident:])
        return len(held) if top == HOST else self._copy_up(lease, path, held)

    def _copy_up(self, lease: Lease, path: Path, device: Slots) -> int:
        """One transfer from HOST behind what DEVICE has of the path."""
        tree = lease.tree
        host, on_host = tree.held(path, HOST)
        at = len(device)
        if on_host <= at:
            return at
        copies = self._copies
        target = copies.pin(DEVICE, tree, device, lease.pins[DEVICE])
        source = copies.pin(HOST, tree, host[:on_host], lease.pins[HOST])
        slots = self._room.take(DEVICE, on_host - at)
        end = at + len(slots)
        if end < on_host:
            lease.short_at = lowest(lease.short_at, end)
        if end > at:
            copies.fill_path(DEVICE, tree, tree.walk(lease.prompt, end), slots)
            whole = copies.pin(DEVICE, tree, np.concatenate((device, slots)), target)
            self._log.begin(
                TransferKind.LOAD,
                tree,
                first=at,
                source_slots=host[at:end],
                target_slots=slots,
                pins=[whole, source],
                lease=lease,
            )
        else:
            copies.drop(source)
        copies.drop(target)
        return end
