"""All formats of traces that are read: how each is told from the others, and what reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from hicache.analytics.formats.accesslog import AccessLogReader, looks_like_access_log
from hicache.analytics.formats.bailian import BailianReader
from hicache.analytics.formats.dynamo import DynamoReader
from hicache.analytics.formats.events import EventReader
from hicache.analytics.formats.objects import OracleReader, TableReader, looks_like_records, looks_like_table
from hicache.analytics.formats.tokens import TokenReader
from hicache.analytics.mooncake import MooncakeReader
from hicache.analytics.sessions import SessionReader
from hicache.analytics.sources import Source
from hicache.analytics.trace import Interner, Reading, TraceRequest


class TraceReader(Protocol):
    """Reads one file. Iterate once."""

    path: Source
    skipped: int

    @property
    def bytes_read(self) -> int:
        """How far it has come in the file, as that lies there."""
        ...

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield requests in the file's order."""
        ...


class MakeReader(Protocol):
    """Makes a reader of a file."""

    def __call__(self, path: Source, reading: Reading, *, interner: Interner | None) -> TraceReader:
        """Without an interner, ids may be used as they are; with one, no other file's ids meet them by accident."""
        ...


@dataclass(frozen=True, slots=True)
class Format:
    """A format of traces.

    Attributes:
        what: in a few words, for messages.
        reader: makes its reader.
        matches: whether a file that begins so has it; called with bytes that are not blank, in the order of `FORMATS`.
        as_is: whether ids of a file that is read alone are used as they are, which is faster.
    """

    what: str
    reader: MakeReader
    matches: Callable[[bytes], bool]
    as_is: bool = False


def _has(*keys: str) -> Callable[[bytes], bool]:
    """Looks for keys of objects anywhere in the head, so that a broken first line does not hide the format."""
    signs = tuple(f'"{key}"'.encode() for key in keys)

    def matches(head: bytes) -> bool:
        return all(sign in head for sign in signs)

    return matches


def _is_tokens(head: bytes) -> bool:
    names = (b'"tokens"', b'"token_ids"', b'"prompt_token_ids"', b'"input_ids"')
    first = head.lstrip()
    return any(name in head for name in names) or (first[:1] == b"[" and first[1:].lstrip()[:1] in b"0123456789]")


def _is_events(head: bytes) -> bool:
    kinds = (b"BlockStored", b"BlockRemoved", b"AllBlocksCleared")
    ours = b'"timestamp_ms"' in head and b'"event"' in head
    return ours or any(kind in head for kind in kinds)


FORMATS: Final[dict[str, Format]] = {
    "access-log": Format(
        "the access log of a service or a cache, which also tells what was hit", AccessLogReader, looks_like_access_log
    ),
    "dynamo": Format(
        "request_end records of dynamo.request.trace.v1, a line each",
        DynamoReader,
        lambda head: b'"dynamo.request.trace' in head or b'"dynamo.agent.trace' in head,
    ),
    "kv-events": Format(
        "KV events of vLLM, SGLang or `hicache events --json`, as JSON lines or MessagePack", EventReader, _is_events
    ),
    "bailian": Format(
        "one JSON object a line, with chat_id, timestamp, input_length and hash_ids",
        BailianReader,
        _has("chat_id", "hash_ids"),
        as_is=True,
    ),
    "mooncake": Format(
        "one JSON object a line, with timestamp, input_length, output_length and hash_ids",
        MooncakeReader,
        _has("timestamp", "input_length"),
        as_is=True,
    ),
    "kv-cache-tester": Format(
        "one JSON document a session, with block_size and requests",
        SessionReader,
        lambda head: b'"requests"' in head or b'"hash_id_scope"' in head,
    ),
    "tokens": Format("token ids, a prompt a line, as [1, 2, ...] or an object with tokens", TokenReader, _is_tokens),
    "oracle-general": Format("libCacheSim's records of 24 bytes", OracleReader, looks_like_records),
    "csv": Format("a table of times and ids, as libCacheSim reads them", TableReader, looks_like_table),
}
"""By name. Detection asks them in this order."""


def format_of(head: bytes) -> str | None:
    """The format of a file that begins so; None where it is none of these."""
    return next((name for name, form in FORMATS.items() if form.matches(head)), None)
