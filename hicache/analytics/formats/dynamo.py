"""Dynamo request traces: JSON lines of `dynamo.request.trace.v1`, one `request_end` a request.

Source: ai-dynamo/dynamo, its documentation of request traces and lib/data-gen/src/request_trace/load.rs. Read are, of
`request_end` records, bare or inside `event`: `request.request_received_ms`, `request.output_tokens`, `request.model`,
and of `request.replay` `trace_block_size`, `input_length` and `input_sequence_hashes`, one for each started block.
These name a block and everything before it in every file. Other records (payloads, tools) are passed over.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Annotated, BinaryIO, Final

import msgspec

from hicache.analytics.formats.lines import LineReader, check_count
from hicache.analytics.sources import Source
from hicache.analytics.trace import Count, Details, Interner, Milliseconds, Reading, TraceRequest
from hicache.errors import TraceError

SCHEMAS: Final = ("dynamo.request.trace.v1", "dynamo.agent.trace.v1")
WINDOW: Final = 4096
"""Requests that are held to put them in order: records are written when requests end."""

_PASSED_OVER: Final = ("request_payload", "tool_start", "tool_end", "tool_error", "tool")

Hash = Annotated[int, msgspec.Meta(ge=0)]


class _Replay(msgspec.Struct):
    trace_block_size: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    input_length: Count
    input_sequence_hashes: list[Hash]


class _Request(msgspec.Struct):
    request_id: str = ""
    model: str | None = None
    output_tokens: Count | None = None
    request_received_ms: Milliseconds | None = None
    replay: _Replay | None = None


class _Agent(msgspec.Struct):
    session_id: str = ""
    parent_session_id: str | None = None


class _Record(msgspec.Struct):
    schema: str = ""
    event_type: str = ""
    request: _Request | None = None
    agent_context: _Agent | None = None


class _Line(_Record):
    event: _Record | None = None


class DynamoReader(LineReader):
    """Requests of one file by the time at which they came, as far as a window of `WINDOW` requests allows."""

    def __init__(self, path: Source, reading: Reading | None = None, *, interner: Interner | None = None) -> None:
        super().__init__(path, reading, interner=Interner() if interner is None else interner)
        self._decode = msgspec.json.Decoder(_Line).decode

    def _requests(self, file: BinaryIO) -> Iterator[TraceRequest]:
        held: list[tuple[float, int, TraceRequest]] = []
        for number, request in enumerate(super()._requests(file)):
            entry = (request.time, number, request)
            if len(held) < WINDOW:
                heapq.heappush(held, entry)
            else:
                yield heapq.heappushpop(held, entry)[2]
        yield from (request for _, _, request in sorted(held))

    def _request(self, line: bytes, number: int) -> TraceRequest | None:
        found = self._decoded(self._decode, line)
        if found is None:
            return None
        record = found.event or found
        if record.schema not in SCHEMAS:
            raise TraceError(f"schema {record.schema!r:.60} is unknown; known are {', '.join(SCHEMAS)}")
        if record.event_type in _PASSED_OVER:
            return None
        if record.event_type != "request_end":
            raise TraceError(f"event_type {record.event_type!r:.60} is unknown")
        request = record.request
        if request is None or request.replay is None:
            raise TraceError("request.replay is missing, without which nothing is known of the prompt")
        if request.request_received_ms is None or request.output_tokens is None:
            raise TraceError("request_received_ms or output_tokens is missing")
        return self._made(request, request.replay, record.agent_context or _Agent(), number)

    def _made(self, request: _Request, replay: _Replay, agent: _Agent, number: int) -> TraceRequest:
        ids, tokens, unit = replay.input_sequence_hashes, replay.input_length, replay.trace_block_size
        check_count(len(ids), tokens, unit, partial=True, name="input_sequence_hashes")
        if ids and max(ids) >= 2**64:
            raise TraceError(f"input_sequence_hashes holds {max(ids)}, and hashes have 64 bits")
        scope = f"dynamo\n{request.model or ''}"
        assert request.request_received_ms is not None
        return TraceRequest(
            time=request.request_received_ms / 1000,
            ids=self._ids(scope, ids),
            unit=unit,
            input_tokens=tokens,
            output_tokens=request.output_tokens or 0,
            scope=scope,
            place=f"line {number}",
            details=Details(
                request=request.request_id,
                session=agent.session_id,
                parent=agent.parent_session_id or "",
                model=request.model or "",
            ),
        )
