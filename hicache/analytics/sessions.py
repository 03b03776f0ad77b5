"""kv-cache-tester traces: one JSON document a file, one file a session of a coding agent.

Source: callanjfox/kv-cache-tester. Read are `block_size` (64 in public ones), `hash_id_scope`, and of each of
`requests` its `t` (seconds), `type`, `model`, `in`, `out` and `hash_ids`, or the `requests` inside it.

Ids mean something only inside their file, and KV of one model is of no use to another, so both are part of a request's
scope. Requests of subagents nest; they are put among the others by time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from hicache.analytics.formats.lines import Reader, check_count
from hicache.analytics.packing import DamagedFile
from hicache.analytics.sources import Source
from hicache.analytics.trace import (
    MAX_DOCUMENT,
    BlockIds,
    Count,
    Details,
    Interner,
    Reading,
    Seconds,
    TraceRequest,
    in_words,
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
    type: str = "n"
    model: str = ""


class SessionReader(Reader):
    """Requests of one file, by time. Iterate once; not thread-safe. Needs the memory of the whole file.

    A file that is no document counts as one broken entry.
    """

    def __init__(self, path: Source, reading: Reading | None = None, *, interner: Interner | None = None) -> None:
        super().__init__(path, reading, interner=Interner() if interner is None else interner)
        self._entry = msgspec.json.Decoder(_Entry).decode
        self._decode = msgspec.json.Decoder(_Request).decode
        self._unit = 0

    def _requests(self, file: BinaryIO) -> Iterator[TraceRequest]:
        try:
            document, size = self._document(file)
            file.close()  # so that a folder of thousands of sessions does not use up what a process may open
        except DamagedFile:
            raise
        except TraceError:
            if not self._reading.skip_bad:
                raise
            self.skipped += 1
            return
        found = sorted(self._walk(document.requests, prefix="", depth=0), key=lambda pair: pair[0].t)
        for position, (entry, place) in enumerate(found, start=1):
            self._consumed = size * position // len(found)
            yield self._finish(entry, place)

    def _document(self, file: BinaryIO) -> tuple[_Document, int]:
        data = file.read(MAX_DOCUMENT + 1)
        if len(data) > MAX_DOCUMENT:
            raise TraceError(
                f"{self.path}: more than {MAX_DOCUMENT} bytes in one document, which is the limit; split the session"
            )
        try:
            document = msgspec.json.decode(data, type=_Document)
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
        self._scope = "" if document.hash_id_scope == "global" else str(self.path)
        return document, len(data)

    def _walk(self, entries: list[msgspec.Raw], *, prefix: str, depth: int) -> Iterator[tuple[_Request, str]]:
        for number, raw in enumerate(entries, start=1):
            place = f"{prefix}{number}"
            try:
                found = self._read(raw, depth=depth)
            except TraceError as error:
                self._bad(f"request {place}", error)
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
            request = self._decode(raw)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise TraceError(in_words(error)) from None
        # public sessions leave the last, partial block without an id; a writer that gives it one is right as well
        check_count(len(request.hash_ids), request.input, self._unit, partial=None)
        return request

    def _finish(self, entry: _Request, place: str) -> TraceRequest:
        scope = f"{self._scope}\n{entry.model}"
        return TraceRequest(
            time=entry.t,
            ids=self._ids(scope, entry.hash_ids),
            unit=self._unit,
            input_tokens=entry.input,
            output_tokens=entry.output,
            scope=scope,
            place=place,
            details=Details(model=entry.model, kind=entry.type),
        )
