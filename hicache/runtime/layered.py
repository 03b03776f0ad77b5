"""Loads of which the last copies into DEVICE are not waited for: an engine computes a layer as soon as it has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hicache.core.residency import Slots
from hicache.core.transfers import Lease, TransferKind
from hicache.memory.base import Copy
from hicache.records import Tier

if TYPE_CHECKING:
    from hicache.runtime.loading import Loading
    from hicache.runtime.parts import Parts

__all__ = ["LayeredLoad", "begin_layered"]


class LayeredLoad:
    """A load that may still copy up. Made by `Request.load_by_layer`; for one thread at a time.

    Attributes:
        slots: int64 `(pages,)`: DEVICE slots of the usable prefix, and of the pages that are being copied up behind it.
        copies: those copies. A layer may be read once each of them has it: `Copy.wait_layer`, or `let_wait` of CUDA's.
    """

    def __init__(
        self, parts: Parts, lease: Lease, loading: Loading | None, slots: Slots, copies: Sequence[Copy]
    ) -> None:
        self._parts = parts
        self._lease = lease
        self._loading = loading
        self.slots = slots
        self.copies = tuple(copies)

    def finish(self) -> Slots:
        """Wait until the copies have ended, and let go of what did not come. Idempotent.

        Returns:
            What `load` would: fewer slots than before where a copy failed or its pages were withdrawn meanwhile.

        Raises:
            CacheClosed: the request or the cache was closed.
        """
        for copy in self.copies:
            copy.wait(None)
        reducer = self._parts.reducer
        loading, self._loading = self._loading, None
        with reducer.lock:
            while loading is not None and (seconds := loading.step()) is not None:
                reducer.wait(seconds)
            return self._lease.usable_slots()


def begin_layered(parts: Parts, lease: Lease, loading: Loading) -> LayeredLoad:
    """Go on with a load until nothing but copies into DEVICE is waited for. The lock is held.

    Raises:
        CacheClosed: the request or the cache was closed while this waited.
    """
    while (seconds := loading.step()) is not None:
        if loading.copies_only:
            return LayeredLoad(parts, lease, loading, *_under_way(parts, lease))
        parts.reducer.wait(seconds)
    return LayeredLoad(parts, lease, None, lease.usable_slots(), ())


def _under_way(parts: Parts, lease: Lease) -> tuple[Slots, list[Copy]]:
    """Slots of the usable pages and, without a gap, of those that the loads which it waits for bring; their copies."""
    transfers, tree = parts.reducer.transfers, lease.tree
    found = [transfers[number] for number in sorted(lease.waiting) if number in transfers]
    loads = [transfer for transfer in found if transfer.kind is TransferKind.LOAD]
    held, _ = tree.held(tree.walk(lease.prompt, lease.limit), int(Tier.DEVICE))
    filled = [transfer.target_slots for transfer in loads if transfer.target_slots is not None]
    comes = np.isin(held[lease.usable :], np.concatenate(filled)) if filled else np.zeros(0, bool)
    more = len(comes) if comes.all() else int(comes.argmin())
    copies = [copy for transfer in loads if (copy := parts.executor.loads.get(transfer.id)) is not None]
    return held[: lease.usable + more], copies
