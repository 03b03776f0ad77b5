"""Opens traces of any known format: files, folders of sessions, several at once merged by time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache.analytics.formats.accesslog import requests_gone
from hicache.analytics.formats.known import FORMATS, format_of
from hicache.analytics.sources import STANDARD_INPUT, Source, check_plain, source_of
from hicache.analytics.trace import Interner, Reading, TraceRequest
from hicache.errors import TraceError

WALL: Final = 1e8
"""Seconds from which on a time is of a wall clock (in 1973): no trace counts from its own begin for three years."""

KNOWN: Final = ".known.json"
"""Ends the name of what `hicache synth` writes beside a trace, which is none."""

_HEAD: Final = 64 * 1024  # bytes that detection looks at
_SUFFIXES: Final = (".json", ".jsonl", ".ndjson", ".csv", ".bin", ".msgpack")
_PACKED: Final = ("", ".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of a trace's time.

    Attributes:
        seconds: since the trace's begin, or since 1970.
        absolute: whether it is the latter.
    """

    seconds: float
    absolute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How traces are opened, and which part of them is read.

    Attributes:
        form: one of `FORMATS`, or "auto": look at the content.
        skip_bad: count broken entries and go on.
        unit: tokens that an id stands for, where formats do not tell.
        columns: which columns of a table are what.
        limit: requests at most.
        since, until: requests from then on, and before then.

    Raises:
        TraceError: a format that is not known.
    """

    form: str = "auto"
    skip_bad: bool = False
    unit: int | None = None
    columns: str = ""
    limit: int | None = None
    since: Moment | None = None
    until: Moment | None = None

    def __post_init__(self) -> None:
        if self.form != "auto" and self.form not in FORMATS:
            raise TraceError(f"trace format {self.form!r} is unknown; known are auto, {', '.join(FORMATS)}")

    @property
    def reading(self) -> Reading:
        """What readers are told."""
        return Reading(skip_bad=self.skip_bad, unit=self.unit, columns=self.columns)

    def open(self, paths: Sequence[Path]) -> Trace:
        """Open trace files without reading them through.

        Args:
            paths: files, or folders whose files of traces are meant; `-` is the standard input.

        Raises:
            TraceError: a path cannot be read, or its format is not known.
        """
        try:
            if list(paths).count(STANDARD_INPUT) > 1:
                raise TraceError("standard input: it can be read once only; name - once")
            files = [source_of(file) for file in expand(paths)]
            return Trace([(file, _detect(file, self.form)) for file in files], self)
        except OSError as error:
            raise _unreadable(error) from None


class Trace:
    """Requests of one or more files, by time. Iterate once; not thread-safe.

    Attributes:
        paths: the files.
        formats: the format of each; "empty" for a file without content.
        size: bytes of all files, as they lie there; 0 for what is piped in.
        wall_begin: seconds since 1970 from which times of requests count, known once the first was read; None where
            files have no wall times, whose times are as they stand there.
    """

    def __init__(self, files: Sequence[tuple[Source, str]], opening: Opening) -> None:
        self.paths = tuple(path for path, _ in files)
        self.formats = tuple(name for _, name in files)
        self.size = sum(path.stat().st_size for path in self.paths)
        self.wall_begin: float | None = None
        self._opening = opening
        # Of a trace of which a part is read: its bounds, and once it was read to its end, its first and last time.
        self._since, self._until = float("-inf"), float("inf")
        self._lasts: tuple[float, float] | None = None
        # ids of one file are used as they are: faster, and known from other reports about it
        alone = len(self.formats) == 1 and self.formats[0] in FORMATS and FORMATS[self.formats[0]].as_is
        interner = None if alone else Interner()
        self._readers = [
            FORMATS[name].reader(path, opening.reading, interner=interner) for path, name in files if name != "empty"
        ]

    @property
    def skipped(self) -> int:
        """Broken entries passed over so far."""
        return sum(reader.skipped for reader in self._readers)

    @property
    def requests_gone(self) -> int:
        """Requests that access logs say to have been written, and that their files lack, as far as these are read."""
        return requests_gone(self._readers)

    @property
    def bytes_read(self) -> int:
        """How far reading has come, of `size`."""
        return sum(reader.bytes_read for reader in self._readers)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield requests of the part that was asked for; each file's own order is kept.

        Raises:
            TraceError: a broken entry, unless the trace was opened with `skip_bad`, a file that went away, or a moment
                that the trace cannot tell.
        """
        opening = self._opening
        try:
            requests = self._merged()
            if opening.since is not None or opening.until is not None:
                requests = self._within(requests)
            yield from itertools.islice(requests, opening.limit)
        except OSError as error:
            raise _unreadable(error) from None

    @property
    def why_nothing(self) -> str:
        """Of a trace that was read and yielded nothing: why, and what to do, in words."""
        since, until = self._opening.since is not None, self._opening.until is not None
        if self._opening.limit == 0:
            return "the selection is empty: --limit 0 reads no request; give 1 or more"
        if self._lasts is None:
            return "there are no requests in it; check the trace"
        begin, end = self._lasts
        over = f"the selection is empty: the trace ends at {end - begin:.6g} s"
        if since and self._since > end:
            return f"{over}, and --since is behind it; give an earlier time"
        if until and self._until <= begin:
            return "the selection is empty: --until is not behind the trace's begin; give a later time"
        given = "between --since and --until" if since and until else "behind --since" if since else "before --until"
        return f"{over}, and no request is {given}; give other times"

    def _merged(self) -> Iterator[TraceRequest]:
        streams = [iter(reader) for reader in self._readers]
        firsts = [next(stream, None) for stream in streams]
        begun = [
            itertools.chain((first,), stream)
            for first, stream in zip(firsts, streams, strict=True)
            if first is not None
        ]
        begins = [first.time for first in firsts if first is not None]
        if begins and min(begins) >= WALL:
            self.wall_begin = min(begins)
            begins = [self.wall_begin] * len(begins)
        shifted = [
            _shifted(stream, begin) if begin >= WALL else stream for stream, begin in zip(begun, begins, strict=True)
        ]
        if len(shifted) == 1:
            return shifted[0]
        return heapq.merge(*shifted, key=lambda request: request.time)

    def _within(self, requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
        first = next(requests, None)
        if first is None:
            return
        since = self._since = self._bound("--since", self._opening.since, first.time, float("-inf"))
        until = self._until = self._bound("--until", self._opening.until, first.time, float("inf"))
        last = first.time
        for request in itertools.chain((first,), requests):
            last = max(last, request.time)
            if since <= request.time < until:
                yield request
        self._lasts = first.time, last

    def _bound(self, option: str, moment: Moment | None, begin: float, otherwise: float) -> float:
        if moment is None:
            return otherwise
        if not moment.absolute:
            return begin + moment.seconds
        if self.wall_begin is None:
            raise TraceError(
                f"{option}: {', '.join(map(str, self.paths)):.200} has no times of a wall clock; give seconds from its "
                "begin"
            )
        return moment.seconds - self.wall_begin


def _shifted(requests: Iterator[TraceRequest], begin: float) -> Iterator[TraceRequest]:
    """The same, with times from a begin on; what is before that comes at it."""
    for request in requests:
        yield TraceRequest(
            max(request.time - begin, 0.0),
            request.ids,
            request.unit,
            request.input_tokens,
            request.output_tokens,
            request.scope,
            request.place,
            request.details,
        )


def open_trace(paths: Sequence[Path], *, form: str = "auto", skip_bad: bool = False, unit: int | None = None) -> Trace:
    """Open trace files to read all of them; see `Opening`.

    Raises:
        TraceError: a path cannot be read, or its format is not known.
    """
    return Opening(form=form, skip_bad=skip_bad, unit=unit).open(paths)


def expand(paths: Sequence[Path]) -> list[Path]:
    """The files that paths stand for: themselves, or those of a folder in the order of their names.

    Raises:
        TraceError: a folder without any, or one that cannot be looked into.
    """
    try:
        return [file for path in paths for file in _expand(path)]
    except OSError as error:
        raise _unreadable(error) from None


def _expand(path: Path) -> list[Path]:
    if path == STANDARD_INPUT or not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if _is_trace(file))
    if not files:
        raise TraceError(f"{path}: a folder without .json or .jsonl files; name a trace or a folder of traces")
    return files


def _is_trace(file: Path) -> bool:
    name = file.name.lower()
    if name.endswith(KNOWN):
        return False
    return any(name.endswith(suffix + packed) for suffix in _SUFFIXES for packed in _PACKED)


def _detect(path: Source, form: str) -> str:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head.strip():
        return "empty"
    check_plain(path, head)
    if form != "auto":
        return form
    found = format_of(head)
    if found is None:
        known = "; ".join(f"{name} ({each.what})" for name, each in FORMATS.items())
        raise TraceError(f"{path}: this is no trace that is known here; known formats are {known}")
    return found


def _unreadable(error: OSError) -> TraceError:
    return TraceError(f"{error.filename}: {error.strerror}; name a trace file that can be read")
