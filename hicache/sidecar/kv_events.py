"""Publishes residency over ZeroMQ, as vLLM and SGLang publish theirs, so that routers find the pages of every tier.

Messages are `[topic, number as u64 big endian, payload]` on a PUB socket. A ROUTER socket replays those that are kept:
to the number of the first one wanted, 8 bytes big endian, it answers `[number, payload]` each, and ends with number -1
and no payload. Numbers have no gaps in one life, begin at a moment in time, and so are never used again in another.

The first message of a life says that all blocks are cleared, as does the last; so does one where the publisher itself
fell behind, and then everything that is resident follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from hicache.errors import HicacheError, HicacheInternalError, LimitExceeded, ServiceUnavailable
from hicache.events import Removed, Stored
from hicache.records import Tier
from hicache.sidecar.batches import size_of
from hicache.sidecar.events import EventLog, first_number
from hicache.sidecar.kv_items import ClearedScopes, Item, Reset, Snapshot, Told, Writing
from hicache.sidecar.kv_sockets import END, KvSockets
from hicache.sidecar.kv_wire import MEDIA, Encoding, Hashes, WireFormat
from hicache.sidecar.residency import Scope, View

BATCH_BYTES: Final = 128 * 1024
"""About the most bytes of hashes and tokens in one message: writing it holds the interpreter for less than a
millisecond."""

_MOST_REMOVED: Final = BATCH_BYTES // 32

KEPT_BYTES: Final = 256 * 2**20
"""Most bytes of messages that are kept for replay."""

SNAPSHOT_BYTES: Final = 64 * 2**20
"""Most bytes of a snapshot: some 150,000 pages of 64 tokens."""

QUEUED_PAGES: Final = 262_144
"""Pages that wait at most for the publisher's thread. Above it all is told anew instead."""

_log = logging.getLogger("hicache.sidecar")


@dataclass(frozen=True, slots=True)
class KvPublisherStatistics:
    """A snapshot of the publisher.

    Attributes:
        messages: published since the start; `events`: in them.
        dropped_events: never published because the thread was too far behind; a reset followed each time.
        resets: how often everything was told anew, the start not counted.
        undescribed_events: of namespaces that nobody has described; they cannot be published.
        replays: requests answered; `replayed`: messages in the answers; `replays_cut`: not to the end, because the
            peer did not read or was gone; `replays_refused`: requests that were none.
        failures: changes that could not be told; everything was told anew instead.
    """

    messages: int = 0
    events: int = 0
    dropped_events: int = 0
    resets: int = 0
    undescribed_events: int = 0
    replays: int = 0
    replayed: int = 0
    replays_cut: int = 0
    replays_refused: int = 0
    failures: int = 0


class KvPublisher:
    """Publishes an event log. Made and closed on one thread; its own thread does the work, and never holds up the log.

    Args:
        log: what is told.
        publish: endpoint of the PUB socket, such as "tcp://127.0.0.1:5557" or "ipc:///run/kv-events".
        replay: endpoint of the replay socket; None: none.
        topic: of all messages.
        encoding, hashes, media, salts: how events are written, see `WireFormat`.
        model: only of this model; None: of all.
        dp_rank: rank among data-parallel replicas that messages carry.
        batches: messages kept for replay, of at most `KEPT_BYTES` together.
        high_water: messages queued for a slow consumer before it loses some.
        queued_pages: pages that wait at most for the thread.
        wall: seconds since the epoch.

    Raises:
        ConfigError: an endpoint that cannot be bound, or pyzmq is not installed.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        publish: str,
        replay: str | None = None,
        topic: str = "",
        encoding: Encoding = "map",
        hashes: Hashes = "int64",
        media: Mapping[Tier, str] = MEDIA,
        salts: bool = False,
        model: str | None = None,
        dp_rank: int | None = 0,
        batches: int = 10_000,
        high_water: int = 10_000,
        queued_pages: int = QUEUED_PAGES,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._log = log
        self._format = WireFormat(encoding=encoding, hashes=hashes, media=media, salts=salts)
        self._topic, self._model, self._dp_rank = topic, model, dp_rank
        self._most_queued, self._wall = queued_pages, wall
        self._lock = threading.Lock()
        self._queue: deque[Item] = deque()
        self._queued = 0
        self._closing = self._closed = self._ended = False
        self._counts = dict.fromkeys(KvPublisherStatistics.__slots__, 0)
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._most_kept = batches
        self._next = first_number(wall())
        self._writing = Writing()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        try:
            self._sockets = KvSockets(publish, replay, topic=topic, high_water=high_water, batches=batches)
        except BaseException:
            self._wake.close()
            self._woken.close()
            raise
        log.listen(self)
        self._thread = threading.Thread(target=self._run, name="hicache-kv-events", daemon=True)
        self._thread.start()

    # ---- called by the log, under its lock

    def reset(self, view: View) -> None:
        """Everything is as in the view."""
        self._put(Reset(view))

    def changed(self, event: Stored | Removed, scope: Scope) -> None:
        """Pages came or went."""
        if not self._mine(scope):
            return
        if scope.derived is None:
            self._counts["undescribed_events"] += 1
            return
        if isinstance(event, Removed) and len(scope.kin) > 1:
            # Namespaces of one chain have equal hashes, and the wire has nothing else: the last one tells.
            kin = [other for other in scope.kin if self._mine(other)]
            table, tier = self._log.table, event.tier
            left = tuple(h for h in event.page_hashes if not table.holds(kin, h, tier, but=scope))
            if not left:
                return
            event = Removed(event.namespace, event.generation, tier, left, event.reason)
        self._put(Told(event, scope, len(event.page_hashes)))

    def cleared(self, scopes: Sequence[Scope], view: View) -> None:
        """All pages of these scopes went at once."""
        mine = tuple(scope for scope in scopes if self._mine(scope))
        if mine:
            kin = tuple(other for scope in mine for other in scope.kin if self._mine(other) and other not in mine)
            self._put(ClearedScopes(mine, kin, view, everything=not any(map(self._mine, view.scopes))))

    def _mine(self, scope: Scope) -> bool:
        return self._model is None or (scope.derived is not None and scope.derived.base.model == self._model)

    def _put(self, item: Item) -> None:
        """Give the thread something to do. Above the bound all that waits is dropped, and everything told anew."""
        if self._ended:
            return
        with self._lock:
            self._queued += item.pages
            if self._queued > self._most_queued and not isinstance(item, Reset):
                self._counts["dropped_events"] += sum(isinstance(queued, Told) for queued in (*self._queue, item))
                asked = [queued for queued in self._queue if isinstance(queued, Snapshot)]
                self._queue.clear()
                self._queue.extend(asked)
                self._counts["resets"] += 1
                item = Reset(self._log.view())
                self._queued = item.pages
            self._queue.append(item)
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            self._wake.send(b"\0")

    # ---- called by whoever made it

    @property
    def endpoints(self) -> tuple[str, str | None]:
        """Where the two sockets are bound, with the port that was free where `*` was given."""
        return self._sockets.endpoints

    async def snapshot(self) -> bytes:
        """What is resident as a JSON document, whose `number` is that of the first message to be applied to it.

        Hashes that are bytes are written as hex digits.

        Raises:
            ServiceUnavailable: it is closed.
            LimitExceeded: the document would have more than `SNAPSHOT_BYTES`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes | HicacheError] = loop.create_future()

        def arrive(document: bytes | HicacheError) -> None:
            if not future.done():
                future.set_result(document)

        def deliver(document: bytes | HicacheError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(arrive, document)

        with self._log.lock:
            if not (self._closing or self._ended):
                self._put(Snapshot(self._log.view(), deliver))
            else:
                arrive(_over())
        document = await future
        if isinstance(document, HicacheError):
            raise document
        return document

    def statistics(self) -> KvPublisherStatistics:
        """A snapshot."""
        return KvPublisherStatistics(**self._counts)

    def close(self) -> None:
        """Publish what waits, say that all blocks are cleared, and end.

        Waits about a second for slow consumers. Idempotent, on one thread.
        """
        with self._log.lock:
            if self._closing:
                return
            self._closing = True
        self._log.leave(self)
        self._wake_up()
        self._thread.join()
        self._wake.close()
        self._woken.close()

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._closed:
                self._step()
        except Exception:  # the sockets themselves fail
            _log.exception("KV events: the publisher has ended")
        finally:
            self._sockets.close()
            with self._log.lock:
                self._ended = True
                while (item := self._take()) is not None:
                    if isinstance(item, Snapshot):
                        item.deliver(_over())

    def _step(self) -> None:
        """Publish all that waits, then wait for more, or for somebody who wants a replay."""
        asked = self._sockets.wait(self._woken)
        closing = self._closing  # before the queue is looked at: nothing is put behind it
        while (item := self._take()) is not None:
            try:
                self._tell(item)
            except Exception:
                _log.exception("KV events: something could not be told")
                self._counts["failures"] += 1
                self._writing = Writing()
                if not isinstance(item, Reset):  # that would fail again, for ever
                    with self._log.lock:
                        self.reset(self._log.view())
        if closing:
            self._clear_all()
            self._closed = True
        self._flush()
        if asked:
            self._replay()

    def _take(self) -> Item | None:
        with self._lock:
            if not self._queue:
                return None
            item = self._queue.popleft()
            self._queued -= item.pages
            return item

    def _tell(self, item: Item) -> None:
        if isinstance(item, Told):
            self._write(item.event, item.scope)
        elif isinstance(item, ClearedScopes):
            self._clear(item)
        elif isinstance(item, Reset):
            self._clear_all()
            for found in item.view.stored(self._mine):
                if found is not None:
                    self._write(found[1], found[0])
        else:
            self._flush()
            try:
                item.deliver(self._document(item.view))
            except LimitExceeded as error:
                item.deliver(error)
            except BaseException:
                item.deliver(HicacheInternalError("a snapshot of KV events failed, see the log"))
                raise

    def _write(self, event: Stored | Removed, scope: Scope) -> None:
        if isinstance(event, Removed):
            self._remove(event.tier, event.page_hashes)
            return
        fields = self._format.stored(event, scope)
        if fields is not None:
            self._writing.store(fields, size_of(event))
            if self._writing.bytes >= BATCH_BYTES:
                self._flush()

    def _remove(self, tier: Tier, page_hashes: Sequence[bytes]) -> None:
        fields = self._format.removed(tier, page_hashes)
        if fields is None:
            return
        if self._writing.stores:
            self._flush()  # in one message removals come first
        self._writing.remove(fields, sum(map(len, page_hashes)))
        if self._writing.bytes >= BATCH_BYTES:
            self._flush()

    def _clear_all(self) -> None:
        self._flush()
        self._writing.remove(self._format.cleared(), 0)

    def _clear(self, item: ClearedScopes) -> None:
        if item.everything:
            self._clear_all()
            return
        found = next(found for found in item.view.by_depth(item.scopes) if found is not None)
        for tier in Tier:
            gone = [
                page_hash
                for index in sorted(found, reverse=True)
                for _, page_hash, page in found[index]
                if page[3] >> tier & 1 and not item.view.holds(item.kin, page_hash, tier)
            ]
            for first in range(0, len(gone), _MOST_REMOVED):
                self._remove(tier, gone[first : first + _MOST_REMOVED])

    def _flush(self) -> None:
        """Publish what is written."""
        events = self._writing.events
        if not events:
            return
        payload = self._format.batch(self._wall(), events, self._dp_rank)
        self._writing = Writing()
        number = self._next
        self._next += 1
        self._keep(number, payload)
        self._counts["messages"] += 1
        self._counts["events"] += len(events)
        self._sockets.publish(number, payload)

    def _keep(self, number: int, payload: bytes) -> None:
        kept = self._kept
        kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(kept) > self._most_kept or (self._kept_bytes > KEPT_BYTES and len(kept) > 1):
            self._kept_bytes -= len(kept.popleft()[1])

    def _replay(self) -> None:
        request = self._sockets.request()
        if request is None:
            self._counts["replays_refused"] += 1
            return
        back, start = request
        self._counts["replays"] += 1
        skipped = max(0, start - self._kept[0][0]) if self._kept else 0
        for number, payload in itertools.islice(self._kept, skipped, None):
            if not self._sockets.answer(back, number, payload):
                self._counts["replays_cut"] += 1
                return
            self._counts["replayed"] += 1
        self._counts["replays_cut"] += not self._sockets.answer(back, END, b"")

    def _document(self, view: View) -> bytes:
        head = {"number": self._next, "timestamp": self._wall(), "dp_rank": self._dp_rank, "topic": self._topic}
        written: list[bytes] = []
        size = 0
        for found in view.stored(self._mine):
            fields = None if found is None else self._format.stored(found[1], found[0])
            if fields is None:
                continue
            written.append(msgspec.json.encode({name: _plain(value) for name, value in fields.items()}))
            size += len(written[-1])
            if size > SNAPSHOT_BYTES:
                raise LimitExceeded(
                    f"the snapshot has more than {SNAPSHOT_BYTES:,} bytes: replay messages, or watch events by gRPC"
                )
        return msgspec.json.encode(head)[:-1] + b',"events":[' + b",".join(written) + b"]}"


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return [_plain(item) for item in value] if isinstance(value, list) and value and type(value[0]) is bytes else value


def _over() -> ServiceUnavailable:
    return ServiceUnavailable("KV events are not published any more: the service ends")
