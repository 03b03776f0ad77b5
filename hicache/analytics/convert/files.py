"""Files that are there when all of them is written, or not at all."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

from hicache.errors import InvalidInput

STANDARD_OUTPUT: Final = Path("-")

_PACKERS: Final[dict[str, Callable[[BinaryIO], Any]]] = {
    # without a time and a name in it, so that the same content is the same file
    ".gz": lambda file: gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0),
    ".bz2": lambda file: bz2.BZ2File(file, "wb"),
    ".xz": lambda file: lzma.LZMAFile(file, "wb"),  # noqa: SIM115  whoever calls it closes it
}
"""By the end of a file's name."""


def same_file(a: Path, b: Path) -> bool:
    """Whether what is written to both would meet, whatever they are called; devices take anything."""
    try:
        if os.path.realpath(a) == os.path.realpath(b) or (a.exists() and b.exists() and a.samefile(b)):
            return a.is_file() or not a.exists()
    except OSError:  # a loop of links, or a folder that may not be looked into: opening it says so
        pass
    return False


@contextmanager
def new_file(out: Path, *, option: str = "--out") -> Iterator[tuple[BinaryIO, Callable[[], None]]]:
    """A file beside its place, which takes it when what is yielded with it is called; else nothing is left of it.

    It is compressed where its name says so. A pipe or a device gets it then, and so does the standard output.

    Args:
        out: its place; `-` is the standard output.
        option: what named it, for messages.

    Raises:
        InvalidInput: it cannot be written.
    """
    _check(out, option)
    beside: list[str] = []
    replaces = out != STANDARD_OUTPUT and (out.is_file() or not out.exists())
    place = Path(os.path.realpath(out))  # a link stays one
    try:
        file = _temporary(place if replaces else None, beside)
    except OSError as error:
        raise InvalidInput(f"{option} {out}: {error.strerror}; name a file in a folder that can be written") from None

    def finish() -> None:
        file.flush()
        file.seek(0)
        if not replaces:
            with _opened(out) as target:
                _copy(file, target, out.suffix)
            return
        done = file.name
        if out.suffix in _PACKERS:
            with _temporary(place, beside) as packed:
                _copy(file, packed, out.suffix)
                done = packed.name
        os.chmod(done, 0o666 & ~_umask())
        os.replace(done, place)
        beside.remove(done)

    try:
        yield file, finish
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InvalidInput(f"{option} {out}: {error.strerror}; make room there, or name another file") from None
    finally:
        with contextlib.suppress(OSError):  # where there was no room, there is none for the rest of the buffer either
            file.close()
        for name in beside:
            os.unlink(name)


def _check(out: Path, option: str) -> None:
    if out.is_dir():
        raise InvalidInput(f"{option} {out}: is a folder; name a file in it")
    if out.suffix == ".zst":
        raise InvalidInput(f"{option} {out}: zstd is only read here; write to - and pipe it: | zstd > {out}")


def _temporary(place: Path | None, beside: list[str]) -> Any:
    """A file beside a place, or anywhere; its name is added to those that are to be removed."""
    file = tempfile.NamedTemporaryFile(  # noqa: SIM115  the caller closes it
        dir=None if place is None else place.parent,
        prefix=".hicache." if place is None else f".{place.name[:100]}.",
        suffix=".part",
        delete=False,
    )
    beside.append(file.name)
    return file


@contextmanager
def _opened(out: Path) -> Iterator[BinaryIO]:
    if out == STANDARD_OUTPUT:
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with out.open("wb") as file:
        yield file


def _copy(source: IO[bytes], target: BinaryIO, suffix: str) -> None:
    if suffix in _PACKERS:
        with _PACKERS[suffix](target) as packed:
            shutil.copyfileobj(source, packed, 1 << 20)
    else:
        shutil.copyfileobj(source, target, 1 << 20)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
