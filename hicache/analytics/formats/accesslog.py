"""Our own access log: what each request asked for and got, written by a service or an embedded cache.

A file is a row of gzip members, see `hicache.runtime.accesslog.format`. One that breaks off, as where its writer was
killed, is read up to there. Lines that somebody has unpacked, or packed in another way, are read as well.

Requests are written when they end, and yielded by when they began, as far as `WINDOW` of them allows. Times are wall
times. A page's id is a number for its hash in its namespace and generation, so the same page has the same id in all
files of one key.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import BinaryIO, Final, cast

import msgspec
import numpy as np

from hicache.analytics.formats.lines import Reader
from hicache.analytics.packing import DamagedFile
from hicache.analytics.sources import Source
from hicache.analytics.trace import Details, Ids, Interner, Reading, TraceRequest, in_words, pack_ids
from hicache.errors import TraceError
from hicache.records import MissReason
from hicache.runtime.accesslog.format import (
    HASH_BYTES,
    MAX_LINE,
    PREFIX_BYTES,
    SIGNATURE,
    VERSION,
    Entry,
    Head,
    NamespaceRecord,
    begins_access_log,
    member_length,
    unpack,
)

__all__ = ["WINDOW", "AccessLogReader", "Outcome", "RecordedDetails", "looks_like_access_log", "requests_gone"]

WINDOW: Final = 4096
"""Requests that are held back, so that those that began earlier and ended later come first."""

MOST_PAGES: Final = 2**22
"""Pages of all requests of a block together; writers end a block far below."""

_SIGN: Final = b'"hicache_access_log"'
_REASONS: Final = frozenset(MissReason)
_SEARCH: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request.

    Attributes:
        asked: leading pages that it might have taken from the cache; equals the sum of all below.
        device, host, storage: pages that it got, by the tier they came from.
        missed: the others, by reason.
        kept: leading pages of `ids` that the cache had in the end.
        ids: of all its pages, those that it grew by too; uint32.
        aborted: whether it ended without success.
        seconds: until it ended; `load` until its load ended, None where it did not load.
        tenant: as it was written, or None.
        head: of the block it stands in.
    """

    asked: int
    device: int
    host: int
    storage: int
    missed: dict[str, int]
    kept: int
    ids: Ids
    aborted: bool
    seconds: float
    load: float | None
    tenant: str | None
    head: Head

    @property
    def hits(self) -> int:
        """Pages that it got."""
        return self.device + self.host + self.storage


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDetails(Details):
    """Details of a request of which is known what became of it.

    Attributes:
        outcome: that.
    """

    outcome: Outcome


def looks_like_access_log(head: bytes) -> bool:
    """Whether a file that begins so is one, packed or unpacked."""
    return begins_access_log(head) or _SIGN in head


@dataclass(slots=True)
class Run:
    """Requests of a writer's life that stand in one block.

    Attributes:
        boot: names that life.
        written: how many it had written with these.
        lines: how many were read here, broken ones too.
        whole: whether these are all of the block.
    """

    boot: str
    written: int
    lines: int = 0
    whole: bool = False


def requests_gone(readers: Iterable[object]) -> int:
    """Requests that were written and that files lack, as the running counts of their blocks tell.

    Args:
        readers: of all files that are read as one log, as far as they have come; others are passed over.
    """
    lives: dict[str, list[Run]] = {}
    for reader in readers:
        for run in reader.runs if isinstance(reader, AccessLogReader) else ():
            lives.setdefault(run.boot, []).append(run)
    return sum(map(_gaps, lives.values()))


def _gaps(runs: list[Run]) -> int:
    gone = reached = 0
    known = True
    for run in sorted(runs, key=lambda run: run.written):
        if known and run.whole:
            gone += max(0, run.written - run.lines - reached)
        reached, known = run.written, run.whole  # what follows a block that is still being read is not read yet
    return gone


class _Block:
    """What the lines of one block have told so far."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.ids: list[Ids] = []
        self.pages = 0


class AccessLogReader(Reader):
    """Requests of one file, by the time of their begin.

    Attributes:
        breaks_off: whether its last block is not whole.
        runs: of the blocks so far.
    """

    def __init__(self, path: Source, reading: Reading | None = None, *, interner: Interner | None = None) -> None:
        super().__init__(path, reading, interner=interner)
        self._names = Interner() if interner is None else interner
        self._past = itertools.count()
        self._block: _Block | None = None
        self._head = msgspec.json.Decoder(Head).decode
        self._entry = msgspec.json.Decoder(Entry).decode
        self.breaks_off = False
        self.runs: list[Run] = []

    def _requests(self, file: BinaryIO) -> Iterator[TraceRequest]:
        waiting: list[tuple[float, int, TraceRequest]] = []
        damage: DamagedFile | None = None
        try:
            for number, request in enumerate(self._in_order_of_ends(file)):
                item = (request.time, number, request)
                if len(waiting) < WINDOW:
                    heapq.heappush(waiting, item)
                else:
                    yield heapq.heappushpop(waiting, item)[2]
        except DamagedFile as error:
            damage = error
        while waiting:
            yield heapq.heappop(waiting)[2]
        if damage is not None:
            raise damage

    def _in_order_of_ends(self, file: BinaryIO) -> Iterator[TraceRequest]:
        packed = begins_access_log(cast("BufferedReader", file).peek(2)[:2])
        for place, line in self._packed(file) if packed else self._unpacked(file):
            try:
                request = self._read(line, place)
            except TraceError as error:
                self._bad(place, error)
                continue
            if request is not None:
                yield request
        self._end_run()

    def _end_run(self) -> None:
        if self.runs:
            self.runs[-1].whole = True

    # ---- lines

    def _unpacked(self, file: BinaryIO) -> Iterator[tuple[str, bytes]]:
        for number, line in enumerate(self._lines(file), start=1):
            yield f"line {number}", line

    def _packed(self, file: BinaryIO) -> Iterator[tuple[str, bytes]]:
        at = 0
        while prefix := _whole(file, PREFIX_BYTES):
            place = f"block at byte {at}"
            try:
                member = prefix + _whole(file, member_length(prefix) - len(prefix))
                if len(member) < member_length(prefix):
                    if SIGNATURE in member[1:]:
                        raise ValueError("a block is damaged: another one begins within it")
                    self.breaks_off = True  # its writer was killed, or is at it just now
                    return
                text = unpack(member)
            except ValueError as error:
                if len(prefix) < PREFIX_BYTES and SIGNATURE.startswith(prefix[: len(SIGNATURE)]):
                    self.breaks_off = True
                    return
                self._bad(place, error)
                at += self._seek(file, at + 1) + 1
                self._consumed = at
                continue
            at += len(member)
            self._consumed = at
            self._block = None
            for number, line in enumerate(text.splitlines()):
                yield f"{place}, request {number}" if number else place, line

    def _seek(self, file: BinaryIO, begin: int) -> int:
        """Go to where the next block seems to begin, from a place on. Returns how far that is; all if none does."""
        gone = 0
        if not file.seekable():
            raise DamagedFile(f"{self.path}: what is damaged cannot be passed over in what is piped in; name the file")
        file.seek(begin)
        kept = b""
        while data := file.read(_SEARCH):
            found = (kept + data).find(SIGNATURE)
            if found >= 0:
                file.seek(begin + gone + found)
                return gone + found
            both = kept + data
            kept = both[-len(SIGNATURE) + 1 :]
            gone += len(both) - len(kept)
        return gone + len(kept)

    # ---- requests

    def _read(self, line: bytes, place: str) -> TraceRequest | None:
        if len(line) > MAX_LINE:
            raise TraceError(f"longer than {MAX_LINE // 2**20} MiB, so it is no line of an access log")
        if not line.strip():
            return None
        try:
            if _SIGN in line[:64]:
                self._block = None
                self._begin(self._head(line))
                return None
            if self._block is not None:
                self.runs[-1].lines += 1
            else:
                raise TraceError("no first line of a block in front of it was read")
            return self._request(self._entry(line), self._block, place)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            if self._block is not None:
                self._block.ids.append(pack_ids([]))  # later requests count it
            raise TraceError(in_words(error)) from None

    def _begin(self, head: Head) -> None:
        if head.version != VERSION:
            raise TraceError(
                f"version {head.version} of an access log, and this hicache reads version {VERSION}: use the one that "
                "wrote it"
            )
        self._block = _Block(head)
        self._end_run()
        self.runs.append(Run(head.boot, head.written))

    def _request(self, entry: Entry, block: _Block, place: str) -> TraceRequest:
        namespaces = block.head.namespaces
        namespace = namespaces[entry.namespace] if entry.namespace < len(namespaces) else None
        try:
            if namespace is None:
                raise TraceError(f"namespace {entry.namespace} is none of the block's {len(namespaces)}")
            ids = self._ids_of(entry, block, namespace)
        except TraceError:
            block.ids.append(pack_ids([]))
            raise
        block.ids.append(ids)
        block.pages += len(ids)
        self._check(entry, len(ids))
        prompt = self._prompt(entry, ids, block, entry.tokens // namespace.page_size)
        outcome = Outcome(
            entry.asked,
            entry.device,
            entry.host,
            entry.storage,
            entry.missed,
            entry.kept,
            ids,
            entry.aborted,
            entry.seconds,
            entry.load,
            namespace.tenant,
            block.head,
        )
        session = "" if entry.session is None else f"{block.head.boot}/{entry.session}"
        return TraceRequest(
            time=entry.time,
            ids=prompt,
            unit=namespace.page_size,
            input_tokens=entry.tokens,
            output_tokens=entry.output,
            scope=_scope(namespace),
            place=place,
            details=RecordedDetails(session=session, model=namespace.model, outcome=outcome),
        )

    def _prompt(self, entry: Entry, ids: Ids, block: _Block, pages: int) -> Ids:
        """The pages of the prompt itself, as it came."""
        lacks = pages - len(ids)
        if lacks <= 0:
            return ids[:pages]
        if MissReason.BYPASSED not in entry.missed:
            raise TraceError(f"it has {len(ids)} pages, and its {entry.tokens} tokens are {pages}")
        if block.pages + lacks > MOST_PAGES:
            raise _too_many()
        block.pages += lacks
        # It went past the cache, so its pages have no names: they are nobody else's.
        names: list[Hashable] = [(id(self), next(self._past)) for _ in range(lacks)]
        return np.concatenate((ids, pack_ids(self._names.translate("past the cache", names))))

    def _ids_of(self, entry: Entry, block: _Block, namespace: NamespaceRecord) -> Ids:
        if len(entry.pages) % HASH_BYTES:
            raise TraceError(f"pages has {len(entry.pages)} bytes, which is no multiple of {HASH_BYTES}")
        if block.pages + entry.same + len(entry.pages) // HASH_BYTES > MOST_PAGES:
            raise _too_many()
        front: Ids | None = None
        if entry.same:
            front = block.ids[entry.like] if entry.like < len(block.ids) else None
            if front is None or entry.same > len(front):
                raise TraceError(
                    f"its first {entry.same} pages are said to be of request {entry.like}, which has not so many"
                )
        names = np.frombuffer(entry.pages, "<u8").tolist()
        behind = pack_ids(self._names.translate(_scope(namespace), names))
        return behind if front is None else np.concatenate((front[: entry.same], behind))

    @staticmethod
    def _check(entry: Entry, pages: int) -> None:
        parts = entry.device + entry.host + entry.storage + sum(entry.missed.values())
        if parts != entry.asked:
            raise TraceError(f"asked is {entry.asked} pages, and hits and misses are {parts} together")
        if not entry.missed.keys() <= _REASONS:
            raise TraceError(
                f"missed has a reason that is unknown: {', '.join(sorted(entry.missed.keys() - _REASONS)):.80}"
            )
        if pages and max(entry.asked, entry.kept) > pages:
            raise TraceError(f"asked is {entry.asked} and kept {entry.kept}, of {pages} pages")


def _too_many() -> TraceError:
    """The error for a block that no writer makes."""
    return TraceError(f"the block has more than {MOST_PAGES} pages, so it is none of an access log")


def _scope(namespace: NamespaceRecord) -> str:
    return f"access log\n{namespace.namespace}\n{namespace.generation}\n{namespace.page_size}"


def _whole(file: BinaryIO, size: int) -> bytes:
    """So many bytes; fewer at the file's end."""
    parts = []
    while size > 0 and (data := file.read(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
