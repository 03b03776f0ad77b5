"""Reads a trace and writes it in another format, all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hicache.analytics.convert.files import STANDARD_OUTPUT, new_file
from hicache.analytics.convert.targets import TARGETS
from hicache.analytics.convert.writers import Writer
from hicache.analytics.traces import Trace
from hicache.errors import InvalidInput, TraceError

# What makes no sense as a target, and what to do instead.
_REFUSED: Final = {
    "kv-events": "a trace does not tell what a cache stored and evicted; see it with hicache simulate",
    "access-log": "a trace does not tell what a cache did; a service writes it itself",
    "auto": "say which format",
}


@dataclass(frozen=True, slots=True)
class Conversion:
    """What became of a trace.

    Attributes:
        requests: written.
        skipped: broken entries passed over.
        losses: what the target does not carry, in words.
    """

    requests: int
    skipped: int
    losses: tuple[str, ...]


def check_target(form: str) -> None:
    """See that traces can be converted to a format.

    Raises:
        InvalidInput: they cannot; says why.
    """
    if form in _REFUSED:
        raise InvalidInput(f"--to {form}: {_REFUSED[form]}")
    if form not in TARGETS:
        raise InvalidInput(f"--to {form:.60}: use one of {', '.join(TARGETS)}")


def convert(
    trace: Trace,
    form: str,
    out: Path,
    *,
    unit: int | None = None,
    stopped: Callable[[], bool] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion | None:
    """Convert a trace.

    Args:
        trace: an open trace; it is read to its end.
        form: one of `TARGETS`.
        out: the file, which is replaced when all is written; `-` is the standard output.
        unit: tokens a block of the target; None for its own, or else the trace's.
        stopped: whether to end now, without a file.
        progress: called now and then with (bytes read, bytes).

    Returns:
        What became of it; None if it was stopped.

    Raises:
        InvalidInput: the trace is broken, the target cannot have it, or the file cannot be written.
    """
    check_target(form)
    for path in trace.paths:
        if isinstance(path, Path) and out != STANDARD_OUTPUT and out.exists() and path.samefile(out):
            raise InvalidInput(f"--out {out}: that is what is read; name another file")
    with new_file(out) as (file, finish):
        writer = TARGETS[form](file, unit)
        for number, request in enumerate(trace):
            if number % 256 == 0:
                writer.begin = trace.wall_begin or 0.0  # it is known with the first one
                if progress is not None:
                    progress(trace.bytes_read, trace.size)
                if stopped is not None and stopped():
                    return None
            try:
                writer.add(request)
            except TraceError as error:
                raise TraceError(f"{', '.join(map(str, trace.paths)):.200}, {request.place}: {error}") from None
        writer.end()
        finish()
    return Conversion(writer.written, trace.skipped, tuple(_losses(writer)))


def _losses(writer: Writer) -> Iterator[str]:
    blocks = writer.blocks
    for what, count in sorted(writer.losses.items()):
        yield f"lost: {what.format(f'{count:,}').rstrip(',')}"
    if writer.begin and not writer.wall:
        begin = datetime.fromtimestamp(writer.begin, UTC).isoformat(timespec="seconds")
        yield f"lost: the wall clock; times count from the begin at {begin}"
    if blocks.joined:
        yield f"lost: common begins of prompts that end inside a block of {blocks.unit} tokens"
    if blocks.tails:
        yield f"the end of {blocks.tails:,} prompts had no id and got one that nobody else has"
    if writer.unit and blocks.units - {writer.unit}:
        yield f"read it with --unit {', '.join(map(str, sorted(blocks.units)))}"
