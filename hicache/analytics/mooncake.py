"""Mooncake traces: one JSON object a line, one id for each started block of 512 tokens.

Source: kvcache-ai/Mooncake, FAST25-release/traces. An id stands for a block and everything before it. Other tools write
the same with blocks of another size, which the format has no field for.
"""

from __future__ import annotations

from typing import Final

import msgspec

from hicache.analytics.formats.lines import LineReader, check_count
from hicache.analytics.sources import Source
from hicache.analytics.trace import BlockIds, Count, Interner, Milliseconds, Reading, TraceRequest

UNIT: Final = 512  # tokens an id stands for; the format has no field for it


class _Line(msgspec.Struct):
    timestamp: Milliseconds
    input_length: Count
    output_length: Count
    hash_ids: BlockIds


class MooncakeReader(LineReader):
    """Requests of one file, in the file's order."""

    def __init__(self, path: Source, reading: Reading | None = None, *, interner: Interner | None = None) -> None:
        super().__init__(path, reading, interner=interner)
        self._unit = self._reading.unit or UNIT
        self._decode = msgspec.json.Decoder(_Line).decode

    def _request(self, line: bytes, number: int) -> TraceRequest | None:
        entry = self._decoded(self._decode, line)
        if entry is None:
            return None
        check_count(len(entry.hash_ids), entry.input_length, self._unit, partial=True)
        return TraceRequest(
            time=entry.timestamp / 1000,
            ids=self._ids(self._scope, entry.hash_ids),
            unit=self._unit,
            input_tokens=entry.input_length,
            output_tokens=entry.output_length,
            scope=self._scope,
            place=f"line {number}",
        )
