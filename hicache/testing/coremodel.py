"""What the core's driver remembers of requests and transfers."""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache.core.residency import Slots
from hicache.core.transfers import Lease, Transfer


@dataclass(eq=False)
class ModelEngine:
    """A request as its engine sees it."""

    lease: Lease
    number: int
    reads: list[tuple[int, Slots, list[int]]] = field(default_factory=list)  # tier, slots, tags expected there


@dataclass
class RunningTransfer:
    """A transfer under way: whether its I/O has begun, and what a read of storage found then."""

    transfer: Transfer
    begun: bool = False
    got: list[bool] = field(default_factory=list)
