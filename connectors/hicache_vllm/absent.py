"""What stands where a side cannot take part: it says why, fails what is asked of it, and lets the engine go on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hicache_vllm.accounts import Account, Missed
from hicache_vllm.compat import Forward
from hicache_vllm.counters import Counters
from hicache_vllm.plans import Load, Report, StepPlan

__all__ = ["AbsentScheduler", "AbsentWorker"]


class AbsentScheduler:
    """Counts what the engine takes up, all of it missed. Used on the scheduler's thread only."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._asked: dict[str, Account] = {}

    def matched(self, request: Any, local: int) -> tuple[int, bool]:
        """See `SchedulerSide`."""
        account = Account(self._counters, page=1, asked=int(request.num_tokens), local=local)
        account.reason = Missed.OFF
        self._asked[str(request.request_id)] = account
        return 0, False

    def allocated(self, request: Any) -> None:
        """See `SchedulerSide`."""
        account = self._asked.pop(str(request.request_id), None)
        if account is not None:
            account.close()

    def finished(self, request: Any) -> None:
        """See `SchedulerSide`: it may never have been taken up."""
        self._asked.pop(str(request.request_id), None)


class AbsentWorker:
    """Has the methods of `WorkerSide`.

    Args:
        why: nothing is read or written.
        loads, stores, kept: what another worker has left behind.
    """

    def __init__(
        self, why: str, *, loads: Iterable[Load] = (), stores: Iterable[int] = (), kept: Iterable[str] = ()
    ) -> None:
        self._why = why
        self._told = False
        self._loads: list[Load] = []
        self._kept = set(kept)
        self._report = Report()
        self._report.done.update(stores)
        self.begin_loads(StepPlan(loads=list(loads)))

    def drain(self) -> None:
        """Nothing is being copied."""

    def fence(self, plan: StepPlan) -> None:
        """Nothing is being read."""

    def begin_stores(self, plan: StepPlan, forward: Forward) -> None:
        """They are over at once."""
        del forward
        self._report.done.update([*(store.job for store in plan.stores), *(audit.job for audit in plan.audits)])
        self._kept.update(plan.kept)

    def begin_loads(self, plan: StepPlan) -> None:
        """They fail."""
        self._loads.extend(plan.loads)
        self._report.done.update(load.job for load in plan.loads)
        self._report.lost.update((load.job, len(load.blocks)) for load in plan.loads)

    def wait_for_layer(self, layer: str) -> None:
        """Nothing comes."""

    def layer_computed(self, layer: str) -> None:
        """Nobody asks."""

    def end_step(self) -> None:
        """Nothing comes."""

    def take_finished(self, *, idle: bool) -> tuple[set[str], set[str]]:
        """See `WorkerSide`."""
        del idle
        sent, self._kept = self._kept, set()
        return sent, {load.request for load in self._loads if not load.layerwise}

    def take_bad_blocks(self) -> set[int]:
        """See `WorkerSide`."""
        loads, self._loads = self._loads, []
        return {block for load in loads for block in load.blocks}

    def take_report(self) -> Report:
        """See `WorkerSide`; the first one has the reason."""
        report, self._report = self._report, Report()
        if not self._told:
            self._told, report.refused = True, self._why
        return report

    def close(self) -> None:
        """Nothing to end."""
