"""Whom an administrator's call is about, and whether he may: the pools that a target names, of those he sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from hicache.errors import InvalidInput, NotFound, PermissionDenied
from hicache.rpc.service import Caller, RequestScope, Target
from hicache.sidecar.document import sees_all
from hicache.sidecar.pool import Pool

__all__ = ["check_admin", "named", "targeted", "token_ids", "visible"]


def check_admin(caller: Caller) -> None:
    """See that a caller may administer.

    Raises:
        PermissionDenied: it may not.
    """
    if not caller.admin:
        raise PermissionDenied(f"{caller.name or 'this caller'} has no right to administer")


def token_ids(tokens: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """The ids of a prompt that came as bytes, u32 little endian.

    Raises:
        InvalidInput: no whole number of ids.
    """
    if len(tokens) % 4:
        raise InvalidInput(f"tokens have {len(tokens)} bytes, not a multiple of 4")
    return np.frombuffer(tokens, "<u4")


def visible(pools: Iterable[Pool], caller: Caller) -> Iterator[Pool]:
    """The pools that a caller may see."""
    return (pool for pool in pools if pool.tenant == caller.tenant or sees_all(caller))


def targeted(pools: Iterable[Pool], caller: Caller, target: Target | None) -> list[tuple[Pool, RequestScope]]:
    """Pools and scopes that a target names; without one all that are in use, of those that the caller may see.

    Raises:
        NotFound, InvalidInput, PermissionDenied: see `named`.
    """
    if target is not None:
        return [(pool, target.scope) for pool in named(pools, caller, target)]
    return [
        (pool, RequestScope(adapter, salt))
        for pool in visible(pools, caller)
        for adapter, salt in pool.cache.scopes_in_use()
    ]


def named(pools: Iterable[Pool], caller: Caller, target: Target) -> list[Pool]:
    """The pools of the model that a target names; several where topologies differ.

    Raises:
        NotFound: none that the caller may see.
        InvalidInput: a model's name that several namespaces have.
        PermissionDenied: it names another tenant.
    """
    tenant = caller.tenant if target.tenant is None else target.tenant
    if tenant != caller.tenant and caller.tenant is not None:
        raise PermissionDenied(f"{caller.name or 'this caller'} may not name other tenants")
    digest, model = target.namespace_digest, target.model
    found = [
        pool
        for pool in pools
        if pool.tenant == tenant and (pool.namespace.digest == digest if digest else pool.namespace.model == model)
    ]
    if not found:
        known = ", ".join(sorted({pool.namespace.model for pool in visible(pools, caller)})) or "none"
        raise NotFound(
            f"no pool of model {model or digest.hex()!r:.80} is here; known models: {known:.300}. A model is known "
            "once an engine has attached to it"
        )
    if len({pool.namespace.digest for pool in found}) > 1:
        digests = ", ".join(sorted({pool.namespace.digest.hex() for pool in found}))
        raise InvalidInput(f"model {model!r:.80} is served under several namespaces; name one by digest: {digests}")
    return found
