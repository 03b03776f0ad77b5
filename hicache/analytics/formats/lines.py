"""What readers of line formats share: lines in bounded memory, their numbers in messages, broken ones passed over."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Final, TypeVar

import msgspec

from hicache.analytics.packing import DamagedFile
from hicache.analytics.sources import Packed, Source
from hicache.analytics.trace import (
    ID_LIMIT,
    MAX_LINE,
    Ids,
    Interner,
    Reading,
    TraceRequest,
    bad_entry,
    in_words,
    pack_ids,
)
from hicache.errors import TraceError

MAX_SKIPPED: Final = 16
"""Times `MAX_LINE` that one line may have before it is no use to look for its end."""

T = TypeVar("T")


class Reader:
    """Requests of one file, in its order. Iterate once; not thread-safe.

    Attributes:
        path: the file.
        skipped: broken entries passed over, with `skip_bad`.
    """

    def __init__(self, path: Source, reading: Reading | None = None, *, interner: Interner | None = None) -> None:
        """Prepare.

        Args:
            path: the file.
            reading: how.
            interner: gives ids numbers that no other file uses; None: ids are used as they are.
        """
        self.path = path
        self.skipped = 0
        self._reading = Reading() if reading is None else reading
        self._interner = interner
        self._scope = "" if interner is None else str(path)
        self._consumed = 0
        self._most = 0  # the largest id that is used as it is
        self._large: dict[int, int] = {}

    @property
    def bytes_read(self) -> int:
        """How far it has come in the file, as that lies there."""
        return self.path.position if isinstance(self.path, Packed) else self._consumed

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield requests.

        Raises:
            TraceError: a broken entry, named by its place, unless `skip_bad`.
        """
        with self.path.open("rb", buffering=1 << 20) as file:
            yield from self._to_damage(self._requests(file))

    @abstractmethod
    def _requests(self, file: BinaryIO) -> Iterator[TraceRequest]:
        """Yield requests of an open file."""

    def _to_damage(self, parts: Iterator[T]) -> Iterator[T]:
        """The same, as far as the file can be read; that it breaks off counts as one broken entry."""
        try:
            yield from parts
        except DamagedFile:
            if not self._reading.skip_bad:
                raise
            self.skipped += 1

    def _bad(self, place: str, problem: object) -> None:
        """Count a broken entry, or raise."""
        if not self._reading.skip_bad:
            raise bad_entry(self.path, place, str(problem)) from None
        self.skipped += 1

    def _ids(self, scope: str, ids: Sequence[int]) -> Ids:
        """Ids of a scope as numbers of this trace."""
        if self._interner is not None:
            return pack_ids(self._interner.translate(scope, ids))
        most = max(ids, default=0)
        if most < ID_LIMIT - len(self._large):
            self._most = max(self._most, most)
            return pack_ids(list(ids))
        return pack_ids(self._folded(ids))

    def _folded(self, ids: Sequence[int]) -> list[int]:
        """Numbers of 32 bits: ids that fit are what they are, larger ones are counted from the largest down."""
        large = self._large
        found = [name if name < ID_LIMIT else ID_LIMIT - 1 - large.setdefault(name, len(large)) for name in ids]
        self._most = max(self._most, *(name for name in (*ids, 0) if name < ID_LIMIT))
        if self._most >= ID_LIMIT - len(large):
            raise TraceError(f"ids up to {self._most} and others above {ID_LIMIT} cannot be told apart in 32 bits")
        return found

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Lines; of one that is too long only the beginning, which cannot pass for a whole one."""
        while line := file.readline(MAX_LINE + 1):
            self._consumed += len(line)
            yield line
            parts = 0
            while len(line) > MAX_LINE and not line.endswith(b"\n"):
                parts += 1
                if parts == MAX_SKIPPED:
                    raise DamagedFile(
                        f"{self.path}: more than {MAX_SKIPPED * MAX_LINE >> 20} MiB without the end of a line, so this "
                        "is no trace of lines; name another file"
                    )
                line = file.readline(MAX_LINE + 1)
                self._consumed += len(line)

    def _decoded(self, decode: Callable[[bytes], T], line: bytes) -> T | None:
        """A line as `decode` reads it; None for a blank one.

        Raises:
            TraceError: it cannot be read.
        """
        check_length(line)
        try:
            return decode(line)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            if not line.strip():
                return None
            raise TraceError(in_words(error)) from None


class LineReader(Reader):
    """Reads a line at a time, so that a file of any length needs the memory of one line."""

    def _requests(self, file: BinaryIO) -> Iterator[TraceRequest]:
        for number, line in enumerate(self._to_damage(self._lines(file)), start=1):
            try:
                request = self._request(line, number)
            except TraceError as error:
                self._bad(f"line {number}", error)
                continue
            if request is not None:
                yield request

    @abstractmethod
    def _request(self, line: bytes, number: int) -> TraceRequest | None:
        """The request of a line; None where it has none.

        Raises:
            TraceError: what is wrong with it, without its place.
        """


def check_length(line: bytes) -> None:
    """See that a line is no longer than any trace has.

    Raises:
        TraceError: it is.
    """
    if len(line) > MAX_LINE:
        raise TraceError(f"longer than {MAX_LINE // 2**20} MiB, so it is no line of a trace")


def check_count(ids: int, tokens: int, unit: int, *, partial: bool | None, name: str = "hash_ids") -> None:
    """See that a prompt has as many ids as its length says.

    Args:
        ids: how many there are.
        tokens: of the prompt.
        unit: tokens an id stands for.
        partial: whether a last, partial block has an id; None: it may.
        name: of the field with the ids.

    Raises:
        TraceError: it has not.
    """
    started, whole = -(-tokens // unit), tokens // unit
    if ids == started and partial is not False:
        return
    if ids == whole and partial is not True:
        return
    what = f"starts {started} blocks of {unit}" if partial else f"has {whole} whole blocks of {unit}"
    raise TraceError(f"{ids} {name}, but input_length {tokens} {what}; tell another size with --unit TOKENS")
