"""What a request was counted as: pages by tier, and a reason for each page that did not come from the cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache.core.registry import DEVICE
from hicache.records import MissReason

if TYPE_CHECKING:
    from hicache.core.ghosts import Ghosts
    from hicache.core.transfers import Lease


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """One request's pages. `asked == device + host + storage + sum(missed.values())`, always.

    Attributes:
        asked: whole pages that the request might have taken from the cache.
        device, host, storage: pages it got, by the tier they were in when it began; those that another request has
            computed since then count as the top tier's.
        missed: the others, by reason; reasons that did not occur are left out.
        aborted: whether the request ended without success; it is counted all the same.
    """

    asked: int = 0
    device: int = 0
    host: int = 0
    storage: int = 0
    missed: dict[MissReason, int] = field(default_factory=dict)
    aborted: bool = False


def count(lease: Lease, ghosts: Ghosts, *, aborted: bool) -> RequestCounts:
    """The counts of a lease that is being released."""
    match, asked = lease.match, lease.limit
    got = min(lease.usable, asked)
    device = min(match.device, got)
    host = min(match.host, got - device)
    storage = min(match.storage, got - device - host)
    # What no tier had when it began, another request has computed meanwhile: that came from the top tier.
    meanwhile = got - device - host - storage
    if lease.tree.registry.top == DEVICE:
        device += meanwhile
    else:
        host += meanwhile
    return RequestCounts(asked, device, host, storage, _missed(lease, ghosts, got), aborted)


def _missed(lease: Lease, ghosts: Ghosts, got: int) -> dict[MissReason, int]:
    asked = lease.limit
    if got >= asked:
        return {}
    known = min(max(got, lease.match.pages), asked)
    missed: Counter[MissReason] = Counter()
    if known > got:
        missed[_undelivered(lease, got)] = known - got
    if known == asked:
        return dict(missed)
    prompt, namespace = lease.prompt, lease.tree.namespace
    elsewhere = not known and ghosts.known_elsewhere(namespace, prompt.symbols[: prompt.width])
    otherwise = MissReason.OTHER_NAMESPACE if elsewhere else MissReason.COLD
    told = asked if lease.unanswered_at is None else min(max(known, lease.unanswered_at), asked)
    reasons = [otherwise] * (told - known) + [lease.unanswered] * (asked - told)
    if ghosts.remembers:
        gone = ghosts.reasons(namespace, prompt.hashes(known, asked))
        reasons = [reason or otherwise for reason, otherwise in zip(gone, reasons, strict=True)]
    missed.update(reasons)
    return dict(missed)


def _undelivered(lease: Lease, got: int) -> MissReason:
    """Why pages that were there when the request began did not reach it."""
    if lease.failed_at is not None and lease.failed_at <= got:
        return lease.failure
    if lease.short_at is not None and lease.short_at <= got:
        return MissReason.OVER_BUDGET
    return MissReason.LATE
