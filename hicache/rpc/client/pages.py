"""The pages of one lease that this process may touch: where they are, and whether what was read of them counts.

Memory cannot be taken away from a process that has mapped it, so two things are said to the service instead: that
nothing is copied any more (`Acknowledge`, after a revocation), and, by whoever closes the request, that it is done.
And one thing is asked after every copy: whether the slots' generation words are still those that came with the lease.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.core.residency import Slots
from hicache.errors import CacheClosed, GeometryError, InvalidInput, LeaseExpired
from hicache.memory.base import Bytes
from hicache.rpc.client.loans import Loan
from hicache.rpc.v1 import session_pb2 as pb
from hicache.units import whole_number

if TYPE_CHECKING:
    from hicache.rpc.client.connection import Connection
    from hicache.rpc.client.state import ClientState

Buffers: TypeAlias = Any
"""Pages in an engine's hands: an array of (pages, page_bytes) bytes, one of fewer dimensions whose bytes are whole
pages, or a sequence with one buffer a page. Tensors of torch in host memory are arrays by `tensor.numpy()`."""

EPOCH_SHIFT: Final = 32
"""Slots are numbers of 32 bits; above them stands the connection that they belong to, 0 for the first."""

NONE: Final = np.empty(0, np.int64)
NONE.flags.writeable = False


class LeasedPages:
    """Pages of one lease. Copies may run in any thread; what they may touch changes in the request's own.

    Args:
        state: of the client.
        connection: over which the lease was made.
        lease: its id.

    Attributes:
        first: index of the first page that is in here.
        ended: why nothing new may be done with the lease, or None.
    """

    __slots__ = (
        "__weakref__",
        "_copies",
        "_lock",
        "_revoked",
        "_slots",
        "_state",
        "_words",
        "closed",
        "connection",
        "ended",
        "first",
        "lease",
        "owned",
    )

    def __init__(self, state: ClientState, connection: Connection, lease: int, *, owned: bool) -> None:
        self.connection = connection
        self.lease = lease
        self.owned = owned
        self.first = 0
        self.ended: str | None = None
        self.closed = False
        self._state = state
        self._slots = NONE
        self._words = np.empty(0, np.uint64)
        self._lock = threading.Lock()
        self._copies = 0
        self._revoked = False

    @property
    def end(self) -> int:
        """Index behind the last page."""
        return self.first + len(self._slots)

    @property
    def live(self) -> bool:
        """Whether something may still be done with the lease, as far as this process knows."""
        return self.ended is None and not self.closed and not self.connection.ending.done()

    @property
    def numbers(self) -> Slots:
        """Slots of all its pages, as the service numbers them."""
        return self._slots

    def slots(self, begin: int, end: int) -> Slots:
        """Slots of pages, as they are handed to the engine."""
        raw = self._slots[begin - self.first : end - self.first]
        return raw | (self.connection.epoch << EPOCH_SHIFT) if self.connection.epoch else raw

    def replace(self, slots: bytes, words: bytes, *, first: int = 0) -> None:
        """The pages from `first` on are these, and no others."""
        self.first = first
        self._slots, self._words = unpack(slots, words)

    def append(self, slots: bytes, words: bytes) -> None:
        """These pages come behind those that are known."""
        more, their_words = unpack(slots, words)
        self._slots = np.concatenate((self._slots, more))
        self._words = np.concatenate((self._words, their_words))

    def described(self, begin: int, end: int) -> tuple[bytes, bytes]:
        """Slots and words of pages, packed as they travel."""
        part = slice(begin - self.first, end - self.first)
        return self._slots[part].astype("<u4").tobytes(), self._words[part].astype("<u8").tobytes()

    # ---- the lease's end

    def lose(self, reason: str) -> None:
        """What the service thinks of the lease is not known any more, so nothing more is done with it."""
        with self._lock:
            if self.ended is None:
                self.ended = reason
                self._state.counters.add("lost")

    def gone(self, reason: str) -> None:
        """The connection has ended. The memory is let go of as soon as no copy runs, and no views are possible."""
        self.lose(reason)
        self._let_go()

    def revoke(self, reason: str) -> None:
        """The service has ended the lease. Acknowledged when no copy runs, and no views of the engine are possible."""
        with self._lock:
            self.ended = self.ended or reason
            self._revoked = True
        self._let_go()

    def close(self) -> None:
        """The request is closed: nothing here is touched any more."""
        with self._lock:
            self.closed = True
            if self.owned:
                self._revoked = False  # its release says it
        self._let_go()

    def _let_go(self) -> None:
        with self._state.viewing, self._lock:
            over = self.ended is not None and self.connection.ending.done()
            if not (self._revoked or over) or self._copies or (self._state.viewed and not self.closed):
                return
            self._revoked = False
            if not self.closed:
                self._state.given_up.add(self)
        if over:
            self._state.forget_memory()
        else:
            self._state.acknowledge(self.connection, (self.lease,))

    def _enter(self) -> bool:
        with self._lock:
            if self.ended is not None or self.closed:
                return False
            self._copies += 1
            return True

    def _leave(self) -> None:
        with self._lock:
            self._copies -= 1
        self._let_go()

    # ---- bytes

    def page(self, page: int) -> Bytes:
        """One page, not a copy; it must not be used after the request is closed.

        Raises:
            GeometryError: the page's bytes are not in one piece in shared memory, or nothing is shared.
            LeaseExpired: the slots may be others' by now.
        """
        memory = self.connection.memory
        if memory is None:
            raise GeometryError("the pages of this client are streamed: use read_into() and write_from()")
        self._state.view()
        if self in self._state.given_up:
            raise LeaseExpired(f"page {page!r:.40}: {self.ended}; close the request, and make another one")
        return memory.page(int(self._slots[self._index(page)]))

    def _index(self, page: int) -> int:
        number = whole_number(page)
        if number is None or not self.first <= number < self.end:
            raise InvalidInput(f"page {page!r:.40} is none of this request's: they are {self.first} to {self.end - 1}")
        return number - self.first

    def span(self, first: int, count: int) -> tuple[int, int]:
        """The pages from `first` on, as far as they are here.

        Raises:
            InvalidInput: a first page that is before those that are here.
        """
        number = whole_number(first)
        if number is None or number < self.first:
            raise InvalidInput(f"first={first!r:.40}: the pages of this request begin at {self.first}")
        return number, max(number, min(number + count, self.end))

    def lend(self, first: int, count: int, *, least: int = 0) -> Loan | None:
        """Slots of pages for somebody who copies their bytes himself, as a device does; close it when that has ended.

        Args:
            first: index of the first page.
            count: pages; fewer where the request has fewer.
            least: pages before it may not be lent, as for writing.

        Returns:
            None where nothing may be touched any more, there is no page, or the pages are streamed.
        """
        if (number := whole_number(first)) is not None and number < least:
            raise InvalidInput(f"first={number}: pages before {least} are shared, and read only")
        begin, end = self.span(first, count)
        memory = self.connection.memory
        if begin == end or memory is None or self.connection.gone() or not self._enter():
            return None
        part = slice(begin - self.first, end - self.first)
        return Loan(self, memory, self._slots[part], self._words[part])

    def returned(self, *, read: int, written: int) -> None:
        """A loan has ended. Called once, by it."""
        if read:
            self._state.counters.add("pages_read", read)
        if written:
            self._state.counters.add("pages_written", written)
        self._leave()

    async def read_into(self, buffers: Buffers, first: int) -> int:
        """Copy pages out; see `ConnectedRequest.read_into`."""
        targets = as_pages(buffers, self._state.page_bytes, writable=True)
        begin, end = self.span(first, len(targets))
        if begin == end or not self._enter():
            return 0
        try:
            streams = self.connection.memory is None
            good = await self._receive(targets, begin, end) if streams else self._gather(targets, begin, end)
            self._state.counters.add("pages_read", good)
            return good
        finally:
            self._leave()

    async def write_from(self, buffers: Buffers, first: int, *, least: int) -> int:
        """Copy pages in, none before the index `least`; see `ConnectedRequest.write_from`."""
        if (number := whole_number(first)) is not None and number < least:
            raise InvalidInput(f"first={number}: pages before {least} are shared, and read only")
        sources = as_pages(buffers, self._state.page_bytes, writable=False)
        begin, end = self.span(first, len(sources))
        if begin == end or not self._enter():
            return 0
        try:
            streams = self.connection.memory is None
            done = await self._send(sources, begin, end) if streams else self._scatter(sources, begin, end)
            self._state.counters.add("pages_written", done)
            return done
        finally:
            self._leave()

    def check_written(self, begin: int, end: int) -> None:
        """Refuse to publish private pages into which nobody here has put anything. Others have their slots' past.

        Raises:
            InvalidInput: such a page.
        """
        connection, memory = self.connection, self.connection.memory
        part = slice(begin - self.first, end - self.first)
        lacking = connection.written.lack(self._slots[part], self._words[part])
        if not self._state.writes or not self.live or not lacking.any():
            return
        try:
            over = memory is not None and not memory.unchanged(self._slots[part], self._words[part]).all()
        except CacheClosed:
            over = True
        if not over and not connection.gone():  # else the lease is lost, with what was to be written
            page = begin + int(np.argmax(lacking))
            raise InvalidInput(
                f"commit: page {page} has a slot and was never written: write it by write_from(), page() or "
                f"cache.host, or commit only what lies before it, by upto={page * self._state.page_size}"
            )

    def _gather(self, targets: list[Bytes] | Bytes, begin: int, end: int) -> int:
        memory = self.connection.memory
        assert memory is not None
        part = slice(begin - self.first, end - self.first)
        try:
            memory.gather(self._slots[part], targets[: end - begin])
            good = memory.unchanged(self._slots[part], self._words[part])
        except CacheClosed:
            return 0
        if self.connection.gone():
            return 0  # whoever came after that service may use the slots, and has words of its own
        leading = len(good) if good.all() else int(np.argmin(good))
        if leading < len(good):
            self._state.counters.add("overwritten_pages", len(good) - leading)
        return leading

    def _scatter(self, sources: list[Bytes] | Bytes, begin: int, end: int) -> int:
        memory = self.connection.memory
        assert memory is not None
        part = slice(begin - self.first, end - self.first)
        try:
            # The service keeps these slots for as long as this process lives; should it not, nobody's page suffers.
            if self.connection.gone() or not memory.unchanged(self._slots[part], self._words[part]).all():
                return 0
            memory.scatter(self._slots[part], sources[: end - begin])
        except CacheClosed:
            return 0
        return 0 if self.connection.gone() else end - begin

    # ---- bytes that are streamed

    async def _receive(self, targets: list[Bytes] | Bytes, begin: int, end: int) -> int:
        """Ask for a window of pages ahead; what came in one piece from the start counts."""
        state, size = self._state, self._state.page_bytes
        step = max(1, state.options.window // (2 * size))
        asked: deque[tuple[int, _Sink, Future[Any]]] = deque()
        at = done = begin
        while at < end or asked:
            while at < end and len(asked) < 2:
                stop = min(at + step, end)
                sink = _Sink(targets, at - begin, at, size)
                message = pb.Request(get_bytes=pb.GetBytes(lease=self.lease, first_page=at, end_page=stop))
                asked.append((stop, sink, state.ask(self.connection, message, sink=sink)))
                at = stop
            stop, sink, future = asked.popleft()
            if await state.reply_to(future, self) is None:
                return done - begin + sink.pages
            done += sink.pages
            if done < stop:
                return done - begin
        return done - begin

    async def _send(self, sources: list[Bytes] | Bytes, begin: int, end: int) -> int:
        """Send pieces, a window of them ahead; a page counts when all of it has arrived."""
        state = self._state
        chunk = min(self.connection.welcome.limits.chunk_bytes, state.options.window)
        asked: deque[tuple[int, Future[Any]]] = deque()
        most = max(1, state.options.window // chunk)
        for index in range(end - begin):
            source = sources[index].data
            for offset in range(0, len(source), chunk):
                if len(asked) >= most:
                    page, future = asked.popleft()
                    if await state.reply_to(future, self) is None:
                        return page
                piece = pb.PutBytes(
                    lease=self.lease, page=begin + index, offset=offset, data=bytes(source[offset : offset + chunk])
                )
                asked.append((index, state.ask(self.connection, pb.Request(put_bytes=piece))))
        while asked:
            page, future = asked.popleft()
            if await state.reply_to(future, self) is None:
                return page
        part = slice(begin - self.first, end - self.first)
        self.connection.written.note(self._slots[part], self._words[part])
        return end - begin


class _Sink:
    """Puts pieces of pages where they belong, as they come, in order.

    Attributes:
        pages: whole pages that have come.
    """

    __slots__ = ("_first", "_offset", "_row", "_size", "_targets", "pages")

    def __init__(self, targets: list[Bytes] | Bytes, row: int, first: int, size: int) -> None:
        self._targets = targets
        self._row = row
        self._first = first
        self._size = size
        self._offset = 0
        self.pages = 0

    def __call__(self, piece: pb.Bytes) -> None:
        data = piece.data
        end = piece.offset + len(data)
        if piece.page != self._first + self.pages or piece.offset != self._offset or end > self._size:
            return  # not what comes next: nothing behind it counts
        self._targets[self._row + self.pages][piece.offset : end] = np.frombuffer(data, np.uint8)
        self._offset = end
        if end == self._size:
            self.pages, self._offset = self.pages + 1, 0


def unpack(slots: bytes, words: bytes) -> tuple[Slots, npt.NDArray[np.uint64]]:
    """Slots and words, as they travel, as arrays.

    Raises:
        LeaseExpired: they are not as many, so they mean nothing.
    """
    numbers = np.frombuffer(slots, "<u4").astype(np.int64)
    marks = np.frombuffer(words, "<u8").astype(np.uint64)
    if len(marks) != len(numbers):
        raise LeaseExpired(f"the service sent {len(numbers)} slots with {len(marks)} words: the lease cannot be used")
    return numbers, marks


def as_pages(buffers: Buffers, page_bytes: int, *, writable: bool) -> list[Bytes] | Bytes:
    """Buffers as bytes, one row a page.

    Raises:
        GeometryError: bytes that are no whole pages, not contiguous, or read-only where they are to be written.
    """
    if isinstance(buffers, Sequence) and not isinstance(buffers, (bytes, bytearray, memoryview, str)):
        rows = [_as_bytes(buffer, writable=writable) for buffer in buffers]
        bad = next((len(row) for row in rows if len(row) != page_bytes), None)
        if bad is not None:
            raise GeometryError(f"a buffer of {bad} bytes is no page of {page_bytes} bytes")
        return rows
    if isinstance(buffers, np.ndarray) and buffers.dtype == np.uint8 and buffers.shape[1:] == (page_bytes,):
        if writable and not buffers.flags.writeable:
            raise GeometryError("the buffer is read-only: give one that can be written")
        return buffers
    flat = _as_bytes(buffers, writable=writable)
    if len(flat) % page_bytes:
        raise GeometryError(f"{len(flat)} bytes are no whole pages of {page_bytes} bytes")
    return flat.reshape(-1, page_bytes)


def _as_bytes(buffer: Any, *, writable: bool) -> Bytes:
    try:
        view = memoryview(buffer)
        flat = np.frombuffer(view.cast("B"), np.uint8)
    except (TypeError, ValueError, BufferError):
        kind = type(buffer).__name__
        raise GeometryError(
            f"a {kind} is no contiguous buffer of bytes: give arrays, or tensors in host memory by tensor.numpy()"
        ) from None
    if writable and view.readonly:
        raise GeometryError("the buffer is read-only: give one that can be written")
    return flat
