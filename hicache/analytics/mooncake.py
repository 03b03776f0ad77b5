"""Mooncake traces: one JSON object a line, one id for each started block of 512 tokens.

Read line by line, so that a trace of any length needs the memory of one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from hicache.analytics.sources import Source
from hicache.analytics.trace import (
    MAX_LINE,
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

UNIT = 512  # tokens an id stands for; the format has no field for it


class _Line(msgspec.Struct):
    timestamp: Seconds  # milliseconds
    input_length: Count
    output_length: Count
    hash_ids: BlockIds


class MooncakeReader:
    """Requests of one file, in the file's order. Iterate once; not thread-safe.

    Attributes:
        skipped: broken lines passed over, with `skip_bad`.
        bytes_read: how far it has come.
    """

    def __init__(self, path: Source, *, skip_bad: bool = False, interner: Interner | None = None) -> None:
        self.path = path
        self.skipped = 0
        self.bytes_read = 0
        self._skip_bad = skip_bad
        self._interner = interner
        self._scope = "" if interner is None else str(path)
        self._decode = msgspec.json.Decoder(_Line).decode

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield requests.

        Raises:
            TraceError: a broken line, named by its number, unless `skip_bad`.
        """
        with self.path.open("rb", buffering=1 << 20) as file:
            for number, line in enumerate(self._lines(file), start=1):
                try:
                    request = self._request(line, number)
                except TraceError as error:
                    if not self._skip_bad:
                        raise bad_entry(self.path, f"line {number}", str(error)) from None
                    self.skipped += 1
                    continue
                if request is not None:
                    yield request

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Lines; of one that is too long only the beginning, which cannot pass for a whole one."""
        while line := file.readline(MAX_LINE + 1):
            self.bytes_read += len(line)
            yield line
            while len(line) > MAX_LINE and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE + 1)
                self.bytes_read += len(line)

    def _request(self, line: bytes, number: int) -> TraceRequest | None:
        if len(line) > MAX_LINE:
            raise TraceError(f"longer than {MAX_LINE // 2**20} MiB, so it is no line of a trace")
        try:
            entry = self._decode(line)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            if not line.strip():
                return None
            raise TraceError(in_words(error)) from None
        started = -(-entry.input_length // UNIT)
        if len(entry.hash_ids) != started:
            have = f"{len(entry.hash_ids)} hash_ids"
            raise TraceError(f"{have}, but input_length {entry.input_length} starts {started} blocks of {UNIT}")
        ids = entry.hash_ids if self._interner is None else self._interner.translate(self._scope, entry.hash_ids)
        return TraceRequest(
            time=entry.timestamp / 1000,
            ids=pack_ids(ids),
            unit=UNIT,
            input_tokens=entry.input_length,
            output_tokens=entry.output_length,
            scope=self._scope,
            place=f"line {number}",
        )
