"""The flight recorder: a core that notes each of its inputs before it acts on it, and what repeats a recording.

A recording is a row of segments. Each begins with a header and, unless the core was new, a checkpoint; then follow the
inputs. Two segments are kept, so memory is bounded and a recording always reaches back over one whole segment. Page
hashes stand for tokens: a recording has no text in it.

A segment is bytes: entries of a u32 length (little endian) and a MessagePack value, ended by a length of 0 or the end.
The length is written after the value, so an entry cut short by the death of the process does not count. The first
entry is a `Header`; each further one an array `[mark, operation, arguments...]`, where `mark` is a fingerprint of the
state before it, by which a replay notices that it went another way.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import msgspec

from hicache.core import checkpoint
from hicache.core.cache import Core
from hicache.core.config import CoreConfig
from hicache.core.prompt import Hasher, Prompt, SymbolsAreHashes
from hicache.core.reasons import RequestCounts
from hicache.core.residency import Slots
from hicache.core.transfers import Lease, Transfer
from hicache.core.tree import HiRadixTree
from hicache.errors import HicacheError, HicacheInternalError, InvalidInput, OutOfSlots
from hicache.records import PageResult

VERSION: Final = 1
MAGIC: Final = "hicache flight recording"
_LENGTH = struct.Struct("<I")


class Header(msgspec.Struct, kw_only=True):
    """The first entry of a segment.

    Attributes:
        magic: what this is.
        version: of the format.
        number: of the segment, from 0.
        config: of the core.
        state: the checkpoint (`checkpoint.encode`), or nothing if the core was new.
        trees, leases: the next numbers of trees and leases.
    """

    magic: str
    version: int
    number: int
    config: CoreConfig
    state: bytes
    trees: dict[int, bytes]
    next_tree: int
    next_lease: int


class Segments(Protocol):
    """Where segments are kept."""

    def begin(self, size: int) -> memoryview:
        """A zeroed, writable buffer for the next segment; the one before the last may be thrown away."""
        ...


class MemorySegments:
    """The last two segments, in memory."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def begin(self, size: int) -> memoryview:
        """The next segment."""
        self._kept = [*self._kept[-1:], bytearray(size)]
        return memoryview(self._kept[-1])

    def dump(self) -> bytes:
        """What is kept, oldest first."""
        return b"".join(trimmed(segment) for segment in self._kept)


def trimmed(segment: bytes | bytearray | memoryview) -> bytes:
    """A segment without what it has not used, so that another may follow it."""
    at = 0
    while at + _LENGTH.size <= len(segment):
        (size,) = _LENGTH.unpack_from(segment, at)
        if not size:
            break
        at += _LENGTH.size + size
    return bytes(segment[:at]) + bytes(_LENGTH.size)


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
        segment_bytes: bytes of inputs a segment holds.
    """

    __slots__ = ("_at", "_buffer", "_leases_by", "_next_lease", "_next_tree", "_number", "_segment_bytes", "_segments",
                 "_trees_by")  # fmt: skip

    def __init__(self, config: CoreConfig, segments: Segments, *, segment_bytes: int = 8 << 20) -> None:
        super().__init__(config)
        self._segments = segments
        self._segment_bytes = segment_bytes
        self._trees_by: dict[HiRadixTree, int] = {}
        self._leases_by: dict[Lease, int] = {}
        self._next_tree = self._next_lease = 1
        self._number = 0
        self._begin(b"")

    def _begin(self, state: bytes) -> None:
        header = Header(
            magic=MAGIC,
            version=VERSION,
            number=self._number,
            config=self.config,
            state=state,
            trees={number: tree.namespace for tree, number in self._trees_by.items()},
            next_tree=self._next_tree,
            next_lease=self._next_lease,
        )
        self._number += 1
        first = msgspec.msgpack.encode(header)
        self._buffer = self._segments.begin(len(first) + self._segment_bytes + 2 * _LENGTH.size)
        self._at = 0
        self._write(first)

    def _write(self, data: bytes) -> None:
        at = self._at
        start = at + _LENGTH.size
        self._buffer[start : start + len(data)] = data  # metadata, a few hundred bytes: no page content comes here
        _LENGTH.pack_into(self._buffer, at, len(data))
        self._at = start + len(data)

    def note(self, operation: str, *arguments: Any) -> None:
        """Record one input, before it is acted on."""
        data = msgspec.msgpack.encode((mark(self), operation, *arguments))
        if self._at + len(data) + 2 * _LENGTH.size > len(self._buffer):
            self._forget_dead()
            self._begin(checkpoint.encode(self._taker().state()))
            if len(data) + 2 * _LENGTH.size > len(self._buffer) - self._at:
                raise HicacheInternalError(f"an input of {len(data)} bytes does not fit a recording's segment")
        self._write(data)

    def _taker(self) -> checkpoint.Taker:
        return checkpoint.Taker(self, trees=self._trees_by, leases=self._leases_by)

    def _forget_dead(self) -> None:
        buried = {grave.tree for grave in self.graves}
        in_use = {lease.tree for lease in self._leases_by} | {t.tree for t in self.log.open.values()} | buried
        self._trees_by = {t: n for t, n in self._trees_by.items() if t.live or t in in_use}

    def _lease_number(self, lease: Lease) -> int:
        return self._leases_by.get(lease, 0)

    # ---- the inputs

    def tree(self, namespace: bytes, *, width: int, hasher: Hasher, generation: int = 0) -> HiRadixTree:
        """See `Core.tree`."""
        known = {tree.namespace for tree in self.trees}
        if namespace not in known:
            self.note("tree", self._next_tree, namespace, generation, self.config.span_bytes // width, hasher.size)
        tree = super().tree(namespace, width=width, hasher=hasher, generation=generation)
        if tree not in self._trees_by:
            self._trees_by[tree] = self._next_tree
            self._next_tree += 1
        return tree

    def lease(self, tree: HiRadixTree, prompt: Prompt, *, limit: int | None = None, priority: int = 0) -> Lease:
        """See `Core.lease`."""
        self.note("lease", self._next_lease, self._trees_by[tree], _glued(prompt), limit, priority)
        lease = super().lease(tree, prompt, limit=limit, priority=priority)
        self._leases_by[lease] = self._next_lease
        self._next_lease += 1
        return lease

    def believe(self, lease: Lease, upto: int) -> None:
        """See `Core.believe`."""
        self.note("believe", self._lease_number(lease), upto)
        super().believe(lease, upto)

    def prefetch(self, lease: Lease, upto: int | None = None) -> int:
        """See `Core.prefetch`."""
        self.note("prefetch", self._lease_number(lease), upto)
        return super().prefetch(lease, upto)

    def load(self, lease: Lease, upto: int | None = None) -> int:
        """See `Core.load`."""
        self.note("load", self._lease_number(lease), upto)
        return super().load(lease, upto)

    def allocate(self, lease: Lease, pages: int) -> Slots:
        """See `Core.allocate`."""
        self.note("allocate", self._lease_number(lease), pages)
        return super().allocate(lease, pages)

    def commit(self, lease: Lease, upto: int, *, ready: bool) -> Transfer | None:
        """See `Core.commit`."""
        self.note("commit", self._lease_number(lease), upto, ready)
        return super().commit(lease, upto, ready=ready)

    def extend(self, lease: Lease, prompt: Prompt) -> None:
        """See `Core.extend`."""
        self.note("extend", self._lease_number(lease), _glued(prompt))
        super().extend(lease, prompt)

    def touch(self, lease: Lease, now: float) -> int:
        """See `Core.touch`."""
        self.note("touch", self._lease_number(lease), now)
        return super().touch(lease, now)

    def withdraw_interest(self, lease: Lease) -> None:
        """See `Core.withdraw_interest`."""
        self.note("withdraw_interest", self._lease_number(lease))
        super().withdraw_interest(lease)

    def release(self, lease: Lease, *, aborted: bool = False) -> RequestCounts:
        """See `Core.release`."""
        if lease.counts is not None:
            return lease.counts
        self.note("release", self._lease_number(lease), aborted)
        counts = super().release(lease, aborted=aborted)
        self._leases_by.pop(lease, None)
        return counts

    def complete(self, transfer_id: int, results: Sequence[PageResult]) -> None:
        """See `Core.complete`."""
        self.note("complete", transfer_id, bytes(results))
        super().complete(transfer_id, results)

    def flush(self) -> int:
        """See `Core.flush`."""
        self.note("flush")
        return super().flush()

    def drain(self, limit: int = 512) -> int:
        """See `Core.drain`."""
        self.note("drain", limit)
        return super().drain(limit)

    def clear(self, tree: HiRadixTree) -> HiRadixTree:
        """See `Core.clear`."""
        self.note("clear", self._trees_by[tree])
        after = super().clear(tree)
        if after not in self._trees_by:
            self._trees_by[after] = self._next_tree
            self._next_tree += 1
        return after

    def sweep(self, pages: int = 8192) -> int:
        """See `Core.sweep`."""
        self.note("sweep", pages)
        return super().sweep(pages)

    def evict(self, tier: int, pages: int) -> int:
        """See `Core.evict`."""
        self.note("evict", tier, pages)
        return super().evict(tier, pages)

    def check(self) -> None:
        """See `Core.check`."""
        self.note("check")
        super().check()


def _glued(prompt: Prompt) -> bytes:
    return b"".join(prompt.hashes(0, prompt.pages))


# ---- repeating


class DivergenceError(HicacheInternalError):
    """A replay went another way than the recording: another version of the code, or a damaged recording."""


class ReplayError(HicacheInternalError):
    """A replay failed, as the recorded run will have.

    Attributes:
        step: number of the input, from 1 in what was read.
        operation: its name.
    """

    def __init__(self, step: int, operation: str, cause: Exception) -> None:
        self.step = step
        self.operation = operation
        super().__init__(f"step {step} ({operation}): {cause}")


class Replayer:
    """Repeats the inputs of a recording on a core of its own.

    Attributes:
        core: the core.
        steps: inputs repeated so far.
    """

    def __init__(self, header: Header) -> None:
        self.steps = 0
        self._width_of_trees = 0
        if header.state:
            maker = checkpoint.Maker(checkpoint.decode(header.state))
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
        act: Callable[..., None] | None = getattr(self, f"_{operation}", None)
        if act is None:
            raise InvalidInput(f"step {self.steps}: unknown operation {operation!r:.40}; the recording is damaged")
        try:
            act(*arguments)
        except (InvalidInput, OutOfSlots):
            pass  # refused then as now; the caller was told
        except (HicacheError, AssertionError, LookupError, ValueError) as error:
            raise ReplayError(self.steps, operation, error) from error
        self.core.actions.clear()
        self.core.finished.clear()
        self.core.events.clear()

    def _tree(self, number: int, namespace: bytes, generation: int, span_pages: int, size: int) -> None:
        tree = self.core.tree(namespace, width=size, hasher=SymbolsAreHashes(size), generation=generation)
        tree.span_pages = max(1, span_pages)
        self._trees[number] = tree
        self._next_tree = number + 1

    def _prompt(self, tree: HiRadixTree, hashes: bytes) -> Prompt:
        return Prompt(hashes, tree.width, tree.hasher)

    def _lease(self, number: int, tree_number: int, hashes: bytes, limit: int | None, priority: int) -> None:
        tree = self._trees[tree_number]
        lease = self.core.lease(tree, self._prompt(tree, hashes), limit=limit, priority=priority)
        self._leases[number] = lease

    def _believe(self, number: int, upto: int) -> None:
        self.core.believe(self._leases[number], upto)

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

    def _flush(self) -> None:
        self.core.flush()

    def _drain(self, limit: int) -> None:
        self.core.drain(limit)

    def _clear(self, number: int) -> None:
        tree = self._trees[number]
        after = self.core.clear(tree)
        if after not in self._trees.values():
            after.span_pages = tree.span_pages
            self._trees[self._next_tree] = after
            self._next_tree += 1

    def _sweep(self, pages: int) -> None:
        self.core.sweep(pages)

    def _evict(self, tier: int, pages: int) -> None:
        self.core.evict(tier, pages)

    def _check(self) -> None:
        self.core.check()


def read_segments(data: bytes) -> Iterator[tuple[Header, Iterator[list[Any]]]]:
    """The segments of a recording, each with its inputs, which must be read before the next segment is.

    Raises:
        InvalidInput: this is no recording, one of another version, or a damaged one.
    """
    at = 0
    while (header := _header_at(data, at)) is not None:
        entries = _Entries(data, at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0])
        yield header, iter(entries)
        for _ in entries:
            pass
        at = entries.at + _LENGTH.size
    if not data or any(data[at:]):
        raise InvalidInput("this is no flight recording of hicache, or it is damaged")


def _header_at(data: bytes, at: int) -> Header | None:
    if at + _LENGTH.size > len(data):
        return None
    (size,) = _LENGTH.unpack_from(data, at)
    try:
        start = msgspec.msgpack.decode(data[at + _LENGTH.size : at + _LENGTH.size + size])
        if not isinstance(start, dict) or start.get("magic") != MAGIC:
            return None
        if start.get("version") != VERSION:
            raise InvalidInput(
                f"a flight recording of version {start.get('version')!r:.20}; this hicache reads version {VERSION}: "
                "replay it with the hicache that wrote it"
            )
        return msgspec.convert(start, Header)
    except msgspec.MsgspecError:
        return None


class _Entries:
    """The inputs of one segment, and where they end."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def __iter__(self) -> Iterator[list[Any]]:
        data = self._data
        while self.at + _LENGTH.size <= len(data):
            (size,) = _LENGTH.unpack_from(data, self.at)
            if not size:
                break
            body = data[self.at + _LENGTH.size : self.at + _LENGTH.size + size]
            try:
                entry = msgspec.msgpack.decode(body)
            except msgspec.MsgspecError:
                entry = None
            if not isinstance(entry, list) or len(entry) < 2 or not isinstance(entry[1], str):
                raise InvalidInput("the flight recording is damaged: an input cannot be read")
            self.at += _LENGTH.size + size
            yield entry
