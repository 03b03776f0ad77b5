"""What a running service says about itself when it is asked whether engines may start."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Final

import numpy as np

from hicache.errors import HicacheError, OutOfSlots
from hicache.rpc.service import Finding, RequestScope
from hicache.units import format_size

if TYPE_CHECKING:
    from hicache.sidecar.pool import Pool
    from hicache.sidecar.service import SidecarService

PATIENCE: Final = 5.0
"""Seconds that the canary page of one pool may take."""

_SALT: Final = "hicache diagnosis"  # a namespace of its own, so that its page is nobody's hit


async def diagnose(service: SidecarService) -> tuple[Finding, ...]:
    """Look at everything that can be looked at without an engine. Changes nothing but the canary's own pages."""
    findings = [_memory(service), *_degraded(service), *_disagreements(service), _quarantine(service)]
    for pool in service.pools:
        findings.append(await _canary(service, pool))
        findings.append(_storage(pool))
    return tuple(findings)


def _memory(service: SidecarService) -> Finding:
    budget = service.pools.budget
    used = budget.total - budget.free
    text = f"{format_size(used)} of {format_size(budget.total)} are in {len(list(service.pools))} pools"
    return Finding("host memory", True, text)


def _degraded(service: SidecarService) -> Iterator[Finding]:
    for text in service.degraded:
        yield Finding("degraded", False, text)


def _disagreements(service: SidecarService) -> Iterator[Finding]:
    """Pools of one model under several namespaces share nothing: often a mistake in one engine's settings."""
    key = lambda pool: (pool.namespace.model, pool.tenant or "")  # noqa: E731
    for (model, _), pools in groupby(sorted(service.pools, key=key), key=key):
        described = [pool.namespace.describe() for pool in pools]
        differing = [
            name for name in described[0] if name != "digest" and len({str(entry[name]) for entry in described}) > 1
        ]
        if differing:
            text = f"engines of {model!r:.80} share nothing: their namespaces differ in {', '.join(differing)}"
            yield Finding("namespaces", False, f"{text}; give all of them the same")


def _quarantine(service: SidecarService) -> Finding:
    leases = service.leases.statistics()
    text = f"{leases.open} open, {leases.ended} ended that still keep {leases.quarantined_slots} slots"
    return Finding("leases", not leases.quarantined_slots, text)


def _storage(pool: Pool) -> Finding:
    check = f"storage of {pool.namespace.model}"
    state = pool.cache.statistics().canary
    if state == "off":
        return Finding(check, True, "there is none, or its canary is off")
    return Finding(check, not state.startswith("failed"), f"canary object: {state}")


async def _canary(service: SidecarService, pool: Pool) -> Finding:
    """A page whose bytes follow from its namespace is committed and read back, from wherever it is by now."""
    check = f"canary page of {pool.namespace.model}"
    scope = RequestScope(salt=_SALT)
    tokens = np.arange(pool.namespace.page_size, dtype=np.uint32)
    expected = hashlib.shake_128(pool.namespace.digest).digest(pool.page_bytes)
    try:
        for came_from in ("storage or host memory", "host memory, where it was just committed"):
            request = await pool.bring_up(scope, tokens, until=service.loop.time() + PATIENCE)
            if request is None:
                return Finding(check, False, "its namespace's generation is not known: storage does not answer")
            try:
                if len(request.usable):
                    same = pool.same_bytes(int(request.usable[0]), expected)
                    text = f"came back from {came_from}" + (
                        "" if same else " with OTHER BYTES: do not use this service"
                    )
                    return Finding(check, same, text)
                (slot,) = request.reserve(1).tolist()
                pool.fill(slot, expected)
                request.commit(1, tokens=tokens.astype("<u4").tobytes(), first=0)
            finally:
                request.close()
        return Finding(check, False, "was committed and is not found")
    except OutOfSlots as error:
        return Finding(check, False, f"no slot for it: {error}")
    except HicacheError as error:
        return Finding(check, False, str(error))
