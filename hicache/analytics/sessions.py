"""kv-cache-tester traces: one JSON document a file, one file a session of a coding agent.

Ids mean something only inside their file, and KV of one model is of no use to another, so both are part of a request's
scope. Requests of subagents nest; they are put among the others by time.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from hicache.analytics.sources import Source
from hicache.analytics.trace import (
    MAX_DOCUMENT,
    BlockIds,
    Count,
    Interner,
    Seconds,
    TraceRequest,
    bad_entry,
    in_words,
    pack_ids,
)
from hicache.errors import TraceError

MAX_DEPTH = 32  # subagents of subagents; real sessions have one level


class _Document(msgspec.Struct):
    block_size: Count
    requests: list[msgspec.Raw]
    hash_id_scope: str = "local"


class _Entry(msgspec.Struct):
    t: Seconds
    type: str = "n"
    requests: list[msgspec.Raw] | None = None


class _Request(msgspec.Struct):
    t: Seconds
    input: Count = msgspec.field(name="in")
    output: Count = msgspec.field(name="out")
    hash_ids: BlockIds
    model: str = ""


class SessionReader:
    """Requests of one file, by time. Iterate once; not thread-safe. Needs the memory of the whole file.

    Attributes:
        skipped: broken requests passed over, with `skip_bad`; a file that is no document counts as one.
        bytes_read: how far it has come, estimated.
    """

    def __init__(self, path: Source, *, skip_bad: bool = False, interner: Interner | None = None) -> None:
        self.path = path
        self.skipped = 0
        self.bytes_read = 0
        self._skip_bad = skip_bad
        self._interner = Interner() if interner is None else interner
        self._entry = msgspec.json.Decoder(_Entry).decode
        self._request = msgspec.json.Decoder(_Request).decode
        self._unit = 0
        self._scope = str(path)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield requests.

        Raises:
            TraceError: the file is no such document, or a request is broken and `skip_bad` is off.
        """
        try:
            document, size = self._document()
        except TraceError:
            if not self._skip_bad:
                raise
            self.skipped += 1
            return
        found = sorted(self._walk(document.requests, prefix="", depth=0), key=lambda pair: pair[0].t)
        for position, (entry, place) in enumerate(found, start=1):
            self.bytes_read = size * position // len(found)
            yield self._finish(entry, place)

    def _document(self) -> tuple[_Document, int]:
        size = self.path.stat().st_size
        if size > MAX_DOCUMENT:
            raise TraceError(
                f"{self.path}: {size} bytes in one document, the limit is {MAX_DOCUMENT}; split the session"
            )
        try:
            document = msgspec.json.decode(self.path.read_bytes(), type=_Document)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise TraceError(f"{self.path}: {in_words(error)}; this is no whole kv-cache-tester document") from None
        if document.block_size == 0:
            raise TraceError(
                f"{self.path}: block_size is 0; it is the tokens that an id stands for, 64 in public traces"
            )
        if document.hash_id_scope not in ("local", "global"):
            raise TraceError(
                f'{self.path}: hash_id_scope {document.hash_id_scope!r} is unknown; use "local" or "global"'
            )
        self._unit = document.block_size
        if document.hash_id_scope == "global":
            self._scope = ""
        return document, size

    def _walk(self, entries: list[msgspec.Raw], *, prefix: str, depth: int) -> Iterator[tuple[_Request, str]]:
        for number, raw in enumerate(entries, start=1):
            place = f"{prefix}{number}"
            try:
                found = self._read(raw, depth=depth)
            except TraceError as error:
                if not self._skip_bad:
                    raise bad_entry(self.path, f"request {place}", str(error)) from None
                self.skipped += 1
                continue
            if isinstance(found, _Request):
                yield found, f"request {place}"
            else:
                yield from self._walk(found, prefix=f"{place}.", depth=depth + 1)

    def _read(self, raw: msgspec.Raw, *, depth: int) -> _Request | list[msgspec.Raw]:
        """One request, or the entries inside a subagent."""
        try:
            entry = self._entry(raw)
            if entry.requests is not None or entry.type == "subagent":
                if depth == MAX_DEPTH:
                    raise TraceError(f"subagents nest deeper than {MAX_DEPTH}")
                return entry.requests or []
            request = self._request(raw)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise TraceError(in_words(error)) from None
        # public sessions leave the last, partial block without an id; a writer that gives it one is right as well
        whole = request.input // self._unit
        if len(request.hash_ids) not in (whole, -(-request.input // self._unit)):
            have = f"{len(request.hash_ids)} hash_ids"
            raise TraceError(f"{have}, but {request.input} tokens have {whole} whole blocks of {self._unit}")
        return request

    def _finish(self, entry: _Request, place: str) -> TraceRequest:
        scope = f"{self._scope}\n{entry.model}"
        return TraceRequest(
            time=entry.t,
            ids=pack_ids(self._interner.translate(scope, entry.hash_ids)),
            unit=self._unit,
            input_tokens=entry.input,
            output_tokens=entry.output,
            scope=scope,
            place=place,
        )
