"""Forgetting a namespace: at once in memory, by a higher generation in storage."""

from __future__ import annotations

from hicache.errors import StorageError
from hicache.runtime.parts import Parts
from hicache.runtime.reducer import Ringer
from hicache.runtime.scopes import Scope


def clear_memory(parts: Parts, scope: Scope, pump: Ringer | None) -> int:
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
    answers: list[str] = []  # why not; empty where it was cleared

    def answer(trouble: str) -> None:
        answers.append(trouble)
        reducer.notify()

    def work() -> None:
        try:
            port.clear(scope.namespace.digest, generation)
        except (StorageError, OSError) as error:  # no fault of ours: whoever cleared is told
            reducer.post(answer, str(error))
        else:
            reducer.post(answer, "")

    asked = storage.call(work, fail=lambda: reducer.post(answer, "see the log"))
    with reducer.lock:
        reducer.settle()
        while asked and not answers and (left := end - parts.clock.now()) > 0:
            reducer.wait(left)
    if "" not in answers:
        why = answers[0] if answers else "it did not answer in time" if asked else "its queue is full"
        raise StorageError(
            f"clear: storage did not confirm the new generation ({why}): see that it works, and call clear again; "
            "until then a restart may find old pages"
        )
