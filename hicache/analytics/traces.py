"""Opens traces of any known format: files, folders of sessions, several at once merged by time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from hicache.analytics.mooncake import MooncakeReader
from hicache.analytics.sessions import SessionReader
from hicache.analytics.sources import STANDARD_INPUT, Source, check_plain, source_of
from hicache.analytics.trace import Interner, TraceRequest
from hicache.errors import TraceError

_HEAD = 64 * 1024  # bytes that detection looks at


class _Reader(Protocol):
    path: Source
    skipped: int
    bytes_read: int

    def __iter__(self) -> Iterator[TraceRequest]: ...


class _MakeReader(Protocol):
    def __call__(self, path: Source, *, skip_bad: bool, interner: Interner | None) -> _Reader: ...


READERS: dict[str, _MakeReader] = {"mooncake": MooncakeReader, "kv-cache-tester": SessionReader}

_FORMATS = (
    "mooncake (one JSON object a line, with timestamp, input_length, output_length and hash_ids) and kv-cache-tester "
    "(one JSON document a session, with block_size and requests)"
)

# Keys are looked for anywhere in the head, so that a broken first line does not hide the format from `skip_bad`.
_SIGNS: dict[str, Callable[[bytes], bool]] = {
    "mooncake": lambda head: b'"timestamp"' in head and b'"input_length"' in head,
    "kv-cache-tester": lambda head: b'"requests"' in head or b'"hash_id_scope"' in head,
}


class Trace:
    """Requests of one or more files, by time. Iterate once; not thread-safe.

    Attributes:
        paths: the files.
        formats: the format of each; "empty" for a file without content.
        size: bytes of all files.
    """

    def __init__(self, files: Sequence[tuple[Source, str]], *, skip_bad: bool) -> None:
        self.paths = tuple(path for path, _ in files)
        self.formats = tuple(name for _, name in files)
        self.size = sum(path.stat().st_size for path in self.paths)
        # ids of one Mooncake file are used as they are: faster, and known from other reports about it
        interner = None if self.formats == ("mooncake",) else Interner()
        self._readers = [
            READERS[name](path, skip_bad=skip_bad, interner=interner) for path, name in files if name != "empty"
        ]

    @property
    def skipped(self) -> int:
        """Broken entries passed over so far."""
        return sum(reader.skipped for reader in self._readers)

    @property
    def bytes_read(self) -> int:
        """How far reading has come, of `size`."""
        return sum(reader.bytes_read for reader in self._readers)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield requests; each file's own order is kept.

        Raises:
            TraceError: a broken entry, unless the trace was opened with `skip_bad`, or a file that went away.
        """
        try:
            if len(self._readers) == 1:
                yield from self._readers[0]
            else:
                yield from heapq.merge(*self._readers, key=lambda request: request.time)
        except OSError as error:
            raise _unreadable(error) from None


def open_trace(paths: Sequence[Path], *, form: str = "auto", skip_bad: bool = False) -> Trace:
    """Open trace files without reading them through.

    Args:
        paths: files, or folders whose `*.json` and `*.jsonl` files are meant; `-` is the standard input.
        form: one of `READERS`, or "auto": look at the content.
        skip_bad: count broken entries and go on.

    Raises:
        TraceError: a path cannot be read, or its format is not known.
    """
    if form != "auto" and form not in READERS:
        raise TraceError(f"trace format {form!r} is unknown; known are auto, {', '.join(READERS)}")
    try:
        if list(paths).count(STANDARD_INPUT) > 1:
            raise TraceError("standard input: it can be read once only; name - once")
        files = [source_of(file) for file in expand(paths)]
        return Trace([(file, _detect(file, form)) for file in files], skip_bad=skip_bad)
    except OSError as error:
        raise _unreadable(error) from None


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
    files = sorted(file for file in path.iterdir() if file.suffix in (".json", ".jsonl"))
    if not files:
        raise TraceError(f"{path}: a folder without .json or .jsonl files; name a trace or a folder of traces")
    return files


def _detect(path: Source, form: str) -> str:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head.strip():
        return "empty"
    check_plain(path, head)
    if form != "auto":
        return form
    for name, matches in _SIGNS.items():
        if matches(head):
            return name
    raise TraceError(f"{path}: this is no trace that is known here; known formats are {_FORMATS}")


def _unreadable(error: OSError) -> TraceError:
    return TraceError(f"{error.filename}: {error.strerror}; name a trace file that can be read")
