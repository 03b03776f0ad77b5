"""Plain token ids: one prompt a line, as `[1, 2, ...]` or `{"tokens": [1, 2, ...], ...}`.

The pages of prompts are named by the cache's own page hash, so nothing of the text is kept. An object may have
`tokens` (or `token_ids`, `prompt_token_ids`, `input_ids`), `timestamp` in seconds, `output_length` and `model`. Without
timestamps one request comes each second. A page has --unit tokens; tokens behind the last whole page have no id.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import numpy as np

from hicache.analytics.formats.lines import LineReader
from hicache.analytics.sources import Source
from hicache.analytics.trace import (
    MAX_TOKENS,
    Count,
    Details,
    Interner,
    Reading,
    Seconds,
    TraceRequest,
    pack_ids,
)
from hicache.core.hashing import PageHasher
from hicache.errors import TraceError

UNIT: Final = 64
"""Tokens of a page where nobody says otherwise."""

Tokens = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]], msgspec.Meta(max_length=MAX_TOKENS)]


class _Prompt(msgspec.Struct):
    tokens: Tokens | None = None
    token_ids: Tokens | None = None
    prompt_token_ids: Tokens | None = None
    input_ids: Tokens | None = None
    timestamp: Seconds | None = None
    output_length: Count = 0
    model: str = ""


class TokenReader(LineReader):
    """Requests of one file, in the file's order."""

    def __init__(self, path: Source, reading: Reading | None = None, *, interner: Interner | None = None) -> None:
        super().__init__(path, reading, interner=interner)
        self._names = Interner() if interner is None else interner
        self._unit = self._reading.unit or UNIT
        self._hasher = PageHasher("xxh3_128", page_size=self._unit)
        self._decode = msgspec.json.Decoder(Tokens | _Prompt).decode
        self._came = -1

    def _request(self, line: bytes, number: int) -> TraceRequest | None:
        found = self._decoded(self._decode, line)
        if found is None:
            return None
        prompt = found if isinstance(found, _Prompt) else _Prompt(tokens=found)
        tokens = next((each for each in self._given(prompt) if each is not None), None)
        if tokens is None:
            raise TraceError("the field tokens is missing")
        self._came += 1
        scope = f"tokens\n{prompt.model}"
        pages = len(tokens) // self._unit
        symbols = np.array(tokens[: pages * self._unit], "<u4").tobytes()
        hashes, size = self._hasher.extend(None, symbols, pages), self._hasher.hash_size
        names = [hashes[at : at + size] for at in range(0, len(hashes), size)]
        return TraceRequest(
            time=float(self._came) if prompt.timestamp is None else prompt.timestamp,
            ids=pack_ids(self._names.translate(scope, names)),
            unit=self._unit,
            input_tokens=len(tokens),
            output_tokens=prompt.output_length,
            scope=scope,
            place=f"line {number}",
            details=Details(model=prompt.model) if prompt.model else None,
        )

    @staticmethod
    def _given(prompt: _Prompt) -> tuple[list[int] | None, ...]:
        return (prompt.tokens, prompt.token_ids, prompt.prompt_token_ids, prompt.input_ids)
