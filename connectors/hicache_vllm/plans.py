"""What the scheduler's side tells the workers' with a step, and what they answer. Plain data: it travels by pickle."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Audit", "Load", "Report", "StepPlan", "Store"]


@dataclass(slots=True)
class Load:
    """Pages that are to come into blocks of a request.

    Attributes:
        job: number of this load.
        request: vLLM's id.
        ticket: of the lease that holds them; None where it is lost already, so that the load only fails.
        blocks: the engine's numbers of the blocks to be written, in order.
        first: place of the first of them, counted in blocks from the prompt's start.
        layerwise: whether the step waits for it, layer by layer.
    """

    job: int
    request: str
    ticket: bytes | None
    blocks: list[int]
    first: int
    layerwise: bool = False


@dataclass(slots=True)
class Store:
    """Pages that the step before, or one before that, has computed.

    Attributes:
        job: number of this store.
        request: vLLM's id.
        ticket: of the lease that has slots for them.
        first, end: page indices.
        blocks: the engine's numbers of all blocks of these pages.
        early: whether it is this very step that computes the last of them: they go layer by layer.
    """

    job: int
    request: str
    ticket: bytes
    first: int
    end: int
    blocks: list[int]
    early: bool = False


@dataclass(slots=True)
class Audit:
    """A page that was computed again although the cache had it.

    Attributes:
        job: number, as of a store.
        request: vLLM's id.
        ticket: of the lease that holds the cached page.
        page: its index in the prompt.
        blocks: the engine's numbers of its blocks.
    """

    job: int
    request: str
    ticket: bytes
    page: int
    blocks: list[int]


@dataclass(slots=True)
class StepPlan:
    """One step.

    Attributes:
        loads, stores, audits: what to begin.
        fence: jobs whose blocks this step may overwrite: wait for them first.
        kept: requests that have ended and keep their blocks until nothing reads them; report each once.
        tokens: that the engine computes with it.
    """

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    audits: list[Audit] = field(default_factory=list)
    fence: list[int] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    tokens: int = 0


@dataclass(slots=True)
class Report:
    """What workers have done since they reported last.

    Attributes:
        done: how many workers have ended each job.
        audited: of audited pages, by outcome: "equal", "different" or why they could not be compared.
        refused: why a worker reads and writes nothing; empty while all do.
        lost: of loads of which blocks did not come, how many those are, by job: the last ones, on this worker.
        unstored: of early stores that came to nothing, index of the first page that is not there, by job.
        at_risk: jobs whose pages a failed device may still write: their leases must not end.
    """

    done: Counter[int] = field(default_factory=Counter)
    audited: Counter[str] = field(default_factory=Counter)
    refused: str = ""
    lost: dict[int, int] = field(default_factory=dict)
    unstored: dict[int, int] = field(default_factory=dict)
    at_risk: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.done or self.audited or self.refused or self.lost or self.unstored or self.at_risk)

    def add(self, other: Report) -> None:
        """Take another worker's report in."""
        self.done.update(other.done)
        self.audited.update(other.audited)
        for job, blocks in other.lost.items():  # blocks that one worker lacks are of no use on others
            self.lost[job] = max(self.lost.get(job, 0), blocks)
        for job, page in other.unstored.items():
            self.unstored[job] = min(self.unstored.get(job, page), page)
        self.at_risk |= other.at_risk
        self.refused = self.refused or other.refused
