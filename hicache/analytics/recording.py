"""Repeats what a cache's flight recorder kept, from files, and says how that went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from hicache.core.recordings import first_header, is_recording, read_segments, untorn
from hicache.core.replayer import DivergenceError, Replayer, ReplayError
from hicache.core.residency import SLOT_BYTES
from hicache.errors import HicacheInternalError, InvalidInput
from hicache.memory.limits import check_memory

SUFFIX: Final = ".hcr"
_TIERS: Final = ("device", "host")
_STATES: Final = ("free", "private", "filling", "resident", "quarantined", "pinned")


@dataclass(frozen=True, slots=True)
class RecordingResult:
    """How the repetition of a recording went.

    Attributes:
        outcome: "ok": repeated to its end, where every invariant holds; "failed": it failed, as the recorded cache
            will have; "diverged": it went another way, which another version of the code does.
        inputs: inputs repeated, the failing one included.
        first_step, last_step: the first and the last of them, counted from the recorded cache's first, which is 1.
        operation: the failing one's name; "" where nothing failed, "end" where the last check failed.
        failure: what it said.
        tiers: pages of each owned tier by state at that point, `capacity` and `pinned` among them.
        requests, transfers: open at that point.
    """

    outcome: str
    inputs: int
    first_step: int
    last_step: int
    operation: str = ""
    failure: str = ""
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    requests: int = 0
    transfers: int = 0

    def document(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self)


def recordings_among(paths: Sequence[Path]) -> list[Path]:
    """Those of the paths that are recordings, or folders of recordings."""
    return [path for path in paths if _looks_recorded(path)]


def read_recording(paths: Sequence[Path]) -> bytes:
    """One recording: a dump, the segment files of one cache, or a folder with them. What death has torn is cut off.

    Raises:
        InvalidInput: it cannot be read, is no recording, or is more than one.
    """
    files = [file for path in paths for file in (_segment_files(path) if path.is_dir() else [path])]
    names = {_recording_name(file) for file in files}
    if len(names) > 1:
        newest = _recording_name(max(files, key=lambda file: file.stat().st_mtime))
        raise InvalidInput(
            f"{len(names)} recordings at once: replay one of them, such as the newest, "
            f"{files[0].parent / newest}*{SUFFIX}"
        )
    segments = []
    for file in files:
        try:
            data = untorn(file.read_bytes())
            if any(data):  # else the process died before it had written anything into it
                segments.append((first_header(data).number, data))
        except OSError as error:
            raise InvalidInput(f"{file}: {error.strerror}") from error
        except InvalidInput as error:
            raise InvalidInput(f"{file}: {error}") from error
    if not segments:
        raise InvalidInput(f"{paths[0]}: this is no flight recording of hicache, or it is damaged")
    return b"".join(data for _, data in sorted(segments))


def repeat(data: bytes) -> RecordingResult:
    """Repeat a recording.

    Raises:
        InvalidInput: it is damaged, of another version, or has a gap.
    """
    replayer: Replayer | None = None
    number = first = 0
    for header, entries in read_segments(data):
        if replayer is None:
            config = header.config
            pages = (config.device_pages or 0) + config.host_pages
            check_memory(pages * SLOT_BYTES, f"tables for the recorded {pages} pages")
            replayer, first = Replayer(header), header.inputs
        elif (header.number, header.inputs) != (number + 1, replayer.steps):
            raise InvalidInput(f"segment {header.number} does not follow segment {number}: name all files of one cache")
        number = header.number
        try:
            _repeat_all(replayer, entries)
        except ReplayError as error:
            return _result(replayer, first, "failed", error.operation, str(error.__cause__ or error))
        except DivergenceError as error:
            return _result(replayer, first, "diverged", failure=str(error))
    assert replayer is not None  # read_segments gives one segment at least
    try:
        replayer.core.check()
    except (HicacheInternalError, AssertionError) as error:
        return _result(replayer, first, "failed", "end", str(error))
    return _result(replayer, first, "ok")


def _repeat_all(replayer: Replayer, entries: Iterable[list[Any]]) -> None:
    for entry in entries:
        replayer.repeat(entry)


def _result(replayer: Replayer, first: int, outcome: str, operation: str = "", failure: str = "") -> RecordingResult:
    statistics = replayer.core.statistics()
    return RecordingResult(
        outcome=outcome,
        inputs=replayer.steps - first,
        first_step=first + 1,
        last_step=replayer.steps,
        operation=operation,
        failure=failure,
        tiers={
            tier: {name: getattr(getattr(statistics, tier), name) for name in ("capacity", *_STATES)} for tier in _TIERS
        },
        requests=statistics.leases,
        transfers=statistics.transfers,
    )


def _segment_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob(f"*{SUFFIX}") if file.is_file())


def _looks_recorded(path: Path) -> bool:
    try:
        if path.is_dir():
            return bool(_segment_files(path))
        if not path.is_file():
            return False  # a pipe would wait here for somebody to write
        if path.suffix == SUFFIX:
            return True
        with path.open("rb") as file:
            return is_recording(file.read(256))
    except OSError:
        return False  # whoever reads it as a trace says what is wrong


def _recording_name(file: Path) -> str:
    """What the segments of one recording share: the name without the segment's number."""
    stem, _, number = file.stem.rpartition("-")
    return stem if file.stem.startswith("flight-") and number.isdecimal() else file.stem
