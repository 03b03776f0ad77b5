"""What every trace reader yields, and the words of its errors."""

from __future__ import annotations

import re
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from hicache.analytics.sources import Source
from hicache.errors import TraceError

MAX_LINE = 64 * 2**20  # bytes; a line of a public trace has some 10 KiB, a longer one is another kind of file
MAX_DOCUMENT = 512 * 2**20  # bytes; formats that are one JSON document are read whole
ID_LIMIT = 2**32  # ids become tokens, and tokens are unsigned 32 bit

MAX_TOKENS = 2**24  # of one request; far above any context length, and a few hundred MiB when ids become tokens

_WORDS = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"JSON is malformed: (.*?) \((byte \d+)\)", r"no valid JSON at \2: \1"),
        (r"Input data was truncated", r"no valid JSON: it breaks off"),
        (r"Object missing required field `(\w+)`(?: - at `\$\.?(.*)`)?", r"the field \1 is missing"),
        (r"Expected `(\w+)`, got `(\w+)` - at `\$\.?(.+)`", r"\3 is of type \2 and must be \1"),
        (r"Expected `(\w+)`, got `(\w+)`", r"it is of type \2 and must be \1"),
        (r"Expected `(\w+)` ([<>]=?) (\S+) - at `\$\.?(.+)`", r"\4 must be \2 \3"),
    )
]

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
BlockIds = list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]
Ids = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How files are read.

    Attributes:
        skip_bad: count broken entries and go on.
        unit: tokens that an id stands for, where the format does not tell, or otherwise than it has it by default.
        columns: which columns of a table are what; "" for what its first line says.
    """

    skip_bad: bool = False
    unit: int | None = None
    columns: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What some formats tell of a request besides; empty where they do not.

    Attributes:
        request, session, parent: names: its own, of what it belongs to, and of what it goes on from.
        kind: such as "text" or "subagent".
        turn: of its session, from 1; 0 where it is not told.
        model: that it asks.
    """

    request: str = ""
    session: str = ""
    parent: str = ""
    kind: str = ""
    turn: int = 0
    model: str = ""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        time: seconds since the start of its trace.
        ids: one id for each `unit` tokens of the prompt, shape (n,), uint32, not writable. An id means something only
            together with all ids before it. Ids of different scopes never meet.
        unit: tokens that an id stands for; the last id may stand for fewer.
        input_tokens: tokens of the prompt. May exceed `len(ids) * unit` by less than one unit: a tail without an id.
        output_tokens: tokens that were generated.
        scope: where ids mean the same: "" for the whole trace, else file and model.
        place: where it stands, for messages: "line 12", "request 3".
        details: what else is known of it.
    """

    time: float
    ids: Ids
    unit: int
    input_tokens: int
    output_tokens: int
    scope: str
    place: str
    details: Details | None = None

    @property
    def known_tokens(self) -> int:
        """Tokens of the prompt that ids cover."""
        return min(self.input_tokens, len(self.ids) * self.unit)


class Interner:
    """Gives each pair of scope and id a number of its own, dense from 0, so that files never share ids."""

    def __init__(self) -> None:
        self._next = 0
        self._known: dict[str, dict[Hashable, int]] = {}

    def translate(self, scope: str, ids: Sequence[Hashable]) -> list[int]:
        """Numbers for ids of a scope, in order.

        Raises:
            TraceError: there are more distinct ids than tokens can name.
        """
        known = self._known.setdefault(scope, {})
        numbers = []
        for name in ids:
            number = known.get(name)
            if number is None:
                number = known[name] = self._next
                self._next += 1
            numbers.append(number)
        if self._next > ID_LIMIT:
            raise TraceError(f"more than {ID_LIMIT} distinct ids; replay fewer files or requests at once")
        return numbers


def pack_ids(ids: list[int]) -> Ids:
    """Ids as a read-only array.

    Raises:
        TraceError: an id is not an unsigned 32-bit number.
    """
    try:
        return np.frombuffer(array("I", ids).tobytes(), dtype=np.uint32)
    except OverflowError:
        raise TraceError(f"hash_ids holds {max(ids)}, and ids go up to {ID_LIMIT - 1}") from None


def in_words(error: Exception) -> str:
    """What a JSON decoder finds wrong, in the words of these messages: the field first, then what it must be."""
    text = str(error)
    for pattern, words in _WORDS:
        if found := pattern.fullmatch(text):
            return found.expand(words)
    return text


def bad_entry(path: Source, place: str, problem: str) -> TraceError:
    """The error for one broken entry: what, where, what to do."""
    return TraceError(f"{path}, {place}: {problem}; mend or remove it, or skip such entries with --skip-bad")
