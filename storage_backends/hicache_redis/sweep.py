"""Removing what a clear has left: in the background, in small batches, nothing but objects of the cleared namespace."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from .channel import Deadline
from .labels import scan
from .names import Names
from .pool import NodePool
from .topology import Topology
from .transfers import ask, command
from .trouble import Trouble

__all__ = ["Sweeper", "remove"]

BATCH: Final = 256
PASSES: Final = 5
_PAUSE: Final = 1.0


def remove(pool: NodePool, names: Sequence[bytes], deadline: Deadline) -> int:
    """Unlink keys of one node, which frees their memory behind the server's back. Returns how many were there.

    Raises:
        Trouble: the call broke off.
    """
    with pool.channel(deadline) as channel:
        answers = ask(channel, [command(b"UNLINK", name) for name in names])
    return sum(answer for answer in answers if isinstance(answer, int))


class Sweeper:
    """Sweeps one namespace after the other, in a thread that lives while there is something to do.

    Args:
        names: of keys.
        topology: where they are.
        deadline: makes the deadline of one step.
    """

    def __init__(self, names: Names, topology: Topology, *, deadline: Callable[[], Deadline]) -> None:
        self._names = names
        self._topology = topology
        self._deadline = deadline
        self._condition = threading.Condition()
        self._wanted: dict[bytes, int] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.removed = 0

    def sweep(self, namespace: bytes, floor: int) -> None:
        """Remove objects of the namespace whose generation is below the floor, some time."""
        with self._condition:
            if self._stop.is_set():
                return
            self._wanted[namespace] = max(floor, self._wanted.get(namespace, 0))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hicache-redis-sweep", daemon=True)
                self._thread.start()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until everything is swept; False if it took longer than `timeout` seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: self._thread is None, timeout)

    def close(self, timeout: float) -> None:
        """End the thread after its current step."""
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._wanted or self._stop.is_set():
                    self._thread = None
                    self._condition.notify_all()
                    return
                namespace, floor = next(iter(self._wanted.items()))
            for attempt in range(PASSES):
                # A node in trouble, or slots on the move: what was not found now is looked for again.
                if self._sweep(namespace, floor) or self._stop.wait(_PAUSE * 2**attempt):
                    break
            with self._condition:
                if self._wanted.get(namespace) == floor:
                    del self._wanted[namespace]

    def _sweep(self, namespace: bytes, floor: int) -> bool:
        """One pass over all nodes; whether nothing was left."""
        complete = True
        with contextlib.suppress(Trouble):
            for pool in self._topology.primaries(self._deadline()):
                for batch in self._old(pool, namespace, floor):
                    if self._stop.is_set():
                        return False
                    removed = remove(pool, batch, self._deadline())
                    complete = complete and removed == len(batch)
                    self.removed += removed
            return complete
        return False

    def _old(self, pool: NodePool, namespace: bytes, floor: int) -> Iterator[list[bytes]]:
        for names in scan(pool, self._names.of_namespace(namespace), self._deadline):
            old = [name for name in set(names) if self._is_old(name, namespace, floor)]
            for at in range(0, len(old), BATCH):
                yield old[at : at + BATCH]

    def _is_old(self, name: bytes, namespace: bytes, floor: int) -> bool:
        key = self._names.parse(name)
        return key is not None and key.namespace == namespace and key.generation < floor
