"""Forgetting a namespace: at once in memory, by a higher generation in storage."""

from __future__ import annotations

from hicache.errors import StorageError
from hicache.runtime.parts import Parts
from hicache.runtime.reducer import Pump
from hicache.runtime.scopes import Scope


def clear_memory(parts: Parts, scope: Scope, pump: Pump | None) -> int:
    """Swap the tree for an empty one of the next generation, which is returned. Slots are freed in slices."""
    reducer = parts.reducer
    with reducer.lock:
        assert scope.tree is not None
        scope.tree = parts.core.clear(scope.tree)
        generation: int = scope.tree.generation
        reducer.sweeping = True
        reducer.settle()
        reducer.notify()
    if pump is not None:
        pump.ring()
    elif parts.options.background:
        while reducer.sweeping:
            reducer.sweep()
    return generation


def clear_storage(parts: Parts, scope: Scope, generation: int, *, end: float) -> None:
    """Make the namespace's generation known to storage, on a storage thread, and wait for it.

    Raises:
        StorageError: it was refused, failed, or did not end in time.
        CacheClosed: the cache was closed meanwhile.
    """
    port, storage, reducer = parts.port, parts.storage, parts.reducer
    if port is None or storage is None or not storage.attached:
        return
    answers: list[bool] = []

    def answer(cleared: bool) -> None:
        answers.append(cleared)
        reducer.notify()

    def work() -> None:
        port.clear(scope.namespace.digest, generation)
        reducer.post(answer, True)

    asked = storage.call(work, fail=lambda: reducer.post(answer, False))
    with reducer.lock:
        reducer.settle()
        while asked and not answers and (left := end - parts.clock.now()) > 0:
            reducer.wait(left)
    if True not in answers:
        raise StorageError("clear: storage did not confirm the new generation: call clear again")
