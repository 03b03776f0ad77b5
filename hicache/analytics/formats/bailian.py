"""Qwen-Bailian usage traces: one JSON object a line, one id for each block of 16 tokens, and which chat goes on.

Source: the README of alibaba-edu/qwen-bailian-usagetraces-anon. Read are `chat_id`, `parent_chat_id` (-1 for none),
`timestamp` (seconds from the trace's begin), `input_length`, `output_length`, `type` (text, search, image, file),
`turn` and `hash_ids`.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from hicache.analytics.formats.lines import LineReader, check_count
from hicache.analytics.sources import Source
from hicache.analytics.trace import BlockIds, Count, Details, Interner, Reading, Seconds, TraceRequest

UNIT: Final = 16

Name = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]


class _Line(msgspec.Struct):
    chat_id: Name
    timestamp: Seconds
    input_length: Count
    output_length: Count
    hash_ids: BlockIds
    parent_chat_id: Name = -1
    type: str = ""
    turn: Count = 0


class BailianReader(LineReader):
    """Requests of one file, in the file's order."""

    def __init__(self, path: Source, reading: Reading | None = None, *, interner: Interner | None = None) -> None:
        super().__init__(path, reading, interner=interner)
        self._unit = self._reading.unit or UNIT
        self._decode = msgspec.json.Decoder(_Line).decode

    def _request(self, line: bytes, number: int) -> TraceRequest | None:
        entry = self._decoded(self._decode, line)
        if entry is None:
            return None
        check_count(len(entry.hash_ids), entry.input_length, self._unit, partial=None)
        return TraceRequest(
            time=entry.timestamp,
            ids=self._ids(self._scope, entry.hash_ids),
            unit=self._unit,
            input_tokens=entry.input_length,
            output_tokens=entry.output_length,
            scope=self._scope,
            place=f"line {number}",
            details=Details(
                request=str(entry.chat_id),
                parent="" if entry.parent_chat_id < 0 else str(entry.parent_chat_id),
                kind=entry.type,
                turn=entry.turn,
            ),
        )
