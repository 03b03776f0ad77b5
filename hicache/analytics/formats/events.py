"""KV events: what a cache stored and removed, from which requests are worked out, as far as that can be.

Sources: vLLM's vllm/distributed/kv_events.py and SGLang's kv events, as JSON lines or as MessagePack payloads one after
the other: batches `[time, [events], rank]` or maps of `ts` and `events`; of `BlockStored` its `block_hashes`,
`parent_block_hash`, `block_size`, `medium` and `group_idx`, of `BlockRemoved` `block_hashes` and `medium`, and
`AllBlocksCleared`; as maps with `type` or as arrays. And what `hicache events --json` prints.

A page that comes to whoever holds it nowhere, or in the same medium already, was computed, for a request whose prompt
is its whole chain; else it is a copy. Pages behind the last one of a chain that come within `GROWING` seconds belong to
the same request: its prefill goes on, or it is decoding. Requests that found all of their prompt may store nothing, so
that they are not seen: hits are a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import msgspec

from hicache.analytics.formats.chains import Chain, Chains
from hicache.analytics.formats.lines import Reader
from hicache.analytics.formats.unpacking import payloads
from hicache.analytics.packing import DamagedFile
from hicache.analytics.sources import Source
from hicache.analytics.trace import MAX_TOKENS, Interner, Reading, TraceRequest, pack_ids
from hicache.errors import TraceError

UNIT: Final = 64
"""Tokens of a page where neither events nor anybody else tell."""

_STORED: Final = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
_STORED_MORE: Final = ("extra_keys", "group_idx")
_REMOVED: Final = ("block_hashes", "medium", "group_idx")
_PLACES: Final = {"BlockStored": _STORED + _STORED_MORE, "BlockRemoved": _REMOVED}

Hash = int | str | bytes
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """An event, of whichever publisher.

    Attributes:
        time: seconds.
        kind: "stored", "removed" or "cleared".
        scope: where hashes mean the same.
        source: who holds the pages, such as a data-parallel rank.
        medium: where.
        pages: their hashes.
        parent: of the first page; None at the start of a prompt.
        unit: tokens of a page; 0 where not told.
        told: whether it only tells what was there already, as a snapshot does.
    """

    time: float
    kind: str
    scope: str
    source: str = ""
    medium: str = ""
    pages: tuple[Hash, ...] = ()
    parent: Hash | None = None
    unit: int = 0
    told: bool = False


class EventReader(Reader):
    """Requests worked out of the events of one file, in the order of their begins."""

    def __init__(self, path: Source, reading: Reading | None = None, *, interner: Interner | None = None) -> None:
        super().__init__(path, reading, interner=interner)
        self._names = Interner() if interner is None else interner
        self._chains = Chains()
        self._time = 0.0
        self._place = ""

    def _requests(self, file: BinaryIO) -> Iterator[TraceRequest]:
        for number, (place, data) in enumerate(self._to_damage(self._entries(file)), start=1):
            self._place = f"{place} {number}"
            try:
                changes = list(self._changes(data))
            except TraceError as error:
                self._bad(self._place, error)
                continue
            for change in changes:
                self._apply(change)
            yield from self._requests_of(self._chains.ended(self._time))
        yield from self._requests_of(self._chains.ended(None))

    def _entries(self, file: BinaryIO) -> Iterator[tuple[str, bytes]]:
        """JSON lines or payloads, and what an entry is called."""
        first = file.peek(1)[:1] if hasattr(file, "peek") else b""
        if first and (first[0] & 0xF0 in (0x80, 0x90) or first[0] in (0xDC, 0xDD, 0xDE, 0xDF)):
            try:
                for payload in payloads(file):
                    self._consumed += len(payload)
                    yield "message", payload
            except TraceError as error:
                raise DamagedFile(f"{self.path}, behind byte {self._consumed}: {error}") from None
            return
        for line in self._lines(file):
            yield "line", line

    def _changes(self, data: bytes) -> Iterator[Change]:
        packed = self._place.startswith("message")
        found = self._decoded(msgspec.msgpack.decode if packed else msgspec.json.decode, data)
        if found is None and not data.strip():
            return
        yield from _changes(found)

    def _apply(self, change: Change) -> None:
        self._time = max(self._time, change.time)
        chains = self._chains
        if change.kind == "cleared":
            chains.clear(change)
        elif change.kind == "removed":
            chains.remove(change)
        else:
            unit = change.unit or self._reading.unit or UNIT
            chains.store(change, unit, self._place)

    def _requests_of(self, chains: Iterator[Chain]) -> Iterator[TraceRequest]:
        for chain in chains:
            pages = chain.pages()
            if len(pages) * chain.unit > MAX_TOKENS:
                self._bad(chain.place, f"its chain of {len(pages)} pages is longer than any prompt")
                continue
            scope = f"events\n{chain.scope}"
            yield TraceRequest(
                time=chain.begun,
                ids=pack_ids(self._names.translate(scope, pages)),
                unit=chain.unit,
                input_tokens=len(pages) * chain.unit,
                output_tokens=0,
                scope=scope,
                place=chain.place,
            )


def _changes(found: object) -> Iterator[Change]:
    """Changes of a decoded line or payload.

    Raises:
        TraceError: it has none.
    """
    rank: object = None
    if isinstance(found, list) and len(found) >= 2 and isinstance(found[1], list):
        (time, events), rank = found[:2], found[2] if len(found) > 2 else None
    elif isinstance(found, dict) and isinstance(found.get("events"), list):
        time, events = found.get("ts", found.get("timestamp")), found["events"]
        rank = found.get("data_parallel_rank", found.get("dp_rank"))
    elif isinstance(found, dict) and isinstance(found.get("event"), str):
        yield from _ours(found)
        return
    elif isinstance(found, dict) and "type" in found:
        time, events = found.get("ts", found.get("timestamp", 0.0)), [found]
    else:
        raise TraceError("it is no batch of KV events, which is [time, [events], rank]")
    when = _time(time)
    for event in events:
        change = _theirs(event, when, str(rank))
        if change is not None:
            yield change


def _ours(event: Fields) -> Iterator[Change]:
    """What `hicache events --json` prints."""
    kind, time = event["event"], _time(event.get("timestamp_ms", 0)) / 1000
    scope = f"{event.get('namespace', '')} {event.get('generation', '')}"
    if kind == "snapshot_end":
        return
    if kind == "lost":
        raise TraceError("events were lost here, so what follows may be of pages that were stored before")
    if kind == "cleared":
        yield Change(time, "cleared", scope)
        return
    if kind not in ("stored", "removed"):
        raise TraceError(f"event {kind!r:.40} is unknown")
    pages, tokens = _hashes(event.get("page_hashes")), event.get("tokens") or []
    unit = len(tokens) // len(pages) if pages and isinstance(tokens, list) else 0
    parent, tier = event.get("parent_hash"), str(event.get("tier", ""))
    told = event.get("snapshot") is True
    yield Change(time, kind, scope, "", tier, pages, None if parent is None else _hash(parent), unit, told)


def _theirs(event: object, time: float, source: str) -> Change | None:
    """A vLLM or SGLang event; None for one of another kind."""
    fields = _fields(event)
    kind = fields["type"]
    if kind == "AllBlocksCleared":
        return Change(time, "cleared", "", source)
    if kind not in _PLACES or fields.get("group_idx") not in (None, 0):
        return None  # layers of other kinds have the same pages once more
    medium, pages = str(fields.get("medium") or "GPU"), _hashes(fields.get("block_hashes"))
    if kind == "BlockRemoved":
        return Change(time, "removed", "", source, medium, pages)
    unit = fields.get("block_size")
    if type(unit) is not int or not 1 <= unit <= 2**24:
        raise TraceError(f"block_size {unit!r:.40} is no number of tokens")
    parent = fields.get("parent_block_hash")
    return Change(time, "stored", "", source, medium, pages, None if parent is None else _hash(parent), unit)


def _fields(event: object) -> Fields:
    if isinstance(event, list) and event and isinstance(event[0], str):
        return {"type": event[0], **dict(zip(_PLACES.get(event[0], ()), event[1:], strict=False))}
    if isinstance(event, dict) and isinstance(event.get("type"), str):
        return event
    raise TraceError("a KV event is a map with its type, or an array that begins with it")


def _hashes(found: object) -> tuple[Hash, ...]:
    if not isinstance(found, list):
        raise TraceError("hashes of pages are missing")
    return tuple(_hash(each) for each in found)


def _hash(found: object) -> Hash:
    if type(found) is int:
        return found - 2**64 if found >= 2**63 else found  # written as signed or not, it is the same
    if isinstance(found, str | bytes) and found:
        return found
    raise TraceError(f"{found!r:.40} is no hash of a page")


def _time(found: object) -> float:
    if isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found < 1e15:
        return float(found)
    raise TraceError(f"{found!r:.40} is no time")
