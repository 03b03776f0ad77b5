"""One request on its way: look, bring up, take slots, compute, commit, close."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from hicache.core.prompt import Prompt
from hicache.core.reasons import RequestCounts
from hicache.errors import OutOfSlots
from hicache.records import MissReason

if TYPE_CHECKING:
    from hicache.analytics.simulate.clock import SimulatedTime
    from hicache.analytics.simulate.instance import Instance
    from hicache.runtime.loading import Loading

SLOT_SECONDS: Final = 30.0
"""For which a request waits until others let go of slots, as in `hicache replay`."""

OTHER_INSTANCE: Final = "other_instance"

Ended = Callable[["Flight", RequestCounts, int], None]
"""Takes a request, what it was counted as, and how many of its missed pages another instance had."""


class Flight:
    """Made for one request; `begin` starts it, and `ended` is called once.

    Attributes:
        request: its number in the trace.
        began: seconds at which it came.
        loaded: seconds at which nothing was brought up any more.
        refused: whether it had no slots; its pages beyond hits are not kept then.
    """

    __slots__ = (
        "_compute",
        "_elsewhere",
        "_ended",
        "_instance",
        "_lease",
        "_loading",
        "_served",
        "_time",
        "_until",
        "began",
        "loaded",
        "refused",
        "request",
    )

    def __init__(
        self,
        request: int,
        instance: Instance,
        time: SimulatedTime,
        *,
        compute: Callable[[Flight, int], float],
        ended: Ended,
    ) -> None:
        self.request = request
        self.refused = False
        self.began = self.loaded = time.now()
        self._instance = instance
        self._time = time
        self._compute = compute
        self._ended = ended
        self._loading: Loading | None = None
        self._served = False
        self._until = 0.0
        self._elsewhere = 0

    def begin(self, prompt: Prompt, elsewhere: int) -> None:
        """Come in. `elsewhere`: leading pages that another instance holds now."""
        instance = self._instance
        instance.open += 1
        instance.requests += 1
        self._elsewhere = elsewhere
        if instance.storage is not None:
            prompt.hashes(0, prompt.pages)
        self._lease = lease = instance.core.lease(instance.tree, prompt)
        prefetch = None if instance.storage is None else instance.loader.start(lease)
        if prefetch is None and not lease.match.host:
            self.take_slots()
            return
        instance.reducer.settle()
        self._loading = instance.loader.begin(lease, prefetch, started=self.began, until=None)
        instance.loading[self] = None
        self.go_on()

    def go_on(self) -> None:
        """Look whether what was waited for has come up."""
        loading = self._loading
        if loading is None:
            return
        seconds = loading.step()
        if seconds is not None:
            # Whatever comes earlier calls again; this is the end of patience.
            self._time.at(self._time.now() + seconds, self._out_of_patience)
            return
        self._loading = None
        del self._instance.loading[self]
        self.loaded = self._time.now()
        self.take_slots()

    def _out_of_patience(self) -> None:
        self.go_on()
        self._instance.settle()

    def take_slots(self) -> None:
        """Take slots for what is to be computed, or wait until some are free."""
        instance, lease = self._instance, self._lease
        fresh = lease.prompt.pages - lease.usable
        try:
            instance.core.allocate(lease, fresh)
        except OutOfSlots as error:
            self._wait(lease.usable + fresh > error.capacity)
            return
        self._served = True
        instance.waiting.pop(self, None)
        instance.reducer.flush()
        seconds = self._compute(self, lease.usable)
        if seconds > 0:
            self._time.at(self._time.now() + seconds, self._computed)
        else:
            self._finish()

    def _wait(self, never: bool) -> None:
        now = self._time.now()
        if self not in self._instance.waiting:
            self._until = now + SLOT_SECONDS
            # Other requests hold slots, and so do copies under way.
            if not never and (self._instance.open > 1 or self._instance.reducer.transfers):
                self._instance.waiting[self] = None
                self._time.at(self._until, self._no_slots)
                return
        elif now < self._until:
            return
        self._no_slots()

    def _no_slots(self) -> None:
        if self._served or self.refused:
            return
        self._instance.waiting.pop(self, None)
        self.refused = True
        self._close()
        self._instance.settle(freed=True)

    def _computed(self) -> None:
        self._finish()
        self._instance.settle(freed=True)

    def _finish(self) -> None:
        instance, lease = self._instance, self._lease
        core = instance.core
        if lease.start != lease.prompt.pages:
            core.commit(lease, lease.prompt.pages, ready=True)
        if instance.storage is not None:
            core.touch(lease, self._time.now())
        instance.reducer.flush()
        self._close()

    def _close(self) -> None:
        instance, lease = self._instance, self._lease
        moved = self._moved()
        counts = instance.core.release(lease)
        instance.open -= 1
        instance.settle(freed=bool(instance.waiting))
        if moved:
            for reason, pages in moved.items():
                counts.missed[reason] -= pages
        self._ended(self, counts, sum(moved.values()))

    def _moved(self) -> dict[MissReason, int]:
        """Pages that were missed and that another instance had, by the reason that they would be counted by here."""
        lease = self._lease
        first, end = max(lease.usable, lease.match.pages), min(self._elsewhere, lease.limit)
        if end <= first:
            return {}
        ghosts, namespace = self._instance.core.registry.ghosts, lease.tree.namespace
        moved: dict[MissReason, int] = {}
        for page, name in enumerate(lease.prompt.hashes(first, end), first):
            told = lease.unanswered_at is None or page < lease.unanswered_at
            reason = ghosts.reason(namespace, name) or (MissReason.COLD if told else lease.unanswered)
            moved[reason] = moved.get(reason, 0) + 1
        return moved
