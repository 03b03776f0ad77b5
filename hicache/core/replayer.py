"""Repeats recordings of the flight recorder, input by input, on a core of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from hicache.core import checkpoint
from hicache.core.cache import Core
from hicache.core.prompt import Prompt, SymbolsAreHashes
from hicache.core.recorder import mark
from hicache.core.recordings import Header
from hicache.core.tree import HiRadixTree
from hicache.errors import HicacheInternalError, InvalidInput, OutOfSlots
from hicache.records import MissReason, PageResult

_OPERATIONS: Final = frozenset(
    [
        "tree",
        "lease",
        "believe",
        "decline",
        "unanswered",
        "prefetch",
        "load",
        "allocate",
        "commit",
        "extend",
        "touch",
        "withdraw_interest",
        "release",
        "complete",
        "give_up",
        "flush",
        "drain",
        "clear",
        "drop",
        "detach_storage",
        "forget_storage",
        "attach_storage",
        "sweep",
        "evict",
        "check",
    ]
)
"""What a recording may ask for; anything else in it is damage, or an attempt to call what is no input."""


class DivergenceError(HicacheInternalError):
    """A replay went another way than the recording: another version of the code, or a damaged recording."""


class ReplayError(HicacheInternalError):
    """A replay failed, as the recorded run will have.

    Attributes:
        step: number of the input, from 1 for the first input of the recorded cache.
        operation: its name.
    """

    def __init__(self, step: int, operation: str, cause: Exception) -> None:
        self.step = step
        self.operation = operation
        kind = "" if isinstance(cause, HicacheInternalError) else f"{type(cause).__name__}: "
        super().__init__(f"step {step} ({operation}): {kind}{cause}")


class Replayer:
    """Repeats the inputs of a recording on a core of its own.

    Args:
        header: of the segment to begin with.

    Attributes:
        core: the core.
        steps: number of the last input repeated; the recorded cache's first one is 1.

    Raises:
        InvalidInput: the checkpoint cannot be read: the recording is damaged.
    """

    def __init__(self, header: Header) -> None:
        self.steps = header.inputs
        if header.state:
            try:
                maker = checkpoint.Maker(checkpoint.decode(header.state))
                mark(maker.core)
            except (msgspec.MsgspecError, AssertionError, LookupError, TypeError, ValueError) as error:
                raise InvalidInput(f"the flight recording is damaged: its checkpoint cannot be read: {error}") from None
            self.core, self._trees, self._leases = maker.core, maker.trees, maker.leases
        else:
            self.core, self._trees, self._leases = Core(header.config), {}, {}
        self._next_tree, self._next_lease = header.next_tree, header.next_lease

    def repeat(self, entry: Sequence[Any]) -> None:
        """Repeat one input.

        Raises:
            DivergenceError: the state is not the one that was recorded.
            ReplayError: the input fails on an internal error, as it did when recorded.
        """
        expected, operation, *arguments = entry
        self.steps += 1
        if mark(self.core) != expected:
            raise DivergenceError(f"step {self.steps} ({operation}): the state is not the one that was recorded")
        act: Callable[..., None] | None = getattr(self, f"_{operation}") if operation in _OPERATIONS else None
        if act is None:
            raise InvalidInput(f"step {self.steps}: unknown operation {operation!r:.40}; the recording is damaged")
        try:
            act(*arguments)
        except (InvalidInput, OutOfSlots):
            pass  # refused then as now; the caller was told
        except Exception as error:  # whatever it was that failed then
            raise ReplayError(self.steps, operation, error) from error
        self.core.actions.clear()
        self.core.finished.clear()
        self.core.events.clear()

    def _tree(self, number: int, namespace: bytes, generation: int, span_pages: int, size: int) -> None:
        tree = self.core.tree(namespace, width=size, hasher=SymbolsAreHashes(size), generation=generation)
        tree.span_pages = max(1, span_pages)
        self._trees[number] = tree
        self._next_tree = number + 1

    def _drop(self, number: int) -> None:
        self.core.drop(self._trees[number])

    def _prompt(self, tree: HiRadixTree, hashes: bytes) -> Prompt:
        return Prompt(hashes, tree.width, tree.hasher)

    def _lease(self, number: int, tree_number: int, hashes: bytes, limit: int | None, priority: int) -> None:
        tree = self._trees[tree_number]
        lease = self.core.lease(tree, self._prompt(tree, hashes), limit=limit, priority=priority)
        self._leases[number] = lease

    def _believe(self, number: int, upto: int) -> None:
        self.core.believe(self._leases[number], upto)

    def _decline(self, number: int, page: int) -> None:
        self.core.decline(self._leases[number], page)

    def _unanswered(self, number: int, page: int, reason: str) -> None:
        self.core.unanswered(self._leases[number], page, MissReason(reason))

    def _prefetch(self, number: int, upto: int | None) -> None:
        self.core.prefetch(self._leases[number], upto)

    def _load(self, number: int, upto: int | None) -> None:
        self.core.load(self._leases[number], upto)

    def _allocate(self, number: int, pages: int) -> None:
        self.core.allocate(self._leases[number], pages)

    def _commit(self, number: int, upto: int, ready: bool) -> None:
        self.core.commit(self._leases[number], upto, ready=ready)

    def _extend(self, number: int, hashes: bytes) -> None:
        lease = self._leases[number]
        self.core.extend(lease, self._prompt(lease.tree, hashes))

    def _touch(self, number: int, now: float) -> None:
        self.core.touch(self._leases[number], now)

    def _withdraw_interest(self, number: int) -> None:
        self.core.withdraw_interest(self._leases[number])

    def _release(self, number: int, aborted: bool) -> None:
        self.core.release(self._leases.pop(number), aborted=aborted)

    def _complete(self, transfer: int, results: bytes) -> None:
        self.core.complete(transfer, [PageResult(result) for result in results])

    def _give_up(self, transfer: int) -> None:
        self.core.give_up(transfer)

    def _flush(self) -> None:
        self.core.flush()

    def _drain(self, limit: int) -> None:
        self.core.drain(limit)

    def _clear(self, number: int, generation: int | None) -> None:
        tree = self._trees[number]
        after = self.core.clear(tree, generation)
        if after not in self._trees.values():
            after.span_pages = tree.span_pages
            self._trees[self._next_tree] = after
            self._next_tree += 1

    def _detach_storage(self) -> None:
        self.core.detach_storage()

    def _forget_storage(self, nodes: int) -> None:
        self.core.forget_storage(nodes)

    def _attach_storage(self) -> None:
        self.core.attach_storage()

    def _sweep(self, pages: int) -> None:
        self.core.sweep(pages)

    def _evict(self, tier: int, pages: int) -> None:
        self.core.evict(tier, pages)

    def _check(self) -> None:
        self.core.check()
