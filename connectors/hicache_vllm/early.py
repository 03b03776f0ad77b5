"""Stores that go with the step that computes their pages: layer by layer, and published only when all of them came.

What may happen, and what becomes of such a store:

    every layer calls        its copies go behind each layer's event; published behind the step's end
    no layer will call       a CUDA graph of the whole model is replayed, micro-batches: it is an ordinary store, which
                             begins with the next step
    a layer does not call    the step was aborted, or vLLM is not as it was known: nothing is published, and the
                             scheduler hears from which page on it has to store anew
    a load of the step       has failed: what was computed behind it is worth nothing, and is not published either
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final, Protocol, runtime_checkable

from hicache.rpc.client.group import JoinedRequest
from hicache_vllm.compat import Forward
from hicache_vllm.copier import Copier
from hicache_vllm.plans import Store
from hicache_vllm.tensors import PagesAtRiskError

__all__ = ["EarlyStores", "LayerCopy", "LayerTensors"]

STEP_BYTES: Final = 2**20
"""That are copied at once at least, but with the last layer: thin layers wait for others, as each copy costs Python."""


class LayerCopy(Protocol):
    """Copies of one store's blocks, out of layer after layer. For one thread."""

    def copy(self, first: int, end: int) -> None:
        """Begin to copy the layers [first, end) of all pages."""
        ...

    def finish(self, *, good: bool) -> int | None:
        """Wait for what was begun, and let go of it.

        Args:
            good: whether all layers are copied, and what was computed counts.

        Returns:
            How many pages, from the first on, are written; None where they cannot be written in this way.
        """
        ...


@runtime_checkable
class LayerTensors(Protocol):
    """Tensors that can be copied so."""

    @property
    def block_bytes(self) -> int:
        """See `KVTensors`."""
        ...

    def mark(self) -> Callable[[], None]:
        """See `KVTensors`."""
        ...

    def by_layer(self, joined: JoinedRequest, first: int, blocks: Sequence[int]) -> LayerCopy:
        """Copies of blocks into pages from the index `first` on."""
        ...


class Ends(Protocol):
    """What becomes of stores. Called by the copier's thread."""

    def join(self, ticket: bytes) -> JoinedRequest:
        """The request of a ticket."""
        ...

    def whole(self, joined: JoinedRequest, store: Store) -> int:
        """Write all layers at once; how many pages, from the first on, are written."""
        ...

    def publish(self, joined: JoinedRequest, store: Store, pages: int) -> int:
        """So many pages are written and right; how many of them are known to others now."""
        ...

    def over(self, store: Store, pages: int) -> None:
        """So many pages, from the first on, are there; nothing reads its blocks any more."""
        ...

    def risk(self, store: Store) -> None:
        """Instead of `over`: a failed device may still write its pages, so the service must not get them back."""
        ...


class EarlyStores:
    """Those of one worker. Used on the engine's threads, one at a time.

    Args:
        tensors: the engine's, or None where they cannot be copied so: then all are ordinary stores of the next step.
        layers: how many.
        copier: runs the copies.
        ends: of each store, told once.
    """

    def __init__(self, tensors: LayerTensors | None, layers: int, copier: Copier, ends: Ends) -> None:
        self._tensors = tensors
        self._layers = layers
        self._copier = copier
        self._ends = ends
        self._step: list[_Early] = []
        self._late: list[Store] = []
        self._next: list[Store] = []
        self._asked = self._copied = 0

    def begin(self, stores: Sequence[Store], forward: Forward) -> None:
        """A step begins that computes the last of these stores' pages."""
        self._asked = self._copied = 0
        tensors = self._tensors
        if tensors is None or not forward.hooked or forward.split:
            self._late = list(stores)
        else:
            self._step = [_Early(store, tensors, self._ends) for store in stores]

    def computed(self, layer: int) -> None:
        """A layer is computed, or on its way on the calling thread's stream."""
        if not self._step or self._tensors is None:
            return
        if layer != self._asked:  # twice, left out, or in an order that is not known here
            self._asked = -1
            return
        self._asked += 1
        blocks = sum(len(early.store.blocks) for early in self._step)
        size = (self._asked - self._copied) * blocks * self._tensors.block_bytes // self._layers
        if size >= STEP_BYTES or self._asked == self._layers:
            part, ready = (self._copied, self._asked), self._tensors.mark()
            self._copied = self._asked
            for early in self._step:
                self._copier.store(partial(early.copy, part, ready))

    def end(self, *, good: bool) -> None:
        """The step is over; `good` where nothing of it is in doubt."""
        step, self._step = self._step, []
        late, self._late = self._late, []
        complete = good and self._asked == self._layers
        for early in step:
            self._copier.store(partial(early.finish, good=complete))
        if good:
            self._next += late
        else:
            self._give_up(late)

    def take_late(self) -> list[Store]:
        """Those that the step before has computed, and that are stored as any other."""
        found, self._next = self._next, []
        return found

    def drop(self, jobs: Collection[int] | None = None) -> None:
        """Give up what `take_late` would take; of these jobs, or all."""
        gone = [store for store in self._next if jobs is None or store.job in jobs]
        self._next = [store for store in self._next if store not in gone]
        self._give_up(gone)

    def _give_up(self, stores: Sequence[Store]) -> None:
        for store in stores:
            self._ends.over(store, 0)


class _Early:
    """One store. Its methods are run by the copier, in the order in which they were handed in."""

    def __init__(self, store: Store, tensors: LayerTensors, ends: Ends) -> None:
        self.store = store
        self._tensors = tensors
        self._ends = ends
        self._joined: JoinedRequest | None = None
        self._copy: LayerCopy | None = None
        self._ready: Callable[[], None] | None = None
        self._failed = False

    def copy(self, layers: tuple[int, int], ready: Callable[[], None]) -> None:
        """Copy the layers [first, end), behind what `ready` waits for."""
        self._ready = ready
        if self._failed:
            return
        try:
            ready()
            if self._joined is None:
                self._joined = self._ends.join(self.store.ticket)
                self._copy = self._tensors.by_layer(self._joined, self.store.first, self.store.blocks)
            if self._copy is not None:
                self._copy.copy(*layers)
        except BaseException:
            self._failed = True
            raise

    def finish(self, *, good: bool) -> None:
        """Wait for the copies, and publish what is right."""
        try:
            pages = self._publish(good=good)
        except PagesAtRiskError:
            self._ends.risk(self.store)
            raise
        except BaseException:
            self._end(0)
            raise
        self._end(pages)

    def _publish(self, *, good: bool) -> int:
        good = good and not self._failed
        written = 0 if self._copy is None else self._copy.finish(good=good)
        if not good or self._joined is None or self._ready is None:
            return 0
        if written is None:
            self._ready()
            written = self._ends.whole(self._joined, self.store)
        return self._ends.publish(self._joined, self.store, written)

    def _end(self, pages: int) -> None:
        try:
            if self._joined is not None:
                self._joined.close()
        finally:
            self._ends.over(self.store, pages)
