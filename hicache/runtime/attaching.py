"""Taking a storage away from a cache that is in use, and giving it one."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from hicache.clock import Clock
from hicache.core.transfers import TransferKind
from hicache.errors import ConfigError, StorageError
from hicache.memory.base import HostPool
from hicache.records import Tier
from hicache.runtime.arguments import storage_of
from hicache.runtime.options import Options
from hicache.runtime.parts import Parts
from hicache.runtime.queues import nothing
from hicache.runtime.reducer import Ringer
from hicache.runtime.scopes import Scope
from hicache.storage.base import StorageBackend
from hicache.storage.registry import configured
from hicache.storage.wrappers import MeteredBackend
from hicache.units import format_size

_log = logging.getLogger("hicache.runtime")

ROUNDS = 8
"""How often attaching asks for generations anew because namespaces were cleared meanwhile."""


@dataclass(frozen=True, slots=True)
class DetachReport:
    """How detaching went.

    Attributes:
        failed_pages: pages of transfers that had been asked for and were failed instead of begun or awaited.
        stuck_pages: pages of transfers that are still inside the old backend: their slots are free when they end.
        stuck_calls: calls, transfers or not, that are still inside it.
    """

    failed_pages: int = 0
    stuck_pages: int = 0
    stuck_calls: int = 0


def open_backend(storage: str | StorageBackend, options: Options, clock: Clock) -> StorageBackend:
    """The guarded backend of what a caller gave, with the wrappers that the options ask for.

    Raises:
        ConfigError, StorageError: as `hicache.open`.
    """
    storage = storage_of(storage)
    if isinstance(storage, MeteredBackend):
        return configured(storage)
    return configured(storage, retry=options.retry, breaker=options.breaker, now=clock.now)


def warn_if_small(backend: StorageBackend, host: HostPool) -> None:
    """Say so when storage holds less than the host tier.

    By estimate what one namespace works with is at least what the host tier holds; less in storage is gone from there
    before it is gone from the host tier, and never of use. Storage without room for two pages takes none, and says so.
    """
    capacity, host_bytes = backend.statistics().capacity, host.slots * host.page_bytes
    if capacity is not None and 2 * host.page_bytes <= capacity < host_bytes:
        _log.warning(
            "storage holds %s, which is less than the host tier's %s and so than one namespace's working set: "
            "hardly anything will be found there; raise its capacity (maxmemory, for Redis)",
            format_size(capacity),
            format_size(host_bytes),
        )


def detach(parts: Parts, pump: Ringer | None, *, end: float, force: bool) -> DetachReport:
    """Take the storage away.

    Args:
        parts: of the cache.
        pump: its pump.
        end: until when to wait.
        force: whether to fail what is under way instead of refusing.

    Raises:
        ConfigError: none is attached.
        StorageError: work was still under way at the end, and `force` was not given; it stays attached.
        CacheClosed: the cache was closed meanwhile.
    """
    storage, port, reducer = parts.storage, parts.port, parts.reducer
    if storage is None or port is None or not storage.attached:
        raise ConfigError("detach: no storage is attached")
    with reducer.lock:
        reducer.settle()
        if not force:
            _let_copies_end(parts, end)
        storage.changed(attached=False)  # from now on nothing is begun
        failed = 0
        try:
            if not force:
                _wait(parts, end)
                if (pages := under_way(parts)) or not storage.idle:
                    raise StorageError(
                        f"detach: {pages} pages are still on their way to or from storage: "
                        "give it more time, or force=True"
                    )
        except BaseException:
            storage.attached = True
            raise
        failed = under_way(parts)
        parts.core.detach_storage()
        storage.drop()
        reducer.settle()
        reducer.notify()
        _wait(parts, end)
        storage.abandon()
        owned = port.detach()
        stuck = under_way(parts)
        calls = sum(queue.hung + queue.running for queue in storage.statistics())
        reducer.forgetting = True
    if pump is not None:
        pump.ring()
    elif parts.options.background:
        while reducer.forgetting:
            reducer.forget()
    if owned is not None:
        _close(owned, max(0.0, end - parts.clock.now()) if calls else None)
    return DetachReport(failed - stuck, stuck, calls)


def attach(parts: Parts, backend: StorageBackend, *, owned: bool) -> None:
    """Give the cache a storage. Blocks on the backend, as opening does, to agree on generations.

    A namespace's generation becomes the higher of what the backend and this cache have, in both of them.

    Raises:
        StorageError: the backend cannot be asked, or namespaces are cleared faster than they can be agreed on.
    """
    storage, port, reducer = parts.storage, parts.port, parts.reducer
    assert storage is not None
    assert port is not None
    while reducer.forgetting:
        reducer.forget()
    for _ in range(ROUNDS):
        agreed = _agree(parts, backend)
        with reducer.lock:
            reducer.settle()
            if any(_generation(scope) != before for scope, before, _ in agreed):
                continue
            known = {scope for scope, _, _ in agreed}
            if any(scope not in known for scope in parts.scopes.resolved()):
                continue
            parts.core.attach_storage()
            port.attach(backend, owned=owned)
            storage.changed(attached=True)
            for scope, _, generation in agreed:
                parts.scopes.agreed(scope, generation)
            reducer.settle()
            reducer.notify()
            return
    raise StorageError("attach: namespaces are being cleared all the time: try again")


def check_attachable(parts: Parts) -> None:
    """Raise ConfigError unless a storage could be attached now."""
    if parts.storage is None:
        raise ConfigError("attach: the cache was opened without storage: open it with attachable=True")
    if parts.storage.attached:
        raise ConfigError("attach: a storage is attached already: detach it first")


def under_way(parts: Parts) -> int:
    """Pages of transfers to or from storage that have not ended. The reducer's lock is held."""
    running = parts.executor.running.values()
    return sum(transfer.count for transfer in running if Tier.STORAGE in transfer.kind.value)


def _let_copies_end(parts: Parts, end: float) -> None:
    """Wait for the write-backs that are under way: what they bring down may still go to storage."""
    reducer = parts.reducer
    begun = {number for number, transfer in reducer.transfers.items() if transfer.kind is TransferKind.WRITE_BACK}
    while not begun.isdisjoint(reducer.transfers) and (left := end - parts.clock.now()) > 0:
        reducer.wait(left)
    if not begun.isdisjoint(reducer.transfers):
        raise StorageError("detach: pages on their way down had not arrived: give it more time, or force=True")


def _wait(parts: Parts, end: float) -> None:
    storage, reducer = parts.storage, parts.reducer
    assert storage is not None
    # Jobs tell their results before they end, and who waits looks again when told: so he is told of their end too.
    storage.ended = lambda: reducer.post(reducer.notify)
    try:
        while (under_way(parts) or not storage.idle) and (left := end - parts.clock.now()) > 0:
            reducer.wait(left)
    finally:
        storage.ended = nothing


def _agree(parts: Parts, backend: StorageBackend) -> list[tuple[Scope, int, int]]:
    """Scopes with their tree's generation, and the one to agree on."""
    agreed = []
    for scope in parts.scopes.resolved():
        ours = _generation(scope)
        theirs = backend.generation(scope.namespace.digest)
        if theirs < ours:
            backend.clear(scope.namespace.digest, ours)  # what is there is of a life that has ended here
        agreed.append((scope, ours, max(ours, theirs)))
    return agreed


def _generation(scope: Scope) -> int:
    assert scope.tree is not None
    return scope.tree.generation


def _close(backend: StorageBackend, patience: float | None) -> None:
    """Close a backend; with calls stuck in it, not for longer than `patience` seconds: it ends when they do."""
    if patience is None:
        backend.close()
        return
    thread = threading.Thread(target=backend.close, name="hicache-detached", daemon=True)
    thread.start()
    thread.join(patience)
