"""Writes traces, a request at a time, and knows what each format cannot carry."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import BinaryIO, Final

from hicache.analytics import mooncake
from hicache.analytics.convert.blocks import Blocks
from hicache.analytics.formats import bailian, tokens
from hicache.analytics.formats.accesslog import RecordedDetails
from hicache.analytics.formats.dynamo import SCHEMAS
from hicache.analytics.prompts import expand
from hicache.analytics.trace import Details, TraceRequest

_NOTHING: Final = Details()


class Writer:
    """Writes one file. Use once.

    Attributes:
        unit: tokens a block that readers take for granted; 0 where the format tells it.
        keeps: whether blocks keep the trace's size all the same.
        partial, chained: of its ids, see `Blocks`.
        wall: whether times of a wall clock stay what they are.
        begin: seconds since 1970 from which times of requests count; 0 where they are of no wall clock.
        written: requests so far.
        losses: what was lost and how often, in words with `{}` for the number.
    """

    unit = 0
    keeps = False
    partial = False
    chained = False
    wall = False

    def __init__(self, file: BinaryIO, unit: int | None) -> None:
        """Begin.

        Args:
            file: where to; can be written and sought.
            unit: tokens a block, None for the format's own or else the trace's.
        """
        self._file = file
        own = 0 if self.keeps else self.unit
        self.blocks = Blocks(own if unit is None else unit, partial=self.partial, chained=self.chained)
        self.begin = 0.0
        self.written = 0
        self.losses: dict[str, int] = {}

    def add(self, request: TraceRequest) -> None:
        """Write a request.

        Raises:
            TraceError: this format cannot have it.
        """
        self._write(request)
        self.written += 1

    @abstractmethod
    def _write(self, request: TraceRequest) -> None:
        """Write a request."""

    def end(self) -> None:
        """Write what belongs behind the last one."""

    def lose(self, what: str) -> None:
        """Count something that is lost."""
        self.losses[what] = self.losses.get(what, 0) + 1

    def _line(self, entry: object) -> None:
        self._file.write(json.dumps(entry, allow_nan=False, separators=(", ", ": ")).encode() + b"\n")

    def lose_details(self, request: TraceRequest, *names: str) -> None:
        """Count which of these details a request has."""
        details = request.details
        if details is None:
            return
        for name in names:
            if getattr(details, name):
                self.lose(f"{_WORDS[name]} of {{}} requests")
        if isinstance(details, RecordedDetails):
            self.lose("what became of {} requests")

    def time(self, request: TraceRequest) -> float:
        """Seconds, of the wall clock where there is one and the format has it."""
        return round(request.time + self.begin if self.wall else request.time, 6)

    def _milliseconds(self, request: TraceRequest, *, whole: bool) -> float:
        time = self.time(request) * 1000
        near = round(time)
        if abs(time - near) < 1e-3:
            return near
        if whole:
            self.lose("parts of a millisecond of the times of {} requests")
            return near
        return round(time, 6)


_WORDS: Final = {
    "request": "names",
    "session": "sessions",
    "parent": "what they go on from,",
    "kind": "types",
    "turn": "turns",
    "model": "models' names",
}


class MooncakeWriter(Writer):
    """One JSON object a line, blocks of 512 tokens unless told otherwise."""

    unit = mooncake.UNIT
    partial = True
    chained = True

    def _write(self, request: TraceRequest) -> None:
        self._line(
            {
                "timestamp": self._milliseconds(request, whole=False),
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": self.blocks.ids(request),
            }
        )
        self.lose_details(request, "request", "session", "parent", "turn", "kind", "model")


class BailianWriter(Writer):
    """One JSON object a line, blocks of 16 tokens unless told otherwise."""

    unit = bailian.UNIT

    def _write(self, request: TraceRequest) -> None:
        details = request.details or _NOTHING
        chats = (_chat(details.request), _chat(details.parent))
        self._line(
            {
                "chat_id": self.written if chats[0] is None else chats[0],
                "parent_chat_id": -1 if chats[0] is None or chats[1] is None else chats[1],
                "timestamp": self.time(request),
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "type": details.kind or "text",
                "turn": details.turn or 1,
                "hash_ids": self.blocks.ids(request),
            }
        )
        self.lose_details(request, "session", "model")
        if chats[0] is None:
            self.lose_details(request, "parent")


def _chat(name: str) -> int | None:
    return int(name) if name.isascii() and name.isdecimal() and len(name) < 19 else None


class DynamoWriter(Writer):
    """One `request_end` record a line; times of a trace without a wall clock count from 1970."""

    partial = True
    chained = True
    wall = True

    def _write(self, request: TraceRequest) -> None:
        details = request.details or _NOTHING
        at = self._milliseconds(request, whole=True)
        replay = {
            "trace_block_size": self.blocks.unit_of(request),
            "input_length": request.input_tokens,
            "input_sequence_hashes": self.blocks.ids(request),
        }
        inside = {
            "request_id": details.request or f"request-{self.written}",
            **({"model": details.model} if details.model else {}),
            "output_tokens": request.output_tokens,
            "request_received_ms": at,
            "replay": replay,
        }
        record = {"schema": SCHEMAS[0], "event_type": "request_end", "event_time_unix_ms": at, "request": inside}
        if details.session:
            parent = {"parent_session_id": details.parent} if details.parent else {}
            record["agent_context"] = {"session_id": details.session, **parent}
        else:
            self.lose_details(request, "parent")
        self._line(record)
        self.lose_details(request, "kind", "turn")


class SessionWriter(Writer):
    """One JSON document with all requests in it, whose ids mean the same in every such file."""

    _begun = False

    def _write(self, request: TraceRequest) -> None:
        details = request.details or _NOTHING
        unit = self.blocks.unit_of(request)
        if not self._begun:
            self._begun = True
            self.blocks.unit = unit
            self._file.write(f'{{"block_size": {unit}, "hash_id_scope": "local", "requests": [\n'.encode())
        else:
            self._file.write(b",\n")
        entry = {
            "t": self.time(request),
            "type": details.kind if details.kind and details.kind != "subagent" else "n",
            "model": details.model,
            "in": request.input_tokens,
            "out": request.output_tokens,
            "hash_ids": self.blocks.ids(request),
        }
        self._file.write(json.dumps(entry, allow_nan=False).encode())
        self.lose_details(request, "request", "session", "parent", "turn")

    def end(self) -> None:
        """Close the list."""
        if not self._begun:
            self._file.write(b'{"block_size": 64, "hash_id_scope": "local", "requests": [')
        self._file.write(b"\n]}\n")


class TokenWriter(Writer):
    """Token ids, made up so that equal blocks have equal tokens, with the time and the model."""

    unit = tokens.UNIT
    keeps = True
    wall = True

    def _write(self, request: TraceRequest) -> None:
        self.blocks.units.add(request.unit)
        found = expand(request.ids, unit=request.unit)[: request.known_tokens].tolist()
        lacks = request.input_tokens - len(found)
        if lacks:
            # A tail without an id is nobody else's; numbers of its own, as far as there are any.
            found += [(self.written + 0x9E3779B9 * place) % 2**32 for place in range(1, lacks + 1)]
        model = request.details.model if request.details is not None else ""
        self._line(
            {
                "tokens": found,
                "timestamp": self.time(request),
                "output_length": request.output_tokens,
                **({"model": model} if model else {}),
            }
        )
        if request.known_tokens % request.unit:
            self.lose("ids of the last, partial blocks of {} requests, as whole blocks only are told from tokens,")
        self.lose_details(request, "request", "session", "parent", "turn", "kind")
