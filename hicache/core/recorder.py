"""The flight recorder: a core that notes each of its inputs before it acts on it.

A recording is a row of segments (see `recordings`), each with a checkpoint at its start unless the core was new, then
the inputs. Two segments are kept, so memory is bounded and a recording always reaches back over one whole segment. Page
hashes stand for tokens: a recording has no text in it. `replayer` repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec

from hicache.core import checkpoint
from hicache.core.cache import FORGET_NODES, Core
from hicache.core.config import CoreConfig
from hicache.core.prompt import Hasher, Prompt
from hicache.core.reasons import RequestCounts
from hicache.core.recordings import HEAD, MAGIC, VERSION, Header, Segments, put_entry
from hicache.core.residency import Slots, Words
from hicache.core.transfers import Lease, Transfer
from hicache.core.tree import HiRadixTree
from hicache.errors import InvalidInput, OutOfSlots
from hicache.records import MissReason, PageResult

P = ParamSpec("P")
R = TypeVar("R")


def mark(core: Core) -> int:
    """A cheap fingerprint of a core's state, equal in a faithful replay."""
    device, host = core.registry.tables
    value = core.registry.tick * 31 + core.log.number
    for pages in (*device.counts, *host.counts, device.pinned, host.pinned):
        value = (value * 1_000_003 + pages) & 0xFFFF_FFFF
    return value


class RecordedCore(Core):
    """A core whose inputs are recorded. Costs a few microseconds an input, and a checkpoint a segment.

    Args:
        config: its settings.
        segments: where to.
        segment_bytes: bytes of inputs a segment holds; one larger input gets a segment that holds it.
        words: as `Core` takes them; they are no part of a recording.
        on_failure: called with the error when an input has failed on a bug, before the error is raised.
    """

    __slots__ = ("_at", "_buffer", "_inputs", "_leases_by", "_next_lease", "_next_tree", "_number", "_on_failure",
                 "_segment_bytes", "_segments", "_trees_by")  # fmt: skip

    def __init__(
        self,
        config: CoreConfig,
        segments: Segments,
        *,
        words: Words | None = None,
        segment_bytes: int = 8 << 20,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        super().__init__(config, words)
        self._segments = segments
        self._segment_bytes = segment_bytes
        self._on_failure = on_failure
        self._trees_by: dict[HiRadixTree, int] = {}
        self._leases_by: dict[Lease, int] = {}
        self._next_tree = self._next_lease = 1
        self._number = self._inputs = 0
        self._begin(b"")

    def _begin(self, state: bytes, *, least: int = 0) -> None:
        room = max(self._segment_bytes, least) + HEAD.size
        header = Header(
            magic=MAGIC,
            version=VERSION,
            number=self._number,
            inputs=self._inputs,
            segment_bytes=room,
            config=self.config,
            state=state,
            trees={number: tree.namespace for tree, number in self._trees_by.items()},
            next_tree=self._next_tree,
            next_lease=self._next_lease,
        )
        self._number += 1
        first = msgspec.msgpack.encode(header)
        self._buffer = self._segments.begin(HEAD.size + len(first) + room)
        self._at = put_entry(self._buffer, 0, first)

    def note(self, operation: str, *arguments: Any) -> None:
        """Record one input, before it is acted on."""
        data = msgspec.msgpack.encode((mark(self), operation, *arguments))
        if self._at + len(data) + 2 * HEAD.size > len(self._buffer):
            self.begin_anew(least=len(data) + HEAD.size)
        self._at = put_entry(self._buffer, self._at, data)
        self._inputs += 1

    def begin_anew(self, *, least: int = 0) -> None:
        """Begin a segment, with room for an input of `least` bytes.

        The last one is full, or the core was changed by other means than its inputs: a replay must begin after that.
        """
        self._forget_dead()
        self._begin(checkpoint.encode(self._taker().state()), least=least)

    def _taker(self) -> checkpoint.Taker:
        return checkpoint.Taker(self, trees=self._trees_by, leases=self._leases_by)

    def _forget_dead(self) -> None:
        buried = {grave.tree for grave in self.graves}
        in_use = {lease.tree for lease in self._leases_by} | {t.tree for t in self.log.open.values()} | buried
        self._trees_by = {t: n for t, n in self._trees_by.items() if t.live or t in in_use}

    def _act(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return act(*args, **kwargs)
        except (InvalidInput, OutOfSlots):
            raise  # the caller's affair
        except Exception as error:
            if self._on_failure is not None:
                self._on_failure(error)
            raise

    def _for(self, lease: Lease, operation: str, *arguments: Any) -> None:
        self.note(operation, self._leases_by.get(lease, 0), *arguments)

    # ---- the inputs

    def tree(self, namespace: bytes, *, width: int, hasher: Hasher, generation: int = 0) -> HiRadixTree:
        """See `Core.tree`."""
        known = {tree.namespace for tree in self.trees}
        if namespace not in known:
            self.note("tree", self._next_tree, namespace, generation, self.config.span_bytes // width, hasher.size)
        tree = self._act(super().tree, namespace, width=width, hasher=hasher, generation=generation)
        self._enter(tree)
        return tree

    def drop(self, tree: HiRadixTree) -> bool:
        """See `Core.drop`."""
        self.note("drop", self._trees_by[tree])
        return self._act(super().drop, tree)

    def _enter(self, tree: HiRadixTree) -> None:
        if tree not in self._trees_by:
            self._trees_by[tree] = self._next_tree
            self._next_tree += 1

    def lease(self, tree: HiRadixTree, prompt: Prompt, *, limit: int | None = None, priority: int = 0) -> Lease:
        """See `Core.lease`."""
        self.note("lease", self._next_lease, self._trees_by[tree], _glued(prompt), limit, priority)
        lease = self._act(super().lease, tree, prompt, limit=limit, priority=priority)
        self._leases_by[lease] = self._next_lease
        self._next_lease += 1
        return lease

    def believe(self, lease: Lease, upto: int) -> None:
        """See `Core.believe`."""
        self._for(lease, "believe", upto)
        self._act(super().believe, lease, upto)

    def decline(self, lease: Lease, page: int) -> None:
        """See `Core.decline`."""
        self._for(lease, "decline", page)
        self._act(super().decline, lease, page)

    def unanswered(self, lease: Lease, page: int, reason: MissReason) -> None:
        """See `Core.unanswered`."""
        self._for(lease, "unanswered", page, reason.value)
        self._act(super().unanswered, lease, page, reason)

    def prefetch(self, lease: Lease, upto: int | None = None) -> int:
        """See `Core.prefetch`."""
        self._for(lease, "prefetch", upto)
        return self._act(super().prefetch, lease, upto)

    def load(self, lease: Lease, upto: int | None = None) -> int:
        """See `Core.load`."""
        self._for(lease, "load", upto)
        return self._act(super().load, lease, upto)

    def allocate(self, lease: Lease, pages: int) -> Slots:
        """See `Core.allocate`."""
        self._for(lease, "allocate", pages)
        return self._act(super().allocate, lease, pages)

    def commit(self, lease: Lease, upto: int, *, ready: bool) -> Transfer | None:
        """See `Core.commit`."""
        self._for(lease, "commit", upto, ready)
        return self._act(super().commit, lease, upto, ready=ready)

    def extend(self, lease: Lease, prompt: Prompt) -> None:
        """See `Core.extend`."""
        self._for(lease, "extend", _glued(prompt))
        self._act(super().extend, lease, prompt)

    def touch(self, lease: Lease, now: float) -> int:
        """See `Core.touch`."""
        self._for(lease, "touch", now)
        return self._act(super().touch, lease, now)

    def withdraw_interest(self, lease: Lease) -> None:
        """See `Core.withdraw_interest`."""
        self._for(lease, "withdraw_interest")
        self._act(super().withdraw_interest, lease)

    def release(self, lease: Lease, *, aborted: bool = False) -> RequestCounts:
        """See `Core.release`."""
        if lease.counts is not None:
            return lease.counts
        self._for(lease, "release", aborted)
        counts = self._act(super().release, lease, aborted=aborted)
        self._leases_by.pop(lease, None)
        return counts

    def complete(self, transfer_id: int, results: Sequence[PageResult]) -> None:
        """See `Core.complete`."""
        self.note("complete", transfer_id, bytes(results))
        self._act(super().complete, transfer_id, results)

    def give_up(self, transfer_id: int) -> None:
        """See `Core.give_up`."""
        self.note("give_up", transfer_id)
        self._act(super().give_up, transfer_id)

    def flush(self) -> int:
        """See `Core.flush`."""
        self.note("flush")
        return self._act(super().flush)

    def drain(self, limit: int = 512) -> int:
        """See `Core.drain`."""
        self.note("drain", limit)
        return self._act(super().drain, limit)

    def clear(self, tree: HiRadixTree, generation: int | None = None) -> HiRadixTree:
        """See `Core.clear`."""
        self.note("clear", self._trees_by[tree], generation)
        after = self._act(super().clear, tree, generation)
        self._enter(after)
        return after

    def detach_storage(self) -> None:
        """See `Core.detach_storage`."""
        self.note("detach_storage")
        self._act(super().detach_storage)

    def forget_storage(self, nodes: int = FORGET_NODES) -> bool:
        """See `Core.forget_storage`."""
        self.note("forget_storage", nodes)
        return self._act(super().forget_storage, nodes)

    def attach_storage(self) -> None:
        """See `Core.attach_storage`."""
        self.note("attach_storage")
        self._act(super().attach_storage)

    def sweep(self, pages: int = 8192) -> int:
        """See `Core.sweep`."""
        self.note("sweep", pages)
        return self._act(super().sweep, pages)

    def evict(self, tier: int, pages: int) -> int:
        """See `Core.evict`."""
        self.note("evict", tier, pages)
        return self._act(super().evict, tier, pages)

    def check(self) -> None:
        """See `Core.check`."""
        self.note("check")
        self._act(super().check)


def _glued(prompt: Prompt) -> bytes:
    return b"".join(prompt.hashes(0, prompt.pages))
